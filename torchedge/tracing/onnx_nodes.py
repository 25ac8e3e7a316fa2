"""Operators of an ONNX graph as plain data, and the tensors whose values are known before running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchedge.errors import CaptureError

MAX_KNOWN = 2**25
"""Most values that the operators of a graph read and compute before it runs."""

_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """An operator: `title` is its type (and domain, unless ONNX's own), `scope` the module it came from."""

    title: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    scope: str = ""

    @classmethod
    def read(cls, proto: Any) -> OnnxNode:
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

    def constant(self) -> torch.Tensor:
        """Return the tensor of a Constant node."""
        for name, value in self.attributes.items():
            if name == "value":
                return read_tensor(value)
            if name in ("value_float", "value_floats"):
                return torch.tensor(value, dtype=torch.float32)
            if name in ("value_int", "value_ints"):
                return torch.tensor(value, dtype=torch.int64)
        raise CaptureError(
            f"the constant {self.name} contains neither a tensor nor numbers; export the model again"
        )

    def axes(self, operand: Any) -> tuple[int, ...] | None:
        """Return axes from an input (newer opsets) or the attribute `axes` (older ones)."""
        axes = self.get("axes", None) if operand is None else numbers(operand, f"the axes of {self.name}")
        return None if axes is None else tuple(axes)


def _scope(proto: Any) -> str:
    """Return the module path that torch.onnx.export stores in a node, "" if there is none."""
    for entry in getattr(proto, "metadata_props", ()):
        if entry.key == "pkg.torch.onnx.name_scopes":
            names = [part.strip(" '\"") for part in entry.value.strip("[]").split(",")]
            return next((n for n in reversed(names[:-1]) if n), "")
    parts = [p for p in str(proto.name).split("/") if p]
    return parts[-2] if len(parts) > 1 else ""


DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64,
    16: torch.bfloat16,
}  # fmt: skip


def read_tensor(proto: Any) -> torch.Tensor:
    """Return a TensorProto as a tensor in main memory."""
    from onnx import numpy_helper

    array = np.array(numpy_helper.to_array(proto))
    if DTYPES[proto.data_type] is torch.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array)


class KnownValues(TorchDispatchMode):
    """A limit on the values that an ONNX graph computes before it runs: shapes, indices, masks.

    While active, every operator's results are counted, by its meta kernel, before they are computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = MAX_KNOWN

    def spend(self, count: int) -> None:
        """Count some values; raises CaptureError once there are more than MAX_KNOWN."""
        self._left -= count
        if self._left < 0:
            raise CaptureError(
                f"the file computes over {MAX_KNOWN} values before it runs, which cannot be captured: shapes "
                "or constants grow, perhaps with the batch size; export the model again, with a batch size"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the results of one operator, then compute them."""
        kwargs = kwargs or {}
        metas = tree_map(_as_meta, (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            metas[1]["device"] = "meta"
        try:
            results = func(*metas[0], **metas[1])
        except (NotImplementedError, RuntimeError):
            results = metas  # as many as are read, where that depends on their values
        self.spend(sum(item.numel() for item in tree_leaves(results) if isinstance(item, torch.Tensor)))
        return func(*args, **kwargs)


def _as_meta(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="meta")


def known_count(items: Any) -> int:
    """Return how many values are known of an operator's inputs."""
    return sum(item.numel() for item in items if item is not None and is_known(item))


def is_known(item: Any) -> bool:
    """Return whether an input's values are known: it is absent, or a tensor in main memory."""
    return item is None or (type(item) is torch.Tensor and item.device.type == "cpu")


def values(item: Any, title: str) -> list[Any]:
    """Return the numbers of a tensor that must be known before running."""
    if not is_known(item):
        raise CaptureError(f"{title} depends on values that are known only when running")
    with torch._C.DisableTorchFunction():
        return list(item.reshape(-1).tolist())


def numbers(item: Any, title: str) -> list[int]:
    """Return whole numbers that must be known before running."""
    return [int(number) for number in values(item, title)]


def scalar(item: Any, default: float) -> float:
    """Return one number that must be known before running."""
    number: float = default if item is None else values(item, "a limit or factor")[0]
    return number
