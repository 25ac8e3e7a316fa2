"""One operator of an ONNX graph as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchedge.errors import CaptureError

_count = itertools.count()
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
    number: int = field(default_factory=_count.__next__)

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
        """Return what a Constant node holds."""
        from onnx import numpy_helper

        for name, value in self.attributes.items():
            if name == "value":
                return np.asarray(numpy_helper.to_array(value))
            if name in ("value_float", "value_floats"):
                return np.asarray(value, dtype=np.float32)
            if name in ("value_int", "value_ints"):
                return np.asarray(value, dtype=np.int64)
        raise CaptureError(f"the constant {self.name} holds neither a tensor nor numbers")

    def axes(self, given: Any, default: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Return axes from an input (newer opsets) or the attribute `axes` (older ones)."""
        found = self.get("axes", default) if given is None else tuple(int(i) for i in np.atleast_1d(given))
        return found if found is None else tuple(found)


def _scope(proto: Any) -> str:
    """Return the module path that torch.onnx.export leaves in a node, "" where there is none."""
    for entry in getattr(proto, "metadata_props", ()):
        if entry.key == "pkg.torch.onnx.name_scopes":
            names = [part.strip(" '\"") for part in entry.value.strip("[]").split(",")]
            return next((n for n in reversed(names[:-1]) if n), "")
    parts = [p for p in str(proto.name).split("/") if p]
    return parts[-2] if len(parts) > 1 else ""
