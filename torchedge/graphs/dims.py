"""Dimensions that are affine in the batch size: the reason why one capture serves every batch."""

from __future__ import annotations

from dataclasses import dataclass

from torchedge.errors import CaptureError
from torchedge.graphs.sizes import Size

BATCH_PRIME = 1_000_000_007
"""The batch size used while capturing. A prime this large cannot be mistaken for a layer's own size, so that
every dimension that follows from it can be read back as ``slope * N + const``."""

_DIGIT_BASE = 2**89 - 1
_LARGEST_CONSTANT = 50_000_000


@dataclass(frozen=True, slots=True, repr=False)
class Affine:
    """A dimension ``slope * N + const`` of a tensor, N being the batch size."""

    slope: int
    const: int = 0

    def at(self, batch_size: int) -> int:
        """Return the dimension at one batch size."""
        return self.slope * batch_size + self.const

    def __str__(self) -> str:
        head = "N" if self.slope == 1 else f"{self.slope}N"
        return head if not self.const else f"{head}{self.const:+d}"

    __repr__ = __str__


Dim = int | Affine
Shape = tuple[Dim, ...]
Poly = tuple[int, int, int]
"""Coefficients of ``c0 + c1 N + c2 N²``: an amount (bytes, elements, FLOPs) by batch size."""


def decode_dim(size: int) -> Dim:
    """Read a dimension seen at batch size `BATCH_PRIME` back as a constant or an affine dimension.

    Raises CaptureError where the size is no affine function of the batch size (for example ``N // 2``).
    """
    if size < _LARGEST_CONSTANT:
        return size
    slope, const = divmod(size, BATCH_PRIME)
    if const > BATCH_PRIME // 2:
        slope, const = slope + 1, const - BATCH_PRIME
    if not 0 < slope < _LARGEST_CONSTANT or abs(const) > _LARGEST_CONSTANT:
        raise CaptureError(
            f"a dimension of size {size} at batch size {BATCH_PRIME} is not affine in the batch size "
            "(a batch that is halved, squared or padded to a multiple); "
            "capture the model for one fixed batch size instead"
        )
    return Affine(slope, const)


def decode_shape(sizes: tuple[int, ...]) -> Shape:
    """Read a whole shape back, see `decode_dim`."""
    for size in sizes:
        if size >= _LARGEST_CONSTANT:
            return tuple([decode_dim(s) for s in sizes])
    return tuple(sizes)


def shape_at(shape: Shape, batch_size: int) -> tuple[int, ...]:
    """Return the concrete shape at one batch size."""
    return tuple([d if type(d) is int else d.at(batch_size) for d in shape])  # type: ignore[union-attr]


def symbolic(shape: Shape) -> tuple[int, ...]:
    """Return the shape at the batch size whose powers act as the digits of `poly`."""
    return shape_at(shape, _DIGIT_BASE)


def poly(amount: int | Size) -> Poly:
    """Read an amount computed from `symbolic` shapes back as a polynomial of the batch size."""
    if isinstance(amount, Size):
        return (
            amount.mapped(lambda c: poly(c)[0]),
            amount.mapped(lambda c: poly(c)[1]),
            amount.mapped(lambda c: poly(c)[2]),
        )
    if amount < _DIGIT_BASE:
        return (amount, 0, 0)
    rest, c0 = divmod(amount, _DIGIT_BASE)
    if c0 > _DIGIT_BASE // 2:
        rest, c0 = rest + 1, c0 - _DIGIT_BASE
    if rest < _DIGIT_BASE:
        return (c0, rest, 0)
    c2, c1 = divmod(rest, _DIGIT_BASE)
    return (c0, c1, c2)


def poly_at(coefficients: Poly, batch_size: int) -> int:
    """Evaluate a polynomial at one batch size."""
    c0, c1, c2 = coefficients
    return c0 + batch_size * (c1 + batch_size * c2)


def format_shape(shape: Shape) -> str:
    """Return a shape as text, ``N×64×56×56``."""
    return "×".join(map(str, shape)) if shape else "scalar"
