"""Operators that walk whole rows: normalization, softmax, reductions and losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.ops.elementwise import flops_each, same_shape
from torchedge.ops.specs import Call, LoadClass, Work, keep, spec
from torchedge.ops.strides import Sizes, as_input

_FLOPS_AN_ELEMENT = 5


def batch_norm_saves(call: Call) -> tuple[int, ...]:
    """The input and the affine weight; in evaluation mode running instead of batch statistics."""
    return tuple(i for i in (0, 1, 3, 4) if i < len(call.ins) and call.ins[i] is not None)


def batch_norm_aux(call: Call) -> tuple[int, ...]:
    """Batch mean and inverse standard deviation: two float32 vectors of C."""
    channels = (call.ins[0] or (0, 0))[1]
    return (4 * channels, 4 * channels) if call.attrs.get("training", True) else ()


def layer_norm_aux(call: Call) -> tuple[int, ...]:
    """Mean and reciprocal deviation of each normalised row, float32."""
    shape = call.ins[0] or ()
    normalized = call.attrs.get("normalized_shape", ())
    rows = prod(shape[: len(shape) - len(normalized)])
    return (4 * rows, 4 * rows)


def group_norm_aux(call: Call) -> tuple[int, ...]:
    """Mean and reciprocal deviation of each sample and group, float32."""
    shape = call.ins[0] or (0,)
    rows = shape[0] * call.attrs.get("num_groups", 1)
    return (4 * rows, 4 * rows)


def instance_norm_aux(call: Call) -> tuple[int, ...]:
    """Statistics of each sample and channel, float32."""
    shape = call.ins[0] or (0, 0)
    return (4 * shape[0] * shape[1],) * 2


def rms_norm_aux(call: Call) -> tuple[int, ...]:
    """Reciprocal root mean square of each row, float32."""
    return layer_norm_aux(call)[:1]


def reduced_flops(call: Call) -> int:
    """One operation for each input element."""
    return prod(call.ins[0] or ())


def extremum_saves(call: Call) -> tuple[int, ...]:
    """max/min along a dimension keep the indices; over everything the input and the result."""
    return (-2,) if len(call.outs) > 1 else (0, -1)


def extremum_scratch(call: Call) -> tuple[int, ...]:
    """Over everything, two boolean masks of the input say where its extremum is."""
    return () if len(call.outs) > 1 else (prod(call.ins[0] or ()),) * 2


def reduced_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """A scalar where the loss is averaged (1) or summed (2), as PyTorch numbers reductions."""
    return () if attrs.get("reduction", 1) in (1, 2, "mean", "sum") else None


def input_flops(call: Call) -> int:
    """A few operations for each prediction."""
    return 4 * prod(call.ins[0] or ())


def log_probabilities(call: Call) -> tuple[int, ...]:
    """cross_entropy is log_softmax followed by nll_loss: the log-probabilities are allocated and kept."""
    return (prod(call.ins[0] or ()) * call.out_item_size(), 4)


def nll_scratch(call: Call) -> tuple[int, ...]:
    """The gradient with respect to the log-probabilities lives while log_softmax runs backward."""
    return (prod(call.ins[0] or ()) * call.out_item_size(),)


def alignment_scores(call: Call) -> tuple[int, ...]:
    """CTC keeps the score of each step and place of a target, between whose entries there are blanks."""
    steps, batch = (call.ins[0] or (0, 0))[:2]
    targets = call.ins[1] or (0,)
    longest = targets[-1] if len(targets) > 1 else targets[0] // batch if batch else 0
    return (steps * batch * (2 * longest + 1) * call.out_item_size(),)


def masked_scratch(call: Call, copies: int) -> tuple[int, ...]:
    """A mask of the input's elements, a byte each, and `copies` tensors of the input's size."""
    return (prod(call.ins[0] or ()), copies * call.in_bytes(0))


_row = partial(spec, load=LoadClass.HIERARCHICAL)
_norm = partial(
    _row,
    work=Work.NORMALIZATION,
    infer=same_shape,
    flops=flops_each(_FLOPS_AN_ELEMENT),
    saves=keep(0, 1),
    autocast="float32_on_cuda",
)
_softmax = partial(
    _row,
    work=Work.SOFTMAX,
    infer=same_shape,
    strides=as_input,
    flops=flops_each(5),
    saves=keep(-1),
    autocast="float32_on_cuda",
    widens=True,
)
_reduce = partial(_row, work=Work.REDUCTION, flops=reduced_flops)
_wide = partial(_reduce, autocast="float32_on_cuda")
_loss = partial(_row, work=Work.LOSS, flops=input_flops, autocast="float32", grads=("new", "none"))
_replayed_loss = partial(_loss, grads=("new",), replayed=True)

OPS = (
    _norm(
        "batch_norm",
        "input weight bias running_mean running_var training momentum eps cudnn_enabled",
        "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update sync_batch_norm",
        saves=batch_norm_saves,
        aux=batch_norm_aux,
        grads=("new", "new", "new", "none"),
        autocast="keep",
    ),
    _norm(
        "layer_norm",
        "input normalized_shape weight bias eps",
        "native_layer_norm",
        saves=keep(0, 1, 2),
        aux=layer_norm_aux,
    ),
    _norm("group_norm", "input num_groups weight bias eps", "native_group_norm", aux=group_norm_aux),
    _norm(
        "instance_norm",
        "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
        aux=instance_norm_aux,
        hides=lambda ins: True,
        grads=("new", "new", "new", "none"),
        autocast="keep",
    ),
    _norm(
        "rms_norm",
        "input normalized_shape weight eps",
        aux=rms_norm_aux,
        replayed=True,
        fused_on_cuda=True,
    ),
    spec(
        "_weight_norm",
        "v g dim",
        "_weight_norm_interface",
        work=Work.NORMALIZATION,
        flops=flops_each(_FLOPS_AN_ELEMENT),
        saves=keep(0, 1),
        aux=lambda c: (c.in_bytes(1),),
    ),
    _softmax("softmax", "input dim dtype", "_softmax"),
    _softmax("log_softmax", "input dim dtype", "_log_softmax"),
    _softmax("softmin", "input dim dtype", flops=flops_each(6), replayed=True),
    _softmax("_safe_softmax", "input dim dtype"),
    _wide("sum", "input dim keepdim dtype", "nansum", grads=("view",), widens=True),
    _reduce("mean", "input dim keepdim dtype", "nanmean", autocast="keep"),
    _reduce("var", "input dim unbiased keepdim", "std var_mean std_mean", autocast="keep", replayed=True),
    _reduce(
        "amax",
        "input dim keepdim",
        "amin",
        saves=keep(0, -1),
        backward_scratch=partial(masked_scratch, copies=1),
    ),
    _reduce(
        "max",
        "input dim keepdim",
        "min median mode kthvalue cummax cummin",
        saves=extremum_saves,
        backward_scratch=extremum_scratch,
    ),
    _reduce("argmax", "input dim keepdim", "argmin all any count_nonzero argsort histc", grads=("none",)),
    _wide(
        "norm",
        "input p dim keepdim dtype",
        "linalg_vector_norm linalg_norm linalg_matrix_norm frobenius_norm",
        replayed=True,
        widens=True,
    ),
    _wide("logsumexp", "input dim keepdim", replayed=True),
    _reduce("prod", "input dim keepdim dtype", autocast="float32", widens=True, replayed=True),
    _wide("cumsum", "input dim dtype", replayed=True),
    _wide(
        "cumprod", "input dim dtype", saves=keep(0, -1), backward_scratch=partial(masked_scratch, copies=3)
    ),
    _reduce("logcumsumexp", "input dim", replayed=True),
    _reduce("topk", "input k dim largest sorted", "sort", saves=keep(-2)),
    _wide("cdist", "x1 x2 p", replayed=True),
    _wide("cosine_similarity", "x1 x2 dim eps", replayed=True),
    _loss(
        "cross_entropy_loss",
        "input target weight reduction ignore_index label_smoothing",
        "cross_entropy",
        infer=reduced_shape,
        first_dtype=True,
        widens=True,
        aux=log_probabilities,
        saves=keep(1),
        backward_scratch=nll_scratch,
    ),
    _loss(
        "nll_loss_nd",
        "input target weight reduction ignore_index",
        "nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward",
        saves=keep(0, 1),
        aux=lambda c: (4,),
    ),
    _replayed_loss("mse_loss", "input target reduction", "l1_loss smooth_l1_loss huber_loss"),
    _replayed_loss(
        "binary_cross_entropy",
        "input target weight reduction",
        "binary_cross_entropy_with_logits kl_div soft_margin_loss hinge_embedding_loss",
    ),
    _loss(
        "ctc_loss",
        "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
        infer=reduced_shape,
        first_dtype=True,
        saves=keep(0, 1),
        aux=alignment_scores,
        backward_scratch=alignment_scores,
    ),
    _replayed_loss("_ctc_loss", "log_probs targets input_lengths target_lengths"),
)
