"""ONNX operators as calls into PyTorch: arithmetic, reductions, shapes and indices, then layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from torchedge.errors import CaptureError
from torchedge.tracing.onnx_nodes import DTYPES, OnnxNode, is_known, numbers, read_tensor, scalar, values
from torchedge.tracing.torch_calls import words

Handler = Callable[..., Any]


def operand(item: Any) -> Any:
    """Return an operand for PyTorch: a number for a known scalar."""
    return item.item() if is_known(item) and not item.dim() else item


def _unary(function: Handler) -> Handler:
    return lambda node, x: function(x)


def _binary(function: Handler) -> Handler:
    def apply(node: OnnxNode, a: Any, b: Any) -> Any:
        return function(a, operand(b))

    return apply


def _folded(function: Handler) -> Handler:
    def apply(node: OnnxNode, *items: Any) -> Any:
        return reduce(function, items)

    return apply


def _clip(node: OnnxNode, x: Any, low: Any = None, high: Any = None) -> Any:
    low = node.get("min", None) if low is None else scalar(low, 0)
    high = node.get("max", None) if high is None else scalar(high, 0)
    if low == 0 and high == 6:
        return F.relu6(x)
    return torch.clamp(x, low, high)


def _reduce(function: Handler) -> Handler:
    def apply(node: OnnxNode, x: Any, axes: Any = None) -> Any:
        dims, keep = node.axes(axes), bool(node.get("keepdims", 1))
        if not dims:
            if node.get("noop_with_empty_axes", 0):
                return x
            dims = tuple(range(x.dim()))
        return function(x, dims, keep)

    return apply


def _divide(a: Any, b: Any) -> Any:
    whole = not (a.is_floating_point() or isinstance(b, float))
    return torch.div(a, b, rounding_mode="trunc" if whole else None)


def _product(x: Any, dims: tuple[int, ...], keep: bool) -> Any:
    for dim in sorted([d % x.dim() for d in dims], reverse=True):
        x = torch.prod(x, dim, keep)
    return x


def _arg(function: Handler) -> Handler:
    return lambda node, x: function(x, node.get("axis", 0), bool(node.get("keepdims", 1)))


def _reshape(node: OnnxNode, x: Any, shape: Any) -> Any:
    sizes = numbers(shape, f"the shape of {node.name}")
    shape = [x.shape[i] if s == 0 and not node.get("allowzero", 0) else s for i, s in enumerate(sizes)]
    return x.reshape(shape)


def _flatten(node: OnnxNode, x: Any) -> Any:
    axis = node.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 1 and x.dim() > 1:
        return torch.flatten(x, 1)
    return x.reshape([math.prod(x.shape[:axis]), -1])


def _squeeze(node: OnnxNode, x: Any, axes: Any = None) -> Any:
    dims = node.axes(axes)
    return x.squeeze() if dims is None else x.squeeze(dims if len(dims) > 1 else dims[0])


def _unsqueeze(node: OnnxNode, x: Any, axes: Any = None) -> Any:
    dims = node.axes(axes) or ()
    rank = x.dim() + len(dims)
    for axis in sorted([d % rank for d in dims]):
        x = x.unsqueeze(axis)
    return x


def _split(node: OnnxNode, x: Any, split: Any = None) -> tuple[Any, ...]:
    axis = node.get("axis", 0)
    parts = node.get("split", None) if split is None else tuple(numbers(split, f"the parts of {node.name}"))
    if parts is not None:
        return tuple(torch.split(x, list(parts), axis))
    return tuple(torch.chunk(x, node.get("num_outputs", len(node.outputs)), axis))


def _sequence(node: OnnxNode, x: Any, split: Any = None) -> tuple[Any]:
    axis = node.get("axis", 0)
    parts = [1] if split is None else numbers(split, f"the parts of {node.name}")
    return (list(torch.split(x, parts[0] if split is None or not split.dim() else parts, axis)),)


def _slice(
    node: OnnxNode, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None
) -> Any:
    def bounds(item: Any, name: str) -> list[int] | None:
        return node.get(name, None) if item is None else numbers(item, f"the {name} of {node.name}")

    first, last = bounds(starts, "starts") or (), bounds(ends, "ends") or ()
    places, strides = bounds(axes, "axes") or range(x.dim()), bounds(steps, "steps")
    index: list[slice] = [slice(None)] * x.dim()
    for k, (start, end) in enumerate(zip(first, last, strict=True)):
        axis, step = places[k], 1 if strides is None else strides[k]
        if step < 0:
            x = x.flip(axis)
            start, end, step = -1 - start, -1 - end if end > -x.shape[axis] else x.shape[axis], -step
            start = max(start, 0) if start < 0 and first[k] >= x.shape[axis] - 1 else start
        index[axis] = slice(start, min(end, x.shape[axis]) if end > 0 else end, step)
    return x[tuple(index)]


def _gather(node: OnnxNode, x: Any, indices: Any) -> Any:
    axis = node.get("axis", 0)
    if is_known(indices) and indices.dim() < 2:
        with torch._C.DisableTorchFunction():
            places = torch.remainder(indices.long(), x.shape[axis])
        return x.index_select(axis, places) if indices.dim() else x.select(axis, int(places))
    if axis == 0 and isinstance(x, torch.nn.Parameter) and x.dim() == 2:
        return F.embedding(indices, x)
    index: list[Any] = [slice(None)] * x.dim()
    index[axis] = indices
    return x[tuple(index)]


def integers(values: Sequence[int]) -> torch.Tensor:
    """Return whole numbers as a known tensor."""
    with torch._C.DisableTorchFunction():
        return torch.tensor(values, dtype=torch.int64)


def _expand(node: OnnxNode, x: Any, shape: Any) -> Any:
    sizes = torch.broadcast_shapes(tuple(x.shape), tuple(numbers(shape, f"the shape of {node.name}")))
    return x.expand(sizes)


def _range(node: OnnxNode, *limits: Any) -> Any:
    start, stop, step = [scalar(item, 1) for item in limits]
    return torch.arange(start, stop, step, dtype=limits[0].dtype)


def _filled(node: OnnxNode, shape: Any) -> Any:
    sizes = numbers(shape, f"the shape of {node.name}")
    value = node.attributes.get("value")
    number = torch.zeros(1) if value is None else read_tensor(value)
    return number.expand(sizes) if sizes else number[0]


def _concat(node: OnnxNode, *items: Any) -> Any:
    known = all(map(is_known, items))
    return torch.cat([i.reshape(1) if known and not i.dim() else i for i in items], node.get("axis", 0))


def _pad(node: OnnxNode, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    amounts = list(node.get("pads", ())) if pads is None else numbers(pads, f"the padding of {node.name}")
    padded = list(range(x.dim())) if axes is None else [a % x.dim() for a in numbers(axes, "padded axes")]
    half = len(amounts) // 2
    before, after = [dict(zip(padded, side, strict=True)) for side in (amounts[:half], amounts[half:])]
    padding = [side.get(a, 0) for a in reversed(range(x.dim())) for side in (before, after)]
    while len(padding) > 2 and padding[-2:] == [0, 0]:
        padding = padding[:-2]
    mode = node.get("mode", "constant")
    mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    return F.pad(x, padding, mode, scalar(value, 0.0) if mode == "constant" else None)


def _dropout(node: OnnxNode, x: Any, ratio: Any = None, *ignored: Any) -> Any:
    rate = node.get("ratio", 0.5) if ratio is None else scalar(ratio, 0.5)
    return F.dropout(x, rate, bool(node.get("training_mode", 0)))


def _softmax(function: Handler) -> Handler:
    return lambda node, x: function(x, node.get("axis", -1))


_LAYERS = words("Relu HardSwish Softplus Softsign Mish Selu HardSigmoid")
_FUNCTIONS = words(
    "Sigmoid Tanh Exp Log Sqrt Neg Abs Erf Reciprocal Sin Cos Floor Ceil Round Sign IsNaN Atan"
)
"""Operators that PyTorch has under the same name."""

OPERATORS: dict[str, Handler] = {
    "Constant": lambda node: node.constant(), "Identity": lambda node, x: x, "Dropout": _dropout,
    **{name: _unary(getattr(F, name.lower())) for name in _LAYERS},
    **{name: _unary(getattr(torch, name.lower())) for name in _FUNCTIONS},
    "Gelu": lambda node, x: F.gelu(x, approximate=node.get("approximate", "none")),
    "Swish": _unary(F.silu), "Not": _unary(torch.logical_not),
    "LeakyRelu": lambda node, x: F.leaky_relu(x, node.get("alpha", 0.01)),
    "Elu": lambda node, x: F.elu(x, node.get("alpha", 1.0)),
    "Celu": lambda node, x: F.celu(x, node.get("alpha", 1.0)),
    "PRelu": lambda node, x, w: F.prelu(x, w.reshape(-1)),
    "ThresholdedRelu": lambda node, x: F.threshold(x, node.get("alpha", 1.0), 0.0),
    "Add": _binary(torch.add), "Sub": _binary(torch.sub), "Mul": _binary(torch.mul),
    "Div": _binary(_divide), "Pow": _binary(torch.pow), "Mod": _binary(torch.remainder),
    "Equal": _binary(torch.eq), "Less": _binary(torch.lt), "LessOrEqual": _binary(torch.le),
    "Greater": _binary(torch.gt), "GreaterOrEqual": _binary(torch.ge), "And": _folded(torch.logical_and),
    "Or": _folded(torch.logical_or), "Xor": _folded(torch.logical_xor), "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum), "Sum": _folded(torch.add), "Clip": _clip,
    "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum), "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin), "ReduceLogSumExp": _reduce(torch.logsumexp),
    "ReduceL2": _reduce(lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep)),
    "ReduceL1": _reduce(lambda x, dims, keep: torch.linalg.vector_norm(x, 1, dims, keep)),
    "ReduceSumSquare": _reduce(lambda x, dims, keep: torch.sum(torch.square(x), dims, keep)),
    "ReduceProd": _reduce(_product), "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumSum": lambda node, x, axis: torch.cumsum(x, numbers(axis, "an axis")[0]),
    "TopK": lambda node, x, k: torch.topk(
        x, numbers(k, "k of TopK")[0], node.get("axis", -1), bool(node.get("largest", 1))
    ),
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax), "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Split": _split,
    "Transpose": lambda node, x: x.permute(node.get("perm", tuple(reversed(range(x.dim()))))),
    "Concat": _concat,
    "Slice": _slice, "Gather": _gather, "Expand": _expand, "Pad": _pad,
    "Where": lambda node, condition, a, b: torch.where(condition, operand(a), operand(b)),
    "Cast": lambda node, x: x.to(DTYPES[node.get("to", 1)]),
    "GatherElements": lambda node, x, i: torch.gather(x, node.get("axis", 0), i),
    "Tile": lambda node, x, repeats: x.repeat(numbers(repeats, f"the repeats of {node.name}")),
    "Range": _range,
    "ConstantOfShape": _filled,
    "OneHot": lambda node, indices, depth, values: F.one_hot(indices, int(scalar(depth, 1))),
    "DepthToSpace": lambda node, x: F.pixel_shuffle(x, node.get("blocksize", 1)),
    "Trilu": lambda node, x, k=None: (torch.triu if node.get("upper", 1) else torch.tril)(
        x, int(scalar(k, 0))
    ),
    "SpaceToDepth": lambda node, x: F.pixel_unshuffle(x, node.get("blocksize", 1)),
    "CastLike": lambda node, x, like: x.to(like.dtype), "SplitToSequence": _sequence,
    "SequenceAt": lambda node, items, at: items[numbers(at, "a place")[0]],
    "Size": lambda node, x: torch.tensor(math.prod(x.shape)),
    "Shape": lambda node, x: torch.tensor(
        x.shape[node.get("start", 0) : node.get("end", None)], dtype=torch.int64
    ),
}  # fmt: skip


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_WHOLE_AVERAGES = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _padded(
    node: OnnxNode, x: Any, kernel: tuple[int, ...], value: float = 0.0
) -> tuple[Any, tuple[int, ...]]:
    """Return the input, padded explicitly if its sides differ, and the padding for the operator."""
    rank = len(kernel)
    pads = tuple(node.get("pads", (0,) * 2 * rank))
    how = node.get("auto_pad", "NOTSET")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        pads = _same(node, x, kernel, how == "SAME_UPPER")
    before, after = pads[:rank], pads[rank:]
    if before == after:
        return x, before
    sides = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    return F.pad(x, sides, value=value), (0,) * rank


def _same(node: OnnxNode, x: Any, kernel: tuple[int, ...], upper: bool) -> tuple[int, ...]:
    rank = len(kernel)
    strides, dilations = node.get("strides", (1,) * rank), node.get("dilations", (1,) * rank)
    before, after = [], []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return (*before, *after)


def _conv(node: OnnxNode, x: Any, w: Any, b: Any = None) -> Any:
    kernel = tuple(w.shape[2:])
    rank = len(kernel)
    x, padding = _padded(node, x, kernel)
    strides, dilations = node.get("strides", (1,) * rank), node.get("dilations", (1,) * rank)
    return _CONVOLUTIONS[rank](x, w, b, strides, padding, dilations, node.get("group", 1))


def _conv_transpose(node: OnnxNode, x: Any, w: Any, b: Any = None) -> Any:
    rank = w.dim() - 2
    pads = node.get("pads", (0,) * 2 * rank)
    if tuple(pads[:rank]) != tuple(pads[rank:]) or "output_shape" in node.attributes:
        raise CaptureError(f"{node.name}: a transposed convolution with uneven padding or an output shape")
    ones, zeros = (1,) * rank, (0,) * rank
    return _TRANSPOSED[rank]( 
        x, w, b, node.get("strides", ones), tuple(pads[:rank]), node.get("output_padding", zeros),
        node.get("group", 1), node.get("dilations", ones),
    )  # fmt: skip


def _gemm(node: OnnxNode, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = a.t() if node.get("transA", 0) else a
    if alpha == 1.0 and (c is None or (beta == 1.0 and c.ndim == 1)):
        return F.linear(a, b if node.get("transB", 0) else b.t(), c)
    product = torch.matmul(a, b.t() if node.get("transB", 0) else b)
    product = product * alpha if alpha != 1.0 else product
    return product if c is None else product + (operand(c) * beta if beta != 1.0 else operand(c))


def _max_pool(node: OnnxNode, x: Any) -> Any:
    kernel = tuple(node.get("kernel_shape", ()))
    rank, ones = len(kernel), (1,) * len(kernel)
    if len(node.outputs) > 1 and node.outputs[1]:
        raise CaptureError(f"{node.name}: max pooling that returns indices")
    x, padding = _padded(node, x, kernel, float("-inf"))
    return _MAX_POOLS[rank](x, kernel, node.get("strides", ones), padding, node.get("dilations", ones), 
                            bool(node.get("ceil_mode", 0)))  # fmt: skip


def _average_pool(node: OnnxNode, x: Any) -> Any:
    kernel = tuple(node.get("kernel_shape", ()))
    rank = len(kernel)
    x, padding = _padded(node, x, kernel)
    ceil, whole = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    return _AVERAGES[rank](x, kernel, node.get("strides", (1,) * rank), padding, ceil, whole)


def _batch_norm(node: OnnxNode, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    training = bool(node.get("training_mode", 0))
    result = torch.batch_norm(x, scale, bias, mean, var, training, 0.1, node.get("epsilon", 1e-5), True)
    return (result, mean, var) if len(node.outputs) > 1 else result


def _resize(node: OnnxNode, x: Any, *operands: Any) -> Any:
    """Resize (roi, scales, sizes) and the older Upsample (scales)."""
    present = [
        r for r in (operands if node.title == "Upsample" else operands[1:]) if r is not None and r.numel()
    ]
    if not present:
        raise CaptureError(f"{node.name}: a resize without a size")
    last = present[-1]
    spatial = x.dim() - 2
    size = values(last, f"the size of {node.name}")[-spatial:]
    if last.is_floating_point():
        size = [int(s * f) for s, f in zip(x.shape[2:], size, strict=True)]
    mode = node.get("mode", "nearest")
    if mode == "nearest":
        return F.interpolate(x, size)
    aligned = node.get("coordinate_transformation_mode", "half_pixel") == "align_corners"
    return F.interpolate(
        x, size, mode="bicubic" if mode == "cubic" else _MODES[spatial], align_corners=aligned
    )


def _recurrent(function: Callable[..., Any], gates: int) -> Callable[..., Any]:
    """LSTM and GRU: one layer, one or two directions, sequence first."""

    def apply(
        node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, *states: Any
    ) -> Any:
        if isinstance(lengths, torch.Tensor) or node.get("layout", 0):
            raise CaptureError(f"{node.name}: a recurrent layer with sequence lengths or batch-first layout")
        directions, hidden = w.shape[0], r.shape[2]
        shape = (directions, x.shape[1], hidden)
        weights = []
        for k in range(directions):
            weights += [w[k], r[k]]
            weights += [] if b is None else [b[k, : gates * hidden], b[k, gates * hidden :]]
        count = 2 if gates == 4 else 1
        initial = [
            s if isinstance(s, torch.Tensor) else x.new_zeros(shape) for s in (*states, None, None)[:count]
        ]
        hx: Any = initial if count == 2 else initial[0]
        results = function(x, hx, weights, b is not None, 1, 0.0, False, directions == 2, False)
        steps = results[0].reshape(x.shape[0], x.shape[1], directions, hidden).permute(0, 2, 1, 3)
        return (steps, *results[1:])

    return apply


LAYERS: dict[str, Callable[..., Any]] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm,
    "MatMul": lambda node, a, b: torch.matmul(a, b),
    "Einsum": lambda node, *items: torch.einsum(node.get("equation", ""), *items),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda node, x: _WHOLE_AVERAGES[x.dim() - 2](x, (1,) * (x.dim() - 2)),
    "GlobalMaxPool": lambda node, x: torch.amax(x, tuple(range(2, x.dim())), True),
    "BatchNormalization": _batch_norm,
    "LayerNormalization": lambda node, x, scale=None, bias=None: F.layer_norm(
        x, tuple(x.shape[node.get("axis", -1):]), scale, bias, node.get("epsilon", 1e-5)
    ),
    "InstanceNormalization": lambda node, x, scale, bias: F.instance_norm(
        x, None, None, scale, bias, True, 0.1, node.get("epsilon", 1e-5)
    ),
    "GroupNormalization": lambda node, x, scale, bias: F.group_norm(
        x, node.get("num_groups", 1), scale, bias, node.get("epsilon", 1e-5)
    ),
    "RMSNormalization": lambda node, x, scale: F.rms_norm(
        x, tuple(x.shape[node.get("axis", -1):]), scale, node.get("epsilon", 1e-5)
    ),
    "LRN": lambda node, x: F.local_response_norm(
        x, node.get("size", 5), node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    ),
    "LpNormalization": lambda node, x: F.normalize(x, node.get("p", 2), node.get("axis", -1)),
    "Resize": _resize, "Upsample": _resize,
    "LSTM": _recurrent(torch.lstm, 4), "GRU": _recurrent(torch.gru, 3),
}  # fmt: skip
"""ONNX name -> function of the node and its inputs (tensors, known arrays, None for an absent one)."""
