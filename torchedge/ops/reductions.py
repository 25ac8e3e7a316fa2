"""Reductions and scans."""

from __future__ import annotations

from functools import partial
from math import prod

from torchedge.ops.specs import Call, LoadClass, keep, spec


def reduced_flops(call: Call) -> int:
    """One operation for each input element."""
    return prod(call.ins[0] or ())


def extremum_saves(call: Call) -> tuple[int, ...]:
    """max/min along a dimension keep the indices; over everything the input and the result."""
    return (-2,) if len(call.outs) > 1 else (0, -1)


_reduce = partial(spec, load=LoadClass.HIERARCHICAL, flops=reduced_flops)

OPS = (
    _reduce("sum", "input dim keepdim dtype", "nansum", grads=("view",), autocast="float32"),
    _reduce("mean", "input dim keepdim dtype", "nanmean", autocast="keep"),
    _reduce("var", "input dim unbiased keepdim", "std var_mean std_mean", saves=keep(0), autocast="keep"),
    _reduce("amax", "input dim keepdim", "amin", saves=keep(0, -1)),
    _reduce("max", "input dim keepdim", "min median mode kthvalue cummax cummin", saves=extremum_saves),
    _reduce("argmax", "input dim keepdim", "argmin all any count_nonzero argsort", grads=("none",)),
    _reduce(
        "norm",
        "input p dim keepdim dtype",
        "linalg_vector_norm linalg_norm linalg_matrix_norm frobenius_norm",
        saves=keep(0, -1),
        autocast="float32",
    ),
    _reduce("logsumexp", "input dim keepdim", saves=keep(0, -1), autocast="float32"),
    _reduce("prod", "input dim keepdim dtype", saves=keep(0, -1), autocast="float32"),
    _reduce("cumsum", "input dim dtype", autocast="float32"),
    _reduce("cumprod", "input dim dtype", saves=keep(0, -1), autocast="float32"),
    _reduce("topk", "input k dim largest sorted", "sort", saves=keep(-2)),
    _reduce("cdist", "x1 x2 p", saves=keep(0, 1, -1), autocast="float32"),
    _reduce("cosine_similarity", "x1 x2 dim eps", saves=keep(0, 1), autocast="float32"),
)
