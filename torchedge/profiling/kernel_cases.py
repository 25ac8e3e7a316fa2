"""The micro-benchmarks of a device for the kernel cost model: cases, and what each one measures.

A case is a benchmark with its parameters; a device behind `BenchDevice` answers it with one number in the
benchmark's unit (`UNITS`). Real devices run the OpenCL C of `hooks/kernels`; tests use a simulated one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from torchedge.textures.coefficients import ARITHMETIC_WIDTHS
from torchedge.textures.layouts import PATTERNS

Value = int | str

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "walk": "ns an access of one work-item that follows random strides (TMModel, 3.1, steps I and II)",
        "loop": "ns an access of one work-item that goes round a footprint, one access a stride",
        "line": "ns an access of one work-item that reads places `stride` bytes apart, each once",
        "scan": "ns an access of each of `threads` work-items that stream by a pattern (TMModel, 3.2.1)",
        "flight": "ns an access of one work-item whose accesses do not wait for each other",
        "waves": "ns of a launch of `groups` work-groups that wait for memory and hold registers (3.2.2)",
        "share": "ns of a launch of `groups` work-groups that wait for memory, with local memory each",
        "bandwidth": "GB/s of all work-items that read a footprint again and again",
        "write": "GB/s of all work-items that write",
        "arithmetic": "GFLOP/s of all work-items, by floats of an instruction and independent chains",
        "chain": "ns of a multiply-add that waits for the one before",
        "barrier": "ns of a barrier of one work-group",
        "tile": "GB/s of all work-items that read operands of a product's tiles in local memory",
        "start": "ns of a launch of `groups` work-groups of so many warps that do nothing",
        "launch": "us of one launch of many",
        "copy": "GB/s of a copy command",
    }
)
"""What a device measures for a case, by benchmark."""

SIDE = 1024
"""Width and height, in texels of 16 bytes, of the memory that walks and scans read: 16 MiB."""

_WALK_STEPS = 6144
_STRIDES = np.array([0, 1, 2, 3, 4, 8, 16, 32])


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark and its parameters, in a fixed order."""

    benchmark: str
    parameters: tuple[tuple[str, Value], ...]

    def __getitem__(self, name: str) -> Value:
        return dict(self.parameters)[name]

    def number(self, name: str) -> int:
        """Return a parameter that is a number."""
        return int(self[name])

    @property
    def title(self) -> str:
        """The case in one line."""
        return " ".join([self.benchmark, *(str(value) for _, value in self.parameters)])


def case(benchmark: str, **parameters: Value) -> Case:
    """Return a case; raises KeyError for an unknown benchmark."""
    assert benchmark in UNITS
    return Case(benchmark, tuple(parameters.items()))


_Count = Annotated[int, Meta(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What a device states about itself, and the benchmarks do not measure.

    name, driver: texts for the profile. kind: the device class. warp: work-items in lock-step. units: compute
    units. max_group: most work-items of a group. local_bytes: local memory of a group. images: it has
    image2d.
    """

    name: str
    driver: str
    kind: Literal["cpu", "gpu", "mobile"]
    warp: _Count
    units: _Count
    max_group: _Count
    local_bytes: _Count
    images: bool


class BenchDevice(Protocol):
    """A device that micro-benchmarks run on."""

    @property
    def traits(self) -> DeviceTraits:
        """What it states about itself."""

    def prepare(self, cases: Sequence[Case]) -> None:
        """Measure cases together, where that is faster: `measure` is called for each of them next."""

    def measure(self, case: Case) -> float:
        """Return the result of a case, in the benchmark's unit."""


@lru_cache(maxsize=8)
def stride_walk(seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (x, y), (steps,) each: a walk with random strides over SIDE x SIDE texels (TMModel, step I).

    Strides in x and in y follow multinomial distributions that the seed draws. The walk goes forward and does
    not meet its own places: past the end of a row or column it goes on 61 further. Of some walks each place
    is a column of 2, 4 or 8 texels, read downwards, as the block patterns read: other walks cannot tell
    blocks of a row that differ in width by strides in y.
    """
    generator = np.random.default_rng(seed)
    sparse = generator.choice([0.05, 0.3, 1.0], 2)  # few strides prevail, or all are about as frequent
    along_x, along_y = (generator.dirichlet(np.full(len(_STRIDES), alpha)) for alpha in sparse)
    still = generator.choice(4)  # of four walks one stays in its row, one in its column
    rows = int(generator.choice([1, 1, 2, 4, 8]))
    places = _WALK_STEPS // rows
    x = np.cumsum(generator.choice(_STRIDES, places, p=along_x) * (still != 1))
    y = np.cumsum((generator.choice(_STRIDES, places, p=along_y) + (rows - 1)) * (still != 0))
    x, y = (x + 61 * (y // SIDE)) % SIDE, (y + 61 * (x // SIDE)) % SIDE
    return np.repeat(x, rows), (np.repeat(y, rows) + np.tile(np.arange(rows), places)) % SIDE


def cases(traits: DeviceTraits, *, quick: bool = False) -> Iterator[Case]:
    """Yield the cases of a device, in the order in which they are measured.

    quick: few of them, for a test.
    """
    storages = ("image", "buffer") if traits.images else ("buffer",)
    vector = 16 if traits.kind == "cpu" else 4
    for storage in storages:
        for size in _footprints(quick):
            yield case("loop", storage=storage, bytes=size, stride=32 if size < 2**20 else 128)
        for stride in (16, 32, 64, 128, 256, 512):
            yield case("line", storage=storage, stride=stride)
        for seed in range(16 if quick else 64):
            yield case("walk", storage=storage, seed=seed)
        yield case("loop", storage=storage, bytes=2**22, stride=64)
        yield case("flight", storage=storage)
        for pattern in PATTERNS:
            for threads in _thread_counts(traits, quick):
                yield case("scan", storage=storage, pattern=pattern, threads=threads)
        yield case("write", storage=storage)
        for size in (2**12, 2**16, 2**20, 2**26):
            yield case("bandwidth", storage=storage, bytes=size, width=4 if storage == "image" else vector)
    yield case("bandwidth", storage="buffer", bytes=2**12, width=1)
    for memory in ("local", "constant"):
        yield case("bandwidth", storage=memory, bytes=2**12, width=vector)
    for width in ARITHMETIC_WIDTHS:
        for chains in (1, 4, 8):
            yield case("arithmetic", width=width, chains=chains)
    yield case("chain")
    yield case("barrier")
    yield case("tile", width=vector)
    for groups in (1, 8, 64, 256):
        yield case("start", warps=1, groups=groups * traits.units)
    yield case("launch")
    for way in ("buffer-image", "image-buffer", "buffer-buffer") if traits.images else ("buffer-buffer",):
        yield case("copy", way=way)
    warps = 2 if traits.kind == "gpu" else 1  # units of desktop GPUs hold more warps than groups
    for registers in (4, 8, 16, 32, 48):
        for groups in _group_counts(traits, quick):
            yield case("waves", registers=registers, warps=warps, groups=groups)
    for groups in _group_counts(traits, quick):
        yield case("share", bytes=traits.local_bytes // 4, groups=groups)


def _footprints(quick: bool) -> list[int]:
    """Return bytes from 512 B to 64 MiB: a quarter apart below 1 MiB, then doubled."""
    small = [512 * 2**octave * quarter // 4 for octave in range(11) for quarter in (4, 5, 6, 7)]
    large = [2**exponent for exponent in range(20, 27)]
    return small[::4] + large[::3] if quick else small + large


def _thread_counts(traits: DeviceTraits, quick: bool) -> list[int]:
    """Return work-items of a group: powers of two and one and a half of them; few on a processor."""
    if traits.kind == "cpu":  # its work-items run one after another
        return [1, 8, 64]
    counts = [2**exponent for exponent in range(11)] + [3 * 2**exponent for exponent in range(9)]
    return sorted(count for count in counts if count <= min(traits.max_group, 1024))[:: 2 if quick else 1]


def _group_counts(traits: DeviceTraits, quick: bool) -> list[int]:
    """Return numbers of work-groups: multiples of the compute units, to beyond what they hold."""
    most = {"cpu": 8, "gpu": 32, "mobile": 64}[traits.kind]
    multiples = [1, 2, 4, 8] if quick else range(1, most + 1)
    return [traits.units * multiple for multiple in multiples]
