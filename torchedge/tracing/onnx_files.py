"""Reads ONNX files as modules to capture: their operators become calls into PyTorch on stand-ins.

Initializers become parameters (floating point) or constants; arithmetic on shapes is computed. Values are
read of small integer tensors only, and data outside the file is never opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchedge.errors import CaptureError, InputError, needed
from torchedge.graphs.graph import last_uses
from torchedge.tracing.onnx_nodes import (
    DTYPES,
    KnownValues,
    OnnxNode,
    is_known,
    known_count,
    numbers,
    read_tensor,
    values,
)
from torchedge.tracing.onnx_operators import LAYERS, OPERATORS, integers
from torchedge.tracing.programs import MAX_NODES, FileProgram, checked_sizes, reading_model, scope

MAX_FILE_BYTES = 2 << 30
_LARGEST_FOLDED = 1_000_000
_BIASED = frozenset(("Conv", "ConvTranspose", "Gemm"))
_TRAINED = frozenset(("BatchNormalization", "Dropout"))
_OF_SHAPES = frozenset(("Shape", "Size"))
"""Operators whose results are known although the values of their input are not."""

_STATISTICS = {"BatchNormalization": (3, 4)}
_READ_VALUES = {"Resize": (1, 2, 3), "Upsample": (1,), "Clip": (1, 2), "Pad": (1, 2, 3),
                "Slice": (1, 2, 3, 4), "Tile": (1,),
                "Reshape": (1,), "Expand": (1,), "ConstantOfShape": (0,), "Range": (0, 1, 2),
                "TopK": (1,)}  # fmt: skip


def load_onnx(path: str | Path) -> FileProgram:
    """Return the graph of an ONNX file as a module to capture.

    Raises InputError if the file is not valid ONNX, CaptureError with the names of unsupported operators, and
    MissingExtraError if the onnx package is not installed.
    """
    with needed("onnx", extra="onnx", purpose="reading ONNX files"):
        import onnx
    with reading_model(path, "an ONNX file, as torch.onnx.export writes"):
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise InputError(
                f"{path}: is larger than {MAX_FILE_BYTES >> 30} GiB; expected weights beside the ONNX file"
            )
        model = onnx.load(str(path), load_external_data=False)
        if not model.graph.node:
            raise InputError(f"{path}: holds no operator; expected an ONNX model: export it again")
        return OnnxProgram(Path(path).name, model.graph)


class OnnxProgram(FileProgram):
    """An ONNX graph; `forward` runs its operators on stand-ins."""

    def __init__(self, title: str, graph: Any) -> None:
        nodes = [OnnxNode.read(proto) for proto in graph.node]
        unknown = sorted({n.title for n in nodes if n.title not in OPERATORS | LAYERS})
        if unknown:
            raise CaptureError(
                f"{title} uses ONNX operators that torchedge does not support: {', '.join(unknown)}"
            )
        if len(nodes) > MAX_NODES:
            raise CaptureError(f"{title} holds {len(nodes)} operators; expected at most {MAX_NODES}")
        constants: dict[str, torch.Tensor] = {}
        weights: list[tuple[str, torch.Tensor, bool]] = []
        statistics = _names_at(nodes, _STATISTICS)
        read = _names_at(nodes, _READ_VALUES)
        for proto in graph.initializer:
            tensor = torch.empty(checked_sizes(proto.dims), dtype=DTYPES[proto.data_type], device="meta")
            small = tensor.numel() <= _LARGEST_FOLDED and proto.data_location == 0
            if small and (not tensor.is_floating_point() or not tensor.dim() or proto.name in read):
                constants[proto.name] = read_tensor(proto)
            else:
                trainable = tensor.is_floating_point() and proto.name not in statistics
                weights.append((proto.name, tensor, trainable))
        super().__init__(title, weights)
        self._nodes, self._constants = nodes, constants
        self._returned = [o.name for o in graph.output]
        initializers = {i.name for i in graph.initializer}
        self._inputs = [(i.name, *_described(i)) for i in graph.input if i.name not in initializers]
        if not self._inputs:
            raise InputError(f"{title} takes no input; expected an ONNX model that takes tensors")
        self._open = isinstance(self._inputs[0][1][0], str) if self._inputs[0][1] else False

    def example(self) -> tuple[torch.Tensor, ...]:
        """Return meta tensors of the shapes in the file; an open batch dimension is 1.

        Raises InputError if another dimension is open: pass input_size= or example= then.
        """
        batch = self._inputs[0][1][0] if self._inputs[0][1] else None
        tensors = []
        for name, sizes, dtype in self._inputs:
            closed = [1 if s == batch and isinstance(s, str) else s for s in sizes]
            open_ones = [s for s in closed if isinstance(s, str)]
            known = [s for s in closed if isinstance(s, int)]
            if open_ones:
                raise InputError(
                    f"{self.title} leaves dimension {open_ones[0]!r} of its input {name} open; pass "
                    "input_size= or example= with its size"
                )
            with reading_model(self.title, "inputs that PyTorch can describe"):
                tensors.append(torch.empty(checked_sizes(known), dtype=dtype, device="meta"))
        return tuple(tensors)

    def forward(self, *fed: torch.Tensor) -> tuple[Any, ...]:
        """Run the operators of the file; only inside a trace."""
        recorder = self.recorder()
        if len(fed) != len(self._inputs):
            raise InputError(
                f"{self.title} takes {len(self._inputs)} inputs, not {len(fed)}; pass all with example="
            )
        tensors: dict[str, Any] = {"": None, **self._constants}
        tensors.update((name, self.weight(name)) for name in self.names)
        tensors.update((name, tensor) for (name, _, _), tensor in zip(self._inputs, fed, strict=True))
        if not self._open and recorder.fixed_batch is None:
            recorder.note(
                f"{self.title} fixes the batch size; dimension 0 of its input is taken as the batch"
            )
        if self.training:
            recorder.note(
                "layers are those of the ONNX file: batch norm that its exporter folded away does not train"
            )
        known = KnownValues()
        spent = last_uses([node.inputs for node in self._nodes], {*self._returned, ""})
        for node, names in zip(self._nodes, spent, strict=True):
            with scope(recorder, node.scope):
                results = self._run(node, [tensors[name] for name in node.inputs], recorder.batch, known)
            tensors.update(zip(node.outputs, results, strict=False))
            for name in names:
                tensors.pop(name, None)
        return tuple([tensors[name] for name in self._returned if not is_known(tensors[name])])

    def _run(self, node: OnnxNode, inputs: list[Any], batch: int, known: KnownValues) -> tuple[Any, ...]:
        """Return the results of one operator: known tensors if all its inputs are known, else stand-ins."""
        if self.training and node.title in _TRAINED:
            node = dataclasses.replace(node, attributes={**node.attributes, "training_mode": 1})
        known.spend(known_count(inputs))
        operator = OPERATORS.get(node.title)
        if operator is not None and (node.title in _OF_SHAPES or all(map(is_known, inputs))):
            with torch._C.DisableTorchFunction(), torch.no_grad(), known:
                result = operator(node, *inputs)
        elif operator is not None:
            if node.title == "Reshape" and not self._open:
                inputs = _with_batch(inputs, batch)
            result = operator(node, *inputs)
        else:
            if node.title not in _READ_VALUES:
                inputs = [_layer_input(i, node.title in _BIASED and k == 2) for k, i in enumerate(inputs)]
            result = LAYERS[node.title](node, *inputs)
        return result if isinstance(result, tuple) else (result,)


def _layer_input(item: Any, bias: bool) -> Any:
    """Return an input of a layer: None for a known bias of zeros."""
    return None if bias and is_known(item) and item is not None and not any(values(item, "a bias")) else item


def _with_batch(inputs: list[Any], batch: int) -> list[Any]:
    """Keep the batch if a reshape keeps dimension 0, in a file with a fixed batch size."""
    tensor, shape = inputs
    sizes = numbers(shape, "a shape")
    if sizes and sizes[0] == 1 and tensor.dim() and tensor.shape[0] == batch:
        return [tensor, integers([batch, *sizes[1:]])]
    return inputs


def _names_at(nodes: list[OnnxNode], places: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names at these input positions of these operators."""
    return {n.inputs[k] for n in nodes for k in places.get(n.title, ()) if k < len(n.inputs)}


def _described(proto: Any) -> tuple[list[int | str], torch.dtype]:
    """Return shape and dtype of an input; an open dimension is text."""
    kind = proto.type.tensor_type
    sizes: list[int | str] = [
        d.dim_param or f"{proto.name}[{axis}]"
        if d.WhichOneof("value") != "dim_value"
        else checked_sizes([d.dim_value])[0]
        for axis, d in enumerate(kind.shape.dim)
    ]
    return sizes, DTYPES[kind.elem_type]
