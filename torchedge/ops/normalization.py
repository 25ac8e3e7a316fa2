"""Batch, layer, group, instance and RMS normalisation."""

from __future__ import annotations

from math import prod

from torchedge.ops.specs import Call, LoadClass, spec

_FLOPS_AN_ELEMENT = 5


def norm_flops(call: Call) -> int:
    """Mean, variance, difference, scale, shift: about five an element."""
    return _FLOPS_AN_ELEMENT * prod(call.outs[0])


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


OPS = (
    spec(
        "batch_norm",
        "input weight bias running_mean running_var training momentum eps cudnn_enabled",
        "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update sync_batch_norm",
        load=LoadClass.HIERARCHICAL,
        infer=lambda ins, attrs: ins[0],
        flops=norm_flops,
        saves=batch_norm_saves,
        aux=batch_norm_aux,
        grads=("new", "new", "new", "none"),
        autocast="keep",
    ),
    spec(
        "layer_norm",
        "input normalized_shape weight bias eps",
        "native_layer_norm",
        load=LoadClass.HIERARCHICAL,
        infer=lambda ins, attrs: ins[0],
        flops=norm_flops,
        saves=lambda c: (0, 1, 2),
        aux=layer_norm_aux,
        autocast="float32",
    ),
    spec(
        "group_norm",
        "input num_groups weight bias eps",
        "native_group_norm",
        load=LoadClass.HIERARCHICAL,
        infer=lambda ins, attrs: ins[0],
        flops=norm_flops,
        saves=lambda c: (0, 1),
        aux=group_norm_aux,
        autocast="float32",
    ),
    spec(
        "instance_norm",
        "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
        load=LoadClass.HIERARCHICAL,
        infer=lambda ins, attrs: ins[0],
        flops=norm_flops,
        saves=lambda c: (0, 1),
        aux=instance_norm_aux,
        grads=("new", "new", "new", "none"),
        autocast="keep",
    ),
    spec(
        "rms_norm",
        "input normalized_shape weight eps",
        load=LoadClass.HIERARCHICAL,
        infer=lambda ins, attrs: ins[0],
        flops=norm_flops,
        saves=lambda c: (0, 1),
        aux=rms_norm_aux,
        autocast="float32",
    ),
    spec(
        "_weight_norm",
        "v g dim",
        "_weight_norm_interface",
        flops=norm_flops,
        saves=lambda c: (0, 1),
        aux=lambda c: (c.in_bytes(1),),
    ),
)
