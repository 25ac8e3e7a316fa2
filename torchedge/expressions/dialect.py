"""OpenCL C as kernels use it: types of dtypes, literals, vector access, and where a tensor lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isinf, isnan

from torchedge.expressions.indices import Index, as_index
from torchedge.graphs import ITEM_SIZES
from torchedge.textures.layouts import Layout

COMPUTE: Mapping[str, str] = {
    "float32": "float", "float16": "float", "bfloat16": "float", "float64": "double", "int64": "long",
    "int32": "int", "int16": "int", "int8": "int", "uint8": "int", "bool": "int", "uint32": "uint",
}  # fmt: skip
"""OpenCL type in which values of a dtype are computed. Bools are masks: 1 in scalars, -1 in vectors."""
STORED: Mapping[str, str] = {
    "float32": "float", "float16": "half", "float64": "double", "int64": "long", "int32": "int",
    "int16": "short", "int8": "char", "uint8": "uchar", "bool": "uchar", "uint32": "uint",
}  # fmt: skip
"""OpenCL type of a dtype in buffers."""
TYPE_BYTES: Mapping[str, int] = {kind: ITEM_SIZES[dtype] for dtype, kind in STORED.items()}
"""By OpenCL type."""

CHECK = """\
#define TE_CHECK(code, index, high) if ((index) < 0 || (index) >= (high)) { \\
  te_words[0] = (code); te_words[1] = (index); te_words[2] = 0; te_words[3] = (high); }
"""
"""Report of an access outside a tensor, in kernels made with checks; the last report stays."""
UNALIGNED = """\
#if defined(__x86_64__) || defined(__aarch64__) || defined(__riscv)
typedef {stored}{width} te_{stored}{width} __attribute__((aligned(sizeof({stored}))));
#define te_load_{stored}{width}(p) (*(__global const te_{stored}{width}*)(p))
#define te_store_{stored}{width}(v, p) (*(__global te_{stored}{width}*)(p) = (v))
#else
#define te_load_{stored}{width}(p) vload{width}(0, p)
#define te_store_{stored}{width}(v, p) vstore{width}(v, 0, p)
#endif
"""
"""Vectors at any address. PoCL compiles `vloadn` to a function call, so processors get unaligned types."""
HALVES = """\
#if defined(__clang__) && (defined(__F16C__) || defined(__aarch64__))
#define te_half(p) __builtin_load_halff(p)
#define te_half2(p) (float2)(te_half(p), te_half((p) + 1))
#define te_half4(p) (float4)(te_half2(p), te_half2((p) + 2))
#define te_half8(p) (float8)(te_half4(p), te_half4((p) + 4))
#define te_half16(p) (float16)(te_half8(p), te_half8((p) + 8))
#else
#define te_half(p) vload_half(0, p)
#define te_half2(p) vload_half2(0, p)
#define te_half4(p) vload_half4(0, p)
#define te_half8(p) vload_half8(0, p)
#define te_half16(p) vload_half16(0, p)
#endif
"""
"""Halves read as floats. PoCL compiles `vload_half` to tens of instructions, processors have one for it."""
WIDE = """\
#if defined(__AVX512F__)
#define te_wide 1
#else
#define te_wide 0
#endif
"""
"""Whether there are 32 vector registers of 64 bytes; other processors have 16 of 32 bytes, or as much."""
SAMPLER = """\
__constant sampler_t te_sampler = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP | CLK_FILTER_NEAREST;
"""
"""The sampler of a kernel: whole coordinates, zero outside the image."""
PICK = """\
inline float te_lane(float4 texel, int lane) {
  return lane < 2 ? (lane == 0 ? texel.x : texel.y) : (lane == 2 ? texel.z : texel.w);
}
"""
"""A channel of a texel by its number."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor lies for a kernel: its argument, shape, dtype and layout.

    check: the number under which accesses outside this tensor are reported; 0 for no report.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    check: int = 0


def offset_of(site: Site, indices: Sequence[Index]) -> Index:
    """Return the offset, in elements, of an element in a buffer."""
    return as_index(site.layout.offset(indices, site.shape))


def texel_of(site: Site, indices: Sequence[Index]) -> tuple[Index, Index, Index]:
    """Return (x, y, channel) of an element of a tensor in an image."""
    x, y, channel = site.layout.texel(indices, site.shape)
    return as_index(x), as_index(y), as_index(channel)


def aligned(offset: Index, width: int) -> bool:
    """Return whether an offset is always a multiple of the width."""
    return gcd(offset.const, *[c for _, c in offset.terms]) % width == 0


def elements_of(kind: str, *elements: tuple[str, int]) -> str:
    """Return elements of vectors, each a vector's name and a place, as one vector, or the only one.

    Swizzles (`.lo`, `.even`) would do, but Oclgrind 21.10 takes parts of sixteen lanes for uninitialised.
    """
    texts = [f"{vector}.s{place:x}" for vector, place in elements]
    return texts[0] if len(texts) == 1 else f"({kind}{len(texts)})({', '.join(texts)})"


def literal(value: float, dtype: str) -> str:
    """Return a number as OpenCL C text of the type its dtype is computed in."""
    kind = COMPUTE[dtype]
    if kind in ("int", "uint", "long"):
        number = int(value)
        if kind == "long":
            return "(-9223372036854775807L - 1)" if number == -(2**63) else f"{number}L"
        return "(-2147483647 - 1)" if number == -(2**31) else str(number)
    if isnan(value):
        return "NAN" if kind == "float" else "((double)NAN)"
    if isinf(value):
        sign = "-" if value < 0 else ""
        return f"({sign}INFINITY)" if kind == "float" else f"((double)({sign}INFINITY))"
    if kind == "double":
        return repr(float(value))
    import numpy as np

    with np.errstate(over="ignore"):
        single = np.float32(value)
    if np.isinf(single):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    return (
        f"{np.format_float_scientific(single, trim='0')}f"
        if single and not 1e-4 <= abs(single) < 1e7
        else f"{float(str(single))!r}f"
    )
