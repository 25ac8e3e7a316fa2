"""The cost of kernels on one device, for arrays of candidates (TMModel, section 4, eq. 1 to 7).

Each level is a function of its own. `predict_kernels` joins them in the paper's pure form (eq. 7: latency of
texture reads times rounds) or in the extended form, which adds the terms that the paper omits: buffers and
local memory, bandwidths, arithmetic, writes, barriers and launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.textures.coefficients import ARITHMETIC_WIDTHS, KernelCoefficients, MemoryPath
from torchedge.textures.work import KernelWork, ReadWork

TERMS = (
    "launches",
    "latency",
    "starts",
    "arithmetic",
    "image cache",
    "buffer cache",
    "local memory",
    "second-level cache",
    "main memory",
    "writes",
)
"""The terms of a kernel's cost in the extended form."""
SHARPNESS = 4.0
"""Exponent of the sum of terms that run side by side: a large one gives their maximum, 1 their sum."""

_IN_FLIGHT = 4.0
"""Independent multiply-adds of a work-item that hide each other's latency: a warp issues one at a time."""
_TILE_BYTES = 16.0
"""Bytes that a work-item reads of a tile's operand at once."""
_SECTOR_BYTES = 32.0
"""Smallest part of a cache line that one access moves."""


# the paper's levels -----------------------------------------------------------------------------------------


def thread_latency(strides: FloatArray, path: MemoryPath) -> FloatArray:
    """Return the latency of an access of one work-item, ns: eq. 1 with an intercept.

    strides: (..., F) cross-block strides per access. Returns (...). The paper's eq. 1 has no intercept: its
    histogram counts strides within a block, too; here they are `hit_ns` for every access.
    """
    return np.asarray(path.hit_ns + strides @ np.asarray(path.across))


def thrashing(live_lines: npt.ArrayLike, lines: float, decay: float) -> FloatArray:
    """Return the factor by which latency grows once the live lines exceed the cache: D^... of eq. 2 and 3.

    live_lines: |W| s, or the sum of w_i s_i over the operands. Eq. 2 as printed gives an exponent of -1,
    a speed-up, for s = 0 (column); section 4 says that a set of lines that fits costs nothing, so that the
    exponent is cut off at 0.
    """
    exponent = np.ceil((np.asarray(live_lines, np.float64) - lines) / lines)
    return np.asarray(decay ** np.clip(exponent, 0.0, 100.0))


def occupancy(registers: npt.ArrayLike, coefficients: KernelCoefficients) -> FloatArray:
    """Return the warps that one compute unit keeps in flight (eq. 4), at least 1.

    registers: bytes of registers of a work-item.
    """
    of_an_item = np.asarray(registers, np.float64) + coefficients.register_base
    of_a_warp = np.maximum(of_an_item, 1.0) * coefficients.warp
    fitting = np.floor(coefficients.register_bytes / of_a_warp)
    return np.clip(fitting, 1.0, float(coefficients.max_waves))


def occupancy_groups(
    groups: npt.ArrayLike, warps: npt.ArrayLike, waves: npt.ArrayLike, units: float
) -> FloatArray:
    """Return the rounds in which a launch runs (eq. 6): warps of different rounds do not run together.

    groups: work-groups. warps: warps of a group. waves: occupancy in warps. units: compute units.

    Eq. 6 as printed divides work-groups by SPs x occupancy, although occupancy counts warps. A work-group
    runs on one compute unit (section 4), so that a unit holds floor(occupancy / warps) of them at once. A
    work-group of more warps than that takes several rounds by itself (3.2.2, Fig. 5: stepped latency).
    """
    warps, waves = np.asarray(warps, np.float64), np.asarray(waves, np.float64)
    resident = np.maximum(np.floor(waves / warps), 1.0)
    alone = np.ceil(np.maximum(warps / waves, 1.0))
    return np.asarray(np.ceil(np.asarray(groups, np.float64) / (units * resident)) * alone)


# costs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class KernelCost:
    """The predicted cost of N candidates.

    ms: (N,) the time of all launches. thread_ns: (N,) latency of the reads of a work-item alone (eq. 1).
    warp_ns: (N,) the same under contention (eq. 3). waves: (N,) occupancy in warps (eq. 4). groups: (N,)
    work-groups (eq. 5). rounds: (N,) occupancy groups (eq. 6). terms: name -> (N,) ms, the parts of `ms`
    that run side by side, and "launches", which is added to them.
    """

    ms: FloatArray
    thread_ns: FloatArray
    warp_ns: FloatArray
    waves: FloatArray
    groups: FloatArray
    rounds: FloatArray
    terms: Mapping[str, FloatArray]


def predict_kernels(work: KernelWork, coefficients: KernelCoefficients, *, pure: bool = False) -> KernelCost:
    """Return the predicted cost of all candidates of one kernel.

    pure: the paper's model (eq. 7), that is `rounds` times `warp_ns`; otherwise the extended form.
    The ablations of Fig. 10 rank by `thread_ns`, `warp_ns` and `ms`.
    """
    place = _Placement(work, coefficients)
    reads = [(operand, _latency(operand, coefficients)) for operand in work.reads]
    thread_ns = np.zeros(len(work)) + sum(operand.count * latency for operand, latency in reads)
    factors = [_contention(work, place, coefficients, image=image, pure=pure) for image in (True, False)]
    warp_ns = np.zeros(len(work)) + sum(
        operand.count * latency * np.where(operand.image, *factors) for operand, latency in reads
    )
    paper = warp_ns, place.waves, place.groups, place.rounds
    if pure:
        ms = warp_ns * place.rounds / 1e6
        return KernelCost(ms, thread_ns, *paper, {"read latency": ms})
    terms = {name: ns / 1e6 for name, ns in _terms(work, place, coefficients, factors)}
    beside = np.stack(list(terms.values())) if terms else np.zeros((1, len(work)))
    terms["launches"] = np.full(len(work), coefficients.launch_us / 1e3)
    largest = np.maximum(beside.max(0), 1e-12)
    together = largest * ((beside / largest) ** SHARPNESS).sum(0) ** (1 / SHARPNESS)
    return KernelCost(terms["launches"] + together, thread_ns, *paper, terms)


class _Placement:
    """How the work-items of N candidates share the device; all columns (N,).

    items: work-items of a group. warps: warps of a group. groups: work-groups. waves: warps in flight on a
    unit as registers and local memory allow. rounds: occupancy groups. busiest: work-groups of the unit that
    has most. active: warps in flight on it at once. lanes: work-items of a warp.
    """

    def __init__(self, work: KernelWork, coefficients: KernelCoefficients) -> None:
        units = float(coefficients.compute_units)
        self.items = np.prod(work.group, axis=1)
        self.lanes = np.minimum(self.items, coefficients.warp)
        self.warps = np.ceil(self.items / coefficients.warp)
        self.groups = np.ceil(work.items / self.items)
        by_local = np.floor(coefficients.local_bytes / np.maximum(work.local_bytes, 1.0))
        local_waves = np.maximum(by_local, 1.0) * self.warps
        self.waves = np.minimum(occupancy(work.registers, coefficients), local_waves)
        self.rounds = occupancy_groups(self.groups, self.warps, self.waves, units)
        self.busiest = np.ceil(self.groups / units)
        self.active = np.minimum(self.busiest * self.warps, self.waves)


def _path(operand: ReadWork, coefficients: KernelCoefficients, name: str) -> FloatArray:
    """Return a coefficient of the memory path of each candidate."""
    image, buffer = getattr(coefficients.image, name), getattr(coefficients.buffer, name)
    return np.asarray(np.where(operand.image, image, buffer))


def _latency(operand: ReadWork, coefficients: KernelCoefficients) -> FloatArray:
    """Return (N,) eq. 1 for one operand, ns."""
    by_path = [thread_latency(operand.strides, path) for path in (coefficients.image, coefficients.buffer)]
    return np.where(operand.image, *by_path)


def _contention(
    work: KernelWork, place: _Placement, coefficients: KernelCoefficients, *, image: bool, pure: bool
) -> FloatArray:
    """Return (N,) the factor of eq. 3 for operands in images, or in buffers.

    Extended: the warps in flight on a unit share its cache, and latency does not exceed that of an access
    which leaves every block.
    """
    path = coefficients.image if image else coefficients.buffer
    parts = [
        np.where(operand.image == image, operand.warp_share * operand.reuse, 0.0) for operand in work.reads
    ]
    live = np.zeros(len(work)) + sum(parts)
    if pure:
        return thrashing(live, path.lines, path.decay)
    worst = path.worst_ns / path.hit_ns
    return np.minimum(thrashing(live * place.active, path.lines, path.decay), worst)


def _terms(
    work: KernelWork, place: _Placement, coefficients: KernelCoefficients, factors: list[FloatArray]
) -> Iterator[tuple[str, FloatArray]]:
    """Yield the terms of one launch that run side by side: name and (N,) ns."""
    units = coefficients.compute_units
    widths = np.log2(np.maximum(work.vector, 1.0))
    rates = np.interp(widths, [log2(width) for width in ARITHMETIC_WIDTHS], coefficients.gflops)
    # A GPU's vectors are several instructions, a processor's are one.
    lanes = work.vector if coefficients.warp == 1 else np.ones(len(work))
    several = np.clip(work.chains * work.vector / lanes, work.chains.clip(max=1.0), _IN_FLIGHT)
    chain = work.flops / (2.0 * lanes * several) * coefficients.arithmetic_ns
    reads_ns = sum(
        operand.count
        * _latency(operand, coefficients)
        * np.where(operand.image, *factors)
        / _path(operand, coefficients, "overlap")
        for operand in work.reads
    )
    barriers_ns = work.barriers * coefficients.barrier_ns
    yield "latency", place.rounds * (reads_ns + chain + barriers_ns)
    yield "starts", place.groups * coefficients.group_ns
    padded = place.busiest * place.warps * coefficients.warp
    yield "arithmetic", padded * work.flops * units / rates
    for name, image in (("image cache", True), ("buffer cache", False)):
        yield name, place.busiest * place.warps * _issue_ns(work, place, coefficients, image)
    tile_traffic = work.tile_reads * _TILE_BYTES * units / (coefficients.tile_gb_s or coefficients.local_gb_s)
    yield "local memory", padded * (work.local_traffic * units / coefficients.local_gb_s + tile_traffic)
    second, main = _traffic(work, place, coefficients)
    yield "second-level cache", second
    yield "main memory", main
    yield "writes", np.zeros(len(work)) + sum(_write_ns(operand, coefficients) for operand in work.writes)


def _issue_ns(
    work: KernelWork, place: _Placement, coefficients: KernelCoefficients, image: bool
) -> FloatArray:
    """Return (N,) ns that a unit's first-level cache takes for the reads of one warp.

    Texture units return a texel to each work-item, sooner where four neighbours read one column; of buffers,
    equal addresses are read once.
    """
    path = coefficients.image if image else coefficients.buffer
    rate = path.cache_gb_s / coefficients.compute_units
    total = np.zeros(len(work))
    for operand in work.reads:
        returned = operand.nbytes * (place.lanes if image else np.minimum(operand.warp_share, place.lanes))
        touched = operand.warp_lines * min(_SECTOR_BYTES, path.line_bytes)
        lookups = np.maximum(path.issue_ns, operand.warp_lines * path.line_ns)
        access = np.maximum(lookups, np.maximum(returned, touched) / rate)
        if image:
            access = access * (path.column_share + (1 - path.column_share) * (operand.quad_columns - 1) / 3)
        total += np.where(operand.image == image, operand.count * access, 0.0)
    return total


def _traffic(
    work: KernelWork, place: _Placement, coefficients: KernelCoefficients
) -> tuple[FloatArray, FloatArray]:
    """Return (N,) ns of the reads from the second-level cache, and from main memory.

    A work-group moves its own bytes once, or all its accesses once its live lines exceed the cache. Where
    the operands exceed the second-level cache, groups of different rounds read them again; those of one
    round, in a square of the output, share each operand by the side of that square. Elements that the same
    work-items read `again` come from the cache that holds them for all groups of a unit, or of the device.
    """
    second, main = np.zeros(len(work)), np.zeros(len(work))
    whole = np.zeros(len(work)) + sum(o.distinct_bytes * ~o.again for o in work.reads)
    later = np.clip(1.0 - coefficients.l2_bytes / np.maximum(whole, 1.0), 0.0, 1.0)
    resident = np.maximum(place.active / place.warps, 1.0)
    together = np.minimum(place.groups, resident * coefficients.compute_units)
    side = np.sqrt(np.maximum(together, 1.0))
    for operand in work.reads:
        own = place.warps * operand.warp_share * operand.count * operand.nbytes
        own = np.minimum(np.where(operand.group_bytes > 0, operand.group_bytes, own), operand.distinct_bytes)
        line_bytes = _path(operand, coefficients, "line_bytes")
        all_lines = place.warps * operand.count * operand.warp_lines * line_bytes
        live = operand.warp_share * operand.reuse * place.active
        lines = _path(operand, coefficients, "lines")
        missing = _beyond(live, lines)
        moved = place.groups * (own + missing * np.maximum(all_lines - own, 0.0))
        left_first = np.where(operand.again, _beyond(own * resident, lines * line_bytes), 1.0)
        in_use = np.minimum(own * together, operand.distinct_bytes)
        left_second = np.where(operand.again, _beyond(in_use, coefficients.l2_bytes), 1.0)
        second += left_first * moved / _path(operand, coefficients, "l2_gb_s")
        reread = later * np.maximum(moved - operand.distinct_bytes, 0.0) / side * ~operand.again
        from_main = left_first * left_second * operand.distinct_bytes + reread
        main += from_main / _path(operand, coefficients, "main_gb_s")
    return second, main


def _beyond(used: FloatArray, cache: FloatArray | float) -> FloatArray:
    """Return the share of accesses that miss a cache: none while all in use fits, all at twice its size."""
    return np.asarray(np.clip((used - cache) / cache, 0.0, 1.0))


def _write_ns(operand: ReadWork, coefficients: KernelCoefficients) -> FloatArray:
    """Return (N,) ns of the writes of a launch: lines that a warp writes in part are moved whole."""
    useful = np.maximum(operand.warp_share * operand.nbytes, 1.0)
    moved = operand.warp_lines * np.minimum(_SECTOR_BYTES, _path(operand, coefficients, "line_bytes"))
    spread = np.maximum(moved / useful, 1.0)
    return np.asarray(operand.distinct_bytes * spread / _path(operand, coefficients, "write_gb_s"))


# baselines --------------------------------------------------------------------------------------------------


def predict_reuse(work: KernelWork, coefficients: KernelCoefficients) -> FloatArray:
    """Return (N,) ms by a reuse-distance model: the baseline in the manner of PPT-GPU.

    Addresses are one-dimensional: a line is found again if the lines since fit the cache; of others, all
    accesses miss. Neither two-dimensional blocks nor registers are seen.
    """
    place = _Placement(work, coefficients)
    waves = np.minimum(place.busiest * place.warps, coefficients.max_waves)
    rounds = np.ceil(place.groups * place.warps / (coefficients.compute_units * coefficients.max_waves))
    total = np.zeros(len(work))
    for operand in work.reads:
        line_bytes, lines = (_path(operand, coefficients, name) for name in ("line_bytes", "lines"))
        fits = operand.warp_share * operand.reuse * waves <= lines
        compulsory = np.clip(operand.warp_share * operand.nbytes / (operand.warp_lines * line_bytes), 0, 1)
        misses = np.where(fits, compulsory, 1.0)
        hit = _path(operand, coefficients, "hit_ns")
        miss = _path(operand, coefficients, "worst_ns") - hit
        total += operand.count * (hit + misses * miss)
    return np.asarray(rounds * total / 1e6)
