"""Scalar expressions as OpenCL C statements, one value or a vector of neighbouring values at a time.

Tensors lie in buffers or in RGBA images. An image is read by whole texels where the lanes of a kernel fill
one, else by single channels; it is written by whole texels alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torchedge.errors import LoweringError
from torchedge.expressions.dialect import (
    CHECK,
    COMPUTE,
    HALVES,
    PICK,
    SAMPLER,
    STORED,
    UNALIGNED,
    Site,
    aligned,
    elements_of,
    literal,
    offset_of,
    texel_of,
)
from torchedge.expressions.functions import FUNCTIONS, HELPERS
from torchedge.expressions.indices import (
    Atom,
    Axis,
    Fetched,
    Floor,
    Index,
    Remainder,
    atoms_of,
    constant,
    of,
    rewrite,
)
from torchedge.expressions.scalars import (
    Apply,
    Bound,
    Constant,
    Guarded,
    Local,
    Position,
    Read,
    Scalar,
    post_order,
    transform,
    walk,
)
from torchedge.expressions.sizes import LITERAL, quotient, size
from torchedge.textures.layouts import LANES

_LANE = of(Axis("lane", LANES))


@dataclass(slots=True)
class Renderer:
    """Turns scalars into statements of one scope.

    site_of: where tensors lie. uniform: names of locals that are the same in all lanes. lane: the axis along
    which `width` neighbouring values are computed at once (its extent a multiple of the width), None for one
    value. Statements collect in `lines`, helpers in `helpers`.
    """

    site_of: Callable[[Any], Site]
    lane: Axis | None = None
    width: int = 1
    lines: list[str] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)
    prefix: str = "v"
    uniform: frozenset[str] = frozenset()
    _known: dict[Any, str] = field(default_factory=dict)
    _count: int = 0

    # -- indices -------------------------------------------------------------------------------------------

    def widened(self, index: Index) -> Index:
        """Return the index with the lane's axis split into its block and the lane within."""
        if self.lane is None or self.width == 1:
            return index
        lane = self.lane
        block = of(Axis(lane.name, -(-lane.extent // self.width))) * self.width + of(Axis("lane", self.width))
        return rewrite(index, lambda atom: block if atom == lane else None)

    def integer(self, index: Index, guard: str = "", lane: int | None = None, role: str = "") -> str:
        """Return an index (already widened, without lanes) as a C expression; `role`: of its numbers."""
        parts: list[str] = []
        for atom, coefficient in sorted(index.terms, key=lambda term: _order(term[0])):
            text = self._atom(atom, guard, lane)
            sign, factor = "-" if coefficient < 0 else "+", abs(coefficient)
            blocks = self.lane is not None and atom == Axis(
                self.lane.name, -(-self.lane.extent // self.width)
            )
            number = str(factor) if blocks and factor == self.width else size(factor, f"{role} {text}")
            body = text if factor == 1 else f"{number} * {text}"
            parts.append(f"{sign} {body}" if parts else (f"-{body}" if sign == "-" else body))
        if index.const or not parts:
            value = index.const
            number = str(abs(value)) if lane is not None else size(abs(value), f"{role} + {len(parts)}")
            parts.append(f"{'-' if value < 0 else '+'} {number}" if parts else str(value))
        return " ".join(parts)

    def _atom(self, atom: Atom, guard: str, lane: int | None) -> str:
        if isinstance(atom, Axis):
            return atom.name
        if isinstance(atom, (Floor, Remainder)):
            divisor, text = atom.divisor, self._bracket(atom.index, guard, lane)
            if divisor <= LITERAL or divisor == self.width:
                return self.named(f"({text} {'/' if isinstance(atom, Floor) else '%'} {divisor})", "int")
            over = self.named(quotient(text, divisor), "int")
            if isinstance(atom, Floor):
                return over
            return self.named(f"({text} - {size(divisor, text)} * {over})", "int")
        text = self._lane_of(self._render(atom.value, guard), lane)
        return f"((int){text})" if COMPUTE[atom.value.dtype] == "long" else text

    def _bracket(self, index: Index, guard: str, lane: int | None) -> str:
        text = self.integer(index, guard, lane)
        return f"({text})" if len(index.terms) > 1 or index.const else text

    def named(self, text: str, kind: str) -> str:
        """Return the variable that holds a text, declaring it once."""
        if text not in self._known:
            self._count += 1
            name = f"{self.prefix}{self._count}"
            self.lines.append(f"const {kind} {name} = {text};")
            self._known[text] = name
        return self._known[text]

    # -- values --------------------------------------------------------------------------------------------

    def value(self, scalar: Scalar, *, wide: bool = False) -> str:
        """Return the C expression of a scalar; with `wide`, as a vector even where all lanes agree."""
        text, vector = self._render(scalar, "")
        return self._wide(text, scalar.dtype) if wide and not vector and self.width > 1 else text

    def inline(self, scalar: Scalar) -> str:
        """Return `value` with its outermost sums and products as one text: compilers may contract them."""
        if not (isinstance(scalar, Apply) and scalar.function in ("add", "mul")):
            return self.value(scalar, wide=True)
        sign = "+" if scalar.function == "add" else "*"
        return f"({f' {sign} '.join([self.inline(part) for part in scalar.args])})"

    def type_of(self, dtype: str) -> str:
        """Return the OpenCL type values of a dtype have here."""
        return COMPUTE[dtype] + (str(self.width) if self.width > 1 else "")

    def _render(self, scalar: Scalar, guard: str) -> tuple[str, bool]:
        """Return the text of a scalar, and whether it is a vector; what it is made of is declared first."""
        for part in post_order([scalar], lambda whole: self._arguments(whole, guard)):
            if (part, guard) not in self._known:
                self._declare(part, guard)
        return self._known[(scalar, guard)]  # type: ignore[return-value]

    def _arguments(self, scalar: Scalar, guard: str) -> tuple[Scalar, ...]:
        """Return the arguments of a function whose text is not known."""
        return scalar.args if isinstance(scalar, Apply) and (scalar, guard) not in self._known else ()

    def _declare(self, scalar: Scalar, guard: str) -> None:
        """Declare the variable of a scalar whose arguments have theirs."""
        text, vector = self._text(scalar, guard)
        if isinstance(scalar, (Apply, Read, Guarded)) and not (
            isinstance(scalar, Apply) and scalar.function == "cast" and " " not in text
        ):
            self._count += 1
            name = f"{self.prefix}{self._count}"
            kind = COMPUTE[scalar.dtype] + (f"{self.width}" if vector else "")
            self.lines.append(f"const {kind} {name} = {text};")
            text = name
        self._known[(scalar, guard)] = (text, vector)  # type: ignore[assignment]

    def _text(self, scalar: Scalar, guard: str) -> tuple[str, bool]:
        if isinstance(scalar, Constant):
            return self._constant(scalar), False
        if isinstance(scalar, Local):
            return scalar.name, self.width > 1 and not self._is_uniform(scalar)
        if isinstance(scalar, Position):
            return self._position(scalar, guard)
        if isinstance(scalar, Read):
            return self._read(scalar, guard)
        if isinstance(scalar, Guarded):
            return self._guarded(scalar, guard)
        assert isinstance(scalar, Apply)
        return self._apply(scalar, guard)

    def _constant(self, scalar: Constant) -> str:
        """Return a number; whole ones beyond those of common formulas are sizes (of which means are made)."""
        kind, value = COMPUTE[scalar.dtype], scalar.value
        if kind in ("float", "double") and 16 < value < 1 << 24 and value == int(value):
            return f"(({kind}){size(int(value), 'value')})"
        return literal(value, scalar.dtype)

    def _position(self, scalar: Position, guard: str) -> tuple[str, bool]:
        kind = COMPUTE[scalar.dtype]
        index = self.widened(scalar.index)
        if not self.depends(index):
            text = self.integer(index, guard)
            return (text if kind == "int" and not index.terms else f"(({kind})({text}))"), False
        lanes = [f"({kind})({self.integer(self.at_lane(index, k), guard, k)})" for k in range(self.width)]
        return f"({kind}{self.width})({', '.join(lanes)})", True

    def _apply(self, scalar: Apply, guard: str) -> tuple[str, bool]:
        rendered: list[tuple[str, bool]] = [self._known[(a, guard)] for a in scalar.args]  # type: ignore[misc]
        vector = any(v for _, v in rendered)
        if scalar.function == "cast":
            return self._cast(rendered[0], scalar.args[0].dtype, scalar.dtype)
        function = FUNCTIONS[scalar.function]
        if function.helper:
            self.helpers[HELPERS[function.helper]] = None
        kind = COMPUTE[scalar.dtype]
        if not vector:
            texts = [t for t, _ in rendered]
            return function.scalar.format(*texts, T=kind, Z=literal(0, scalar.dtype)), False
        if function.lanewise:
            lanes = [
                function.scalar.format(*[self._lane_of(r, k) for r in rendered], T=kind, Z="0")
                for k in range(self.width)
            ]
            return f"({kind}{self.width})({', '.join(lanes)})", True
        texts = [t if v else self._wide(t, a.dtype) for (t, v), a in zip(rendered, scalar.args, strict=True)]
        masks = [a.dtype for a in scalar.args if a.dtype != "bool"]
        if function.predicate and masks and COMPUTE[masks[0]] in ("double", "long"):
            text = function.for_vectors.format(*texts, T=f"{kind}{self.width}", Z="0")
            return f"convert_int{self.width}({text})", True
        if scalar.function == "where" and kind in ("double", "long"):
            # Mesa's rusticl 22.3 loses the sign of a widened mask, and `?:` selects by the sign.
            texts[0] = f"(convert_long{self.width}({texts[0]}) != (long{self.width})(0L))"
        zero = self._wide(literal(0, scalar.dtype), scalar.dtype)
        return function.for_vectors.format(*texts, T=f"{kind}{self.width}", Z=zero), True

    def _cast(self, rendered: tuple[str, bool], old: str, new: str) -> tuple[str, bool]:
        text, vector = rendered
        kind, suffix = COMPUTE[new], str(self.width) if vector else ""
        if new == "bool":
            zero = self._wide(literal(0, old), old) if vector else literal(0, old)
            test = f"({text} != {zero})"
            long = vector and COMPUTE[old] in ("double", "long")
            return f"convert_int{suffix}({test})" if long else test, vector
        if old == "bool" and vector:
            text = f"(-{text})"
        narrow = {"int8": "char", "uint8": "uchar", "int16": "short"}.get(new)
        if narrow:
            text = f"convert_{narrow}{suffix}({text})"
        if COMPUTE[old] == kind and not narrow:
            return text, vector
        return f"convert_{kind}{suffix}({text})", vector

    def _wide(self, text: str, dtype: str) -> str:
        if dtype == "bool":
            return f"((int{self.width})(-({text})))"
        return f"(({COMPUTE[dtype]}{self.width})({text}))"

    def _lane_of(self, rendered: tuple[str, bool], lane: int | None) -> str:
        text, vector = rendered
        if not vector:
            return text
        if lane is None:
            raise AssertionError("an index that differs between lanes is read as one")
        return f"{text}.s{lane:x}"

    # -- reads ---------------------------------------------------------------------------------------------

    def depends(self, index: Index) -> bool:
        """Return whether an index (already widened) differs between lanes."""
        for atom in atoms_of(index):
            if isinstance(atom, Axis) and atom.name == "lane":
                return True
            if isinstance(atom, Fetched) and any(self._varies(s) for s in walk(atom.value)):
                return True
        return False

    def _varies(self, scalar: Scalar) -> bool:
        """Return whether a part of an expression differs between lanes."""
        if self.width == 1:
            return False
        if isinstance(scalar, Local):
            return not self._is_uniform(scalar)
        if isinstance(scalar, Read):
            return any(self.depends(self.widened(i)) for i in scalar.indices)
        return isinstance(scalar, Position) and self.depends(self.widened(scalar.index))

    def _is_uniform(self, scalar: Local) -> bool:
        return scalar.uniform or scalar.name in self.uniform

    def at_lane(self, index: Index, lane: int) -> Index:
        """Return an index (already widened) as one lane has it."""
        return rewrite(index, lambda a: constant(lane) if isinstance(a, Axis) and a.name == "lane" else None)

    def _guarded(self, scalar: Guarded, guard: str) -> tuple[str, bool]:
        needed = self._beyond_borders(scalar)
        if not needed:
            return self._render(scalar.value, guard)
        scalar = Guarded(needed, scalar.value, scalar.other)
        bounds = [self._in_step((self.widened(i), low, high)) for i, low, high in needed]
        if self.width > 1 and any(self.depends(i) for i, _, _ in bounds):
            return self._guarded_lanes(scalar, guard)
        test = self.named(self._test(bounds, guard, None), "int")
        inner = f"{guard} && {test}" if guard else test
        (value, vector), (other, other_vector) = (
            self._render(scalar.value, inner),
            self._render(scalar.other, guard),
        )
        if vector or other_vector:
            value = value if vector else self._wide(value, scalar.dtype)
            other = other if other_vector else self._wide(other, scalar.dtype)
        return f"({test} ? {value} : {other})", vector or other_vector

    def _beyond_borders(self, scalar: Guarded) -> tuple[Bound, ...]:
        """Return the bounds that a kernel tests: left of and above an image, a sampler reads zero padding.

        To the right and below there may be other texels: a slot of the arena can be larger than its image.
        """
        value, other = scalar.value, scalar.other
        if not (isinstance(value, Read) and isinstance(other, Constant) and other.value == 0):
            return scalar.bounds
        site = self.site_of(value.tensor)
        borders = {value.indices[d] for d in site.layout.borders(site.shape)}
        bounds = [
            # A fetched number may be so small that its coordinate overflows.
            (index, low, high)
            if low or index not in borders or any(isinstance(a, Fetched) for a in atoms_of(index))
            else (index, index.range[0] // LANES * LANES, high)
            for index, low, high in scalar.bounds
        ]
        return tuple([(i, low, high) for i, low, high in bounds if i.range[0] < low or i.range[1] >= high])

    def _in_step(self, bound: Bound) -> Bound:
        """Return a bound that all lanes keep or break together as one of the first lane."""
        index, low, high = bound
        if self.width == 1 or not self.depends(index) or self._lane_step(index) != 1:
            return bound
        first = self.at_lane(index, 0)
        together = aligned(first, self.width) and low % self.width == high % self.width == 0
        return (first, low, high) if together else bound

    def _guarded_lanes(self, scalar: Guarded, guard: str) -> tuple[str, bool]:
        """Bounds that differ between lanes: each lane on its own."""
        lanes = []
        for lane in range(self.width):
            single = Renderer(
                self.site_of, None, 1, self.lines, self.helpers, self.prefix, self.uniform, {}, self._count
            )
            lanes.append(single._render(self._at_one_lane(scalar, lane), guard)[0])
            self._count = single._count
        kind = COMPUTE[scalar.dtype]
        negated = "-" if scalar.dtype == "bool" else ""
        return f"({kind}{self.width})({', '.join(negated + t for t in lanes)})", True

    def _at_one_lane(self, scalar: Scalar, lane: int) -> Scalar:
        """Return an expression as one lane computes it; variables that are vectors become their component."""

        def index(item: Index, fetched: Callable[[Atom], Index | None]) -> Index:
            def change(atom: Atom) -> Index | None:
                return constant(lane) if isinstance(atom, Axis) and atom.name == "lane" else fetched(atom)

            return rewrite(self.widened(item), change)

        def leaf(item: Scalar) -> Scalar | None:
            if isinstance(item, Local) and not self._is_uniform(item):
                return Local(f"{item.name}.s{lane:x}", item.dtype, True)
            return None

        return transform(scalar, index, leaf)

    def _test(self, bounds: Sequence[Bound], guard: str, lane: int | None) -> str:
        tests = []
        for index, low, high in bounds:
            text = self.integer(index, guard, lane)
            smallest, largest = index.range
            if smallest < low:
                tests.append(f"{text} >= {size(low, f'>= {text}')}")
            if largest >= high:
                tests.append(f"{text} < {size(high, f'< {text}')}")
        return "(" + " && ".join(tests) + ")"

    def _read(self, scalar: Read, guard: str) -> tuple[str, bool]:
        site = self.site_of(scalar.tensor)
        indices = tuple([self.widened(i) for i in scalar.indices])
        if site.layout.storage != "buffer":
            return self._texel_read(site, indices, guard)
        offset = offset_of(site, indices)
        if self.width == 1 or not self.depends(offset):
            return self._element(site, self._safe(offset, guard, None, site)), False
        step, first = self._lane_step(offset), self.at_lane(offset, 0)
        if step == 1:
            return self._vector(site, first, guard), True
        if step == 2 and self.width >= LANES:
            odd = 0 if aligned(first, 2) else 1
            first = first - odd
            elements = prod(site.shape)
            if aligned(first, self.width) and elements % 2 == 0 and elements >= 2 * self.width:
                return self._every_other(site, first, guard, odd), True
        half = self.width // 2
        if half >= LANES and [self.at_lane(offset, k) - first for k in range(self.width)] == [
            constant(k // 2) for k in range(self.width)
        ]:
            kind = COMPUTE[site.dtype]
            pairs = self.named(self._vector(site, first, guard, half), f"{kind}{half}")
            return elements_of(kind, *[(pairs, k // 2) for k in range(self.width)]), True
        lanes = [
            self._element(site, self._safe(self.at_lane(offset, k), guard, k, site))
            for k in range(self.width)
        ]
        text = f"({COMPUTE[site.dtype]}{self.width})({', '.join(lanes)})"
        return (f"(-{text})" if site.dtype == "bool" else text), True

    def _every_other(self, site: Site, first: Index, guard: str, odd: int) -> str:
        """Return the even or odd elements of two neighbouring vectors, read whole; what is between is there.

        The last one is in the tensor too: its elements are even in number, as those before the vectors are.
        """
        kind, width = COMPUTE[site.dtype], self.width
        halves = [self.named(self._vector(site, first + k, guard), f"{kind}{width}") for k in (0, width)]
        return elements_of(kind, *[(half, k) for half in halves for k in range(odd, width, 2)])

    def _safe(self, offset: Index, guard: str, lane: int | None, site: Site, width: int = 1) -> str:
        text = self.integer(offset, guard, lane, site.name)
        text = f"({guard} ? {text} : 0)" if guard and offset.terms else text
        self.check(site, text, prod(site.shape) - width + 1)
        return text

    def check(self, site: Site, index: str, high: int) -> None:
        """Let a kernel made with checks report an index outside 0 to `high` - 1."""
        if site.check:
            self.helpers[CHECK] = None
            self.lines.append(f"TE_CHECK({site.check}, {index}, {size(high, index)});")

    def _lane_step(self, offset: Index) -> int | None:
        """Return by how much the offset grows from lane to lane, None where it is no constant."""
        step = 0
        for atom, coefficient in offset.terms:
            if isinstance(atom, Axis) and atom.name == "lane":
                step += coefficient
            elif self.depends(Index(((atom, 1),))):
                return None
        return step

    def _element(self, site: Site, offset: str) -> str:
        if site.dtype == "float16":
            self.helpers[HALVES] = None
            return f"te_half({site.name} + {offset})"
        text = f"{site.name}[{offset}]"
        return f"({text} != 0)" if site.dtype == "bool" else text

    def _vector(self, site: Site, offset: Index, guard: str, width: int = 0) -> str:
        width = width or self.width
        text = self._safe(offset, guard, None, site, width)
        if site.dtype == "float16":
            self.helpers[HALVES] = None
            return f"te_half{width}({site.name} + {text})"
        stored, kind = STORED[site.dtype], COMPUTE[site.dtype]
        if aligned(offset, width):
            loaded = f"*(__global const {stored}{width}*)({site.name} + {text})"
        else:
            self.helpers[UNALIGNED.format(stored=stored, width=width)] = None
            loaded = f"te_load_{stored}{width}({site.name} + {text})"
        if site.dtype == "bool":
            return f"(convert_int{width}({loaded}) != (int{width})(0))"
        return loaded if stored == kind else f"convert_{kind}{width}({loaded})"

    # -- stores --------------------------------------------------------------------------------------------

    def prepare(self, site: Site, indices: Sequence[Index], scalar: Scalar) -> None:
        """Add the statements that compute what `store` writes."""
        if self._changes(site, indices, scalar) is None:
            self.value(scalar)

    def _changes(
        self, site: Site, indices: Sequence[Index], scalar: Scalar
    ) -> tuple[str, tuple[str, bool]] | None:
        """Return the test of a guard whose other value the tensor holds there already, and the value's text.

        None: the scalar is something else, or the test differs between lanes.
        """
        if not isinstance(scalar, Guarded) or not isinstance(scalar.other, Read):
            return None
        old = self.site_of(scalar.other.tensor)
        if old != site or site.layout.storage != "buffer":
            return None
        if offset_of(old, scalar.other.indices) != offset_of(site, indices):
            return None
        bounds = [self._in_step((self.widened(i), low, high)) for i, low, high in scalar.bounds]
        if self.width > 1 and any(self.depends(i) for i, _, _ in bounds):
            return None
        test = self.named(self._test(bounds, "", None), "int")
        return test, self._render(scalar.value, test)

    def store(self, site: Site, indices: Sequence[Index], scalar: Scalar) -> None:
        """Add the statements that write a scalar to a tensor, save where the tensor holds it already."""
        if site.layout.storage != "buffer":
            self._store_texel(site, [self.widened(i) for i in indices], scalar)
            return
        changes = self._changes(site, indices, scalar)
        if changes is None:
            self.lines += self._stored(site, indices, self._render(scalar, ""), scalar.dtype)
            return
        test, value = changes
        stores = self._stored(site, indices, value, scalar.dtype)
        self.lines += [f"if ({test}) {{", *[f"  {line}" for line in stores], "}"]

    def _stored(self, site: Site, indices: Sequence[Index], value: tuple[str, bool], dtype: str) -> list[str]:
        """Return the statements that write a value; what they use of indices is added."""
        offset, (text, vector) = offset_of(site, [self.widened(i) for i in indices]), value
        if self.width == 1 or not self.depends(offset):
            return [self._put(site, self._safe(offset, "", None, site), text)]
        text = text if vector else self._wide(text, dtype)
        if self._lane_step(offset) == 1:
            return [self._put_vector(site, self.at_lane(offset, 0), text)]
        places = [self._safe(self.at_lane(offset, lane), "", lane, site) for lane in range(self.width)]
        parts = [f"{'-' if site.dtype == 'bool' else ''}{text}.s{lane:x}" for lane in range(self.width)]
        return [self._put(site, where, part) for where, part in zip(places, parts, strict=True)]

    def _put(self, site: Site, offset: str, value: str) -> str:
        if site.dtype == "float16":
            return f"vstore_half({value}, {offset}, {site.name});"
        stored = STORED[site.dtype]
        return (
            f"{site.name}[{offset}] = {value if stored == COMPUTE[site.dtype] else f'({stored})({value})'};"
        )

    def _put_vector(self, site: Site, offset: Index, value: str) -> str:
        width = self.width
        text = self._safe(offset, "", None, site, width)
        if site.dtype == "float16":
            return f"vstore_half{width}({value}, 0, {site.name} + {text});"
        stored = STORED[site.dtype]
        if stored != COMPUTE[site.dtype]:
            value = f"convert_{stored}{width}({'-' if site.dtype == 'bool' else ''}({value}))"
        if aligned(offset, width):
            return f"*(__global {stored}{width}*)({site.name} + {text}) = {value};"
        self.helpers[UNALIGNED.format(stored=stored, width=width)] = None
        return f"te_store_{stored}{width}({value}, {site.name} + {text});"

    # -- images --------------------------------------------------------------------------------------------

    def _texel_read(self, site: Site, indices: Sequence[Index], guard: str) -> tuple[str, bool]:
        """Return the text of an element, or of a texel's four, and whether it is a vector."""
        self.helpers[SAMPLER] = None
        x, y, channel = texel_of(site, indices)
        lanes_differ = self.depends(x) or self.depends(y)
        if self.width == LANES and not lanes_differ and channel == _LANE:
            return self._texel(site, x, y, guard, None), True
        if self.width == 1 or not (lanes_differ or self.depends(channel)):
            return self._channel(site, (x, y, channel), guard, None), False
        lanes = [
            self._channel(site, tuple([self.at_lane(i, k) for i in (x, y, channel)]), guard, k)
            for k in range(self.width)
        ]
        return f"(float{self.width})({', '.join(lanes)})", True

    def _texel(self, site: Site, x: Index, y: Index, guard: str, lane: int | None) -> str:
        where = f"(int2)({self.integer(x, guard, lane)}, {self.integer(y, guard, lane)})"
        return self.named(f"read_imagef({site.name}, te_sampler, {where})", "float4")

    def _channel(self, site: Site, place: Sequence[Index], guard: str, lane: int | None) -> str:
        x, y, channel = place
        texel = self._texel(site, x, y, guard, lane)
        if channel.constant is not None:
            return f"{texel}.s{channel.constant}"
        self.helpers[PICK] = None
        return f"te_lane({texel}, {self.integer(channel, guard, lane)})"

    def fills_texels(self, site: Site, indices: Sequence[Index]) -> bool:
        """Return whether the lanes are the channels of one texel; indices: widened."""
        x, y, channel = texel_of(site, indices)
        whole = self.width == LANES and channel == _LANE and not (self.depends(x) or self.depends(y))
        return whole or (self.width == 1 and site.shape[site.layout.order[-1]] == 1)

    def _store_texel(self, site: Site, indices: Sequence[Index], scalar: Scalar) -> None:
        """Add the statements that write a texel."""
        if not self.fills_texels(site, indices):
            raise LoweringError(
                f"no kernel writes {site.dtype}{list(site.shape)} by whole texels; keep it in a buffer"
            )
        x, y, _ = texel_of(site, indices)
        wide = self.width == LANES
        value = self.value(scalar, wide=True) if wide else f"(float4)({self.value(scalar)}, 0, 0, 0)"
        across, down = self.integer(x), self.integer(y)
        width, height = site.layout.extent(site.shape)
        self.check(site, across, width)  # OpenCL drops writes outside an image silently
        self.check(site, down, height)
        self.lines.append(f"write_imagef({site.name}, (int2)({across}, {down}), {value});")


def writes_texels(site: Site, indices: Sequence[Index], lane: Axis | None, width: int) -> bool:
    """Return whether a kernel whose `width` lanes lie along a loop writes an image by whole texels."""
    renderer = Renderer(lambda _: site, lane if width > 1 else None, width)
    return renderer.fills_texels(site, [renderer.widened(index) for index in indices])


def is_within(index: Index, most: int) -> bool:
    """Return whether the sums that `Renderer.integer` writes for an index stay from -most to most."""
    low = high = 0
    for atom, coefficient in sorted(index.terms, key=lambda term: _order(term[0])):
        if isinstance(atom, (Floor, Remainder)) and not is_within(atom.index, most):
            return False
        ends = sorted([end * coefficient for end in atom.range])
        low, high = low + ends[0], high + ends[1]
        if low < -most or high > most:
            return False
    return -most <= low + index.const and high + index.const <= most


def _order(atom: Atom) -> str:
    """Return the place of an atom in a sum, which does not depend on sizes."""
    if isinstance(atom, Axis):
        return atom.name
    if isinstance(atom, Fetched):
        return "~"
    inner = " ".join(sorted([_order(inner) for inner, _ in atom.index.terms]))
    return f"{'/' if isinstance(atom, Floor) else '%'}{inner}"
