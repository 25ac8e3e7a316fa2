"""Activation functions, softmax among them."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from torchedge.ops.specs import Call, LoadClass, keep, spec


def flops_each(count: int) -> Any:  # noqa: ANN401 - a FLOPs rule
    """Return a rule that counts `count` FLOPs for each output element."""
    return lambda call: count * prod(call.outs[0])


def same_shape(ins: Any, attrs: Any) -> Any:  # noqa: ANN401 - a shape rule
    """The output has the shape of input 0."""
    return ins[0]


def glu_half(call: Call) -> tuple[int, ...]:
    """GLU keeps its input."""
    return (0,)


def log_sigmoid_aux(call: Call) -> tuple[int, ...]:
    """log_sigmoid keeps a buffer of the input's size on the CPU, none on CUDA."""
    return (call.in_bytes(0),) if call.backend == "cpu" else ()


_input_kept = partial(spec, infer=same_shape, saves=keep(0))
_result_kept = partial(spec, infer=same_shape, saves=keep(-1))
_whole_row = partial(_result_kept, load=LoadClass.HIERARCHICAL, autocast="float32")

OPS = (
    _result_kept("relu", "input"),
    _input_kept("relu6", "input"),
    _input_kept("hardtanh", "input min_val max_val"),
    _result_kept("sigmoid", "input", "special_expit", flops=flops_each(4)),
    _result_kept("tanh", "input", flops=flops_each(6)),
    _input_kept("silu", "input", flops=flops_each(5)),
    _input_kept("gelu", "input approximate", flops=flops_each(8)),
    _input_kept("mish", "input", flops=flops_each(8)),
    _input_kept("hardswish", "input", flops=flops_each(4)),
    _input_kept("hardsigmoid", "input", flops=flops_each(3)),
    spec(
        "leaky_relu", "input negative_slope", infer=same_shape, saves=lambda c: (-1,) if c.inplace else (0,)
    ),
    spec(
        "elu",
        "input alpha scale input_scale",
        "selu celu",
        flops=flops_each(3),
        infer=same_shape,
        saves=lambda c: (-1,) if c.inplace else (0,),
    ),
    _input_kept("rrelu", "input lower upper training"),
    _input_kept("softplus", "input beta threshold", flops=flops_each(4)),
    spec(
        "log_sigmoid",
        "input",
        "logsigmoid",
        flops=flops_each(4),
        infer=same_shape,
        saves=keep(0),
        aux=log_sigmoid_aux,
    ),
    _input_kept("threshold", "input threshold value"),
    _input_kept("hardshrink", "input lambd", "softshrink"),
    spec("prelu", "input weight", "_prelu_kernel", infer=same_shape, saves=keep(0, 1)),
    _whole_row("softmax", "input dim dtype", "_softmax", flops=flops_each(5)),
    _whole_row("log_softmax", "input dim dtype", "_log_softmax", flops=flops_each(5)),
    _whole_row("softmin", "input dim dtype", flops=flops_each(6)),
    _whole_row("_safe_softmax", "input dim dtype", flops=flops_each(5)),
    spec("glu", "input dim", flops=flops_each(5), saves=glu_half),
)
