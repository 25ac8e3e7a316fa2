"""ONNX operators on tensors (arithmetic, reductions, shapes, indices) as calls into PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from torchedge.errors import CaptureError
from torchedge.tracing.onnx_folding import DTYPES
from torchedge.tracing.onnx_node import Node

_TORCH_DTYPES = {code: torch.from_numpy(np.zeros(0, dtype)).dtype for code, dtype in DTYPES.items()}
_TORCH_DTYPES[16] = torch.bfloat16
Handler = Callable[..., Any]


def operand(item: Any) -> Any:
    """Return what PyTorch computes with: a number for a scalar array, a constant tensor for a larger one."""
    if not isinstance(item, np.ndarray | np.generic):
        return item
    array = np.asarray(item)
    return array.item() if array.ndim == 0 else torch.from_numpy(np.array(array))


def tensor_of(item: Any) -> torch.Tensor:
    """Return a tensor, also for a scalar array."""
    return item if isinstance(item, torch.Tensor) else torch.from_numpy(np.array(item))


def numbers(item: Any, what: str) -> list[int]:
    """Return whole numbers that must be known before running."""
    if isinstance(item, torch.Tensor):
        raise CaptureError(f"{what} depends on values that are known only when running")
    return [int(i) for i in np.atleast_1d(item)]


def scalar(item: Any, default: float) -> float:
    """Return one number that must be known before running."""
    if item is None:
        return default
    if isinstance(item, torch.Tensor):
        raise CaptureError("a limit or factor depends on values that are known only when running")
    return float(np.asarray(item).reshape(-1)[0])


def _unary(function: Handler) -> Handler:
    return lambda node, x: function(x)


def _binary(function: Handler) -> Handler:
    def apply(node: Node, a: Any, b: Any) -> Any:
        left, right = operand(a), operand(b)
        return function(left if isinstance(left, torch.Tensor) else tensor_of(a), right)

    return apply


def _folded(function: Handler) -> Handler:
    def apply(node: Node, *items: Any) -> Any:
        found = tensor_of(items[0])
        for item in items[1:]:
            found = function(found, tensor_of(item))
        return found

    return apply


def _clip(node: Node, x: Any, low: Any = None, high: Any = None) -> Any:
    low = node.get("min", None) if low is None else scalar(low, 0)
    high = node.get("max", None) if high is None else scalar(high, 0)
    if low == 0 and high == 6:
        return F.relu6(x)
    return torch.clamp(x, low, high)


def _reduce(function: Handler, whole: Handler | None = None) -> Handler:
    def apply(node: Node, x: Any, axes: Any = None) -> Any:
        dims, keep = node.axes(axes), bool(node.get("keepdims", 1))
        if dims is None or not dims:
            if node.get("noop_with_empty_axes", 0):
                return x
            dims = tuple(range(x.dim()))
        return function(x, dims, keep)

    return apply


def _arg(function: Handler) -> Handler:
    return lambda node, x: function(x, node.get("axis", 0), bool(node.get("keepdims", 1)))


def _reshape(node: Node, x: Any, shape: Any) -> Any:
    sizes = numbers(shape, f"the shape of {node.name}")
    kept = [x.shape[i] if s == 0 and not node.get("allowzero", 0) else s for i, s in enumerate(sizes)]
    return x.reshape(kept)


def _flatten(node: Node, x: Any) -> Any:
    axis = node.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 1 and x.dim() > 1:
        return torch.flatten(x, 1)
    return x.reshape([int(np.prod(x.shape[:axis], dtype=object)), -1])


def _squeeze(node: Node, x: Any, axes: Any = None) -> Any:
    dims = node.axes(axes)
    return x.squeeze() if dims is None else x.squeeze(dims if len(dims) > 1 else dims[0])


def _unsqueeze(node: Node, x: Any, axes: Any = None) -> Any:
    dims = node.axes(axes) or ()
    rank = x.dim() + len(dims)
    for axis in sorted([d % rank for d in dims]):
        x = x.unsqueeze(axis)
    return x


def _split(node: Node, x: Any, split: Any = None) -> tuple[Any, ...]:
    axis = node.get("axis", 0)
    parts = node.get("split", None) if split is None else tuple(numbers(split, f"the parts of {node.name}"))
    if parts is not None:
        return tuple(torch.split(x, list(parts), axis))
    return tuple(torch.chunk(x, node.get("num_outputs", len(node.outputs)), axis))


def _sequence(node: Node, x: Any, split: Any = None) -> tuple[Any]:
    axis = node.get("axis", 0)
    parts = [1] if split is None else numbers(split, f"the parts of {node.name}")
    return (list(torch.split(x, parts[0] if np.ndim(split) == 0 else parts, axis)),)


def _slice(
    node: Node, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None
) -> Any:
    def given(item: Any, name: str) -> list[int] | None:
        return node.get(name, None) if item is None else numbers(item, f"the {name} of {node.name}")

    first, last = given(starts, "starts") or (), given(ends, "ends") or ()
    index: list[slice] = [slice(None)] * x.dim()
    for k, (start, end) in enumerate(zip(first, last, strict=True)):
        axis = (given(axes, "axes") or range(x.dim()))[k]
        step = 1 if steps is None else numbers(steps, "a step")[k]
        if step < 0:
            x = x.flip(axis)
            start, end, step = -1 - start, -1 - end if end > -x.shape[axis] else x.shape[axis], -step
            start = max(start, 0) if start < 0 and first[k] >= x.shape[axis] - 1 else start
        index[axis] = slice(start, min(end, x.shape[axis]) if end > 0 else end, step)
    return x[tuple(index)]


def _gather(node: Node, x: Any, indices: Any) -> Any:
    axis = node.get("axis", 0)
    if isinstance(indices, np.ndarray | np.generic):
        array = np.asarray(indices)
        return (
            x.select(axis, int(array))
            if array.ndim == 0
            else tensor_of(x).index_select(axis, tensor_of(array.reshape(-1)))
        )
    if axis == 0 and isinstance(x, torch.nn.Parameter) and x.dim() == 2:
        return F.embedding(indices, x)
    index: list[Any] = [slice(None)] * x.dim() if isinstance(x, torch.Tensor) else [slice(None)] * np.ndim(x)
    index[axis] = indices
    return tensor_of(x)[tuple(index)]


def _expand(node: Node, x: Any, shape: Any) -> Any:
    x = tensor_of(x)
    return x.expand(
        torch.broadcast_shapes(tuple(x.shape), tuple(numbers(shape, f"the shape of {node.name}")))
    )


def _pad(node: Node, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    given = list(node.get("pads", ())) if pads is None else numbers(pads, f"the padding of {node.name}")
    chosen = list(range(x.dim())) if axes is None else [a % x.dim() for a in numbers(axes, "padded axes")]
    half = len(given) // 2
    before, after = dict(zip(chosen, given[:half], strict=True)), dict(zip(chosen, given[half:], strict=True))
    padding = [side.get(a, 0) for a in reversed(range(x.dim())) for side in (before, after)]
    while len(padding) > 2 and padding[-2:] == [0, 0]:
        padding = padding[:-2]
    mode = {"edge": "replicate", "wrap": "circular"}.get(
        node.get("mode", "constant"), node.get("mode", "constant")
    )
    return F.pad(x, padding, mode, scalar(value, 0.0) if mode == "constant" else None)


def _where(node: Node, condition: Any, a: Any, b: Any) -> Any:
    return torch.where(tensor_of(condition), operand(a), operand(b))


def _cast(node: Node, x: Any) -> Any:
    return x.to(_TORCH_DTYPES[node.get("to", 1)])


def _cast_like(node: Node, x: Any, like: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(tensor_of(like).dtype)
    name = str(like.dtype).removeprefix("torch.")
    return np.asarray(x).astype("float32" if name == "bfloat16" else name)


def _filled(node: Node, shape: Any) -> Any:
    raise CaptureError(f"the shape of {node.name} depends on values that are known only when running")


def _one_hot(node: Node, indices: Any, depth: Any, values: Any) -> Any:
    return F.one_hot(indices, int(scalar(depth, 1)))


def _cumsum(node: Node, x: Any, axis: Any) -> Any:
    return torch.cumsum(x, numbers(axis, "an axis")[0])


def _topk(node: Node, x: Any, k: Any) -> Any:
    return torch.topk(x, numbers(k, "k of TopK")[0], node.get("axis", -1), bool(node.get("largest", 1)))


def _depth_to_space(node: Node, x: Any) -> Any:
    return F.pixel_shuffle(x, node.get("blocksize", 1))


def _trilu(node: Node, x: Any, k: Any = None) -> Any:
    return (torch.triu if node.get("upper", 1) else torch.tril)(tensor_of(x), int(scalar(k, 0)))


def _gelu(node: Node, x: Any) -> Any:
    return F.gelu(x, approximate=node.get("approximate", "none"))


def _einsum(node: Node, *items: Any) -> Any:
    return torch.einsum(node.get("equation", ""), *[tensor_of(i) for i in items])


def _dropout(node: Node, x: Any, ratio: Any = None, *rest: Any) -> Any:
    rate = node.get("ratio", 0.5) if ratio is None else scalar(ratio, 0.5)
    return F.dropout(x, rate, bool(node.get("training_mode", 0)))


def _softmax(function: Handler) -> Handler:
    return lambda node, x: function(x, node.get("axis", -1))


OPERATORS: dict[str, Handler] = {
    "Identity": lambda node, x: x, "Dropout": _dropout, "Relu": _unary(F.relu),
    "Sigmoid": _unary(torch.sigmoid), "Tanh": _unary(torch.tanh), "HardSwish": _unary(F.hardswish),
    "Gelu": _gelu, "Softplus": _unary(F.softplus), "Softsign": _unary(F.softsign), "Mish": _unary(F.mish),
    "Exp": _unary(torch.exp), "Swish": _unary(F.silu), "Log": _unary(torch.log), "Sqrt": _unary(torch.sqrt),
    "Neg": _unary(torch.neg), "Abs": _unary(torch.abs), "Erf": _unary(torch.erf),
    "Reciprocal": _unary(torch.reciprocal), "Sin": _unary(torch.sin), "Cos": _unary(torch.cos),
    "Floor": _unary(torch.floor), "Ceil": _unary(torch.ceil), "Round": _unary(torch.round),
    "Sign": _unary(torch.sign), "Not": _unary(torch.logical_not), "IsNaN": _unary(torch.isnan),
    "Atan": _unary(torch.atan), "LeakyRelu": lambda node, x: F.leaky_relu(x, node.get("alpha", 0.01)),
    "Elu": lambda node, x: F.elu(x, node.get("alpha", 1.0)),
    "Celu": lambda node, x: F.celu(x, node.get("alpha", 1.0)), "Selu": _unary(F.selu),
    "HardSigmoid": _unary(F.hardsigmoid), "PRelu": lambda node, x, w: F.prelu(x, w.reshape(-1)),
    "ThresholdedRelu": lambda node, x: F.threshold(x, node.get("alpha", 1.0), 0.0),
    "Add": _binary(torch.add), "Sub": _binary(torch.sub), "Mul": _binary(torch.mul),
    "Div": _binary(torch.div), "Pow": _binary(torch.pow), "Mod": _binary(torch.remainder),
    "Equal": _binary(torch.eq), "Less": _binary(torch.lt), "LessOrEqual": _binary(torch.le),
    "Greater": _binary(torch.gt), "GreaterOrEqual": _binary(torch.ge), "And": _folded(torch.logical_and),
    "Or": _folded(torch.logical_or), "Xor": _folded(torch.logical_xor), "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum), "Sum": _folded(torch.add), "Clip": _clip,
    "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum), "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin), "ReduceLogSumExp": _reduce(torch.logsumexp),
    "ReduceL2": _reduce(lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep)),
    "ReduceL1": _reduce(lambda x, dims, keep: torch.linalg.vector_norm(x, 1, dims, keep)),
    "ReduceSumSquare": _reduce(lambda x, dims, keep: torch.sum(torch.square(x), dims, keep)),
    "ReduceProd": _reduce(lambda x, dims, keep: torch.prod(x, dims[0], keep)), "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin), "CumSum": _cumsum, "TopK": _topk, "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax), "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Split": _split,
    "Transpose": lambda node, x: tensor_of(x).permute(node.get("perm", tuple(reversed(range(x.dim()))))),
    "Concat": lambda node, *items: torch.cat([tensor_of(i) for i in items], node.get("axis", 0)),
    "Slice": _slice, "Gather": _gather, "Expand": _expand, "Pad": _pad, "Where": _where, "Cast": _cast,
    "GatherElements": lambda node, x, i: torch.gather(x, node.get("axis", 0), tensor_of(i)),
    "Tile": lambda node, x, repeats: tensor_of(x).repeat(numbers(repeats, "the repeats of Tile")),
    "ConstantOfShape": _filled, "OneHot": _one_hot, "DepthToSpace": _depth_to_space, "Trilu": _trilu,
    "Einsum": _einsum, "SpaceToDepth": lambda node, x: F.pixel_unshuffle(x, node.get("blocksize", 1)),
    "CastLike": _cast_like, "SplitToSequence": _sequence,
    "SequenceAt": lambda node, items, at: items[numbers(at, "a place")[0]],
    "Size": lambda node, x: np.asarray(x.numel(), dtype=np.int64),
    "Shape": lambda node, x: np.array(tuple(x.shape), dtype=np.int64),
}  # fmt: skip
