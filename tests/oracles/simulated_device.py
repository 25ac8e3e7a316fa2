"""A device whose parameters are known, behind `torchedge.profiling.kernel_cases.BenchDevice`.

Its texture cache is simulated line by line: blocks of texels, sets, ways, a replacement policy. Contention
between work-items follows the law of eq. 2 with a known D, occupancy the law of eq. 4 and 6 of TMModel, so
that a fit to its measurements has right answers. It shares no code with the fit or the cost model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchedge.profiling.kernel_cases import SIDE, Case, DeviceTraits, stride_walk

REUSE = {"column": 0, "row": 1, "block-2": 2, "block-4": 4, "block-8": 8}


class LineCache:
    """A set-associative cache of lines; replacement "lru", "fifo" or "random"."""

    def __init__(self, lines: int, ways: int, replacement: str) -> None:
        self.sets: list[list[tuple[int, int]]] = [[] for _ in range(lines // ways)]
        self.ways, self.replacement = ways, replacement
        self.random = random.Random(7)

    def misses(self, line: tuple[int, int]) -> bool:
        """Access a line; return whether it had to be loaded."""
        column, row = line
        ways = self.sets[(column + 7 * row) % len(self.sets)]
        if line in ways:
            if self.replacement == "lru":
                ways.remove(line)
                ways.append(line)
            return False
        if len(ways) == self.ways:
            ways.pop(self.random.randrange(self.ways) if self.replacement == "random" else 0)
        ways.append(line)
        return True


@dataclass
class SimulatedDevice:
    """An Adreno-like device.

    block: texels of a cache line, (width, height). page: texels of a block whose change costs more.
    lines, ways, replacement: of a unit's texture cache. decay: D. overlap: accesses in flight. noise:
    relative standard deviation of measurements.
    """

    block: tuple[int, int] = (2, 1)
    page: tuple[int, int] = (16, 16)
    lines: int = 32
    ways: int = 4
    replacement: str = "lru"
    decay: float = 1.4
    warp: int = 64
    units: int = 2
    register_bytes: int = 294_912
    max_waves: int = 30
    unit_local_bytes: int = 106_496
    hit_ns: float = 130.0
    miss_ns: float = 60.0
    page_ns: float = 40.0
    overlap: float = 3.0
    l2_bytes: int = 2**17
    rates: tuple[float, float, float] = (195.0, 99.0, 30.0)
    noise: float = 0.003
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))
    exact: dict[Case, float] = field(default_factory=dict)

    @property
    def traits(self) -> DeviceTraits:
        return DeviceTraits("Simulated 640", "1", "mobile", self.warp, self.units, 1024, 32_768, True)

    @property
    def line_bytes(self) -> int:
        return 16 * self.block[0] * self.block[1]

    def prepare(self, cases: Sequence[Case]) -> None:
        """Nothing: cases are measured one by one."""

    def measure(self, case: Case) -> float:
        if case not in self.exact:
            self.exact[case] = getattr(self, f"_{case.benchmark}")(case)
        return float(self.exact[case] * (1 + abs(self.generator.normal(0, self.noise))))

    # one work-item

    def latency(self, x, y, block: tuple[int, int] | None = None, skip: int = 0) -> float:
        """Return the mean latency in ns of a sequence of accesses, without the first `skip`."""
        width, height = block or self.block
        cache = LineCache(self.lines, self.ways, self.replacement)
        total, counted, page = 0.0, 0, None
        for number, (column, row) in enumerate(
            zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True)
        ):
            missed = cache.misses((column // width, row // height))
            new_page = (column // self.page[0], row // self.page[1])
            ns = self.hit_ns + missed * (self.miss_ns + (new_page != page) * self.page_ns)
            page = new_page if missed else page
            if number >= skip:
                total += ns
                counted += 1
        return total / counted

    def _block(self, case: Case) -> tuple[int, int]:
        return self.block if case["storage"] == "image" else (4, 1)

    def _walk(self, case: Case) -> float:
        return self.latency(*stride_walk(case.number("seed")), self._block(case))

    def _loop(self, case: Case) -> float:
        texels = case.number("bytes") // 16
        stride = max(1, case.number("stride") // 16)
        width = 1 << min((texels - 1).bit_length() // 2 + 1, 10)
        places = np.arange(0, texels, stride)
        distinct = {
            (p % width // self._block(case)[0], p // width // self._block(case)[1])
            for p in places[:4096].tolist()
        }
        if len(distinct) > 4 * self.lines:
            beyond = 2.0 if case.number("bytes") > self.l2_bytes else 1.0
            return self.hit_ns + beyond * self.miss_ns
        twice = np.tile(places, 2)
        return self.latency(twice % width, twice // width, self._block(case), skip=len(places))

    def _line(self, case: Case) -> float:
        places = np.arange(512) * (case.number("stride") // 16)
        return self.latency(places % SIDE, places // SIDE, self._block(case))

    def _flight(self, case: Case) -> float:
        return (self.hit_ns + 2 * self.miss_ns) / self.overlap

    # many work-items

    def pattern_latency(self, pattern: str, steps: int, block: tuple[int, int] | None = None) -> float:
        """Return the mean latency of one work-item that streams a line by a pattern (TMModel, Fig. 3)."""
        step = np.arange(steps)
        if pattern == "column":
            return self.latency(0 * step, step, block)
        rows = REUSE[pattern]
        return self.latency(step // rows, step % rows, block)

    def contention(self, live_lines: float) -> float:
        """Return the factor of eq. 2 for so many live lines."""
        return self.decay ** max(0, math.ceil((live_lines - self.lines) / self.lines))

    def _scan(self, case: Case) -> float:
        pattern = str(case["pattern"])
        live = (
            case.number("threads")
            * {"column": 0, "row": 1, "block-2": 2, "block-4": 4, "block-8": 8}[pattern]
        )
        return self.pattern_latency(pattern, 256, self._block(case)) * self.contention(live)

    def occupancy(self, register_bytes: int) -> int:
        """Return the warps that a unit keeps in flight."""
        return max(1, min(self.max_waves, self.register_bytes // (register_bytes * self.warp)))

    def _waves(self, case: Case) -> float:
        resident = self.occupancy(16 * case.number("registers")) // case.number("warps")
        return 1e5 * math.ceil(case.number("groups") / (self.units * resident))

    def _share(self, case: Case) -> float:
        resident = self.unit_local_bytes // case.number("bytes")
        return 1e5 * math.ceil(case.number("groups") / (self.units * resident))

    # rates

    def _bandwidth(self, case: Case) -> float:
        nbytes = case.number("bytes")
        if case["width"] == 1:
            return self.rates[0] / 4
        fits = (nbytes <= self.lines * self.line_bytes, nbytes <= self.l2_bytes, True)
        return next(rate for rate, fit in zip(self.rates, fits, strict=True) if fit)

    def _write(self, case: Case) -> float:
        return 20.0

    def _arithmetic(self, case: Case) -> float:
        return 800.0 if case["chains"] == 1 else 889.9

    def _chain(self, case: Case) -> float:
        return 8.0

    def _barrier(self, case: Case) -> float:
        return 200.0

    def _tile(self, case: Case) -> float:
        return 240.0

    def _start(self, case: Case) -> float:
        return 4000.0 + 50.0 * case.number("groups")

    def _launch(self, case: Case) -> float:
        return 20.0

    def _copy(self, case: Case) -> float:
        return 14.0
