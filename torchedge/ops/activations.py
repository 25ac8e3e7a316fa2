"""Activation functions, softmax among them."""

from __future__ import annotations

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


_INPUT = {"infer": same_shape, "saves": keep(0)}
_RESULT = {"infer": same_shape, "saves": keep(-1)}
_WHOLE = {"infer": same_shape, "saves": keep(-1), "load": LoadClass.HIERARCHICAL, "autocast": "float32"}

OPS = (
    spec("relu", "input", **_RESULT),
    spec("relu6", "input", **_INPUT),
    spec("hardtanh", "input min_val max_val", **_INPUT),
    spec("sigmoid", "input", "special_expit", flops=flops_each(4), **_RESULT),
    spec("tanh", "input", flops=flops_each(6), **_RESULT),
    spec("silu", "input", flops=flops_each(5), **_INPUT),
    spec("gelu", "input approximate", flops=flops_each(8), **_INPUT),
    spec("mish", "input", flops=flops_each(8), **_INPUT),
    spec("hardswish", "input", flops=flops_each(4), **_INPUT),
    spec("hardsigmoid", "input", flops=flops_each(3), **_INPUT),
    spec("leaky_relu", "input negative_slope", infer=same_shape, saves=lambda c: (-1,) if c.inplace else (0,)),
    spec("elu", "input alpha scale input_scale", "selu celu", flops=flops_each(3), infer=same_shape,
         saves=lambda c: (-1,) if c.inplace else (0,)),
    spec("rrelu", "input lower upper training", **_INPUT),
    spec("softplus", "input beta threshold", flops=flops_each(4), **_INPUT),
    spec("log_sigmoid", "input", "logsigmoid", flops=flops_each(4), infer=same_shape, saves=keep(0), aux=log_sigmoid_aux),
    spec("threshold", "input threshold value", **_INPUT),
    spec("hardshrink", "input lambd", "softshrink", **_INPUT),
    spec("prelu", "input weight", "_prelu_kernel", infer=same_shape, saves=keep(0, 1)),
    spec("softmax", "input dim dtype", "_softmax", flops=flops_each(5), **_WHOLE),
    spec("log_softmax", "input dim dtype", "_log_softmax", flops=flops_each(5), **_WHOLE),
    spec("softmin", "input dim dtype", flops=flops_each(6), **_WHOLE),
    spec("_safe_softmax", "input dim dtype", flops=flops_each(5), **_WHOLE),
    spec("glu", "input dim", flops=flops_each(5), saves=glu_half),
)  # fmt: skip
