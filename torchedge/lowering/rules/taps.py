"""How windows lie on what they slide over: which elements they cover, and which windows cover an element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from torchedge.expressions.indices import Index
from torchedge.expressions.scalars import Bound


@dataclass(frozen=True, slots=True)
class Taps:
    """How a convolution's kernel lies on x, one entry a spatial dimension; `sizes` are x's."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        kernel: Sequence[int] | int,
        stride: Sequence[int] | int,
        padding: Sequence[int] | int,
        dilation: Sequence[int] | int = 1,
        groups: int = 1,
    ) -> Taps:
        """Return the taps of an operator's arguments, of which a single number stands for all dimensions."""
        n = len(sizes)
        lying = (each(kernel, n), each(stride, n), each(padding, n), each(dilation, n))
        return cls(tuple(sizes), *lying, groups)

    def under(self, outs: Sequence[Index], taps: Sequence[Index]) -> tuple[list[Index], list[Bound]]:
        """Return where on x the taps of outputs lie, and the bounds within which that is on x."""
        places = [
            o * s + k * d - p
            for o, k, s, p, d in zip(outs, taps, self.stride, self.padding, self.dilation, strict=True)
        ]
        return places, [(i, 0, n) for i, n in zip(places, self.sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Phases:
    """How one spatial dimension of x splits by what taps reach it: x + padding = stride · q + remainder.

    All x of one remainder meet the same taps, `first` + `step` · j, in outputs q - m - `back` · j.
    Phases are numbered by their first tap; remainders without one meet no tap at all.
    """

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def common(self) -> int:
        """Remainders that are no multiple of this meet no tap."""
        return gcd(self.stride, self.dilation)

    @property
    def step(self) -> int:
        """From one tap of a phase to its next."""
        return self.stride // self.common

    @property
    def back(self) -> int:
        """From the output of one tap of a phase back to that of its next."""
        return self.dilation // self.common

    @property
    def count(self) -> int:
        """Number of phases that have a tap."""
        return min(self.step, self.kernel)

    @property
    def most_taps(self) -> int:
        """Number of taps of the first phase; others may have one fewer."""
        return -(-self.kernel // self.step)

    @property
    def low(self) -> int:
        """The q of x = 0."""
        return self.padding // self.stride

    @property
    def quotients(self) -> int:
        """Number of different q."""
        return (self.size - 1 + self.padding) // self.stride - self.low + 1

    @property
    def trivial(self) -> bool:
        """Whether there is one phase, of which x itself is the quotient."""
        return self.stride == 1

    def output(self, quotient: Index, first: Index, turn: Index) -> Index:
        """Return the output in which tap `first` + `step` · `turn` meets the x of a quotient."""
        return quotient + self.low - first * self.dilation // self.stride - turn * self.back

    def split(self, place: Index) -> tuple[Index, Index, list[Bound]]:
        """Return quotient and phase of an x, and the bounds within which it has a tap."""
        moved = place + self.padding
        remainder = moved % self.stride
        first = remainder // self.common * pow(self.back, -1, self.step) % self.step
        return (
            moved // self.stride - self.low,
            first,
            [(remainder % self.common, 0, 1), (first, 0, self.count)],
        )


def each(sizes: Sequence[int] | int, space: int) -> tuple[int, ...]:
    """Return one size for each of `space` dimensions; a single one stands for all."""
    several = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return several * space if len(several) == 1 else several
