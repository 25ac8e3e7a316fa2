"""The functions of scalar expressions and their OpenCL C text. The one place to add a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Function:
    """One function: its text for scalars and, where that differs, for vectors; `{0}` is the first argument.

    predicate: it gives a bool. cost: rough number of arithmetic operations. helper: a key of `HELPERS` whose
    text must stand before the kernel. lanewise: it exists for scalars alone. `{T}` stands for the OpenCL
    type of the result, `{Z}` for its zero.
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


COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
"""The operators of C by function."""
UNARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    "floor", "ceil", "trunc", "lgamma",
)  # fmt: skip
"""Functions that OpenCL C calls by the same name, of one argument."""
ANGLES = ("sin", "cos", "tan")
"""Functions that are computed lane by lane."""
BINARY = ("fmod", "atan2", "hypot", "copysign", "nextafter")
"""OpenCL functions of two arguments."""

FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        "add": Function("({0} + {1})"),
        "sub": Function("({0} - {1})"),
        "mul": Function("({0} * {1})"),
        "div": Function("({0} / {1})", cost=4),
        "neg": Function("(-{0})"),
        "neg_int": Function("as_{T}(-as_u{T}({0}))"),  # the least number is its own negative
        "abs": Function("fabs({0})"),
        "abs_int": Function("convert_{T}(abs({0}))"),
        "pow": Function("pow({0}, {1})", cost=20),
        "square": Function("({0} * {0})"),
        "reciprocal": Function("(1 / {0})", cost=4),
        "sigmoid": Function("(1 / (1 + exp(-{0})))", cost=12),
        "relu": Function("({0} < {Z} ? {Z} : {0})"),
        "max_int": Function("max({0}, {1})"),
        "min_int": Function("min({0}, {1})"),
        "maximum": Function(
            "({0} > {1} || {0} != {0} ? {0} : {1})", "((({0} > {1}) | ({0} != {0})) ? {0} : {1})", cost=2
        ),
        "minimum": Function(
            "({0} < {1} || {0} != {0} ? {0} : {1})", "((({0} < {1}) | ({0} != {0})) ? {0} : {1})", cost=2
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
        "where": Function("({0} ? {1} : {2})"),
        "cast": Function("{0}"),
        "int_pow": Function("({T})te_int_pow({0}, {1})", cost=40, helper="int_pow", lanewise=True),
        "digamma": Function("te_digamma({0})", cost=60, helper="digamma", lanewise=True),
        "trigamma": Function("te_trigamma({0})", cost=60, helper="trigamma", lanewise=True),
        "zeta": Function("te_zeta({0}, {1})", cost=200, helper="zeta", lanewise=True),
        "erfcx": Function("te_erfcx({0})", cost=40, helper="erfcx", lanewise=True),
        "erfinv": Function("te_erfinv({0})", cost=30, helper="erfinv", lanewise=True),
        "uniform": Function("te_uniform({0}, {1}, {2}, {3})", cost=60, helper="uniform", lanewise=True),
        **{name: Function(f"({{0}} {sign} {{1}})", predicate=True) for name, sign in COMPARISONS.items()},
        # Vectors that mix small and huge angles come out wrong on PoCL 3.
        **{name: Function(f"{name}({{0}})", cost=8, lanewise=name in ANGLES) for name in UNARY},
        **{name: Function(f"{name}({{0}}, {{1}})", cost=1 if name == "copysign" else 8) for name in BINARY},
    }
)
"""By name. Predicates on vectors give a mask of -1 and 0, on scalars 1 and 0."""

HELPERS: Mapping[str, str] = MappingProxyType(
    {
        # Philox-4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
        "uniform": """\
inline float te_uniform(long seed, long counter, long offset, long position) {
  uint a = (uint)position, b = (uint)offset, c = (uint)counter, d = 0, left = (uint)seed, right = 0;
  for (int round = 0; round < 10; ++round) {
    uint high = mul_hi(0xD2511F53u, a), low = 0xD2511F53u * a;
    a = mul_hi(0xCD9E8D57u, c) ^ b ^ left;
    b = 0xCD9E8D57u * c;
    c = high ^ d ^ right;
    d = low;
    left += 0x9E3779B9u;
    right += 0xBB67AE85u;
  }
  return (float)(a >> 8) * 5.9604644775390625e-8f;
}
""",
        "int_pow": """\
inline long te_int_pow(long base, long exponent) {
  if (exponent < 0) return base == 1 ? 1 : (base == -1 ? 1 - 2 * (exponent & 1) : 0);
  long result = 1;
  for (; exponent; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}
""",
        # Recurrence up to 6, then the asymptotic series; reflection below 0 (Abramowitz and Stegun 6.3, 6.4).
        "digamma": """\
inline float te_digamma(float x) {
  float sum = 0;
  if (x == 0) return copysign(INFINITY, -x);
  if (x < 0) {
    if (x == floor(x)) return NAN;
    sum = -3.14159265f / tanpi(x);
    x = 1 - x;
  }
  for (; x < 6; x += 1) sum -= 1 / x;
  float square = 1 / (x * x);
  float series = square * (1.0f / 12 - square * (1.0f / 120 - square * (1.0f / 252 - square / 240)));
  return sum + log(x) - 0.5f / x - series;
}
""",
        "trigamma": """\
inline float te_trigamma(float x) {
  float sum = 0, sign = 1;
  if (x < 0.5f) {
    float sine = sinpi(x);
    sum = -9.8696044f / (sine * sine);
    sign = -1;
    x = 1 - x;
  }
  float found = 0;
  for (; x < 6; x += 1) found += 1 / (x * x);
  float square = 1 / (x * x);
  found += (1 + 0.5f / x + square * (1.0f / 6 - square * (1.0f / 30 - square / 42))) / x;
  return sign * (sum + found);
}
""",
        # Euler and Maclaurin's sum behind ten terms (Cephes, Mathematical Functions, 1989).
        "zeta": """\
inline float te_zeta(float x, float q) {
  if (x == 1) return INFINITY;
  if (x < 1 || (q <= 0 && q != floor(q) && x != floor(x))) return NAN;
  if (q <= 0 && q == floor(q)) return INFINITY;
  if (q > 1 && (isinf(x) || isinf(q))) return NAN;
  if (q > 1e6f) return pow(q, 1 - x) / (x - 1) + 0.5f * pow(q, -x);
  float sum = pow(q, -x), a = q, b = 0, lost = 0;
  for (int i = 0; i < 9 || a <= 9; ++i) {
    a += 1;
    b = pow(a, -x);
    float total = sum + b;  // Neumaier's sum: terms on both sides of zero cancel
    if (isfinite(total)) lost += fabs(sum) > fabs(b) ? (sum - total) + b : (b - total) + sum;
    sum = total;
    if (a > 0 && b <= 3e-8f * fabs(sum)) return sum + lost;
  }
  sum += lost;
  const float terms[5] = {12.0f, -720.0f, 30240.0f, -1209600.0f, 47900160.0f};
  float factor = 1, k = 0, power = b / a;
  sum += b * a / (x - 1) - 0.5f * b;
  for (int i = 0; i < 5; ++i) {
    factor *= x + k;
    sum += factor * power / terms[i];
    factor *= x + k + 1;
    power /= a * a;
    k += 2;
  }
  return sum;
}
""",
        # (1 + 2 x) exp(x²) erfc(x) is a polynomial in (x - 2) / (x + 2): least squares at 80 Chebyshev nodes.
        "erfcx": """\
inline float te_erfcx(float x) {
  float y = fabs(x), t = (y - 2) / (y + 2);
  if (y > 1e9f) return x > 0 ? 0.564189584f / x : (x < 0 ? INFINITY : x);
  float p = 6.33694581e-05f;
  p = 0.000160803582f + p * t;
  p = -0.000357920449f + p * t;
  p = -0.0013957069f + p * t;
  p = 0.00121741055f + p * t;
  p = 0.00868915953f + p * t;
  p = -0.00801896304f + p * t;
  p = -0.0542119592f + p * t;
  p = 0.164049461f + p * t;
  p = -0.166031092f + p * t;
  p = -0.0927637592f + p * t;
  p = (1.27697837f + p * t) / (1 + 2 * y);
  if (x >= 0 || y > 9.4f) return x < 0 ? INFINITY : p;
  float square = x * x, power = exp(square);
  return 2 * (power + power * fma(x, x, -square)) - p;
}
""",
        # M. Giles, Approximating the erfinv function (GPU Computing Gems 2, 2011).
        "erfinv": """\
inline float te_erfinv(float x) {
  if (fabs(x) >= 1) return fabs(x) > 1 ? NAN : copysign(INFINITY, x);
  float w = -log((1 - x) * (1 + x)), p;
  if (w < 5) {
    w -= 2.5f;
    p = 2.81022636e-08f;
    p = 3.43273939e-07f + p * w;
    p = -3.5233877e-06f + p * w;
    p = -4.39150654e-06f + p * w;
    p = 0.00021858087f + p * w;
    p = -0.00125372503f + p * w;
    p = -0.00417768164f + p * w;
    p = 0.246640727f + p * w;
    p = 1.50140941f + p * w;
  } else {
    w = sqrt(w) - 3;
    p = -0.000200214257f;
    p = 0.000100950558f + p * w;
    p = 0.00134934322f + p * w;
    p = -0.00367342844f + p * w;
    p = 0.00573950773f + p * w;
    p = -0.0076224613f + p * w;
    p = 0.00943887047f + p * w;
    p = 1.00167406f + p * w;
    p = 2.83297682f + p * w;
  }
  return p * x;
}
""",
    }
)
"""OpenCL C text that some functions and reads need before the kernel, by name."""


def cost_of(function: str) -> int:
    """Return the rough number of arithmetic operations of one application."""
    return FUNCTIONS[function].cost
