"""Integer index expressions: sums of loop axes, quotients and remainders, kept in a normal form.

Views (reshape, permute, slice, pad, ...) are rewritings of indices; the normal form undoes what cancels, so
that a chain of views costs as much as one view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeGuard

from torchedge.storage.locks import cached_property


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable that runs from 0 to `extent` - 1."""

    name: str
    extent: int

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value."""
        return 0, self.extent - 1


@dataclass(frozen=True)
class Floor:
    """The floor of an index over a positive number; the index is never negative."""

    index: Index
    divisor: int

    @cached_property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value."""
        low, high = self.index.range
        return low // self.divisor, high // self.divisor


@dataclass(frozen=True)
class Remainder:
    """The remainder of an index by a positive number; the index is never negative."""

    index: Index
    divisor: int

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value."""
        return 0, self.divisor - 1


@dataclass(frozen=True, slots=True)
class Fetched:
    """An index that is itself the value of a scalar expression (gather, embedding), within a range."""

    value: Any
    low: int
    high: int

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value."""
        return self.low, self.high


Atom = Axis | Floor | Remainder | Fetched


@dataclass(frozen=True, eq=False)
class Index:
    """A sum of atoms with whole coefficients and a constant.

    Supports + - * // % with whole numbers (and + - with other indices). Equal indices have equal normal
    forms.
    """

    terms: tuple[tuple[Atom, int], ...]
    const: int = 0

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (frozenset(self.terms), self.const)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, int):
            return not self.terms and self.const == other
        return isinstance(other, Index) and self._key == other._key

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")  # as cached_property does, without its lock
        if known is None:
            known = self.__dict__["_hash"] = hash(self._key)
        return known

    @cached_property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value."""
        low = high = self.const
        for atom, coefficient in self.terms:
            ends = atom.range[0] * coefficient, atom.range[1] * coefficient
            low, high = low + min(ends), high + max(ends)
        return low, high

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other) if other else self
        if not (self.terms and other.terms):
            return Index(self.terms or other.terms, self.const + other.const)
        merged = dict(self.terms)
        for atom, coefficient in other.terms:
            merged[atom] = merged.get(atom, 0) + coefficient
        return _sum(merged, self.const + other.const)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Index:
        if factor == 1:
            return self
        if factor == 0:
            return ZERO
        return Index(tuple([(a, c * factor) for a, c in self.terms]), self.const * factor)

    __rmul__ = __mul__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | int) -> Index:
        return self + -other

    def __rsub__(self, other: int) -> Index:
        return -self + other

    def __floordiv__(self, divisor: int) -> Index:
        return _divided(self, divisor)[0]

    def __mod__(self, divisor: int) -> Index:
        return _divided(self, divisor)[1]

    def __repr__(self) -> str:
        return show(self)

    @property
    def constant(self) -> int | None:
        """The number it always is, or None."""
        return None if self.terms else self.const

    @property
    def atom(self) -> Atom | None:
        """The atom that the index is; None if it is a sum, a multiple or a number."""
        alone = len(self.terms) == 1 and self.terms[0][1] == 1 and not self.const
        return self.terms[0][0] if alone else None

    def substitute(self, axes: Mapping[Axis, Index]) -> Index:
        """Return the index with axes replaced."""
        return rewrite(self, lambda atom: axes.get(atom) if isinstance(atom, Axis) else None)


ZERO = Index(())


def constant(value: int) -> Index:
    """Return the index that is one number."""
    return Index((), value)


def of(axis: Atom) -> Index:
    """Return the index that is one atom."""
    return Index(((axis, 1),))


def as_index(value: Index | int) -> Index:
    """Return a number as an index, an index as it is."""
    return constant(value) if isinstance(value, int) else value


def _sum(terms: dict[Atom, int], const: int) -> Index:
    """Return the normal form: no vanished terms, q(x//d) + r(x%d) joined where they make x again."""
    nonzero = {a: c for a, c in terms.items() if c}
    for atom in [a for a in nonzero if isinstance(a, Remainder)]:
        if atom in nonzero:
            whole = (atom.index // atom.divisor).atom
            factor = nonzero[atom]
            if whole is not None and nonzero.get(whole) == factor * atom.divisor:
                del nonzero[atom], nonzero[whole]
                return Index(tuple(nonzero.items()), const) + atom.index * factor
            within = next((o for o in nonzero if _is_floor_within(o, atom)), None)
            if within is not None and nonzero[within] == factor * atom.divisor:
                del nonzero[atom], nonzero[within]
                return Index(tuple(nonzero.items()), const) + within.index * factor
    return Index(tuple(nonzero.items()), const)


def _is_floor_within(other: Atom, rest: Remainder) -> TypeGuard[Floor]:
    """Return whether an atom is the floor of x % (d · m) over d beside a remainder x % d."""
    if not isinstance(other, Floor) or other.divisor != rest.divisor:
        return False
    inner = other.index.atom
    return isinstance(inner, Remainder) and inner.divisor % rest.divisor == 0 and inner.index == rest.index


def _divided(index: Index, divisor: int) -> tuple[Index, Index]:
    """Return the floor and the remainder of an index by a positive number."""
    if divisor <= 0:
        raise ValueError(f"an index is divided by {divisor}; expected a positive number")
    if divisor == 1:
        return index, ZERO
    whole = {a: c // divisor for a, c in index.terms if c % divisor == 0}
    rest = Index(tuple([(a, c) for a, c in index.terms if c % divisor]), index.const % divisor)
    quotient = Index(tuple(whole.items()), index.const // divisor)
    low, high = rest.range
    if low < 0:
        shift = -(low // divisor)
        rest, quotient = rest + shift * divisor, quotient - shift
        low, high = rest.range
    if low // divisor == high // divisor:
        step = low // divisor
        return quotient + step, rest - step * divisor
    floor, remainder = _split_atom(rest, divisor)
    return quotient + floor, remainder


def _split_atom(rest: Index, divisor: int) -> tuple[Index, Index]:
    """Return floor and remainder of an index that does not simplify term by term."""
    common = gcd(divisor, *[c for _, c in rest.terms])
    if common > 1:
        small = Index(tuple([(a, c // common) for a, c in rest.terms]), rest.const // common)
        floor, remainder = _divided(small, divisor // common)
        return floor, remainder * common + rest.const % common
    atom = rest.atom
    if isinstance(atom, Floor):
        return atom.index // (atom.divisor * divisor), Index(((Remainder(rest, divisor), 1),))
    if isinstance(atom, Remainder) and atom.divisor % divisor == 0:
        return Index(((Floor(rest, divisor), 1),)), atom.index % divisor
    coarse, fine = _split_sum(rest, divisor)
    if fine.terms:
        floor, remainder = _divided(coarse, divisor)
        return floor, remainder + fine
    return Index(((Floor(rest, divisor), 1),)), Index(((Remainder(rest, divisor), 1),))


def _split_sum(index: Index, divisor: int) -> tuple[Index, Index]:
    """Return an index as multiples of a factor of the divisor, and a rest below that factor (or nothing).

    The rest decides nothing about the floor: 4 · block + lane of 32 is block of 8.
    """
    terms = sorted(index.terms, key=lambda term: abs(term[1]))
    for count in range(len(terms) - 1, 0, -1):
        step = gcd(divisor, *[c for _, c in terms[count:]])
        fine = Index(tuple(terms[:count]), index.const % step)
        if step > 1 and fine.range[0] >= 0 and fine.range[1] < step:
            return Index(tuple(terms[count:]), index.const - fine.const), fine
    return index, ZERO


def rewrite(index: Index, change: Callable[[Atom], Index | None]) -> Index:
    """Return the index with atoms replaced where `change` gives an index, from the inside out."""
    parts = [_rewritten(atom, change) for atom, _ in index.terms]
    if all(part is None for part in parts):
        return index
    total = constant(index.const)
    for part, (atom, coefficient) in zip(parts, index.terms, strict=True):
        total = total + (of(atom) if part is None else part) * coefficient
    return total


def _rewritten(atom: Atom, change: Callable[[Atom], Index | None]) -> Index | None:
    """Return what an atom becomes, None where it stays."""
    new = change(atom)
    if new is None and isinstance(atom, (Floor, Remainder)):
        inside = rewrite(atom.index, change)
        if inside is not atom.index:
            return inside // atom.divisor if isinstance(atom, Floor) else inside % atom.divisor
    return new


def atoms_of(index: Index) -> Iterable[Atom]:
    """Yield all atoms, those inside quotients and remainders too."""
    for atom, _ in index.terms:
        yield atom
        if isinstance(atom, (Floor, Remainder)):
            yield from atoms_of(atom.index)


def axes_of(index: Index) -> set[Axis]:
    """Return the loop axes an index depends on directly (not through fetched values)."""
    return {atom for atom in atoms_of(index) if isinstance(atom, Axis)}


def flatten(indices: Sequence[Index], sizes: Sequence[int]) -> Index:
    """Return the row-major position of a multi-dimensional index."""
    position = ZERO
    for index, size in zip(indices, sizes, strict=True):
        position = position * size + index
    return position


def unflatten(position: Index, sizes: Sequence[int]) -> tuple[Index, ...]:
    """Return the multi-dimensional index of a row-major position."""
    indices: list[Index] = []
    for size in reversed(sizes[1:]):
        position, remainder = position // size, position % size
        indices.append(remainder)
    if sizes:
        indices.append(position)
    return tuple(reversed(indices))


def reshape(indices: Sequence[Index], sizes: Sequence[int], new_sizes: Sequence[int]) -> tuple[Index, ...]:
    """Return the index into a tensor of `sizes` for an index into its reshaping to `new_sizes`.

    Runs of dimensions that agree stay as they are, without quotients.
    """
    moved: list[Index] = []
    old, new = 0, 0
    while old < len(sizes) or new < len(new_sizes):
        old_end, new_end, left, right = old, new, 1, 1
        if old_end < len(sizes):
            left, old_end = sizes[old_end], old_end + 1
        if new_end < len(new_sizes):
            right, new_end = new_sizes[new_end], new_end + 1
        while left != right:
            if left < right and old_end < len(sizes):
                left, old_end = left * sizes[old_end], old_end + 1
            elif new_end < len(new_sizes):
                right, new_end = right * new_sizes[new_end], new_end + 1
            else:
                left, old_end = left * sizes[old_end], old_end + 1
        moved += unflatten(flatten(indices[new:new_end], new_sizes[new:new_end]), sizes[old:old_end])
        old, new = old_end, new_end
    return tuple([ZERO if size == 1 else index for index, size in zip(moved, sizes, strict=True)])


def inverse(
    indices: Sequence[Index], element: Sequence[Index], loops: Sequence[Axis]
) -> dict[Axis, Index] | None:
    """Return the loop axes at which `indices` are `element`; None where that is not found digit by digit.

    Each index has to be a sum of digits of the axes (`a`, `a // d`, `a % d`, `a // d % e`), and the digits of
    an axis have to make up all of it. The result is a candidate: check that it gives the element.
    """
    digits: dict[Axis, list[tuple[int, int, Index]]] = {axis: [] for axis in loops}
    for index, place in zip(indices, element, strict=True):
        for atom, coefficient in index.terms:
            axis, weight, count = _digit(atom)
            if axis not in digits or coefficient < 0 or index.const:
                return None
            digits[axis].append((weight, count, place // coefficient % count))
    moved: dict[Axis, Index] = {}
    for axis, parts in digits.items():
        whole, total = 1, ZERO
        for weight, count, digit in sorted(parts, key=lambda part: part[0]):
            if weight != whole:
                return None
            whole, total = whole * count, total + digit * weight
        if whole != axis.extent:
            return None
        moved[axis] = total
    return moved


def _digit(atom: Atom) -> tuple[Axis | None, int, int]:
    """Return the axis that an atom is a digit of, the digit's weight and its number of values."""
    if isinstance(atom, Axis):
        return atom, 1, atom.extent
    if isinstance(atom, Fetched) or atom.index.const or [c for _, c in atom.index.terms] != [1]:
        return None, 1, 1
    axis, weight, count = _digit(atom.index.terms[0][0])
    if isinstance(atom, Remainder):
        return (axis if count % atom.divisor == 0 else None), weight, atom.divisor
    return (axis if count % atom.divisor == 0 else None), weight * atom.divisor, count // atom.divisor


def show(index: Index) -> str:
    """Return an index as text, for people."""
    parts = []
    for atom, coefficient in index.terms:
        if isinstance(atom, Axis):
            name = atom.name
        elif isinstance(atom, Fetched):
            name = f"[{atom.value}]"
        else:
            sign = "//" if isinstance(atom, Floor) else "%"
            name = f"(({show(atom.index)}) {sign} {atom.divisor})"
        parts.append(name if coefficient == 1 else f"{coefficient}*{name}")
    if index.const or not parts:
        parts.append(str(index.const))
    return " + ".join(parts)
