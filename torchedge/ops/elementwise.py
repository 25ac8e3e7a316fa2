"""Element-wise arithmetic, activation functions and dropout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.graphs import ITEM_SIZES
from torchedge.ops.specs import Call, Work, crossed, keep, spec
from torchedge.ops.strides import Sizes, as_input


def broadcast(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """The broadcast shape of all tensor inputs; None where they do not fit (the framework then says why)."""
    shapes = [s for s in ins if s is not None]
    first = shapes[0]
    if all(s == first for s in shapes[1:]):
        return first
    rank = max(map(len, shapes))
    out = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if out[axis] not in (1, size):
                    return None
                out[axis] = size
    return tuple(out)


def result_or_input(call: Call) -> tuple[int, ...]:
    """An in-place call keeps its result, another one its input."""
    return (-1,) if call.inplace else (0,)


def flops_each(count: int) -> Any:  # noqa: ANN401 - a FLOPs rule
    """Return a rule that counts `count` FLOPs for each output element."""
    return lambda call: count * prod(call.outs[0])


def same_shape(ins: Any, attrs: Any) -> Any:  # noqa: ANN401 - a shape rule
    """The output has the shape of input 0."""
    return ins[0]


def log_sigmoid_aux(call: Call) -> tuple[int, ...]:
    """log_sigmoid keeps a buffer of the input's size on the CPU, none on CUDA."""
    return (call.in_bytes(0),) if call.backend == "cpu" else ()


def dropout_aux(call: Call) -> tuple[int, ...]:
    """The mask: a byte an element in CUDA's fused kernel, else (and in-place) noise in the input's dtype."""
    elements = prod(call.ins[0] or ())
    if call.backend == "cuda" and not call.inplace:
        return (elements,)
    return (elements * ITEM_SIZES[call.in_dtype(0)],)


def channel_mask_aux(call: Call) -> tuple[int, ...]:
    """Noise of one number for each sample and channel."""
    shape = call.ins[0] or (1, 1)
    return (prod(shape[:2]) * ITEM_SIZES[call.in_dtype(0)],)


_alike = partial(spec, infer=broadcast, strides=as_input)
_activation = partial(spec, work=Work.ACTIVATION, infer=same_shape, strides=as_input)
_input_kept = partial(_activation, saves=keep(0))
_result_kept = partial(_activation, saves=keep(-1))
_wide = partial(spec, autocast="float32_on_cuda", replayed=True)
_dropout = partial(spec, work=Work.DROPOUT, infer=same_shape, autocast="keep")

OPS = (
    _alike("add", "input other alpha", "__radd__", work=Work.SUM, grads=("pass", "pass")),
    _alike("sub", "input other alpha", "subtract", work=Work.SUM, grads=("pass", "new"), broadcasts=True),
    _alike("rsub", "input other alpha", "__rsub__", grads=("pass", "new"), broadcasts=True),
    _alike("mul", "input other", "multiply __rmul__", saves=crossed(0, 1), broadcasts=True),
    _alike("div", "input other rounding_mode", "true_divide divide", replayed=True),
    spec("__rtruediv__", "other input", "__rdiv__ reciprocal_mul", replayed=True),
    spec("floor_divide", "input other", "__rfloordiv__ nextafter", grads=("none",)),
    spec("fmod", "input other", "remainder __rmod__", replayed=True),
    _wide("pow", "input exponent", "float_power __rpow__", broadcasts=True),
    spec("square", "input", "sqrt exp2", replayed=True),
    _wide(
        "exp",
        "input",
        "rsqrt expm1 reciprocal tan log log2 log10 log1p asin acos sinh cosh erfinv special_erfcx",
    ),
    spec(
        "sin",
        "input",
        "cos abs absolute atan erf erfc lgamma digamma sinc angle atan2 logit xlogy acosh asinh atanh "
        "polygamma special_xlog1py",
        replayed=True,
    ),
    spec("neg", "input", "negative positive"),
    spec("sign", "input", "round floor ceil trunc sgn frac"),
    spec("clamp", "input min max", "clip clamp_min clamp_max", replayed=True),
    _alike("maximum", "input other", "minimum fmax fmin hypot", replayed=True),
    spec("where", "condition input other", broadcasts=True, replayed=True),
    spec("masked_fill", "input mask value", replayed=True),
    spec("lerp", "input end weight", broadcasts=True, replayed=True),
    spec(
        "addcmul",
        "input tensor1 tensor2 value",
        "addcdiv",
        broadcasts=True,
        autocast="join_on_cuda",
        replayed=True,
    ),
    spec(
        "eq",
        "input other",
        "ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor "
        "bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift isclose "
        "signbit __and__ __or__ __xor__ __invert__ __rand__ __ror__ __lshift__ __rshift__",
        grads=("none",),
    ),
    spec("diff", "input n dim prepend append", replayed=True),
    spec("copysign", "input other", "ldexp special_zeta", broadcasts=True, replayed=True),
    spec("nan_to_num", "input nan posinf neginf", replayed=True),
    spec("polar", "abs angle", "complex view_as_complex_copy", replayed=True),
    spec("heaviside", "input values", grads=("none",)),
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
    _activation("leaky_relu", "input negative_slope", saves=result_or_input),
    _activation("elu", "input alpha scale input_scale", "selu celu", flops=flops_each(3), replayed=True),
    _input_kept("rrelu", "input lower upper training", replayed=True),
    _input_kept(
        "softplus", "input beta threshold", flops=flops_each(4), autocast="float32_on_cuda", replayed=True
    ),
    _input_kept("log_sigmoid", "input", "logsigmoid", flops=flops_each(4), aux=log_sigmoid_aux),
    _input_kept("threshold", "input threshold value"),
    _input_kept("hardshrink", "input lambd", "softshrink", replayed=True),
    _activation("prelu", "input weight", "_prelu_kernel", autocast="lower", replayed=True),
    spec("glu", "input dim", work=Work.ACTIVATION, flops=flops_each(5), replayed=True),
    _dropout("dropout", "input p train", "native_dropout", aux=dropout_aux),
    _dropout("feature_dropout", "input p train", aux=channel_mask_aux),
    _dropout("alpha_dropout", "input p train", "feature_alpha_dropout", aux=dropout_aux),
    spec("bernoulli", "input p", "uniform normal random exponential log_normal multinomial", autocast="keep"),
)
