"""Latencies by the roofline, capacities by the thresholds, and the instance that follows."""

from __future__ import annotations

import pytest

from torchedge.devices import Provenance, find_device, parse_device
from torchedge.errors import DeviceError, InputError
from torchedge.streaming.capacities import make_instance, rate_capacities
from torchedge.streaming.layering import InferenceGraph, Operation, StoredWeight
from torchedge.streaming.rates import THRESHOLDS, estimate_latencies, inline_rate, roofline_of

CHUNK = 1000


def operation(name, load_class, flops=0, nbytes=0, weights=()):
    return Operation(name, name, load_class, flops, nbytes, tuple(weights), (), 0)


GRAPH = InferenceGraph(
    "three",
    (
        operation("product", "reusable", flops=2_000_000, nbytes=100, weights=["w", "b"]),
        operation("norm", "hierarchical", flops=10, nbytes=50_000, weights=["g"]),
        operation("add", "elemental", flops=10, nbytes=20_000, weights=["b"]),
    ),
    (StoredWeight("w", 2001), StoredWeight("b", 1000), StoredWeight("g", 1)),
    input_bytes=10,
    outputs=(2,),
)


@pytest.fixture
def device(tmp_path):
    """1 GFLOP/ms in half precision, half of it in single; 1 MB/ms; launches of 10 us; twice the roofline."""
    return make_device(tmp_path)


def make_device(folder, **changes):
    figures = {
        "peak_fp32_gflops": (500.0, "GFLOP/s"),
        "peak_fp16_gflops": (1000.0, "GFLOP/s"),
        "bandwidth_gb_s": (2.0, "GB/s"),
        "measured_bandwidth_gb_s": (1.0, "GB/s"),
        "launch_overhead_us": (10.0, "us"),
        "inference_time_ratio": (2.0, "1"),
        "unified_to_texture_gb_s": (0.5, "GB/s"),
    } | changes
    document = {
        "name": "phone",
        "title": "Phone",
        "kind": "gpu",
        "vendor": "Acme",
        "memory": "unified",
        "figures": {
            name: {"value": given[0], "unit": given[1], "provenance": "published", "source": "Acme"}
            for name, given in figures.items()
            if given is not None
        },
    }
    return parse_device(document, folder=folder)


def test_latencies_are_the_roofline_times_the_measured_ratio(device):
    roofline = roofline_of(device)
    assert estimate_latencies(GRAPH.operations, roofline) == pytest.approx(
        [2 * (0.010 + 0.002), 2 * (0.010 + 0.050), 2 * (0.010 + 0.020)]
    )
    assert roofline.notes == ()
    assert roofline_of(device, "float32").flops_ms == 500e6
    assert roofline_of(device, "model").flops_ms == 500e6


def test_missing_figures_are_told_or_refused(tmp_path):
    bare = make_device(
        tmp_path,
        peak_fp16_gflops=None,
        measured_bandwidth_gb_s=None,
        launch_overhead_us=None,
        inference_time_ratio=None,
        unified_to_texture_gb_s=None,
    )
    roofline = roofline_of(bare)
    assert (roofline.flops_ms, roofline.bytes_ms, roofline.launch_ms, roofline.ratio) == (
        500e6,
        2e6,
        0.0,
        1.0,
    )
    told = " ".join(rate_capacities(GRAPH, bare).notes)
    for name in ("half-precision", "inference_time_ratio", "launch_overhead_us"):
        assert name in told
    assert (inline_rate(bare).value, inline_rate(bare).provenance) == (1.0, Provenance.ASSUMED)
    with pytest.raises(DeviceError, match="bandwidth_gb_s"):
        rate_capacities(GRAPH, make_device(tmp_path, bandwidth_gb_s=None, measured_bandwidth_gb_s=None))


def test_capacities_are_the_classes_shares_of_the_latency(device):
    capacities = rate_capacities(GRAPH, device, chunk_bytes=CHUNK)
    latencies = capacities.latencies_ms
    expected = [
        int(THRESHOLDS[op.load_class] * ms * 500_000 / CHUNK)
        for op, ms in zip(GRAPH.operations, latencies, strict=True)
    ]
    assert list(capacities.chunks) == expected == [2, 0, 90]
    assert capacities.provenance is Provenance.ASSUMED
    assert "4.2" in capacities.source
    assert dict(THRESHOLDS) == {"hierarchical": 0.0, "reusable": 0.2, "elemental": 3.0}


class Tenfold:
    """A model of load: ten bytes for each microsecond, none for norms."""

    def capacity_bytes(self, operation, latency_ms):
        return -5 if operation.kind == "norm" else int(latency_ms * 10_000)


def test_a_fitted_model_takes_the_place_of_the_thresholds(device):
    capacities = rate_capacities(GRAPH, device, chunk_bytes=100, model=Tenfold(), model_source="measured")
    assert capacities.chunks == (2, 0, 6)
    assert (capacities.provenance, capacities.source) == (Provenance.MEASURED, "measured")


def test_the_instance(device):
    instance = make_instance(
        GRAPH, device, chunk_bytes=CHUNK, m_peak_bytes=4999, lam=0.5, memory_bytes=10_000, residency="weights"
    )
    assert [(w.name, w.nbytes, w.chunks, w.first_use, w.last_use) for w in instance.weights] == [
        ("w", 2001, 3, 1, 1),
        ("b", 1000, 1, 1, 3),
        ("g", 1, 1, 2, 2),
    ]
    assert [(x.name, x.capacity_chunks, x.load_class) for x in instance.layers] == [
        ("product", 2, "reusable"),
        ("norm", 0, "hierarchical"),
        ("add", 90, "elemental"),
    ]
    assert [x.latency_ms for x in instance.layers] == pytest.approx([0.024, 0.12, 0.06])
    assert (instance.m_peak_chunks, instance.memory_chunks, instance.lam) == (4, 10, 0.5)
    assert (instance.residency, instance.distance, instance.name) == ("weights", "layers", "three")


def test_the_papers_setting_is_the_default(device):
    instance = make_instance(GRAPH, device)
    assert (instance.chunk_bytes, instance.m_peak_chunks, instance.lam) == (2**18, 2000, 0.9)
    assert instance.memory_chunks is None
    assert make_instance(GRAPH, device, m_peak_bytes=None).m_peak_chunks is None


def test_given_capacities_are_used(device):
    capacities = rate_capacities(GRAPH, device, chunk_bytes=CHUNK, model=Tenfold())
    instance = make_instance(GRAPH, device, chunk_bytes=CHUNK, capacities=capacities)
    assert tuple(layer.capacity_chunks for layer in instance.layers) == capacities.chunks == (0, 0, 0)


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1.5, True])
def test_wrong_chunk_size(device, chunk_bytes):
    with pytest.raises(InputError, match="chunk_bytes"):
        make_instance(GRAPH, device, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(
    "name", ["adreno-750", "adreno-540", "adreno-740", "mali-g715", "jetson-tx2", "nvidia-h200"]
)
def test_devices_that_ship_can_be_planned_for(name):
    instance = make_instance(GRAPH, find_device(name))
    assert all(layer.latency_ms > 0 for layer in instance.layers)
