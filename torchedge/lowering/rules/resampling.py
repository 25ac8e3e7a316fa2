"""Tensors drawn at other sizes (nearest, linear, cubic); in gradients elements gather what was read of them.

Along each dimension a place of the result reads a few taps of the input, each with a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from itertools import product
from math import floor
from operator import add, mul

import numpy as np

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Position, Scalar, apply, cast, constant, guarded, where
from torchedge.lowering.building import clamped, pointwise, reduction
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import arithmetic_dtype
from torchedge.lowering.rules.registry import Result, spatial_rule

Tap = tuple[Index, Scalar | None]
"""Where a tap lies in the input, and its weight (None: one)."""
_CUBIC = -0.75


@dataclass(frozen=True, slots=True)
class Scaling:
    """How one dimension is resampled to `new_size`. ratio: steps in the input for one in the result."""

    kind: str
    size: int
    new_size: int
    ratio: float
    align_corners: bool = False

    def taps(self, place: Index) -> list[Tap]:
        """Return what a place of the result reads."""
        if self.size == self.new_size and self.ratio == 1:
            return [(place, None)]
        if self.kind == "linear":
            return self._linear(place)
        return self._cubic(place) if self.kind == "cubic" else [(self._nearest(place), None)]

    def reads(self, place: int) -> range:
        """Return which elements of the input a place of the result reads, to within the borders."""
        if self.kind.startswith("nearest"):
            nearest = self._nearest_place(place)
            return range(nearest, nearest + 1)
        start = floor(self._source_of(place))
        low, high = (start, start + 1) if self.kind == "linear" else (start - 1, start + 2)
        last = self.size - 1
        return range(min(max(low, 0), last), min(max(high, 0), last) + 1)

    def _source_of(self, place: int) -> float:
        if self.align_corners:
            return place * self.ratio
        source = (place + 0.5) * self.ratio - 0.5
        return max(source, 0.0) if self.kind == "linear" else source

    def _source(self, place: Index) -> Scalar:
        at = Position(place, "float32")
        if self.align_corners:
            return at * self.ratio
        source = (at + 0.5) * self.ratio - 0.5
        return apply("maximum", source, 0) if self.kind == "linear" else source

    def _linear(self, place: Index) -> list[Tap]:
        source = self._source(place)
        low = cast(source, "int32")
        share = apply("minimum", source - cast(low, "float32"), 1)
        return [
            (clamped(low, self.size - 1), constant(1, "float32") - share),
            (clamped(low + 1, self.size - 1), share),
        ]

    def _cubic(self, place: Index) -> list[Tap]:
        source = self._source(place)
        start = apply("floor", source)
        t, low = source - start, cast(start, "int32")
        distances = [t + 1, t, constant(1, "float32") - t, constant(2, "float32") - t]
        weights = [(_far if k in (0, 3) else _near)(d) for k, d in enumerate(distances)]
        return [(clamped(apply("add", low, k - 1), self.size - 1), w) for k, w in enumerate(weights)]

    def _nearest_place(self, place: int) -> int:
        shift = 0.5 if self.kind == "nearest exact" else 0.0
        nearest = np.floor(np.float32(place + shift) * np.float32(self.ratio))
        return min(int(nearest), self.size - 1)

    def _nearest(self, place: Index) -> Index:
        """Return the place read, in whole numbers that round as PyTorch's single precision does."""
        twice = place * 2 + 1 if self.kind == "nearest exact" else place * 2
        ratio = _fraction(
            {2 * p + (self.kind == "nearest exact"): self._nearest_place(p) for p in range(self.new_size)},
            Fraction(self.size, 2 * self.new_size),
        )
        if ratio is not None:
            return twice * ratio.numerator // ratio.denominator
        exact = Position(twice, "float32") * (self.ratio / 2)
        return clamped(cast(exact, "int32"), self.size - 1)


def _fraction(places: dict[int, int], likely: Fraction) -> Fraction | None:
    """Return a fraction f with floor(p · f) = place for all p, None if there is none."""
    low = max((Fraction(q, p) for p, q in places.items() if p), default=Fraction(0))
    high = min((Fraction(q + 1, p) for p, q in places.items() if p), default=Fraction(1))
    if low <= likely < high:
        return likely
    return low if low < high else None


def _near(x: Scalar) -> Scalar:
    return (x * (_CUBIC + 2) - (_CUBIC + 3)) * x * x + 1


def _far(x: Scalar) -> Scalar:
    return ((x * _CUBIC - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


def _scalings(
    kind: str,
    sizes: Sequence[int],
    new_sizes: Sequence[int],
    scales: dict[str, float | None],
    align_corners: bool,
) -> list[Scaling]:
    names = ["scales"] if len(sizes) == 1 else ["scales_d", "scales_h", "scales_w"][-len(sizes) :]
    scalings = []
    for name, size, new in zip(names, sizes, new_sizes, strict=True):
        scale = scales.get(name)
        ratio = 1 / scale if scale else size / new
        if align_corners:
            ratio = (size - 1) / (new - 1) if new > 1 else 0.0
        elif (size == new and kind in ("nearest", "linear")) or (2 * size == new and kind == "nearest"):
            ratio = size / new  # PyTorch forgets the given scale there
        scalings.append(Scaling(kind, size, new, ratio, align_corners))
    return scalings


def _gathered(shape: Sequence[int], dtype: str, grad: Node, scalings: dict[int, Scaling]) -> Node:
    """Return for each element the sum of the gradients of the places that read it, by their weights."""
    rank, compute = len(shape), arithmetic_dtype(dtype)
    spans = {dim: _span(s) for dim, s in scalings.items()}

    def term(*indices: Index) -> Scalar:
        at, bounds, weights = list(indices[:rank]), [], []
        for turn, (dim, scaling) in zip(indices[rank:], scalings.items(), strict=True):
            at[dim] = indices[dim] * scaling.new_size // scaling.size - spans[dim][0] + turn
            bounds.append((at[dim], 0, scaling.new_size))
            weights.append(_weight(scaling.taps(at[dim]), indices[dim]))
        factors = [cast(weight, compute) for weight in weights if weight is not None]
        return guarded(bounds, reduce(mul, factors, cast(grad.at(*at), compute)))

    domain = (*shape, *[w for _, w in spans.values()])
    return reduction(domain, range(rank, rank + len(spans)), "resample", term, dtype)


def _weight(taps: Sequence[Tap], element: Index) -> Scalar | None:
    """Return with what weight taps read an element (None: one)."""
    parts: list[Scalar] = []
    for place, weight in taps:
        if weight is None and place == element:
            return None
        hit = Position(place, "int32").equals(Position(element, "int32"))
        parts.append(where(hit, constant(1, "float32") if weight is None else weight, 0))
    return reduce(add, parts)


def _span(scaling: Scaling) -> tuple[int, int]:
    """Return (before, count): element i is read by some of `count` places from i·new // size - before on."""
    places: list[list[int]] = [[] for _ in range(scaling.size)]
    for place in range(scaling.new_size):
        for element in scaling.reads(place):
            places[element].append(place)
    starts = [i * scaling.new_size // scaling.size for i in range(scaling.size)]
    before = max((s - p[0] for s, p in zip(starts, places, strict=True) if p), default=0)
    count = max((p[-1] - s + before + 1 for s, p in zip(starts, places, strict=True) if p), default=1)
    return before, count


def _forward(
    kind: str,
    space: int,
    result: Result,
    input: Node,
    output_size: Sequence[int],
    align_corners: bool = False,
    **scales: float | None,
) -> Node:
    """Input at another size."""
    sizes, new_sizes = input.shape[-space:], result.shape[-space:]
    scalings = _scalings(kind, sizes, new_sizes, scales, align_corners)
    compute = arithmetic_dtype(result.dtype)

    def element(*indices: Index) -> Scalar:
        lead, places = indices[:-space], indices[-space:]
        values = []
        for taps in product(*[s.taps(p) for s, p in zip(scalings, places, strict=True)]):
            value = cast(input.at(*lead, *[at for at, _ in taps]), compute)
            values.append(reduce(mul, [cast(w, compute) for _, w in taps if w is not None], value))
        return reduce(add, values)

    return pointwise(result.shape, result.dtype, element)


def _backward(
    kind: str,
    space: int,
    result: Result,
    grad_output: Node,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool = False,
    **scales: float | None,
) -> Node:
    """The gradient of the input: at once where taps have no weights, else one dimension after the other."""
    sizes, new_sizes, rank = result.shape[-space:], grad_output.shape[-space:], len(result.shape)
    scalings = dict(enumerate(_scalings(kind, sizes, new_sizes, scales, align_corners), start=rank - space))
    if kind.startswith("nearest"):
        return _gathered(result.shape, result.dtype, grad_output, scalings)
    gradient = grad_output
    for dim, scaling in scalings.items():
        shape = [scaling.size if d == dim else n for d, n in enumerate(gradient.shape)]
        gradient = _gathered(shape, result.dtype, gradient, {dim: scaling})
    return gradient


_KINDS = {
    "nearest": [f"upsample_nearest{space}d" for space in (1, 2, 3)],
    "nearest exact": [f"_upsample_nearest_exact{space}d" for space in (1, 2, 3)],
    "linear": ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"],
    "cubic": ["upsample_bicubic2d"],
}
for _kind, _names in _KINDS.items():
    spatial_rule(*_names)(partial(_forward, _kind))
    spatial_rule(*[f"{name}_backward" for name in _names])(partial(_backward, _kind))
