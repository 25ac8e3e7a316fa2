"""Operators that walk whole rows: normalization, softmax, reductions and losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.graphs.footprints import Footprint
from torchedge.ops.elementwise import flops_each, same_shape
from torchedge.ops.kernels import kernel
from torchedge.ops.specs import EVERY, Call, LoadClass, Work, spec
from torchedge.ops.strides import Sizes, as_image, packed

_FLOPS_AN_ELEMENT = 5


def rms_norm(call: Call) -> Footprint | None:
    """CUDA's kernel keeps input, weight and the reciprocal root mean square of each row, float32."""
    if call.backend == "cpu":
        return None
    shape, normalized = call.ins[0] or (), call.attrs.get("normalized_shape", ())
    return kernel(call, (0, 1), (4 * prod(shape[: len(shape) - len(normalized)]),))


def reduced_flops(call: Call) -> int:
    """One operation for each input element."""
    return prod(call.ins[0] or ())


def reduced_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """A scalar where the loss is averaged (1) or summed (2), as PyTorch numbers reductions."""
    return () if attrs.get("reduction", 1) in (1, 2, "mean", "sum") else None


def input_flops(call: Call) -> int:
    """A few operations for each prediction."""
    return 4 * prod(call.ins[0] or ())


def ctc_loss(call: Call) -> Footprint:
    """CTC keeps the score of each step and place of a target, between whose entries there are blanks."""
    steps, batch = (call.ins[0] or (0, 0))[:2]
    targets = call.ins[1] or (0,)
    longest = targets[-1] if len(targets) > 1 else targets[0] // batch if batch else 0
    scores = steps * batch * (2 * longest + 1) * call.out_item_size()
    return kernel(call, (0, 1), (scores,), (), (scores,))


def multilabel_margin_loss(call: Call) -> Footprint:
    """It keeps which classes are targets, as numbers. Meta tensors do not run its derivative."""
    return kernel(call, (0, 1), (call.in_bytes(0),))


_row = partial(spec, load=LoadClass.HIERARCHICAL)
_norm = partial(
    _row,
    work=Work.NORMALIZATION,
    infer=same_shape,
    flops=flops_each(_FLOPS_AN_ELEMENT),
    autocast="float32_on_cuda",
)
_softmax = partial(
    _row,
    work=Work.SOFTMAX,
    infer=same_shape,
    strides=packed,
    flops=flops_each(5),
    autocast="float32_on_cuda",
    widens=True,
)
_reduce = partial(_row, work=Work.REDUCTION, flops=reduced_flops)
_wide = partial(_reduce, autocast="float32_on_cuda")
_loss = partial(_row, work=Work.LOSS, flops=input_flops, autocast="float32", strides=packed)

OPS = (
    _norm(
        "batch_norm",
        "input weight bias running_mean running_var training momentum eps cudnn_enabled",
        "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update sync_batch_norm",
        stops=(3, 4),
        autocast="keep",
        strides=as_image,
    ),
    _norm("layer_norm", "input normalized_shape weight bias eps", "native_layer_norm", strides=packed),
    _norm("group_norm", "input num_groups weight bias eps", "native_group_norm"),
    _norm(
        "instance_norm",
        "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
        hides=lambda ins: True,
        stops=(3, 4),
        autocast="keep",
    ),
    _norm("rms_norm", "input normalized_shape weight eps", memory=rms_norm),
    spec(
        "_weight_norm",
        "v g dim",
        "_weight_norm_interface",
        work=Work.NORMALIZATION,
        flops=flops_each(_FLOPS_AN_ELEMENT),
    ),
    _softmax("softmax", "input dim dtype", "_softmax"),
    _softmax("log_softmax", "input dim dtype", "_log_softmax"),
    _softmax("softmin", "input dim dtype", flops=flops_each(6)),
    _softmax("_safe_softmax", "input dim dtype"),
    _wide("sum", "input dim keepdim dtype", "nansum", widens=True),
    _reduce("mean", "input dim keepdim dtype", "nanmean", autocast="keep"),
    _reduce("var", "input dim unbiased keepdim", "std var_mean std_mean", autocast="keep"),
    _reduce("amax", "input dim keepdim", "amin"),
    _reduce("max", "input dim keepdim", "min median mode kthvalue cummax cummin"),
    _reduce("argmax", "input dim keepdim", "argmin all any count_nonzero argsort histc", stops=EVERY),
    _wide(
        "norm",
        "input p dim keepdim dtype",
        "linalg_vector_norm linalg_norm linalg_matrix_norm frobenius_norm",
        widens=True,
    ),
    _reduce("_foreach_norm", "tensors ord dtype", stops=EVERY),  # of gradients, for clipping
    _wide("logsumexp", "input dim keepdim"),
    _reduce("prod", "input dim keepdim dtype", autocast="float32", widens=True),
    _wide("cumsum", "input dim dtype", casts_inside=True),
    _wide("cumprod", "input dim dtype", casts_inside=True),
    _reduce("logcumsumexp", "input dim"),
    _reduce("topk", "input k dim largest sorted", "sort"),
    _wide("cdist", "x1 x2 p", "pdist dist renorm"),
    _reduce("pairwise_distance", "x1 x2 p eps keepdim"),
    _wide("cosine_similarity", "x1 x2 dim eps"),
    _loss(
        "cross_entropy_loss",
        "input target weight reduction ignore_index label_smoothing",
        "cross_entropy",
        widens=True,
    ),
    _loss(
        "nll_loss_nd",
        "input target weight reduction ignore_index",
        "nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward",
    ),
    _loss("multilabel_margin_loss", "input target reduction", memory=multilabel_margin_loss),
    _loss("multi_margin_loss", "input target p margin weight reduction"),
    _loss("cosine_embedding_loss", "input other target margin reduction", "margin_ranking_loss"),
    _loss("triplet_margin_loss", "input positive negative margin p eps swap reduction"),
    _loss("mse_loss", "input target reduction", "l1_loss smooth_l1_loss huber_loss"),
    _loss(
        "binary_cross_entropy",
        "input target weight reduction",
        "binary_cross_entropy_with_logits kl_div soft_margin_loss hinge_embedding_loss",
    ),
    _loss(
        "ctc_loss",
        "log_probs targets input_lengths target_lengths blank reduction zero_infinity",
        infer=reduced_shape,
        first_dtype=True,
        memory=ctc_loss,
    ),
    _loss("_ctc_loss", "log_probs targets input_lengths target_lengths"),
)
