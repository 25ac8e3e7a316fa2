"""The 2-D convolution calls of a graph as columns of numbers: the terms of the perf4sight features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph, Op
from torchedge.graphs.sizes import Affine, Dim, format_shape

KINDS = frozenset({"conv2d", "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"})

Column = NDArray[Any]
"""(L,) one number for each of L convolution calls: float64, or Python integers where float64 would round."""


@dataclass(frozen=True, slots=True)
class BatchAmount:
    """A quantity ``const + slope * batch_size``."""

    const: float = 0
    slope: float = 0

    def __add__(self, other: BatchAmount) -> BatchAmount:
        return BatchAmount(self.const + other.const, self.slope + other.slope)

    def __rmul__(self, factor: float) -> BatchAmount:
        return BatchAmount(factor * self.const, factor * self.slope)


class ConvolutionCall(NamedTuple):
    """Dimensions of one call of a 2-D convolution, per sample; a layer that is used twice makes two calls.

    It sees ``copies * N + extra`` samples when the network sees N: N for nearly every layer.
    """

    copies: int
    extra: int
    n: int
    """Output channels."""
    m: int
    """Input channels."""
    e: int
    """Input channels of one group, m / groups."""
    kh: int
    kw: int
    ih: int
    iw: int
    oh: int
    ow: int


class Convolutions:
    """Columns of L calls, named as in perf4sight's appendix B; see `ConvolutionCall`.

    ``ip2``, ``op2`` and ``k2`` are the products of both sides; ``ip`` and ``op`` their geometric means,
    the side of a square. ``exact`` keeps Python integers in place of float64, for sums beyond 2**53.
    """

    def __init__(self, calls: Sequence[ConvolutionCall], *, exact: bool = False) -> None:
        table = np.array(calls, dtype=object if exact else np.float64).reshape(
            -1, len(ConvolutionCall._fields)
        )
        self.copies, self.extra, self.n, self.m, self.e = table.T[:5]
        self.kh, self.kw, self.ih, self.iw, self.oh, self.ow = table.T[5:]
        self.ip2: Column = self.ih * self.iw
        self.op2: Column = self.oh * self.ow
        self.k2: Column = self.kh * self.kw
        self.ip: Column = np.sqrt(self.ip2.astype(np.float64))
        self.op: Column = np.sqrt(self.op2.astype(np.float64))
        self._any_extra = bool(self.extra.any())

    def fixed(self, column: Column) -> BatchAmount:
        """Sum a column that does not depend on the batch size."""
        return BatchAmount(column.sum(), 0)

    def per_sample(self, column: Column) -> BatchAmount:
        """Sum amounts for each sample of a layer's input: ``bs * column`` in the paper's notation."""
        return BatchAmount(column @ self.extra if self._any_extra else 0, column @ self.copies)

    @staticmethod
    def tiles(height: Column, width: Column, side: int) -> Column:
        """Return how many squares of the given side cover each plane, ``ceil(h / side) * ceil(w / side)``."""
        tiles: Column = (-(-height // side)) * (-(-width // side))
        return tiles


def convolution_calls(graph: ForwardGraph) -> tuple[ConvolutionCall, ...]:
    """Return the calls of 2-D convolutions in order of execution; transposed, 1-D and 3-D ones do not count.

    Raises InputError for a convolution whose planes grow with the batch size (not affine in it).
    """
    calls = []
    for op in graph.ops:
        if op.kind in KINDS and not op.attrs.get("transposed", False):
            kernel = graph.values[op.inputs[1]].shape  # type: ignore[index]
            if len(kernel) == 4:
                calls.append(_call(graph, op, kernel))
    return tuple(calls)


def _call(graph: ForwardGraph, op: Op, kernel: tuple[Dim, ...]) -> ConvolutionCall:
    image = graph.values[op.inputs[0]].shape  # type: ignore[index]
    m, ih, iw = image[-3:]
    batch = image[0] if len(image) == 4 else 1
    n, e, kh, kw = kernel
    oh, ow = graph.values[op.outputs[0]].shape[-2:]
    if isinstance(batch, int) and _grows(m) and _grows(n):
        # Samples folded into channels, each with weights of its own (conditional convolutions).
        batch, m, n = Affine(batch), m.slope, n.slope
    copies, extra = (batch.slope, batch.const) if isinstance(batch, Affine) else (0, batch)
    call = (copies, extra, n, m, e, kh, kw, ih, iw, oh, ow)
    if not all(isinstance(size, int) for size in call):
        raise InputError(
            f"{op.kind} at {op.scope or 'the top level'} reads {format_shape(image)} with weights "
            f"{format_shape(kernel)}: its planes or channels grow with the batch size N; "
            "capture the model for one fixed batch size instead"
        )
    return ConvolutionCall(*call)  # type: ignore[arg-type]


def _grows(size: Dim) -> TypeGuard[Affine]:
    """Return whether a size is a multiple of the batch size."""
    return isinstance(size, Affine) and size.const == 0
