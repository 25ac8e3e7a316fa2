"""Latencies by the roofline, capacities by the thresholds, and the instance that follows."""

from dataclasses import asdict, replace

import pytest
from oracles.small_programs import pointwise, program, tensor

from torchedge.devices import Provenance, find_device, parse_device
from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.streaming.capacities import make_instance, rate_capacities
from torchedge.streaming.rates import THRESHOLDS, copy_rate, kernel_rates
from torchedge.streaming.schedules import works_of

CHUNK = 1000


def bytes_of(name, count, role="parameter"):
    return tensor(name, (count,), role, "uint8")


def kernel(name, load_class, access):
    return pointwise(name, "", access, load_class=load_class)


def launch(name, tensors, flops):
    return name, tensors, (1,), None, "", (), flops


PROGRAM = program(
    [
        bytes_of("x", 1000, "input"),
        *(bytes_of("w", 2001), bytes_of("b", 1000), bytes_of("g", 1)),
        *(bytes_of("y", 40_000, "output"), bytes_of("z", 9999), bytes_of("v", 9000)),
    ],
    [
        kernel("product", "reusable", ["read", "read", "read", "write"]),
        kernel("norm", "hierarchical", ["read", "read", "write"]),
        kernel("add", "elemental", ["read", "read", "write"]),
    ],
    [
        launch("product", ["x", "w", "b", "y"], 2_000_000),
        launch("norm", ["z", "g", "y"], 10),
        launch("add", ["v", "b", "x"], 10),
    ],
)
"""Launches that move 44,001, 50,000 and 11,000 bytes."""


@pytest.fixture
def device(tmp_path):
    """0.5 GFLOP/ms; 1 MB/ms; launches of 10 us; twice the roofline; copies of 0.5 MB/ms."""
    return make_device(tmp_path)


def make_device(folder, **changes):
    figures = {
        "peak_fp32_gflops": (500.0, "GFLOP/s"),
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


def alone(device):
    rates, _ = kernel_rates(device)
    return [rates[work.load_class].latency_ms(work) for work in works_of(PROGRAM)]


def test_latencies_are_the_roofline_times_the_measured_ratio(device, tmp_path):
    assert alone(device) == pytest.approx([2 * (0.010 + 0.044001), 2 * (0.010 + 0.050), 2 * (0.010 + 0.011)])
    assert kernel_rates(device)[1] == ()
    slow = make_device(tmp_path, peak_fp32_gflops=(2.0, "GFLOP/s"))
    assert alone(slow)[0] == pytest.approx(2 * (0.010 + 1))


def test_measured_rates_of_kernels_come_before_the_roofline(tmp_path):
    rates = {name: {"gflops": 2.0, "gb_s": 4.0, "us": 3.0} for name in THRESHOLDS}
    profile = {"loading": {"kernels": {**rates, "hierarchical": {"gflops": 1.0, "gb_s": 4.0, "us": 0}}}}
    device = replace(make_device(tmp_path, inference_time_ratio=None), profile=profile)
    assert kernel_rates(device)[1] == ()
    expected = []
    for work in works_of(PROGRAM):
        gflops, us = (1.0, 0) if work.load_class == "hierarchical" else (2.0, 3)
        expected.append(us / 1e3 + max(work.flops / gflops, work.bytes_moved / 4.0) / 1e6)
    assert alone(device) == pytest.approx(expected)


@pytest.mark.parametrize(
    "kernels",
    ["fast", {}, {"reusable": {}}, {name: {"gflops": -1, "gb_s": 1, "us": 1} for name in THRESHOLDS}],
)
def test_damaged_rates_of_kernels_are_refused(kernels, tmp_path):
    device = replace(make_device(tmp_path), profile={"loading": {"kernels": kernels}})
    with pytest.raises(ProfileError, match=r"\[profile.loading.kernels\] does not give gflops, gb_s, us"):
        kernel_rates(device)


def test_missing_figures_are_named_or_refused(tmp_path):
    bare = make_device(
        tmp_path,
        measured_bandwidth_gb_s=None,
        launch_overhead_us=None,
        inference_time_ratio=None,
        unified_to_texture_gb_s=None,
    )
    assert asdict(kernel_rates(bare)[0]["reusable"]) == {"gflops": 500.0, "gb_s": 2.0, "us": 0.0}
    notes = " ".join(rate_capacities(PROGRAM, bare).notes)
    for name in ("inference_time_ratio", "launch_overhead_us"):
        assert name in notes
    assert (copy_rate(bare).value, copy_rate(bare).provenance) == (1.0, Provenance.ASSUMED)
    with pytest.raises(DeviceError, match="bandwidth_gb_s"):
        rate_capacities(PROGRAM, make_device(tmp_path, bandwidth_gb_s=None, measured_bandwidth_gb_s=None))


def test_capacities_are_the_classes_shares_of_the_latency(device):
    capacities = rate_capacities(PROGRAM, device, chunk_bytes=CHUNK)
    latencies = capacities.latencies_ms
    expected = [
        int(THRESHOLDS[work.load_class] * ms * 500_000 / CHUNK)
        for work, ms in zip(works_of(PROGRAM), latencies, strict=True)
    ]
    assert list(capacities.chunks) == expected == [10, 0, 63]
    assert capacities.provenance is Provenance.ASSUMED
    assert "4.2" in capacities.source
    assert dict(THRESHOLDS) == {"hierarchical": 0.0, "reusable": 0.2, "elemental": 3.0}


def test_measured_latencies_replace_the_roofline(device):
    capacities = rate_capacities(PROGRAM, device, chunk_bytes=CHUNK, launch_ms=[1.0, 2.0, 0.5])
    assert capacities.latencies_ms == (1.0, 2.0, 0.5) and capacities.chunks == (100, 0, 750)
    with pytest.raises(InputError, match="launch_ms has 2 entries; expected 3"):
        rate_capacities(PROGRAM, device, launch_ms=[1.0, 2.0])


def test_the_instance(device):
    instance = make_instance(PROGRAM, device, chunk_bytes=CHUNK, m_peak_bytes=4999, lam=0.5)
    assert [(w.name, w.nbytes, w.chunks, w.first_use, w.last_use) for w in instance.weights] == [
        ("w", 2001, 3, 1, 1),
        ("b", 1000, 1, 1, 3),
        ("z", 9999, 10, 2, 2),
        ("v", 9000, 9, 3, 3),
    ]
    assert [(x.name, x.capacity_chunks, x.load_class) for x in instance.layers] == [
        ("product", 10, "reusable"),
        ("norm", 0, "hierarchical"),
        ("add", 63, "elemental"),
    ]
    assert [x.latency_ms for x in instance.layers] == pytest.approx([0.108002, 0.12, 0.042])
    assert (instance.m_peak_chunks, instance.memory_chunks, instance.lam) == (4, None, 0.5)
    assert (instance.residency, instance.distance, instance.name) == ("weights", "layers", "small")


def test_the_papers_setting_is_the_default(device):
    instance = make_instance(PROGRAM, device)
    assert (instance.chunk_bytes, instance.m_peak_chunks, instance.lam) == (2**18, 2000, 0.9)
    assert instance.memory_chunks is None and instance.residency == "weights"
    assert make_instance(PROGRAM, device, m_peak_bytes=None).m_peak_chunks is None


def test_given_capacities_are_used(device):
    capacities = rate_capacities(PROGRAM, device, chunk_bytes=CHUNK, launch_ms=[0.0, 0.0, 0.0])
    instance = make_instance(PROGRAM, device, chunk_bytes=CHUNK, capacities=capacities)
    assert tuple(layer.capacity_chunks for layer in instance.layers) == capacities.chunks == (0, 0, 0)


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1.5, True])
def test_wrong_chunk_size(device, chunk_bytes):
    with pytest.raises(InputError, match="chunk_bytes"):
        make_instance(PROGRAM, device, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(
    "name", ["adreno-750", "adreno-540", "adreno-740", "mali-g715", "jetson-tx2", "nvidia-h200"]
)
def test_devices_that_ship_can_be_planned_for(name):
    instance = make_instance(PROGRAM, find_device(name))
    assert all(layer.latency_ms > 0 for layer in instance.layers)
