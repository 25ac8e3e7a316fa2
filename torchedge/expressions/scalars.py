"""Scalar expressions: the formula of one element of a tensor. Immutable, compared by content."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, TypeVar

from torchedge.errors import InputError
from torchedge.expressions.functions import FUNCTIONS
from torchedge.expressions.indices import Atom, Axis, Fetched, Index, atoms_of, of, rewrite

T = TypeVar("T")

Number = int | float | bool
Bound = tuple[Index, int, int]
"""(index, low, high): low <= index < high."""


def _operator(function: str, *, swapped: bool = False) -> Callable[[Scalar, Scalar | Number], Scalar]:
    """Return an operator of Python; swapped: its left operand is the second argument, a number."""

    def operate(self: Scalar, other: Scalar | Number) -> Scalar:
        if swapped and not isinstance(other, Scalar):
            return apply(function, constant(other, self.dtype), self)
        return apply(function, self, other)

    return operate


class Scalar:
    """One value of a known dtype. Arithmetic with a Scalar of that dtype, or a number, gives a Scalar."""

    dtype: str
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        # The parts have their hashes: no recursion over the depth of an expression.
        self.__dict__["_hash"] = hash((type(self).__name__, self._content, self._parts))

    @property
    def _content(self) -> tuple[Any, ...]:
        """The fields by which two scalars of equal parts are equal."""
        return tuple([getattr(self, name) for name in self.__match_args__])

    @property
    def _parts(self) -> tuple[Scalar, ...]:
        """The scalars that it is made of, without those in indices."""
        return ()

    def __hash__(self) -> int:
        known: int = self.__dict__["_hash"]
        return known

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Scalar) or hash(self) != hash(other):
            return False
        pairs, seen = [(self, other)], set[tuple[int, int]]()
        while pairs:
            one, two = pairs.pop()
            if one is two or (id(one), id(two)) in seen:
                continue
            seen.add((id(one), id(two)))
            alike = type(one) is type(two) and hash(one) == hash(two) and one._content == two._content
            if not alike or len(one._parts) != len(two._parts):
                return False
            pairs += zip(one._parts, two._parts, strict=True)
        return True

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("mul")
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __and__, __or__ = _operator("and"), _operator("or")
    equals = _operator("eq")
    """Whether both are equal, as a bool (== compares the expressions themselves)."""

    def __neg__(self) -> Scalar:
        return apply("neg", self)

    def __invert__(self) -> Scalar:
        return apply("not", self)


@dataclass(frozen=True, eq=False)
class Constant(Scalar):
    """A number."""

    value: Number
    dtype: str

    @property
    def _content(self) -> tuple[Any, ...]:
        return (repr(self.value), self.dtype)


@dataclass(frozen=True, eq=False)
class Read(Scalar):
    """An element of a tensor that lies in memory. `tensor`: the kernel builder's key for it."""

    tensor: Any
    indices: tuple[Index, ...]
    dtype: str

    @property
    def _content(self) -> tuple[Any, ...]:
        return (id(self.tensor), self.indices, self.dtype)


@dataclass(frozen=True, eq=False)
class Local(Scalar):
    """A variable of the kernel: the result of a reduction, say. `uniform`: the same in all lanes."""

    name: str
    dtype: str
    uniform: bool = False


@dataclass(frozen=True, eq=False)
class Position(Scalar):
    """The number that an index is."""

    index: Index
    dtype: str


@dataclass(frozen=True, eq=False)
class Apply(Scalar):
    """A function of `expressions.functions` of its arguments."""

    function: str
    args: tuple[Scalar, ...]
    dtype: str

    @property
    def _content(self) -> tuple[Any, ...]:
        return (self.function, self.dtype)

    @property
    def _parts(self) -> tuple[Scalar, ...]:
        return self.args


@dataclass(frozen=True, eq=False)
class Guarded(Scalar):
    """`value` where all bounds hold, `other` elsewhere; loads of `value` are skipped elsewhere."""

    bounds: tuple[Bound, ...]
    value: Scalar
    other: Scalar

    @property
    def _content(self) -> tuple[Any, ...]:
        return (self.bounds,)

    @property
    def _parts(self) -> tuple[Scalar, ...]:
        return (self.value, self.other)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """That of the value."""
        return self.value.dtype


def constant(value: Number, dtype: str) -> Constant:
    """Return a number as a scalar of the dtype."""
    if dtype == "bool":
        return Constant(bool(value), dtype)
    if dtype.startswith(("int", "uint")):
        return Constant(int(value), dtype)
    return Constant(float(value), dtype)


_WHOLE = {"maximum": "max_int", "minimum": "min_int"}
"""The functions for whole numbers in place of those that follow NaN."""


def apply(function: str, *args: Scalar | Number, dtype: str | None = None) -> Scalar:
    """Return a function of scalars; numbers take the dtype of the first scalar.

    dtype: of the result; by default "bool" for predicates, else that of the first scalar argument.
    Raises InputError for an unknown function.
    """
    if function not in FUNCTIONS:
        raise InputError(
            f"a kernel was to apply {function!r}; expected one of {', '.join(sorted(FUNCTIONS))}"
        )
    first = next(a for a in args if isinstance(a, Scalar))
    if first.dtype.startswith(("int", "uint")):
        function = _WHOLE.get(function, function)
    scalars = tuple([a if isinstance(a, Scalar) else constant(a, first.dtype) for a in args])
    simple = _simplified(function, scalars)
    if simple is not None:
        return simple
    return Apply(function, scalars, dtype or ("bool" if FUNCTIONS[function].predicate else first.dtype))


def _simplified(function: str, args: tuple[Scalar, ...]) -> Scalar | None:
    """Return the simpler form of x+0, x*1 and the like; NaN and infinities stay.

    A float times 0.0 is written as x−x with the sign of x: rusticl takes a product with 0 for 0 of NaN too.
    """
    if len(args) == 2 and isinstance(args[1], Constant):
        value = args[1].value
        if (function in ("add", "sub") and value == 0) or (function in ("mul", "div") and value == 1):
            return args[0]
    neutral = {"add": 0, "mul": 1}
    if len(args) == 2 and isinstance(args[0], Constant) and args[0].value == neutral.get(function):
        return args[1]
    for other, factor in (args, args[::-1]) if function == "mul" else ():
        if isinstance(factor, Constant) and repr(factor.value) == "0.0":  # of no whole number, and not -0.0
            return Apply("copysign", (Apply("sub", (other, other), other.dtype), other), other.dtype)
    return None


_OF_WHOLE_NUMBERS: Mapping[str, Callable[[Any, Any], Number]] = {
    "max_int": max,
    "min_int": min,
    "lt": operator.lt,
    "ge": operator.ge,
}
"""The functions by which numbers of bits to shift are kept in range."""


def _known(function: str, args: tuple[Scalar, ...]) -> Scalar | None:
    """Return what a function of whole numbers gives where substitution has made its arguments constants."""
    first, *others = args
    if function == "where" and isinstance(first, Constant):
        return others[0] if first.value else others[1]
    if function == "shift_right" and isinstance(others[0], Constant) and others[0].value == 0:
        return first
    numbers = [arg.value for arg in args if isinstance(arg, Constant) and isinstance(arg.value, int)]
    if function not in _OF_WHOLE_NUMBERS or len(numbers) < len(args):
        return None
    return constant(
        _OF_WHOLE_NUMBERS[function](*numbers), "bool" if FUNCTIONS[function].predicate else first.dtype
    )


def factored(total: Scalar) -> Scalar:
    """Return a sum of products with the factors that all of them share taken out: x·s + y·s as (x + y)·s."""
    terms = [_operands(term, "mul") for term in _operands(total, "add")]
    first, *others = terms
    shared = [factor for factor in first if others and all(factor in term for term in others)]
    if not shared or any(len(term) <= len(shared) for term in terms):
        return total
    for term in terms:
        for factor in shared:
            term.remove(factor)
    products = [reduce(operator.mul, term) for term in terms]
    return reduce(operator.mul, shared, reduce(operator.add, products))


def _operands(total: Scalar, function: str) -> list[Scalar]:
    """Return what is added, or multiplied, from the first operand to the last one."""
    operands, waiting = list[Scalar](), [total]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Apply) and item.function == function:
            waiting += reversed(item.args)
        else:
            operands.append(item)
    return operands


def cast(value: Scalar, dtype: str) -> Scalar:
    """Return the value converted to a dtype, as `Tensor.to` does."""
    if value.dtype == dtype:
        return value
    if isinstance(value, Constant):
        return constant(value.value, dtype)
    return Apply("cast", (value,), dtype)


def where(condition: Scalar, value: Scalar, other: Scalar | Number) -> Scalar:
    """Return `value` where the bool holds, else `other`; both sides are computed."""
    alternative = other if isinstance(other, Scalar) else constant(other, value.dtype)
    return Apply("where", (condition, value, alternative), value.dtype)


def guarded(bounds: Iterable[Bound], value: Scalar, other: Scalar | Number = 0) -> Scalar:
    """Return `value` where the bounds hold, else `other`; bounds that always hold are dropped."""
    needed = tuple([b for b in bounds if b[0].range[0] < b[1] or b[0].range[1] >= b[2]])
    if not needed:
        return value
    fallback = other if isinstance(other, Scalar) else constant(other, value.dtype)
    if any(b[0].range[1] < b[1] or b[0].range[0] >= b[2] for b in needed):
        return fallback
    return Guarded(needed, value, fallback)


def children(scalar: Scalar) -> tuple[Scalar, ...]:
    """Return the scalars a scalar is directly made of, fetched indices included."""
    if isinstance(scalar, Apply):
        return scalar.args
    if isinstance(scalar, Guarded):
        return (scalar.value, scalar.other, *fetched_by([b[0] for b in scalar.bounds]))
    if isinstance(scalar, Read):
        return fetched_by(scalar.indices)
    if isinstance(scalar, Position):
        return fetched_by([scalar.index])
    return ()


def fetched_by(indices: Iterable[Index]) -> tuple[Scalar, ...]:
    """Return the values that are places in indices."""
    return tuple([a.value for index in indices for a in atoms_of(index) if isinstance(a, Fetched)])


def walk(*roots: Scalar) -> Iterable[Scalar]:
    """Yield every distinct scalar below the roots once, parts before wholes."""
    if len(roots) == 1:
        return _below(roots[0])
    return dict.fromkeys([scalar for root in roots for scalar in _below(root)])


def _below(root: Scalar) -> tuple[Scalar, ...]:
    """Return `walk` of one root, which is kept with it."""
    known: tuple[Scalar, ...] | None = root.__dict__.get("_below")
    if known is None:
        known = root.__dict__["_below"] = tuple(post_order([root], children))
    return known


def post_order(roots: Sequence[T], parts: Callable[[T], Sequence[T]]) -> list[T]:
    """Return everything below the roots once, parts before wholes; however deep, without recursion."""
    order: list[T] = []
    seen: set[T] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        item, parts_done = stack.pop()
        if parts_done:
            order.append(item)
        elif item not in seen:
            seen.add(item)
            stack.append((item, True))
            stack += [(part, False) for part in reversed(parts(item))]
    return order


def level_of(scalar: Scalar) -> int:
    """Return how much a scalar adds to the depth of an expression: reads at places that are read, much."""
    return 16 if isinstance(scalar, Read) and children(scalar) else 1


def depth_of(root: Scalar) -> int:
    """Return the levels on the longest way from a scalar to one that is made of no other."""
    known: int | None = root.__dict__.get("_depth")
    if known is None:
        depths: dict[Scalar, int] = {}
        for scalar in walk(root):
            depths[scalar] = level_of(scalar) + max([depths[part] for part in children(scalar)], default=0)
        known = root.__dict__["_depth"] = depths[root]
    return known


def reads_of(*roots: Scalar) -> list[Read]:
    """Return every distinct load below the roots."""
    return [s for s in walk(*roots) if isinstance(s, Read)]


def transform(
    scalar: Scalar,
    change_index: Callable[[Index, Callable[[Atom], Index | None]], Index],
    change_leaf: Callable[[Scalar], Scalar | None],
    known: dict[Scalar, Scalar] | None = None,
) -> Scalar:
    """Return an expression with its indices and its leaves (reads, locals, constants) replaced.

    change_index: gets an index and the change of its fetched values, which it has to apply. change_leaf:
    gives None where a leaf stays; reads come with their new indices. known: results of earlier calls with the
    same changes.
    """
    memo = {} if known is None else known

    def fetched(atom: Atom) -> Index | None:
        return of(Fetched(memo[atom.value], atom.low, atom.high)) if isinstance(atom, Fetched) else None

    def index(item: Index) -> Index:
        return change_index(item, fetched)

    def again(item: Scalar) -> Scalar:
        for part in post_order([item], lambda whole: () if whole in memo else children(whole)):
            if part not in memo:
                memo[part] = build(part)
        return memo[item]

    def build(item: Scalar) -> Scalar:
        if isinstance(item, Apply):
            args = tuple([memo[part] for part in item.args])
            return _known(item.function, args) or Apply(item.function, args, item.dtype)
        if isinstance(item, Guarded):
            bounds = [(index(i), low, high) for i, low, high in item.bounds]
            return guarded(bounds, memo[item.value], memo[item.other])
        if isinstance(item, Position):
            place = index(item.index)
            return Position(place, item.dtype) if place.terms else constant(place.const, item.dtype)
        if isinstance(item, Read):
            item = Read(item.tensor, tuple(map(index, item.indices)), item.dtype)
        return change_leaf(item) or item

    return again(scalar)


def substitute(
    scalar: Scalar,
    axes: Mapping[Axis, Index],
    change: Callable[[Read], Scalar | None] = lambda read: None,
    known: dict[Scalar, Scalar] | None = None,
) -> Scalar:
    """Return an expression with axes replaced, then reads for which `change` gives an expression."""

    def index(item: Index, fetched: Callable[[Atom], Index | None]) -> Index:
        return rewrite(item, lambda atom: axes.get(atom) if isinstance(atom, Axis) else fetched(atom))

    return transform(scalar, index, lambda leaf: change(leaf) if isinstance(leaf, Read) else None, known)


def substitute_index(
    index: Index,
    axes: Mapping[Axis, Index],
    change: Callable[[Read], Scalar | None] = lambda read: None,
    known: dict[Scalar, Scalar] | None = None,
) -> Index:
    """Return an index in which `substitute` was applied, to the values that it fetches as well."""
    place = substitute(Position(index, "int32"), axes, change, known)
    return place.index if isinstance(place, Position) else Index((), place.value)  # type: ignore[attr-defined]
