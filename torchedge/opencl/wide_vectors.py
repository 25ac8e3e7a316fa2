"""Calls on 512-bit vectors in halves, for PoCL on processors whose AVX-512 its compiler does not know.

PoCL links its AVX-512 library by the features of the processor, but compiles for the nearest processor that
its LLVM knows (AMD Zen 4 becomes Zen 3, without AVX-512). A call of a built-in function on a 512-bit vector
then ends the whole process. The text of `in_halves` redirects such calls to functions of half the width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchedge.expressions.functions import BINARY, UNARY

_ONE = (*UNARY, "rint", "fabs", "isinf", "isfinite", "abs")
_TWO = (*BINARY, "pow", "max", "min")
_WIDE = re.compile(
    r"\b(?:float16|int16|uint16|double8|double16|long8|long16|half16)\b|_half16\b|convert_\w+16\b"
)
_DIRECT = {"float": 8, "double": 4, "int": 8, "uint": 8, "long": 4}
"""Widest vector of 256 bits."""
_INLINE = "static inline __attribute__((overloadable, always_inline))"
_CONVERTED = ("float", "double", "int", "uint", "long", "short", "char", "uchar")
_HALVES = """\
#undef vload_half16
#undef vstore_half16
#define vload_half16(o, p) ((float16)(vload_half8(2 * (o), p), vload_half8(2 * (o) + 1, p)))
#define vstore_half16(v, o, p) do { const float16 te_wide = (v); \\
  vstore_half8(te_wide.lo, 2 * (o), p); vstore_half8(te_wide.hi, 2 * (o) + 1, p); } while (0)
"""


def in_halves(source: str) -> str:
    """Return a text to stand before a source, empty where the source computes on no 512-bit vectors."""
    if not _WIDE.search(source):
        return ""
    lines = ["#if defined(__x86_64__) && !defined(__AVX512F__)", *_conversions(source)]
    for name in (*_ONE, *_TWO):
        if re.search(rf"\b{name}\(", source):
            lines += [*_overloads(name), f"#undef {name}", f"#define {name} te_{name}"]
    return "\n".join([*lines, _HALVES + "#endif\n"])


def _conversions(source: str) -> Iterator[str]:
    for kind in _CONVERTED:
        if f"convert_{kind}" in source:
            for width in (8, 16):
                half = f"convert_{kind}{width // 2}"
                yield f"#undef convert_{kind}{width}"
                yield f"#define convert_{kind}{width}(x) (({kind}{width})({half}((x).lo), {half}((x).hi)))"


def _overloads(name: str) -> Iterator[str]:
    kinds = {"abs": ("int",), "max": ("int", "uint", "long"), "min": ("int", "uint", "long")}
    count = 2 if name in _TWO else 1
    for kind in kinds.get(name, ("float", "double")):
        for width in (1, 2, 4, 8, 16):
            result = kind
            if name == "abs":
                result = "uint"
            elif name in ("isinf", "isfinite"):
                result = "long" if kind == "double" and width > 1 else "int"
            sized, returned = (word + (str(width) if width > 1 else "") for word in (kind, result))
            parameters = ", ".join(f"{sized} {letter}" for letter in "ab"[:count])
            if width <= _DIRECT[kind]:
                value = f"{name}({', '.join('ab'[:count])})"
            else:
                low, high = (", ".join(f"{letter}.{end}" for letter in "ab"[:count]) for end in ("lo", "hi"))
                value = f"({returned})(te_{name}({low}), te_{name}({high}))"
            yield f"{_INLINE} {returned} te_{name}({parameters}) {{ return {value}; }}"
