"""Capacities from a model of latency under load: exact, within what was measured, safe on damaged files."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.streaming_programs import program_of_amounts

from torchedge.devices import Provenance, find_device, write_device
from torchedge.errors import ProfileError
from torchedge.forests.trees import build_forest
from torchedge.storage import read_toml
from torchedge.streaming.capacities import (
    FILE,
    LOAD_FEATURES,
    LOADS,
    THRESHOLDS,
    FittedLoads,
    load_features,
    load_model_of,
    make_instance,
    rate_capacities,
)
from torchedge.streaming.instances import MEBIBYTE
from torchedge.streaming.rates import write_class_forests
from torchedge.streaming.schedules import LaunchWork, works_of

HIGH = {
    "log2_bytes": 14.0,
    "log2_latency_us": 10.0,
    "extra_ratio": 8.0,
    "extra_gb_s": 50.0,
    "extra_mib": 0.05,
}


def stairs(steps, *, high=HIGH, items="64", names=LOAD_FEATURES):
    """A forest: a tree for each (feature, threshold, rise) that adds `rise` to the logarithm above it."""
    feature, payload = [], []
    for name, threshold, rise in steps:
        feature += [names.index(name), -1, -1]
        payload += [threshold, 0.0, rise]
    low, top = np.full(len(names), -20.0), [high.get(name, 40.0) for name in names]
    low[[place for place, name in enumerate(names) if name in LOADS]] = 0
    return build_forest(
        learner="stairs",
        feature_names=names,
        feature=np.array(feature, np.int16),
        payload=np.array(payload, np.float32),
        sizes=np.full(len(steps), 3, np.int32),
        hull=np.array([low, top], np.float32),
        scale=1.0,
        metadata={"group_items": items},
    )


def model(*steps, **options):
    return FittedLoads(dict.fromkeys(THRESHOLDS, stairs(steps, **options)), "stairs")


def launch(load_class="reusable", flops=1000, nbytes=3000, output=1000, group=None):
    return LaunchWork("launch", load_class, flops, nbytes - output, output, 125, group)


def test_features_of_a_kernel_under_loads():
    work = LaunchWork("k", "reusable", 4096, 1024, 1024, work_items=128, group_items=64)
    rows = load_features(work, 1.0, [0, 2048, MEBIBYTE])
    assert rows.shape == (3, len(LOAD_FEATURES))
    assert rows[:, :6] == pytest.approx(np.tile([12, 11, 1, 7, 6, np.log2(1000)], (3, 1)))
    assert rows[:, 6:] == pytest.approx(
        np.array([[0, 0, 0], [2, 2048e-6, 2048 / MEBIBYTE], [1024, MEBIBYTE / 1e6, 1]])
    )


def test_a_launch_counts_with_its_own_work_group_or_the_probes():
    usual = model(("extra_ratio", 1, 1), items="256")
    assert usual.usual(launch()) == LaunchWork("", "reusable", 1000, 2000, 1000, 125, 256)
    assert usual.usual(launch(group=32)) == LaunchWork("", "reusable", 1000, 2000, 1000, 125, 32)
    assert usual.usual(launch(flops=0, nbytes=0, output=0)).input_bytes == 1


def test_capacity_is_the_last_byte_within_the_threshold():
    slower = model(("extra_ratio", 0.5, np.log(1.1)), ("extra_ratio", 2.5, np.log(1.1)))  # 10 %, then 21 %
    assert slower.capacity_bytes(launch("reusable"), 1.0) == 5000
    assert slower.increase(launch(), 1.0, [0, 1000, 1001, 5000, 5001]) == pytest.approx(
        [0, 0, 0.1, 0.1, 0.21]
    )


def test_classes_have_their_own_thresholds_and_hierarchical_operators_load_nothing():
    slower = model(("extra_ratio", 1, np.log(1.5)), ("extra_ratio", 4, np.log(3)))
    assert slower.capacity_bytes(launch("reusable"), 1.0) == 2000
    assert slower.capacity_bytes(launch("elemental"), 1.0) == 8000
    assert slower.capacity_bytes(launch("hierarchical"), 1.0) == 0


def test_a_kernel_that_slows_under_any_load_loads_nothing():
    assert model(("log2_flops", -30, 1.0)).capacity_bytes(launch(), 1.0) == 0


steps = st.lists(
    st.tuples(st.sampled_from(LOADS), st.floats(0, 10, width=32), st.floats(0, 0.25, width=32)),
    min_size=1,
    max_size=6,
)


@given(steps, st.integers(1, 40_000), st.integers(1, 4000), st.floats(1e-4, 10))
def test_capacity_by_trying_every_byte(found, nbytes, output, latency_ms):
    slower = model(*found)
    work_of_launch = launch("reusable", nbytes=nbytes + output, output=output)
    most = slower.most_bytes(work_of_launch, latency_ms)
    increases = slower.increase(work_of_launch, latency_ms, np.arange(most + 1))
    assert (np.diff(increases) >= 0).all()
    within = np.flatnonzero(increases <= 0.2)
    assert slower.capacity_bytes(work_of_launch, latency_ms) == (within[-1] if len(within) else 0)


@given(st.integers(1, 10**12), st.floats(1e-4, 1e4))
def test_never_more_than_was_measured(nbytes, latency_ms):
    free = model(("extra_ratio", 100, 1.0))
    capacity = free.capacity_bytes(launch(nbytes=nbytes + 1000), latency_ms)
    input_bytes = min(nbytes, 2**14 * nbytes / (nbytes + 1000))
    limits = (8 * input_bytes, 50e6 * min(latency_ms, 1.024), 0.05 * MEBIBYTE)
    assert capacity == pytest.approx(min(limits), rel=1e-6, abs=1)
    assert capacity <= 0.05 * MEBIBYTE * (1 + 1e-6)


def test_what_lies_outside_is_named():
    slower = model(("extra_ratio", 1, 1.0))
    assert slower.outside(launch(), 1.0) == ()
    assert slower.outside(launch(nbytes=10**6), 2.0) == ("log2_bytes", "log2_latency_us")


# in a profile -----------------------------------------------------------------------------------------------


def put(folder, forests=None, **described):
    """A copy of a phone's profile with a model of latency under load."""
    folder.mkdir(exist_ok=True)
    chosen = model(("extra_ratio", 1, np.log(1.5))).forests if forests is None else forests
    digest = write_class_forests(FILE, folder, chosen)
    table = {"provenance": "measured", "dataset": "loads.jsonl", "measured": "2026-11-21", "rows": 7}
    document = read_toml(find_device("adreno-750").folder / "device.toml")
    loading = {**table, "sha256": digest, **described}
    return write_device({**document, "profile": {"loading": loading}}, folder)


ROWS = [("reusable", 2000), ("hierarchical", 2000), ("elemental", 10**6)]
PROGRAM = program_of_amounts([(name, 1000, nbytes, 1000) for name, nbytes in ROWS])


def test_planning_uses_the_measured_capacities(tmp_path):
    device = put(tmp_path / "mine")
    capacities = rate_capacities(PROGRAM, device, chunk_bytes=100)
    fitted = load_model_of(device)
    layers = zip(works_of(PROGRAM), capacities.latencies_ms, strict=True)
    assert capacities.chunks == tuple(fitted.capacity_bytes(op, ms) // 100 for op, ms in layers)
    assert capacities.chunks[:2] == (20, 0)
    assert capacities.provenance is Provenance.MEASURED
    assert capacities.source == "latency under load, 7 rows of loads.jsonl, measured 2026-11-21"
    assert "1 of 2 layers that may load lie outside the measured range (log2_bytes)" in capacities.notes[-1]
    instance = make_instance(PROGRAM, device, chunk_bytes=100)
    assert tuple(layer.capacity_chunks for layer in instance.layers) == capacities.chunks


def test_without_measurements_the_thresholds_remain():
    device = find_device("adreno-750")
    assert load_model_of(device) is None
    assert rate_capacities(PROGRAM, device).provenance is Provenance.ASSUMED


def test_a_file_that_is_another_or_missing_is_refused(tmp_path):
    device = put(tmp_path / "other", sha256="0" * 64)
    with pytest.raises(ProfileError, match="is not the file that device"):
        load_model_of(device)
    device = put(tmp_path / "missing")
    (device.folder / FILE).unlink()
    with pytest.raises(ProfileError, match="cannot be read"):
        rate_capacities(PROGRAM, device)
    with pytest.raises(ProfileError, match=r"\[profile.loading\] is no table"):
        load_model_of(replace(device, profile={"loading": "measured"}))


def test_forests_of_another_version_are_refused(tmp_path):
    good = model(("extra_ratio", 1, 1.0)).forests
    wrong = {
        "order": ({**good, "reusable": stairs([("extra_ratio", 1, 1.0)], names=LOAD_FEATURES[::-1])}, "hash"),
        "class": ({name: good[name] for name in ("reusable", "elemental")}, "expected hierarchical too"),
    }
    for items in ("", "0", "-1", "65537", "9" * 5000, "many", "٣"):
        forests = {**good, "elemental": stairs([("extra_ratio", 1, 1.0)], items=items)}
        wrong[f"items-{len(wrong)}"] = (forests, "forest elemental has group_items")
    for name in ("log2_bytes", "extra_mib"):
        far = stairs([("extra_ratio", 1, 1.0)], high={**HIGH, name: 1e30})
        wrong[name] = ({**good, "reusable": far}, "forest reusable claims a measured range beyond any device")
    for name, (forests, message) in wrong.items():
        with pytest.raises(ProfileError, match=message):
            load_model_of(put(tmp_path / name, forests))
