"""Rates: times of reads and copies, the slowdown of layers, and the figures behind them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.devices import Figure, Provenance, find_device, list_devices
from torchedge.errors import DeviceError
from torchedge.streaming.instances import Layer
from torchedge.streaming.rates import STAGING_BYTES, THRESHOLDS, Rates, derive_rates

MEGABYTE = 10**6


def figure(value: float, unit: str = "GB/s") -> Figure:
    return Figure(value, unit, Provenance.MEASURED, "a test")


RATES = Rates(figure(1), figure(2), figure(1000, "us"))
"""A megabyte takes 1 ms from the disk and 0.5 ms (and 1 ms to start) to copy."""


def test_moving_a_megabyte():
    assert RATES.read_ms(3 * MEGABYTE) == 3
    assert RATES.copy_ms(3 * MEGABYTE) == 2.5


def slowing(load_class: str, capacity: int, latency_ms: float = 10.0) -> float:
    return RATES.slowing(Layer("layer", capacity, latency_ms, load_class), MEGABYTE)


def test_nothing_is_hidden_where_the_capacity_follows_from_the_threshold():
    # 20 % of 10 ms at 2 GB/s are 4 MB, 300 % are 60 MB.
    assert slowing("reusable", 4) == slowing("reusable", 1) == slowing("reusable", 0) == 1
    assert slowing("elemental", 60) == 1
    assert slowing("hierarchical", 0) == slowing("hierarchical", 100) == 1


def test_a_larger_capacity_hides_part_of_a_copy():
    # 8 MB take 4 ms and slow the layer by 20 % of 10 ms.
    assert slowing("reusable", 8) == 0.5
    assert slowing("elemental", 240) == 0.25


@given(st.sampled_from(sorted(THRESHOLDS)), st.integers(0, 1000), st.floats(0, 100))
def test_a_layer_at_its_capacity_slows_by_its_threshold(load_class, capacity, latency_ms):
    share = slowing(load_class, capacity, latency_ms)
    assert 0 < share <= 1
    most = THRESHOLDS[load_class] * latency_ms
    if most * RATES.copy.value * 1e6 < capacity * MEGABYTE and most > 0:
        assert share * capacity * MEGABYTE / (RATES.copy.value * 1e6) == pytest.approx(most)


def test_the_whole_is_as_weak_as_its_weakest_figure():
    assert RATES.provenance is Provenance.MEASURED
    weak = replace(figure(1), provenance=Provenance.PUBLISHED)
    assert replace(RATES, disk_read=weak).provenance is Provenance.PUBLISHED


def test_a_phone_takes_every_figure_from_its_profile():
    device = find_device("adreno-750")
    rates = derive_rates(device)
    assert rates.disk_read == device.figure("disk_read_gb_s")
    assert rates.copy == device.figure("unified_to_texture_gb_s")
    assert rates.copy_overhead == device.figure("launch_overhead_us")
    assert rates.staging_bytes == STAGING_BYTES
    assert rates.provenance is Provenance.ASSUMED


def test_a_substitute_for_a_missing_figure_is_assumed():
    device = find_device("jetson-tx2")
    rates = derive_rates(device)
    assert rates.copy.provenance is Provenance.ASSUMED
    without = {k: v for k, v in device.figures.items() if k != "launch_overhead_us"}
    assert derive_rates(replace(device, figures=without)).copy_overhead.value == 0


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.name)
def test_every_profile_gives_rates_or_names_the_figure_it_lacks(device):
    try:
        rates = derive_rates(device)
    except DeviceError as error:
        assert "disk_read_gb_s" in str(error)
    else:
        assert rates.disk_read.value > 0
