"""The functions of scalar expressions and their OpenCL C text. The one place to add a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Function:
    """One function: its text for scalars and, where that differs, for vectors; `{0}` is the first argument.

    predicate: it gives a bool. cost: rough number of arithmetic operations. helper: a key of `HELPERS` whose
    text must stand before the kernel. lanewise: it exists for scalars alone. `{T}` stands for the OpenCL type of the result, `{Z}` for its zero.
    """

    scalar: str
    vector: str = ""
    predicate: bool = False
    cost: int = 1
    helper: str = ""
    lanewise: bool = False

    @property
    def for_vectors(self) -> str:
        """The text for vectors."""
        return self.vector or self.scalar


_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_MATH = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc", "lgamma"]
_TWO = {"fmod": "fmod", "atan2": "atan2", "hypot": "hypot", "copysign": "copysign", "nextafter": "nextafter"}

FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        "add": Function("({0} + {1})"),
        "sub": Function("({0} - {1})"),
        "mul": Function("({0} * {1})"),
        "div": Function("({0} / {1})", cost=4),
        "neg": Function("(-{0})"),
        "abs": Function("fabs({0})"),
        "abs_int": Function("convert_{T}(abs({0}))"),
        "pow": Function("pow({0}, {1})", cost=20),
        "square": Function("({0} * {0})"),
        "reciprocal": Function("(1 / {0})", cost=4),
        "sigmoid": Function("(1 / (1 + exp(-{0})))", cost=12),
        "relu": Function("({0} < 0 ? {Z} : {0})", "select({0}, {Z}, {0} < {Z})"),
        "maximum": Function(
            "({0} > {1} || {0} != {0} ? {0} : {1})", "select({1}, {0}, ({0} > {1}) | ({0} != {0}))", cost=2
        ),
        "minimum": Function(
            "({0} < {1} || {0} != {0} ? {0} : {1})", "select({1}, {0}, ({0} < {1}) | ({0} != {0}))", cost=2
        ),
        "round": Function("rint({0})"),
        "sign": Function("({T})(({0} > 0) - ({0} < 0))", "convert_{T}(({0} < {Z}) - ({0} > {Z}))"),
        "isnan": Function("({0} != {0})", predicate=True),
        "isinf": Function("isinf({0})", predicate=True),
        "and": Function("({0} & {1})", predicate=True),
        "or": Function("({0} | {1})", predicate=True),
        "xor": Function("({0} ^ {1})", predicate=True),
        "not": Function("(!{0})", "(~{0})", predicate=True),
        "bit_and": Function("({0} & {1})"),
        "bit_or": Function("({0} | {1})"),
        "bit_xor": Function("({0} ^ {1})"),
        "bit_not": Function("(~{0})"),
        "shift_left": Function("({0} << {1})"),
        "shift_right": Function("({0} >> {1})"),
        "int_div": Function("({0} / {1})", cost=8),
        "int_mod": Function("({0} % {1})", cost=8),
        "mad": Function("mad({0}, {1}, {2})"),
        "where": Function("({0} ? {1} : {2})", "select({2}, {1}, {0})"),
        "cast": Function("{0}"),
        "uniform": Function("te_uniform({0}, {1}, {2})", cost=60, helper="uniform", lanewise=True),
        **{name: Function(f"({{0}} {sign} {{1}})", predicate=True) for name, sign in _COMPARISONS.items()},
        **{name: Function(f"{name}({{0}})", cost=8) for name in _MATH},
        **{name: Function(f"{text}({{0}}, {{1}})", cost=8) for name, text in _TWO.items()},
    }
)
"""By name. Predicates on vectors give a mask of -1 and 0, on scalars 1 and 0."""

HELPERS: Mapping[str, str] = MappingProxyType(
    {
        # Philox-2x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
        "uniform": """\
inline float te_uniform(long seed, long counter, long position) {
  uint left = (uint)position, right = (uint)counter, key = (uint)seed ^ (uint)((ulong)position >> 32) * 0x85EBCA6Bu;
  for (int round = 0; round < 10; ++round) {
    uint high = mul_hi(0xD256D193u, left), low = 0xD256D193u * left;
    left = high ^ key ^ right;
    right = low;
    key += 0x9E3779B9u;
  }
  return (float)(left >> 8) * 5.9604644775390625e-8f;
}
""",
        "lane": """\
inline float te_lane(float4 texel, int lane) {
  return lane < 2 ? (lane == 0 ? texel.x : texel.y) : (lane == 2 ? texel.z : texel.w);
}
""",
    }
)
"""OpenCL C text that some functions and reads need before the kernel, by name."""


def cost_of(function: str) -> int:
    """Return the rough number of arithmetic operations of one application."""
    return FUNCTIONS[function].cost
