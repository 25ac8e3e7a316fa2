"""Reductions as statements of a kernel: declared, added to in loops, joined over lanes and work-items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchedge.expressions.dialect import COMPUTE, TYPE_BYTES, elements_of, literal
from torchedge.lowering.nodes import ReduceKind

_JOIN = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "(({1} > {0}) | ({1} != {1})) ? {1} : {0}",
    "min": "(({1} < {0}) | ({1} != {1})) ? {1} : {0}",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
}
_OF_WHOLE = {"max": "({1} > {0}) ? {1} : {0}", "min": "({1} < {0}) ? {1} : {0}"}


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One reduction in a kernel.

    name: the variable of the result; `name_l` are the lanes while the loops run, `name_t` is the remainder of
    a row. kind, dtype: as in the stage. of: the dtype of the reduced values. width: lanes. along: the lanes
    are neighbours in one row, not rows of their own. exact: a long sum of floats is compensated (Kahan), so
    that its error does not grow with its length; `name_u` is the uncompensated sum. Bools are 1 and 0 as
    scalars, masks of -1 and 0 in lanes.
    """

    name: str
    kind: ReduceKind
    dtype: str
    of: str
    width: int
    along: bool
    exact: bool = False

    @property
    def type(self) -> str:
        """OpenCL type of one result."""
        return COMPUTE[self.dtype]

    @property
    def result_type(self) -> str:
        """OpenCL type of the variable of the result: of as many rows as there are lanes."""
        return sized(self.type, 1 if self.along else self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the variable of the result."""
        return TYPE_BYTES[self.type] * (1 if self.along else self.width)

    @property
    def searches(self) -> bool:
        """Whether it looks for a position: argmax and argmin."""
        return self.kind in ("argmax", "argmin")

    @property
    def contracts(self) -> bool:
        """Whether a product may be added without being rounded first."""
        return self.kind == "sum" and not self.exact and self._may_be_nan

    def start(self, lanes: bool = False) -> str:
        """The result over nothing."""
        kind = self.kind.removeprefix("arg")
        if kind in ("any", "all"):
            return "0" if kind == "any" else ("-1" if lanes else "1")
        if kind in ("sum", "prod"):
            return literal(0 if kind == "sum" else 1, self.of)
        if COMPUTE[self.of] in ("float", "double"):
            return literal(float("-inf") if kind == "max" else float("inf"), self.of)
        bits = 63 if COMPUTE[self.of] == "long" else 31
        return literal(-(2**bits) if kind == "max" else 2**bits - 1, self.of)

    def declare(self) -> list[str]:
        """Return the statements before the loops."""
        if self.searches:
            value, place = sized(COMPUTE[self.of], self.width), sized("int", self.width)
            return [
                f"{value} {self.name}_b = ({value})({self.start()});",
                f"{place} {self.name}_p = ({place})(0);",
            ]
        wide = sized(self.type, self.width)
        lost = [f"{wide} {self.name}_c = ({wide})(0), {self.name}_u = ({wide})(0);"] if self.exact else []
        if self.width == 1:
            return [f"{self.type} {self.name} = {self.start()};", *lost]
        lines = [f"{wide} {self.name}_l = ({wide})({self.start(lanes=True)});", *lost]
        return [*lines, f"{self.type} {self.name}_t = {self.start()};"] if self.along else lines

    def add(self, value: str, position: str, tail: bool) -> list[str]:
        """Return the statements within the loops.

        position: of the element in its row, as C text. tail: for the remainder of a row.
        """
        if self.searches:
            best, sign = f"{self.name}_b", ">" if self.kind == "argmax" else "<"
            better = f"({value} {sign} {best})"
            if self._may_be_nan:
                better = f"({better} | (({value} != {value}) & ({best} == {best})))"
            place = sized("int", self.width)
            mask = better  # as wide as the compared values
            if self.width > 1 and COMPUTE[self.of] in ("double", "long"):
                mask = f"convert_{place}({better})"
            return [
                f"{self.name}_p = {mask} ? ({place})({position}) : {self.name}_p;",
                f"{best} = {better} ? {value} : {best};",
            ]
        target = self.name if self.width == 1 else f"{self.name}_t" if tail else f"{self.name}_l"
        if self.exact and not tail:
            wide, lost, term = sized(self.type, self.width), f"{self.name}_c", f"{self.name}_y"
            return [
                f"{self.name}_u += {value};",
                f"const {wide} {term} = {value} - {lost};",
                f"const {wide} {self.name}_n = {target} + {term};",
                f"{lost} = ({self.name}_n - {target}) - {term};",
                f"{target} = {self.name}_n;",
            ]
        return [f"{target} = {self.joined(target, value)};"]

    def close(self, *, shared: bool = False) -> list[str]:
        """Return the statements behind the loops, after which `name` holds the result.

        shared: `share` follows.
        """
        if self.searches:
            wide = sized("long", self.width)
            return [f"const {wide} {self.name} = convert_{wide}({self.name}_p);"]
        summed = self.name if self.width == 1 else f"{self.name}_l"
        # A compensated sum is NaN once it was infinite; what is not finite is the uncompensated sum's.
        lines = [f"{summed} = isfinite({summed}) ? {summed} : {self.name}_u;"] if self.exact else []
        if self.width == 1:
            return lines
        if not self.along:
            const = "" if shared else "const "
            return [*lines, f"{const}{self.result_type} {self.name} = {self.name}_l;"]
        lanes, half = f"{self.name}_l", self.width // 2
        while half:  # the upper half of the lanes to the lower one
            kind, names = sized(self.type, half), (f"{self.name}_a{half}", f"{self.name}_b{half}")
            for name, places in zip(names, (range(half), range(half, 2 * half)), strict=True):
                lines.append(
                    f"const {kind} {name} = {elements_of(self.type, *[(lanes, k) for k in places])};"
                )
            lanes = f"{self.name}_{half}"
            lines.append(f"const {kind} {lanes} = {self.joined(*names)};")
            half //= 2
        lanes = f"({lanes} != 0)" if self.dtype == "bool" else lanes
        return [*lines, f"{self.type} {self.name} = {self.joined(lanes, f'{self.name}_t')};"]

    def joined(self, left: str, right: str) -> str:
        """Return the result of two results over parts, as C text."""
        form = _JOIN[self.kind] if self._may_be_nan else _OF_WHOLE.get(self.kind, _JOIN[self.kind])
        return form.format(left, right)

    @property
    def _may_be_nan(self) -> bool:
        return COMPUTE[self.of] in ("float", "double")


def share(accumulators: Sequence[Accumulator], members: int, step: int) -> list[str]:
    """Return the statements that join the results of a row's members, in a fixed order.

    members: a power of two; each has its place `slot` in the local arrays `name_s`, `step` apart from the
    next one's.
    """
    apart = f"span * {step}" if step > 1 else "span"
    first = f"slot - member * {step}" if step > 1 else "slot - member"
    joins = []
    for a in accumulators:
        mine, other = f"{a.name}_s[slot]", f"{a.name}_s[slot + {apart}]"
        joins.append(f"    {mine} = {a.joined(mine, other)};")
    return [
        *[f"{a.name}_s[slot] = {a.name};" for a in accumulators],
        "barrier(CLK_LOCAL_MEM_FENCE);",
        f"for (int span = {members // 2}; span > 0; span >>= 1) {{",
        "  if (member < span) {",
        *joins,
        "  }",
        "  barrier(CLK_LOCAL_MEM_FENCE);",
        "}",
        *[f"{a.name} = {a.name}_s[{first}];" for a in accumulators],
    ]


def sized(kind: str, width: int) -> str:
    """Return the OpenCL type of a vector; of one value for width 1."""
    return kind if width == 1 else f"{kind}{width}"
