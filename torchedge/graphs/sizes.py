"""Sizes that are not plain numbers, and how each of them passes through code written for whole numbers.

A captured graph serves every batch size N, and a family of graphs every width, because sizes follow from a
few unknowns. One idea serves three places: put something in for the unknown that integer arithmetic carries
along, compute, and read the result back as a polynomial.

- During capture PyTorch computes the shapes, and it needs real integers: N is `BATCH_PRIME`, and `decode_dim`
  reads a dimension back as an `Affine`.
- Rules of operators compute amounts (elements, bytes, FLOPs): N is a huge number whose powers act as digits
  (`symbolic`), and `poly` reads an amount back as ``c0 + c1 N + c2 N²``.
- Graphs of one structure (a search) differ in widths: each width is a `Size`, a polynomial of named symbols
  with Python's operators. `Amounts` evaluates many of them for many candidates at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from torchedge.errors import CaptureError

Monomial = tuple[str, ...]
Amount = Any
"""An int, a float or a Size."""

LARGEST_BATCH = 2**31 - 1
"""The largest batch size that is predicted."""
BATCH_PRIME = 1_000_000_007
"""The batch size during capture. A prime this large cannot be mistaken for a layer's own size."""
LARGEST_CONSTANT = 50_000_000
"""Numbers below it are taken as they are, larger ones as sizes that follow from the batch."""

_DIGIT_BASE = 2**89 - 1
_LARGEST_COEFFICIENT = 2**72


class NotAffineError(CaptureError):
    """A size or an amount does not follow the batch size as a polynomial: capture for one batch size."""


class UndecidedError(TypeError):
    """A Size was asked for something that differs between the graphs of a family."""


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

    Raises NotAffineError where the size is no affine function of the batch size (for example ``N // 2``).
    """
    if size < LARGEST_CONSTANT:
        return size
    slope, const = divmod(size, BATCH_PRIME)
    if const > BATCH_PRIME // 2:
        slope, const = slope + 1, const - BATCH_PRIME
    if not 0 < slope < LARGEST_CONSTANT or abs(const) > LARGEST_CONSTANT:
        raise NotAffineError(
            f"a dimension of size {size} at batch size {BATCH_PRIME} is not affine in the batch size "
            "(a batch that is halved, squared or padded to a multiple); "
            "capture the model for one fixed batch size instead"
        )
    return Affine(slope, const)


def decode_shape(sizes: tuple[int, ...]) -> Shape:
    """Read a whole shape back, see `decode_dim`."""
    for size in sizes:
        if size >= LARGEST_CONSTANT:
            return tuple([decode_dim(s) for s in sizes])
    return tuple(sizes)


def shape_at(shape: Shape, batch_size: int) -> tuple[int, ...]:
    """Return the concrete shape at one batch size."""
    return tuple([d if type(d) is int else d.at(batch_size) for d in shape])  # type: ignore[union-attr]


def symbolic(shape: Shape) -> tuple[int, ...]:
    """Return the shape at the batch size whose powers act as the digits of `poly`."""
    return shape_at(shape, _DIGIT_BASE)


def poly(amount: int | Size) -> Poly:
    """Read an amount computed from `symbolic` shapes back as a polynomial of the batch size.

    Raises NotAffineError for anything but whole coefficients up to degree two (``3N // 2``, ``N³``).
    """
    if isinstance(amount, Size):
        return (
            amount.mapped(lambda c: poly(c)[0]),
            amount.mapped(lambda c: poly(c)[1]),
            amount.mapped(lambda c: poly(c)[2]),
        )
    if abs(amount) < _LARGEST_COEFFICIENT:
        return (amount, 0, 0)
    digits, rest = [], amount
    for _ in range(3):
        rest, digit = divmod(rest, _DIGIT_BASE)
        if digit > _DIGIT_BASE // 2:
            rest, digit = rest + 1, digit - _DIGIT_BASE
        digits.append(digit)
    if rest or any(abs(digit) > _LARGEST_COEFFICIENT for digit in digits):
        raise NotAffineError(
            "an amount is no polynomial of the batch size (a batch that is halved or padded to a multiple); "
            "capture the model for one fixed batch size instead"
        )
    return (digits[0], digits[1], digits[2])


def poly_at(coefficients: Poly, batch_size: int) -> int:
    """Evaluate a polynomial at one batch size."""
    c0, c1, c2 = coefficients
    return c0 + batch_size * (c1 + batch_size * c2)


def format_shape(shape: Shape) -> str:
    """Return a shape as text, ``N×64×56×56``."""
    return "×".join(map(str, shape)) if shape else "scalar"


class Size:
    """A polynomial of symbols. A symbol stands for a whole number from 2 on.

    Sums and products give a Size, or a plain number where no symbol is left. Equality is that of the
    polynomials. Order is known against 0 and 1 alone, where no coefficient is negative; any other comparison
    raises UndecidedError, as does what no polynomial has (`float`, an index, a remainder).
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, Any]) -> None:
        self.terms = terms

    @classmethod
    def symbol(cls, name: str) -> Size:
        """Return the Size that is one symbol."""
        return cls({(name,): 1})

    def at(self, batch_size: int) -> Size:
        """Return itself: no symbol depends on the batch size (as `Affine.at` does)."""
        return self

    def mapped(self, change: Callable[[Any], Any]) -> Amount:
        """Return the Size with every coefficient changed."""
        return _number({monomial: change(c) for monomial, c in self.terms.items()})

    def substitute(self, values: Mapping[str, int]) -> int:
        """Return the number that it is for the given symbols."""
        total = 0
        for monomial, coefficient in self.terms.items():
            for name in monomial:
                coefficient *= name.value(values) if isinstance(name, Quotient) else values[name]
            total += coefficient
        return total

    def __add__(self, other: Amount) -> Amount:
        if not isinstance(other, Size) and other == 0:
            return self
        terms = dict(self.terms)
        for monomial, coefficient in _terms(other).items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _number(terms)

    __radd__ = __add__

    def __neg__(self) -> Amount:
        return self.mapped(lambda c: -c)

    def __sub__(self, other: Amount) -> Amount:
        return self + -other

    def __rsub__(self, other: Amount) -> Amount:
        return -self + other

    def __mul__(self, other: Amount) -> Amount:
        if not isinstance(other, Size):
            if other == 1:
                return self
            return Size({m: c * other for m, c in self.terms.items()}) if other else 0
        terms: dict[Monomial, Any] = {}
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                monomial = tuple(sorted(left + right))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return _number(terms)

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> Amount:
        return self.mapped(lambda c: c / other)

    def __floordiv__(self, divisor: int) -> Amount:
        if divisor == 1:
            return self
        if all(c % divisor == 0 for c in self.terms.values()):
            return self.mapped(lambda c: c // divisor)
        return Size({(Quotient(self, divisor),): 1})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and dict(self.terms) == dict(other.terms)

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __bool__(self) -> bool:
        return True

    def __gt__(self, other: Amount) -> bool:
        return self._above(other)

    def __ge__(self, other: Amount) -> bool:
        return self._above(other)

    def __lt__(self, other: Amount) -> bool:
        return not self._above(other)

    def __le__(self, other: Amount) -> bool:
        return not self._above(other)

    def _above(self, other: Amount) -> bool:
        if other in (0, 1) and all(c > 0 for c in self.terms.values()):
            return True
        raise UndecidedError(f"{self} and {other} have no order that holds for every graph of a family")

    def _undecided(self, *_: object) -> NoReturn:
        raise UndecidedError(f"{self} has no value that holds for every graph of a family")

    __float__ = __int__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = __abs__ = _undecided
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __rfloordiv__ = __rtruediv__ = _undecided
    __pow__ = __rpow__ = __iter__ = _undecided

    def __str__(self) -> str:
        return "+".join("·".join([str(c), *m]) for m, c in sorted(self.terms.items()))

    __repr__ = __str__


class Quotient(str):
    """The symbol that stands for the floor of a Size over a whole number; its name contains both."""

    size: Size
    divisor: int

    def __new__(cls, size: Size, divisor: int) -> Quotient:
        """Name the symbol after its parts, so that equal quotients are one symbol."""
        symbol = super().__new__(cls, f"({size})//{divisor}")
        symbol.size, symbol.divisor = size, divisor
        return symbol

    def __getnewargs__(self) -> tuple[Size, int]:  # type: ignore[override]
        """Return what a copy is made of."""
        return self.size, self.divisor

    def value(self, values: Mapping[str, int]) -> int:
        """Return the number that it is for the given symbols."""
        return self.size.substitute(values) // self.divisor


def _terms(amount: Amount) -> Mapping[Monomial, Any]:
    return amount.terms if isinstance(amount, Size) else {(): amount}


def _number(terms: dict[Monomial, Any]) -> Amount:
    """Return a Size without vanished terms, or the number that is left."""
    nonzero = {m: c for m, c in terms.items() if c}
    if not nonzero:
        return 0
    if len(nonzero) == 1 and () in nonzero:
        return nonzero[()]
    return Size(nonzero)


class Amounts:
    """Numbers and Sizes, (A,), made ready to be evaluated for many values of their symbols at once."""

    def __init__(self, amounts: Sequence[Amount], symbols: Sequence[str], dtype: type = np.int64) -> None:
        self.dtype = dtype
        unique: dict[Amount, int] = {}
        self._which = np.array([unique.setdefault(a, len(unique)) for a in amounts], dtype=np.intp)
        terms = [(place, m, c) for place, a in enumerate(unique) for m, c in _terms(a).items()]
        quotients = sorted({name for _, m, _ in terms for name in m if isinstance(name, Quotient)})
        self._inner = Amounts([q.size for q in quotients], symbols) if quotients else None
        self._divisors = np.array([[q.divisor] for q in quotients], dtype=np.int64)
        lines = {name: line for line, name in enumerate((*symbols, *quotients))}
        most = max((len(m) for _, m, _ in terms), default=0)
        self._factors = np.full((most, len(terms)), len(lines), dtype=np.intp)  # by default the line of ones
        for column, (_, monomial, _) in enumerate(terms):
            for row, name in enumerate(monomial):
                self._factors[row, column] = lines[name]
        self._scale: npt.NDArray[Any] = np.array([c for _, _, c in terms], dtype=dtype)[:, None]
        places = np.array([place for place, _, _ in terms], dtype=np.intp)
        self._starts = np.searchsorted(places, np.arange(len(unique)))
        self._single = len(terms) == len(unique)

    def at(self, values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return (A, C): every amount for each column of the symbols' values (D, C)."""
        lines = [values, np.ones((1, values.shape[1]), dtype=np.int64)]
        if self._inner is not None:
            lines.insert(1, self._inner.at(values) // self._divisors)
        table: npt.NDArray[Any] = np.concatenate(lines).astype(self.dtype, copy=False)
        totals: npt.NDArray[Any] = self._scale * table[-1]
        for factor in self._factors:
            totals *= table[factor]
        if not self._single:
            totals = np.add.reduceat(totals, self._starts, axis=0)
        return np.asarray(totals[self._which])


def substituted(item: Any, values: Mapping[str, int]) -> Any:  # noqa: ANN401 - a dimension or an attribute
    """Return plain data with every Size in it replaced by its number."""
    if isinstance(item, Size):
        return item.substitute(values)
    if isinstance(item, Affine):
        slope, const = substituted(item.slope, values), substituted(item.const, values)
        return Affine(slope, const) if slope else const
    if isinstance(item, slice):
        return slice(*substituted((item.start, item.stop, item.step), values))
    if isinstance(item, (tuple, list)):
        return type(item)([substituted(entry, values) for entry in item])
    if isinstance(item, Mapping):
        return {key: substituted(entry, values) for key, entry in item.items()}
    return item


def symbols_in(items: Iterable[Any]) -> bool:
    """Return whether any of the plain data holds a Size."""
    return any(
        isinstance(i, Size)
        or (isinstance(i, Affine) and symbols_in((i.slope, i.const)))
        or (isinstance(i, slice) and symbols_in((i.start, i.stop, i.step)))
        or (isinstance(i, (tuple, list)) and symbols_in(i))
        or (isinstance(i, Mapping) and symbols_in(i.values()))
        for i in items
    )
