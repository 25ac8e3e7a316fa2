"""Element-wise arithmetic, activation functions and dropout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.graphs.footprints import Footprint
from torchedge.ops.kernels import kernel
from torchedge.ops.specs import EVERY, Call, Work, spec
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


def flops_each(count: int) -> Any:  # noqa: ANN401 - a FLOPs rule
    """Return a rule that counts `count` FLOPs for each output element."""
    return lambda call: count * prod(call.outs[0])


def same_shape(ins: Any, attrs: Any) -> Any:  # noqa: ANN401 - a shape rule
    """The output has the shape of input 0."""
    return ins[0]


def log_sigmoid(call: Call) -> Footprint | None:
    """On CUDA log_sigmoid keeps its input alone, elsewhere a buffer as well."""
    return kernel(call, (0,)) if call.backend == "cuda" else None


def dropout(call: Call) -> Footprint | None:
    """CUDA's fused kernel keeps a mask of a byte an element; in place, PyTorch draws noise as elsewhere."""
    fused = call.backend == "cuda" and not call.inplace
    return kernel(call, hidden=(prod(call.ins[0] or ()),)) if fused else None


_alike = partial(spec, infer=broadcast, strides=as_input)
_activation = partial(spec, work=Work.ACTIVATION, infer=same_shape, strides=as_input)
_wide = partial(spec, autocast="float32_on_cuda")
_dropout = partial(spec, work=Work.DROPOUT, infer=same_shape, strides=as_input, autocast="keep")

OPS = (
    _alike("add", "input other alpha", "__radd__", work=Work.SUM),
    _alike("sub", "input other alpha", "subtract", work=Work.SUM),
    _alike("rsub", "input other alpha", "__rsub__"),
    _alike("mul", "input other", "multiply __rmul__"),
    _alike("div", "input other rounding_mode", "true_divide divide"),
    spec("__rtruediv__", "other input", "__rdiv__ reciprocal_mul"),
    spec("floor_divide", "input other", "__rfloordiv__ nextafter", stops=EVERY),
    spec("fmod", "input other", "remainder __rmod__"),
    _wide("pow", "input exponent", "float_power __rpow__", strides=as_input),
    spec("square", "input", "sqrt exp2"),
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
    ),
    spec("neg", "input", "negative positive conj_physical"),
    spec("sign", "input", "round floor ceil trunc sgn frac"),
    spec("clamp", "input min max", "clip clamp_min clamp_max"),
    _alike("maximum", "input other", "minimum fmax fmin hypot"),
    spec("where", "condition input other", strides=as_input),
    spec("masked_fill", "input mask value"),
    spec("lerp", "input end weight", strides=as_input),
    spec("addcmul", "input tensor1 tensor2 value", "addcdiv", strides=as_input, autocast="join_on_cuda"),
    spec(
        "eq",
        "input other",
        "ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor "
        "bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift isclose "
        "signbit __and__ __or__ __xor__ __invert__ __rand__ __ror__ __lshift__ __rshift__",
        stops=EVERY,
    ),
    spec("diff", "input n dim prepend append"),
    spec("copysign", "input other", "ldexp special_zeta", strides=as_input),
    spec("nan_to_num", "input nan posinf neginf"),
    spec("polar", "abs angle", "complex view_as_complex_copy"),
    spec("heaviside", "input values", stops=EVERY),
    _activation("relu", "input"),
    _activation("relu6", "input"),
    _activation("hardtanh", "input min_val max_val"),
    _activation("sigmoid", "input", "special_expit", flops=flops_each(4)),
    _activation("tanh", "input", flops=flops_each(6)),
    _activation("silu", "input", flops=flops_each(5)),
    _activation("gelu", "input approximate", flops=flops_each(8)),
    # On meta tensors its derivative is that of its parts, elsewhere one kernel.
    _activation("mish", "input", flops=flops_each(8), memory=lambda call: kernel(call, (0,))),
    _activation("hardswish", "input", flops=flops_each(4)),
    _activation("hardsigmoid", "input", flops=flops_each(3)),
    _activation("leaky_relu", "input negative_slope"),
    _activation("elu", "input alpha scale input_scale", "selu celu", flops=flops_each(3)),
    _activation("rrelu", "input lower upper training"),
    _activation("softplus", "input beta threshold", flops=flops_each(4), autocast="float32_on_cuda"),
    _activation("log_sigmoid", "input", "logsigmoid", flops=flops_each(4), memory=log_sigmoid),
    _activation("threshold", "input threshold value"),
    _activation("hardshrink", "input lambd", "softshrink"),
    _activation("prelu", "input weight", "_prelu_kernel", autocast="lower"),
    spec("glu", "input dim", work=Work.ACTIVATION, flops=flops_each(5)),
    _dropout("dropout", "input p train", "native_dropout", memory=dropout),
    _dropout("feature_dropout", "input p train"),
    _dropout("alpha_dropout", "input p train", "feature_alpha_dropout", memory=dropout),
    spec("bernoulli", "input p", "uniform normal random exponential log_normal multinomial", autocast="keep"),
)
