"""The fit of the kernel cost model: parameters of simulated devices come back from their measurements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles.simulated_device import REUSE, SimulatedDevice

from torchedge.devices import Provenance, find_device
from torchedge.errors import ProfileError
from torchedge.profiling.kernel_cases import cases
from torchedge.profiling.kernel_fitting import (
    KernelTable,
    count_waves,
    fit_coefficients,
    fit_kernels,
    fit_scans,
    read_kernels,
    repeatability,
)
from torchedge.profiling.kernel_measuring import measure_kernels
from torchedge.profiling.profile_folders import write_profile
from torchedge.textures.coefficients import coefficients_of
from torchedge.textures.layouts import PATTERNS
from torchedge.textures.model import occupancy, predict_kernels
from torchedge.textures.strides import cross_block_strides, lines_of, reuse_distances
from torchedge.textures.work import KernelWork, ReadWork

pytest.importorskip("scipy")

DEVICES = {
    "rows of two texels": SimulatedDevice(),
    "blocks of four": SimulatedDevice(block=(2, 2), lines=48, ways=8, decay=1.25, replacement="fifo"),
    "blocks of sixteen": SimulatedDevice(
        block=(4, 4), lines=24, ways=24, decay=1.8, replacement="random", register_bytes=131_072, max_waves=16
    ),
    "a narrow warp": SimulatedDevice(
        block=(4, 1), lines=128, ways=128, decay=1.1, warp=16, units=9, register_bytes=65_536, max_waves=64
    ),
}


def table_of(device):
    """Measurements of images, and all that has no storage."""
    results = {
        case: device.measure(case)
        for case in cases(device.traits)
        if ("storage", "buffer") not in case.parameters
        and (case.benchmark != "walk" or case.number("seed") < 40)
    }
    environment = {"command": "test", "date": "2026-01-01", "device": device.traits.name, "driver": "1"}
    return KernelTable(environment, device.traits, {1: results, 2: {}})


@pytest.fixture(scope="module")
def fitted():
    return {name: fit_coefficients(table_of(device)) for name, device in DEVICES.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DEVICES)
def test_lines_and_decay_come_back(fitted, name):
    device, coefficients = DEVICES[name], fitted[name]
    assert coefficients.image.lines == device.lines
    assert coefficients.image.decay == pytest.approx(device.decay, rel=0.05)
    assert coefficients.origins["image"].provenance is Provenance.MEASURED


@pytest.mark.parametrize("name", DEVICES)
def test_occupancy_comes_back_for_every_footprint(fitted, name):
    device, coefficients = DEVICES[name], fitted[name]
    assert coefficients.local_bytes == device.unit_local_bytes
    for registers in range(4, 64):
        assert occupancy(16 * registers, coefficients) == device.occupancy(16 * registers), registers


@pytest.mark.parametrize("name", DEVICES)
def test_rates_and_latencies_come_back(fitted, name):
    device, coefficients = DEVICES[name], fitted[name]
    assert coefficients.image.hit_ns == pytest.approx(device.hit_ns, rel=0.1)
    assert coefficients.image.main_gb_s == pytest.approx(device.rates[2], rel=0.02)
    assert coefficients.image.overlap == pytest.approx(device.overlap, rel=0.05)
    assert max(coefficients.gflops) == pytest.approx(889.9, rel=0.02)
    assert coefficients.group_ns == pytest.approx(50.0, rel=0.05)
    assert coefficients.tile_gb_s == pytest.approx(240.0, rel=0.02)
    assert coefficients.origins["image"].residual < 5


def operand(patterns, steps, share):
    """A read of one line of so many steps by each of some patterns."""
    step = np.arange(steps)
    places = [np.stack(np.broadcast_arrays(*PATTERNS[name].place(step, 0 * step))) for name in patterns]
    x, y = np.stack(places, axis=1)
    return ReadWork(
        image=True, count=steps, nbytes=16, distinct_bytes=16 * steps * share,
        strides=cross_block_strides(x, y), reuse=reuse_distances(lines_of(x, y, 2)), warp_lines=share,
        warp_share=share,
    )  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_the_best_patterns_come_back(fitted, name):
    """Two operands by five patterns each: in 95 % of cases the choice is within 1 % of the true best."""
    device, coefficients = DEVICES[name], fitted[name]
    generator = np.random.default_rng(5)
    pairs = list(itertools.product(PATTERNS, repeat=2))
    right = 0
    for _ in range(40):
        steps = generator.choice([16, 32, 64], 2)
        shares = generator.choice([n for n in (1, 2, 4, 8, 16, 32, 64) if n <= device.warp], 2)
        first, second = zip(*pairs, strict=True)
        reads = [operand(first, steps[0], shares[0]), operand(second, steps[1], shares[1])]
        work = KernelWork(np.full(len(pairs), 4096.0), (device.warp, 1, 1), 0, 64, tuple(reads))
        chosen = int(np.argmin(predict_kernels(work, coefficients, pure=True).ms))
        alone = [{p: n * device.pattern_latency(p, int(n)) for p in PATTERNS} for n in steps]
        true = [
            (alone[0][a] + alone[1][b]) * device.contention(shares[0] * REUSE[a] + shares[1] * REUSE[b])
            for a, b in pairs
        ]
        right += true[chosen] <= 1.01 * min(true)
    assert right >= 38


def test_c_is_found_among_all_numbers():
    live = np.array([t * s for s in (1, 2, 4, 8) for t in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)], float)
    for lines in (20, 32, 37, 100):
        slowdown = 1.3 ** np.maximum(np.ceil((live - lines) / lines), 0)
        fit = fit_scans(live, slowdown, expected=lines)
        assert (fit.lines, fit.residual) == (lines, 0)
        assert fit.decay == pytest.approx(1.3)


def test_without_contention_d_is_1():
    assert fit_scans(np.array([1.0, 8, 64]), np.ones(3), expected=32).decay == 1


def test_waves_are_counted_at_the_jump():
    assert count_waves({1: 10, 2: 10.1, 3: 10.2, 4: 20.3}, 2) == 6
    assert count_waves({1: 10, 2: 10.2, 3: 10.4}, 2) is None


# journals ---------------------------------------------------------------------------------------------------


class Counting:
    """A device of which every result is 7, but fails for one case."""

    traits = SimulatedDevice().traits

    def __init__(self) -> None:
        self.measured = 0

    def measure(self, case):
        self.measured += 1
        return 7.0 + self.measured / 1e6


@pytest.mark.slow
def test_a_journal_is_continued_and_read(tmp_path):
    device, file = DEVICES["rows of two texels"], tmp_path / "rows.jsonl"
    names = []
    new = measure_kernels(file, device, quick=True, step=names.append)
    count = len(list(cases(device.traits, quick=True)))
    assert new == 2 * count == len(names)
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    assert measure_kernels(file, device, quick=True) == len(lines) - len(lines) // 2
    assert measure_kernels(file, Counting(), quick=True) == 0
    table = read_kernels(file)
    assert len(table.passes[1]) == len(table.passes[2]) == count
    again = repeatability(table)
    assert 0 < again["cases"] < 3 and again["coefficients"] < 3


@pytest.mark.slow
def test_a_profile_with_coefficients_is_written_and_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    measure_kernels(file, DEVICES["rows of two texels"], quick=True)
    device = find_device("adreno-640")
    out = tmp_path / "mine"
    written = write_profile(out, device, {}, kernels=fit_kernels(file, device, out))
    coefficients = coefficients_of(written)
    assert coefficients.provenance is Provenance.MEASURED
    assert written.profile["kernels"]["residuals"]["image"] < 5
    (out / "kernels.toml").write_text("warp = 1\n")
    with pytest.raises(ProfileError, match="sha256 differs"):
        coefficients_of(written)


@pytest.mark.parametrize(
    "line",
    [
        '{"pass": 1, "benchmark": "walk", "seed": 1, "value": -3}',
        '{"pass": 1, "benchmark": "gallop", "value": 3}',
        '{"pass": 3, "benchmark": "walk", "value": 3}',
        '{"pass": 1, "benchmark": "walk", "seed": [1], "value": 3}',
        '{"value": 3}',
    ],
)
def test_damaged_rows_are_named(line, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ProfileError, match="line 1"):
        read_kernels(file)
