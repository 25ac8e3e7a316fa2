"""Reads `.pt2` files without torch.export.load, which unpickles and so may run code of the file.

A `.pt2` file is a zip archive. One JSON document holds the graph and the shapes of all tensors; weights,
constants and sample inputs are separate files, partly pickled. Prediction needs shapes only, so only the
document is read. Operators are looked up by name among ATen's, and symbolic sizes (text that
torch.export.load evaluates) are never parsed.
"""

from __future__ import annotations

import math
import operator
import re
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from torchedge.errors import CaptureError, InputError
from torchedge.ops import registry
from torchedge.storage.documents import MAX_INTEGER, Document, parse_json
from torchedge.tracing.programs import MAX_NODES, FileProgram, checked_sizes, reading_model, scope
from torchedge.tracing.recorder import Recorder

MAX_DOCUMENT_BYTES = 64 << 20
_DOCUMENT = re.compile(r"(.*/)?models/[^/]+\.json|serialized_exported_program\.json")
_ATEN = re.compile(r"torch\.ops\.(aten|torchvision)\.(\w+)\.(\w+)")
_PYTHON: dict[str, Callable[..., Any]] = {
    **{f"_operator.{n}": getattr(operator, n) for n in (
        "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge",
        "and_", "or_", "getitem",
    )},
    **{f"math.{n}": getattr(math, n) for n in ("floor", "ceil", "trunc")},
    **{f"torch.{n}": getattr(torch, n) for n in (
        "sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite",
    )},
}  # fmt: skip
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16,
    7: torch.float32,
    8: torch.float64, 9: torch.complex32, 10: torch.complex64, 11: torch.complex128, 12: torch.bool,
    13: torch.bfloat16,
}  # fmt: skip
_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_MODES = frozenset(("training", "train"))
_WEIGHTS = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


def load_pt2(path: str | Path) -> FileProgram:
    """Return the program of a `.pt2` file as a module to capture.

    Raises InputError if the file is not a .pt2 archive, is too large, or refers to a missing name.
    """
    with reading_model(path, "a file written by torch.export.save of PyTorch 2.6 or newer"):
        document: Any = _read_document(Path(path))
        return Pt2Program(Path(path).name, document["graph_module"])


def _read_document(path: Path) -> Document:
    with zipfile.ZipFile(path) as archive:
        graphs = [i for i in archive.infolist() if _DOCUMENT.fullmatch(i.filename)]
        if len(graphs) != 1:
            raise InputError(
                f"{path}: holds {len(graphs)} graphs; expected one, written by torch.export.save"
            )
        with archive.open(graphs[0]) as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{path}: the graph is larger than {MAX_DOCUMENT_BYTES >> 20} MiB; expected a smaller one"
        )
    return parse_json(path, data)


class Pt2Program(FileProgram):
    """The exported program; `forward` runs its operators on stand-ins."""

    def __init__(self, title: str, module: dict[str, Any]) -> None:
        graph, signature = module["graph"], module["signature"]
        sizes = graph["tensor_values"]
        weights: list[tuple[str, torch.Tensor, bool]] = []
        self_inputs: list[tuple[str, str]] = []
        for spec in signature["input_specs"]:
            ((kind, body),) = spec.items()
            if kind in _WEIGHTS:
                place, name = body["arg"]["name"], str(body[_WEIGHTS[kind]])
                meta = sizes[place]
                trainable = kind == "parameter" and bool(meta["requires_grad"])
                weights.append((name, _tensor(meta, None), trainable))
                self_inputs.append((name, place))
            elif kind == "user_input":
                self_inputs.append(("", _name(body["arg"])))
            else:
                raise ValueError(f"input of kind {kind}")
        super().__init__(title, weights)
        self._graph, self._inputs = MappingProxyType(graph), self_inputs
        self._returned = [
            _name(spec["user_output"]["arg"]) for spec in signature["output_specs"] if "user_output" in spec
        ]
        fed = [sizes[place] for name, place in self_inputs if not name and place in sizes]
        first = fed[0]["sizes"][0] if fed and fed[0]["sizes"] else {}
        # The text of a symbolic size is compared and never evaluated.
        symbol = str(first["as_expr"]["expr_str"]) if "as_expr" in first else None
        self.batch_is_dynamic = symbol is not None
        self._example = tuple([_tensor(meta, symbol) for meta in fed])

    def example(self) -> tuple[torch.Tensor, ...]:
        """Return meta tensors of the shapes in the file; a dynamic batch dimension is 1."""
        return self._example

    def forward(self, *fed: torch.Tensor) -> Any:
        """Run the operators of the file; only inside a trace."""
        recorder = self.recorder()
        tensors = iter(fed)
        sizes = self._graph["tensor_values"]
        values: dict[str, Any] = {}
        for name, place in self._inputs:
            if name:
                values[place] = self.weight(name)
            elif place in sizes:
                values[place] = next(tensors)
        if not self.batch_is_dynamic and recorder.fixed_batch is None:
            raise CaptureError(
                f"{self.title} was exported for one batch size; expected a dynamic batch dimension "
                "or batch_size="
            )
        _run(self._graph, values, recorder, self.training)
        return tuple([values[name] for name in self._returned if name in values])


def _run(graph: Mapping[str, Any], values: dict[str, Any], recorder: Recorder, training: bool) -> None:
    """Run the nodes of a graph and add their results to `values` by name."""
    nodes = graph["nodes"]
    if len(nodes) > MAX_NODES:
        raise CaptureError(f"the file holds {len(nodes)} operators; expected at most {MAX_NODES}")
    for node in nodes:
        stack = (node.get("metadata") or {}).get("nn_module_stack", "")
        last = stack.rsplit(";", 1)[-1].split(",")
        path = last[1] if len(last) == 3 and not last[1].startswith("_empty_nn_module_stack") else ""
        with scope(recorder, path):
            result = _call(node, values, recorder, training)
        outputs = node["outputs"]
        if len(outputs) == 1 and "as_tensors" in outputs[0]:
            outputs = [{"as_tensor": o} for o in outputs[0]["as_tensors"]]
        elif len(outputs) == 1 and not isinstance(result, (tuple, list)):
            result = (result,)
        if result is not None:
            for output, value in zip(outputs, result, strict=False):
                if "as_none" not in output:
                    values[_name(output)] = value


def _call(node: dict[str, Any], values: dict[str, Any], recorder: Recorder, training: bool) -> Any:
    target = str(node["target"])
    named = [(i["name"], i["arg"], i.get("kind", 1)) for i in node["inputs"]]
    if target.startswith("torch.ops.higher_order."):
        return _higher_order(target, [a for _, a, _ in named], values, recorder, training)
    function = _function(target)
    args = [_argument(a, values) for _, a, kind in named if kind != 2]
    keywords = {n: _argument(a, values) for n, a, kind in named if kind == 2}
    for place, (name, _, kind) in enumerate(named):
        if name in _MODES and kind != 2 and isinstance(args[place], bool) and args[place] is not training:
            args[place] = training
            recorder.note(
                "batch norm and dropout of the file run in the requested mode, not in the mode of the export"
            )
    return function(*args, **keywords)


def _function(target: str) -> Callable[..., Any]:
    """Return an operator by name: ATen's if it is registered or reads a tensor, or arithmetic on sizes."""
    if target in _PYTHON:
        return _PYTHON[target] if target == "_operator.getitem" else partial(_on_sizes, _PYTHON[target])
    match = _ATEN.fullmatch(target)
    packet = getattr(getattr(torch.ops, match[1]), match[2], None) if match else None
    overload = getattr(packet, match[3], None) if match and packet is not None else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise CaptureError(
            f"the file uses {target}, which is no operator of this PyTorch ({torch.__version__}); expected "
            "operators of ATen or torchvision"
        )
    reads = any("Tensor" in str(a.type) for a in overload._schema.arguments)
    if not reads and match is not None and match[2] not in registry():
        raise CaptureError(f"the file uses {target}, which reads no tensor; expected operators on tensors")
    function: Callable[..., Any] = overload
    return function


def _on_sizes(function: Callable[..., Any], *args: Any) -> Any:
    """Compute with numbers of 64 bits, and return one: neither a power nor a text grows with it."""
    numbers = [_size(arg) for arg in args]
    if function is operator.pow and abs(numbers[0]) > 1 and abs(numbers[1]) > 64:
        raise CaptureError(f"the file computes {numbers[0]} ** {numbers[1]}; expected sizes of 64 bits")
    return _size(function(*numbers))


def _size(item: Any) -> Any:
    if isinstance(item, (int, float)) and abs(item) <= MAX_INTEGER:
        return item
    raise CaptureError(
        f"the file computes a size from or to a {type(item).__name__} that is no number of 64 bits; export "
        "the model again"
    )


def _higher_order(
    target: str, args: list[Any], values: dict[str, Any], recorder: Recorder, training: bool
) -> Any:
    """Run a nested graph: a region without gradients or with autocast."""
    place = next((i for i, a in enumerate(args) if "as_graph" in a), -1)
    if place < 0 or not target.endswith(("wrap_with_set_grad_enabled", "wrap_with_autocast")):
        raise CaptureError(f"the file uses {target}: control flow that depends on values cannot be captured")
    settings = [_argument(a, values) for a in args[:place]]
    graph = args[place]["as_graph"]["graph"]
    inner = {_name(i): _argument(a, values) for i, a in zip(graph["inputs"], args[place + 1 :], strict=True)}
    if target.endswith("autocast"):
        device, dtype, enabled, cache = settings
        with torch.autocast(device, dtype=dtype, enabled=bool(enabled), cache_enabled=bool(cache)):
            _run(graph, inner, recorder, training)
    else:
        with torch.set_grad_enabled(bool(settings[0])):
            _run(graph, inner, recorder, training)
    return tuple([inner[_name(o)] for o in graph["outputs"]])


def _argument(arg: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return the value of a serialized argument."""
    ((kind, body),) = arg.items()
    if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
        return _symbolic(body, values)
    if kind in ("as_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools"):
        return [_symbolic(b, values) for b in body]
    if kind == "as_optional_tensors":
        return [None if "as_none" in b else _argument(b, values) for b in body]
    if kind == "as_optional_tensor":
        return None if "as_none" in body else _argument(body, values)
    if kind == "as_scalar_type":
        return _DTYPES[body]
    if kind == "as_memory_format":
        return _FORMATS[body]
    if kind == "as_device":
        return torch.device("meta")
    if kind == "as_layout":
        return torch.strided
    if kind == "as_none":
        return None
    if kind == "as_float":
        return float(body)
    if kind in ("as_int", "as_bool", "as_string", "as_ints", "as_bools", "as_floats", "as_strings"):
        return body
    raise CaptureError(f"the file passes an argument of kind {kind}, which cannot be captured")


def _symbolic(body: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return a tensor or number by name, or the number itself."""
    for key in ("name", "as_name"):
        if key in body:
            return values[body[key]]
    return next(iter(body.values()))


def _name(arg: dict[str, Any]) -> str:
    """Return the name of an argument or result, "" if it has none."""
    ((_, body),) = arg.items()
    return str(body.get("name", body.get("as_name", ""))) if isinstance(body, dict) else ""


def _tensor(meta: dict[str, Any], symbol: str | None) -> torch.Tensor:
    """Return a meta tensor; a symbolic size is 1 for the batch, else the size at export."""
    sizes = []
    for size in meta["sizes"]:
        if "as_int" in size:
            number = int(size["as_int"])
        else:
            expression = size["as_expr"]
            number = 1 if expression["expr_str"] == symbol else int(expression["hint"]["as_int"])
        sizes.append(number)
    return torch.empty(checked_sizes(sizes), dtype=_DTYPES[meta["dtype"]], device="meta")
