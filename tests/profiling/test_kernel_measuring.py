"""Micro-benchmarks on the processor: every kernel builds and gives a sensible number; the command."""

import json

import numpy as np
import pytest

from torchedge.cli import main
from torchedge.opencl import open_context
from torchedge.profiling import kernel_cases, kernel_measuring
from torchedge.profiling.kernel_cases import SIDE, UNITS, Case, DeviceTraits, cases, stride_walk
from torchedge.profiling.kernel_measuring import OpenCLBench

pytest.importorskip("pyopencl")

TRAITS = {
    kind: DeviceTraits("a", "1", kind, warp, 2, 1024, 32_768, True)
    for kind, warp in (("cpu", 1), ("gpu", 32), ("mobile", 64))
}


def few(traits, *, quick=False):
    """One small case of each benchmark, storage and memory."""
    seen = set()
    for case in cases(traits, quick=True):
        key = case.benchmark, *[value for name, value in case.parameters if name in ("storage", "way")]
        if key not in seen and not (case.benchmark == "bandwidth" and case.number("bytes") > 2**20):
            seen.add(key)
            yield case


@pytest.fixture
def brisk(monkeypatch):
    monkeypatch.setattr(kernel_measuring, "_LEAST_RUNS", 1)
    monkeypatch.setattr(kernel_measuring, "_CASE_NS", 0)
    monkeypatch.setattr(kernel_measuring, "_LAUNCHES", 5)


@pytest.mark.slow
def test_every_benchmark_runs_on_the_processor(brisk):
    bench = OpenCLBench("cpu", large=2**22)
    assert bench.traits.kind == "cpu" and bench.traits.warp == 1
    done = {case.benchmark: bench.measure(case) for case in few(bench.traits)}
    assert set(done) == set(UNITS)
    assert all(0 < value < 1e9 for value in done.values())


def test_a_walk_on_the_processor(brisk):
    kind = open_context(None).device.kind
    walk = next(case for case in cases(TRAITS[kind]) if case.benchmark == "walk")
    assert 0 < OpenCLBench(None, large=2**22).measure(walk) < 1e6


@pytest.mark.parametrize("kind", TRAITS)
def test_the_cases_of_a_class_are_distinct_and_few(kind):
    every = [case.title for case in cases(TRAITS[kind])]
    assert len(set(every)) == len(every) < 1000
    assert {case.benchmark for case in cases(TRAITS[kind])} == set(UNITS)
    quick = {case.title for case in cases(TRAITS[kind], quick=True)}
    assert quick < set(every)


def test_walks_fit_a_signed_byte_and_go_on():
    for seed in range(64):
        places = np.stack(stride_walk(seed), axis=-1)
        strides = (np.diff(places, axis=0) + SIDE // 2) % SIDE - SIDE // 2
        assert np.abs(strides).max() < 128
        assert places.min() >= 0 and places.max() < SIDE


def test_a_case_gives_its_parameters():
    case = Case("loop", (("storage", "image"), ("bytes", 512)))
    assert (case["storage"], case.number("bytes"), case.title) == ("image", 512, "loop image 512")


@pytest.mark.slow
def test_the_command_measures_fits_and_prints(brisk, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_measuring, "cases", lambda traits, quick: few(traits))
    monkeypatch.setattr(kernel_cases, "cases", lambda traits, quick: few(traits))
    assert main(["profile", "--kernels", "--device", "cpu", "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "local-cpu"
    assert document["coefficients"]["warp"] == 1
    assert set(document["kernels"]["repeatability"]) == {"cases", "cases_p90", "coefficients"}
    assert (tmp_path / "profiles" / "local-cpu" / "kernels.toml").is_file()
    rows = tmp_path / "kernels" / "local-cpu-quick.jsonl"
    before = rows.read_text()
    assert main(["profile", "--kernels", "--device", "cpu", "--quick"]) == 0
    assert rows.read_text() == before and "two passes differ" in capsys.readouterr().out


def test_kernels_and_streaming_are_two_measurements(capsys):
    assert main(["profile", "--kernels", "--streaming"]) == 2
    assert "run the command twice" in capsys.readouterr().err
