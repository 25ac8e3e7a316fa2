"""Rates: the law of slowdown in closed form, and where a device's figures come from."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.devices import Figure, Provenance, find_device, list_devices
from torchedge.errors import DeviceError, InputError
from torchedge.streaming.instances import Layer
from torchedge.streaming.rates import (
    STAGING_BYTES,
    THRESHOLDS,
    Rates,
    Slowdown,
    derive_rates,
    framework_rates,
)

MEGABYTE = 10**6


def figure(value: float, unit: str = "GB/s") -> Figure:
    return Figure(value, unit, Provenance.MEASURED, "a test")


RATES = Rates(figure(1), figure(2), figure(0.5), figure(1000, "us"))
"""A megabyte takes 1 ms from the disk, 0.5 ms in a kernel, 2 ms (and 1 ms to launch) in a transform."""


def layer(load_class: str, latency_ms: float = 10.0, capacity: int = 0) -> Layer:
    return Layer("layer", capacity, latency_ms, load_class)


def loaded_ms(layer: Layer, megabytes: float) -> float:
    return RATES.loaded_ms(layer, round(megabytes * MEGABYTE), MEGABYTE)


def test_moving_a_megabyte():
    assert RATES.read_ms(3 * MEGABYTE) == 3
    assert RATES.transform_ms(3 * MEGABYTE) == 7


@pytest.mark.parametrize("load_class", THRESHOLDS)
def test_without_loads_a_layer_takes_its_latency(load_class):
    assert loaded_ms(layer(load_class), 0) == 10


def test_within_the_capacity_that_follows_from_the_threshold_a_load_costs_its_copying_time():
    # 20 % of 10 ms at 2 GB/s are 4 MB, 300 % are 60 MB.
    assert loaded_ms(layer("reusable"), 1) == 10.5
    assert loaded_ms(layer("reusable"), 4) == 12
    assert loaded_ms(layer("elemental"), 60) == 40


def test_beyond_its_capacity_a_byte_costs_the_overload():
    assert loaded_ms(layer("reusable"), 6) == 12 + 2 * 1
    assert loaded_ms(layer("elemental"), 64) == 40 + 2 * 2
    assert loaded_ms(layer("hierarchical"), 3) == 10 + 4 * 1.5


def test_a_larger_capacity_hides_part_of_a_load():
    # The layer is given 8 MB: at them it slows by 20 %, although copying takes 4 ms.
    roomy = layer("reusable", capacity=8)
    assert loaded_ms(roomy, 4) == 11
    assert loaded_ms(roomy, 8) == 12
    assert loaded_ms(roomy, 10) == 12 + 2 * 1
    assert loaded_ms(layer("hierarchical", capacity=8), 8) == 10


def test_nothing_is_faster_than_copying():
    assert loaded_ms(layer("reusable", 1.0, capacity=100), 100) == 50
    assert loaded_ms(layer("elemental", 0.0), 100) == 100  # no capacity at all: overload 2


@given(
    st.sampled_from(sorted(THRESHOLDS)),
    st.floats(0, 100),
    st.integers(0, 50),
    st.lists(st.integers(0, 10**9), min_size=2, max_size=2),
)
def test_more_loads_never_take_less_and_never_beat_copying(load_class, latency, capacity, sizes):
    less, more = sorted(sizes)
    busy = layer(load_class, latency, capacity)
    taken = [RATES.loaded_ms(busy, nbytes, MEGABYTE) for nbytes in (0, less, more)]
    assert taken[0] == latency
    assert taken[0] <= taken[1] * (1 + 1e-12) and taken[1] <= taken[2] * (1 + 1e-12)
    assert taken[2] >= more / 2e6


def test_the_whole_is_as_weak_as_its_weakest_figure():
    measured = {name: Slowdown(t, 2.0, Provenance.MEASURED) for name, t in THRESHOLDS.items()}
    assert RATES.provenance is Provenance.ASSUMED  # the overloads
    assert replace(RATES, slowdowns=measured).provenance is Provenance.MEASURED
    weak = replace(figure(1), provenance=Provenance.PUBLISHED)
    assert replace(RATES, slowdowns=measured, disk_read=weak).provenance is Provenance.PUBLISHED


@pytest.mark.parametrize(
    "changed",
    [
        {"disk_read": figure(0)},
        {"inline_load": figure(-1)},
        {"weight_transform": figure(float("nan"))},
        {"launch_overhead": figure(-1, "us")},
        {"staging_bytes": -1},
        {"request_bytes": 0},
        {"slowdowns": {"elemental": Slowdown(3.0, 2.0)}},
        {"slowdowns": {name: Slowdown(0.2, 0.5) for name in THRESHOLDS}},
        {"slowdowns": {name: Slowdown(-0.2, 2.0) for name in THRESHOLDS}},
    ],
)
def test_rates_that_make_no_sense_are_refused(changed):
    with pytest.raises(InputError, match=r"expected"):
        replace(RATES, **changed)


def test_a_phone_takes_every_figure_from_its_profile():
    device = find_device("adreno-750")
    rates = derive_rates(device)
    assert rates.disk_read == device.figure("disk_read_gb_s")
    assert rates.inline_load == device.figure("unified_to_texture_gb_s")
    assert rates.weight_transform == device.figure("weight_transform_gb_s")
    assert rates.launch_overhead == device.figure("launch_overhead_us")
    assert rates.staging_bytes == STAGING_BYTES
    assert rates.provenance is Provenance.ASSUMED


def test_prepared_weights_are_copied():
    device = find_device("adreno-750")
    rates = derive_rates(device, prepared=True, staging_bytes=None)
    assert rates.weight_transform == device.figure("unified_to_texture_gb_s")
    assert rates.staging_bytes is None


def test_frameworks_read_and_transform_at_rates_of_their_own():
    device = find_device("adreno-750")
    rates = framework_rates(device)
    assert rates.disk_read == device.figure("weight_load_gb_s")
    assert rates.weight_transform == device.figure("weight_transform_gb_s")
    assert rates.staging_bytes is None
    board = find_device("jetson-tx2")
    assert framework_rates(board).disk_read == board.figure("disk_read_gb_s")


def test_what_stands_in_for_a_missing_figure_is_assumed():
    device = find_device("jetson-tx2")
    rates = derive_rates(device)
    assert rates.inline_load.provenance is Provenance.ASSUMED
    assert rates.weight_transform.value == rates.inline_load.value
    assert rates.weight_transform.provenance is Provenance.ASSUMED
    assert "weight_transform_gb_s" in rates.weight_transform.source
    without = {k: v for k, v in device.figures.items() if k != "launch_overhead_us"}
    assert derive_rates(replace(device, figures=without)).launch_overhead.value == 0


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.name)
def test_every_profile_gives_rates_or_says_what_it_lacks(device):
    try:
        rates = derive_rates(device)
    except DeviceError as error:
        assert "disk_read_gb_s" in str(error)
    else:
        assert rates.disk_read.value > 0
