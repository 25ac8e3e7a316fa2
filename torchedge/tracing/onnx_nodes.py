"""Operators of an ONNX graph as plain data, and constant folding with numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchedge.errors import CaptureError

_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Node:
    """An operator: `title` is its type (and domain, unless ONNX's own), `scope` the module it came from."""

    title: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    scope: str = ""

    @classmethod
    def read(cls, proto: Any) -> Node:
        """Return a NodeProto as plain data; raises CaptureError for control flow."""
        from onnx import helper

        title = proto.op_type if proto.domain in _STANDARD else f"{proto.domain}::{proto.op_type}"
        attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
        if any(hasattr(v, "node") for v in attributes.values()):
            raise CaptureError(f"{title} ({proto.name}) is control flow, which cannot be captured")
        return cls(title, proto.name, tuple(proto.input), tuple(proto.output), attributes, _scope(proto))

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute: text for bytes, a tuple for lists."""
        value = self.attributes.get(name, default)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return tuple(value) if isinstance(value, list) else value

    def constant(self) -> np.ndarray[Any, Any]:
        """Return the array of a Constant node."""
        from onnx import numpy_helper

        for name, value in self.attributes.items():
            if name == "value":
                return np.asarray(numpy_helper.to_array(value))
            if name in ("value_float", "value_floats"):
                return np.asarray(value, dtype=np.float32)
            if name in ("value_int", "value_ints"):
                return np.asarray(value, dtype=np.int64)
        raise CaptureError(
            f"the constant {self.name} contains neither a tensor nor numbers; export the model again"
        )

    def axes(self, operand: Any) -> tuple[int, ...] | None:
        """Return axes from an input (newer opsets) or the attribute `axes` (older ones)."""
        axes = self.get("axes", None) if operand is None else [int(i) for i in np.atleast_1d(operand)]
        return None if axes is None else tuple(axes)


def _scope(proto: Any) -> str:
    """Return the module path that torch.onnx.export stores in a node, "" if there is none."""
    for entry in getattr(proto, "metadata_props", ()):
        if entry.key == "pkg.torch.onnx.name_scopes":
            names = [part.strip(" '\"") for part in entry.value.strip("[]").split(",")]
            return next((n for n in reversed(names[:-1]) if n), "")
    parts = [p for p in str(proto.name).split("/") if p]
    return parts[-2] if len(parts) > 1 else ""


Array = np.ndarray[Any, Any]
_LARGEST = 10_000_000
DTYPES = {
    1: np.float32, 2: np.uint8, 3: np.int8, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
    10: np.float16,
    11: np.float64, 12: np.uint32, 13: np.uint64,
}  # fmt: skip


def _check_size(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > _LARGEST:
        raise CaptureError(
            f"a constant of shape {shape} follows from the batch size, which cannot be captured"
        )


def _bounded(array: Array) -> Array:
    _check_size(array.shape)
    return array


def _size(sizes: Any) -> tuple[int, ...]:
    shape = tuple(int(s) for s in np.atleast_1d(sizes))
    _check_size(shape)
    return shape


def _slice(
    node: Node, data: Array, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None
) -> Array:
    starts = node.get("starts", ()) if starts is None else starts
    ends = node.get("ends", ()) if ends is None else ends
    axes = node.get("axes", range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index: list[slice] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        low = None if step < 0 and end < -data.shape[axis] else int(end)
        index[int(axis)] = slice(int(start), low, int(step))
    return data[tuple(index)]


def _divide(node: Node, a: Array, b: Array) -> Array:
    integral = np.issubdtype(np.asarray(a).dtype, np.integer)
    if not integral:
        return np.asarray(a / b)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))  # towards zero, as in C


def _filled(node: Node, shape: Array) -> Array:
    from onnx import numpy_helper

    value = node.attributes.get("value")
    number = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    return np.full(_size(shape) if len(shape) else (), number[0], dtype=number.dtype)


def _range(node: Node, start: Array, stop: Array, step: Array) -> Array:
    _size((int(stop) - int(start)) // int(step or 1))
    return np.asarray(np.arange(start.item(), stop.item(), step.item()), dtype=start.dtype)


def _reduce(function: Callable[..., Any]) -> Callable[..., Array]:
    def reduce(node: Node, data: Array, axes: Any = None) -> Array:
        return np.asarray(function(data, axis=node.axes(axes), keepdims=bool(node.get("keepdims", 1))))

    return reduce


def _plain(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda node, *arrays: _bounded(np.asarray(function(*arrays)))


FOLDS: dict[str, Callable[..., Array]] = {
    "Identity": _plain(lambda a: a), "Add": _plain(np.add), "Sub": _plain(np.subtract),
    "Mul": _plain(np.multiply), "Div": _divide, "Neg": _plain(np.negative), "Abs": _plain(np.abs),
    "Floor": _plain(np.floor), "Ceil": _plain(np.ceil), "Sqrt": _plain(np.sqrt), "Pow": _plain(np.power),
    "Max": _plain(lambda *a: np.maximum.reduce(a)), "Min": _plain(lambda *a: np.minimum.reduce(a)),
    "Mod": _plain(np.mod), "Equal": _plain(np.equal), "Less": _plain(np.less), "Greater": _plain(np.greater),
    "Not": _plain(np.logical_not), "And": _plain(np.logical_and), "Or": _plain(np.logical_or),
    "Where": _plain(np.where), "Exp": _plain(np.exp), "Log": _plain(np.log),
    "Reciprocal": _plain(np.reciprocal), "Round": _plain(np.round), "Sign": _plain(np.sign),
    "Cast": lambda node, a: np.asarray(a).astype(DTYPES[node.get("to", 1)]),
    "Shape": lambda node, a: np.array(a.shape, np.int64)[slice(node.get("start", 0), node.get("end", None))],
    "Size": lambda node, a: np.asarray(a.size, dtype=np.int64),
    "Gather": lambda node, a, i: np.take(a, i, axis=node.get("axis", 0)),
    "Concat": lambda node, *arrays: np.concatenate(list(map(np.atleast_1d, arrays)), node.get("axis", 0)),
    "Slice": _slice,
    "Squeeze": lambda node, a, axes=None: np.squeeze(a, node.axes(axes)),
    "Unsqueeze": lambda node, a, axes=None: np.expand_dims(a, node.axes(axes) or ()),
    "Reshape": lambda node, a, shape: a.reshape(
        [a.shape[i] if s == 0 else int(s) for i, s in enumerate(shape)]
    ),
    "Transpose": lambda node, a: np.transpose(a, node.get("perm", None)),
    "Expand": lambda node, a, shape: np.broadcast_to(a, np.broadcast_shapes(a.shape, _size(shape))),
    "Tile": lambda node, a, repeats: _bounded(np.tile(a, _size(repeats))),
    "ConstantOfShape": _filled, "Range": _range, "ReduceProd": _reduce(np.prod), "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max), "ReduceMin": _reduce(np.min),
}  # fmt: skip
