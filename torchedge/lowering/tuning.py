"""The tuner: which schedule every kernel takes, and where its operands lie, by predicted cost.

TMModel, sections 4 and 5: all combinations of access patterns, tiles, work-groups and unrolling are scored;
no kernel is written or run. The default stays where the model predicts no clear gain over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import DeviceError
from torchedge.expressions.dialect import LANES, Site
from torchedge.expressions.rendering import writes_texels
from torchedge.lowering.candidates import Candidates, candidates_of
from torchedge.lowering.kernel_work import Sketch, sketches_of
from torchedge.lowering.kernels.nests import Nest, written
from torchedge.lowering.nodes import Node
from torchedge.lowering.schedules import Schedule
from torchedge.lowering.targets import Target
from torchedge.textures.coefficients import KernelCoefficients
from torchedge.textures.layouts import PATTERNS, Layout, fitted
from torchedge.textures.model import KernelCost, predict_kernels, predict_reuse
from torchedge.textures.work import KernelWork, ReadWork

Array = npt.NDArray[Any]

MARGIN = 0.1
"""Predicted gain over the default, relative, below which the default stays: about the model's error."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate of a kernel: its schedule, where its operands lie, and its predicted time."""

    schedule: Schedule
    layouts: Mapping[Node, Layout]
    ms: float


@dataclass(frozen=True, slots=True)
class Scores:
    """All candidates of one kernel: C choices of layouts, and N schedules for each.

    ms: (C, N) predicted times, infinite where a result's image cannot be written. thread_ns, warp_ns,
    pure_ms, reuse_ms: (C, N) those of the ablations and of the reuse-distance baseline. The default is (0,
    0).
    """

    sets: tuple[Candidates, ...]
    layouts: tuple[Mapping[Node, Layout], ...]
    ms: Array
    thread_ns: Array
    warp_ns: Array
    pure_ms: Array
    reuse_ms: Array

    def choice(self, place: int) -> Choice:
        """Return a candidate by its place in `ms.ravel()`."""
        layouts, number = divmod(place, self.ms.shape[1])
        ms = float(self.ms.reshape(-1)[place])
        for candidates in self.sets:
            if number < len(candidates):
                return Choice(candidates.pick(number), self.layouts[layouts], ms)
            number -= len(candidates)
        raise IndexError(place)

    def order(self, cost: Array | None = None) -> Array:
        """Return the places of all candidates that can be written, the fastest first (by `ms`)."""
        values = np.where(np.isfinite(self.ms), self.ms if cost is None else cost, np.inf).reshape(-1)
        places = np.argsort(values, kind="stable")
        return places[: int(np.isfinite(values).sum())]

    def best(self, margin: float = MARGIN) -> int:
        """Return the place of the fastest candidate; the default's where no other is faster by the margin."""
        place = int(self.order()[0])
        return place if self.ms.reshape(-1)[place] * (1 + margin) < self.ms[0, 0] else 0


def score(
    nest: Nest,
    layouts: Mapping[Node, Layout],
    target: Target,
    coefficients: KernelCoefficients,
    options: Mapping[Node, Sequence[Layout]] | None = None,
) -> Scores:
    """Return the predicted cost of all candidates of a kernel.

    options: layouts to choose among, by tensor; the first one is the default. All others stay as in
    `layouts`.
    """
    sets = candidates_of(nest.extents, target)
    choices = [dict(zip(options or {}, chosen, strict=True)) for chosen in product(*(options or {}).values())]
    placed = [{**layouts, **chosen} for chosen in choices]
    parts = [_score_set(nest, candidates, placed, target, coefficients) for candidates in sets]
    columns = [np.concatenate(column, axis=1) for column in zip(*parts, strict=True)]
    return Scores(tuple(sets), tuple(placed), *columns)


def _score_set(
    nest: Nest,
    candidates: Candidates,
    placed: Sequence[Mapping[Node, Layout]],
    target: Target,
    coefficients: KernelCoefficients,
) -> list[Array]:
    """Return (C, N) times, and those of the ablations, of one set of candidates."""
    shape = (len(placed), len(candidates))
    totals = [np.zeros(shape) for _ in range(5)]
    for sketch, share in sketches_of(nest, candidates, target):
        work = _stacked(sketch, placed, coefficients)
        cost: KernelCost = predict_kernels(work, coefficients)
        pure = predict_kernels(work, coefficients, pure=True).ms
        reuse = predict_reuse(work, coefficients)
        for total, part in zip(totals, (cost.ms, cost.thread_ns, cost.warp_ns, pure, reuse), strict=True):
            total += part.reshape(shape) * share
    totals[0] = np.where(_writable(nest, candidates, placed, target), totals[0], np.inf)
    return totals


def _stacked(
    sketch: Sketch, placed: Sequence[Mapping[Node, Layout]], coefficients: KernelCoefficients
) -> KernelWork:
    """Return the work of all candidates in all layouts: those of the first layouts first."""
    known: dict[Any, ReadWork] = {}

    def operand(number: int, layouts: Mapping[Node, Layout]) -> ReadWork:
        walk, access = (*sketch.reads, *sketch.writes)[number]
        key = (number, layouts[access.tensor])
        if key not in known:
            known[key] = sketch.access(walk, access, layouts[access.tensor], coefficients)
        return known[key]

    def stacked(number: int) -> ReadWork:
        return _joined([operand(number, layouts) for layouts in placed], sketch.candidates)

    count = len(placed)
    reads = [stacked(number) for number in range(len(sketch.reads))]
    writes = [stacked(len(sketch.reads) + number) for number in range(len(sketch.writes))]
    scratch = [_joined([part] * count, sketch.candidates) for part in sketch.scratch]
    slices = np.tile(np.broadcast_to(sketch.slices, (sketch.candidates,)), count)
    writes = [replace(part, distinct_bytes=part.distinct_bytes * slices) for part in writes]
    columns = {
        name: np.tile(np.broadcast_to(value, (sketch.candidates, 3)), (count, 1))
        if name == "group"
        else np.tile(np.broadcast_to(np.asarray(value, float), (sketch.candidates,)), count)
        for name, value in sketch.columns.items()
    }
    return KernelWork(**columns, reads=(*scratch, *reads), writes=tuple(writes))


def _joined(parts: Sequence[ReadWork], candidates: int) -> ReadWork:
    """Return the work of several layouts, one after the other."""
    whole = [part.spread_over(candidates) for part in parts]
    if len(whole) == 1:
        return whole[0]
    names = ReadWork.__dataclass_fields__
    return ReadWork(**{name: np.concatenate([getattr(part, name) for part in whole]) for name in names})


def _writable(
    nest: Nest, candidates: Candidates, placed: Sequence[Mapping[Node, Layout]], target: Target
) -> Array:
    """Return (C, N): whether a schedule's kernel writes its results, in images by whole texels."""
    results = list(dict.fromkeys(node for node, _ in nest.stores))
    legal = np.ones((len(placed), len(candidates)), bool)
    for number, layouts in enumerate(placed):
        if all(layouts[node].storage == "buffer" for node in results):
            continue
        known: dict[Any, bool] = {}
        for candidate in range(len(candidates)):
            fits = True
            for node, element, lane, width in written(nest, candidates.pick(candidate), target):
                layout = layouts[node]
                key = (node, lane, width)
                if key not in known:
                    site = Site("", node.shape, node.dtype, layout)
                    known[key] = layout.storage == "buffer" or writes_texels(site, element, lane, width)
                fits &= known[key]
            legal[number, candidate] = fits
    return legal


def layout_options(node: Node, layout: Layout, target: Target) -> list[Layout]:
    """Return where a tensor may lie: as it does, in a buffer, and in an image by every access pattern."""
    options = [layout, Layout(layout.order)]
    rank = len(node.shape)
    if rank >= 2 and node.dtype in ("float32", "float16") and node.shape[layout.order[-1]] % LANES == 0:
        split = rank - 2 if rank > 3 else rank - 1
        for pattern in PATTERNS:
            image = Layout(layout.order, "image", split, pattern)
            try:
                options.append(fitted(image, node.shape, target.image_width, target.image_height))
            except DeviceError:
                continue
    return list(dict.fromkeys(options))
