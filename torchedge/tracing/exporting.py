"""The fallback of capture: torch.export, whose ATen graph then runs on stand-ins like a model."""

from __future__ import annotations

import dataclasses
import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchedge.errors import CaptureError, first_line
from torchedge.graphs import ForwardGraph
from torchedge.graphs.graph import Role
from torchedge.tracing.aten_graphs import scope_of
from torchedge.tracing.copies import LOCK, forget_cached, isolated
from torchedge.tracing.interception import ForwardCall, Interceptor, batch_of, feed, loss_index, tensors_in
from torchedge.tracing.programs import scope
from torchedge.tracing.recorder import Recorder, TracedTensor

_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def replay(module: GraphModule, inputs: list[Any], recorder: Recorder, prefix: str = "") -> Any:
    """Run the nodes of a graph in order inside the tracer; returns the arguments of its output node.

    The module paths without `prefix` become the operators' scopes.
    """
    values: dict[Node, Any] = {}
    fed = iter(inputs)
    last = _last_uses(module)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(fed)
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(module)
        elif node.op == "output":
            return map_arg(node.args[0], values.__getitem__)
        else:
            args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            with scope(recorder, _path_of(node, prefix)):
                values[node] = _call(node.target, args, kwargs, recorder, prefix)
            del args, kwargs
        for spent in last.get(node, ()):
            del values[spent]
    raise CaptureError("the exported graph has no output")


def _call(target: Any, args: Any, kwargs: Any, recorder: Recorder, prefix: str) -> Any:
    if not isinstance(target, torch._ops.HigherOrderOperator):
        function: Callable[..., Any] = target
        return function(*args, **kwargs)
    name = target.name()
    if name == _SET_GRAD:
        enabled, module, *inputs = args
        with torch.set_grad_enabled(enabled):
            return replay(module, inputs, recorder, prefix)
    if name == _AUTOCAST:
        device, dtype, enabled, cache, module, *inputs = args
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
            return replay(module, inputs, recorder, prefix)
    raise CaptureError(
        f"the exported graph holds {name}: control flow that depends on values cannot be captured"
    )


def _last_uses(module: GraphModule) -> dict[Node, list[Node]]:
    """Return for each node the nodes read by it and by no later one."""
    last: dict[Node, Node] = {}
    for node in module.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    spent: dict[Node, list[Node]] = {}
    for used, node in last.items():
        spent.setdefault(node, []).append(used)
    return spent


def _path_of(node: Node, prefix: str) -> str:
    """Return the path of the module that a node comes from, "loss" for a node outside of the model."""
    path = scope_of(node)
    if path.startswith("_empty_nn_module_stack"):
        path = ""
    return "loss" if prefix and not path else path.removeprefix(prefix).lstrip(".")


_PROBE_BATCH = 13
"""The batch size to export at: torch.export takes 0 and 1 as constants, and layers rarely have this size."""
_PREFIX = "model"
_ROLES: dict[InputKind, Role] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}


class _Objective(torch.nn.Module):
    """The model and its loss as one module from a list of tensors to a list of tensors, the loss last."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any], Any] | None,
        rebuild: Callable[[Any], Any],
        count: Callable[[int], None],
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._loss, self._rebuild, self._count = loss, rebuild, count

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = self._rebuild(tensors)
        outputs = self.model(*args, **kwargs)
        returned = tensors_in(outputs, torch.Tensor)
        self._count(len(returned))
        if self._loss is None:
            return returned
        value = self._loss(outputs)
        return returned if value is None else [*returned, value]


def export_graph(call: ForwardCall) -> ForwardGraph:
    """Capture a forward pass (and its loss) through torch.export, else raise CaptureError.

    Python's lifetimes are unknown, so the graph has no releases.
    """
    leaves, structure = tree_flatten((call.args, call.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: list[torch.Tensor]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return tree_unflatten(filled, structure)

    batch = batch_of((call.args, call.kwargs))
    counts: list[int] = []
    probes = _probes(call.model, leaves, batch, call.fixed_batch or _PROBE_BATCH)
    with LOCK, isolated(call.model, call.training) as model:
        objective = _Objective(model, call.loss, rebuild, counts.append)
        program = _exported(objective, probes, batch, leaves, call.fixed_batch)
    recorder = Recorder(_leaves_of(program), call.fixed_batch)
    fed = feed([leaves[i] for i in places], recorder)
    inputs = list(range(len(fed)))
    results = _run(program, fed, recorder, call.training)
    count = counts[-1]
    returned = [recorder.index_of(t) for t in results[:count] if isinstance(t, torch.Tensor)]
    if not returned:
        raise CaptureError(f"{call.name} returns no tensor; expected tensors in tuples, lists or dicts")
    last = loss_index(recorder, results[-1] if len(results) > count else None) if call.loss else None
    graph = recorder.finish(inputs, returned, last, call.training, call.name, call.notes)
    return dataclasses.replace(graph, releases=None, captured_by="export")


def _probes(model: torch.nn.Module, leaves: list[Any], batch: int | None, size: int) -> list[torch.Tensor]:
    """Return tensors like the example's with the batch size to export at, on the model's own device."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    shapes = [(t.dtype, tuple(t.shape)) for t in leaves if isinstance(t, torch.Tensor)]
    return [
        torch.zeros((size, *shape[1:]) if shape and shape[0] == batch else shape, dtype=dtype, device=device)
        for dtype, shape in shapes
    ]


def _exported(
    objective: _Objective,
    probes: list[torch.Tensor],
    batch: int | None,
    leaves: list[Any],
    fixed_batch: int | None,
) -> torch.export.ExportedProgram:
    """Run torch.export with a dynamic batch dimension, or none at all for a fixed batch."""
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    moving = [{0: torch.export.Dim.DYNAMIC} if t.dim() and t.shape[0] == batch else {} for t in tensors]
    shapes = None if fixed_batch else (moving,)
    try:
        with _quiet():
            program = torch.export.export(objective, (probes,), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        reason = first_line(error)
        if reason.startswith("Constraints violated"):
            raise CaptureError(
                "the model contains the batch size of its example as a constant; capture it for one batch "
                "size with batch_size="
            ) from error
        raise CaptureError(f"torch.export raised {type(error).__name__}: {reason}") from error
    finally:
        forget_cached((TracedTensor, FakeTensor))
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export's warnings and logs: a failure raises an error with the reason."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _leaves_of(
    program: torch.export.ExportedProgram,
) -> Callable[[], Iterator[tuple[str, torch.Tensor, Role]]]:
    def leaves() -> Iterator[tuple[str, torch.Tensor, Role]]:
        for spec in reversed(program.graph_signature.input_specs):  # tied parameters get their first name
            tensor = _tensor_of(program, spec.target)
            if isinstance(tensor, torch.Tensor):
                yield str(spec.target).removeprefix(f"{_PREFIX}."), tensor, _ROLES.get(spec.kind, "constant")

    return leaves


def _tensor_of(program: torch.export.ExportedProgram, target: str | None) -> Any:
    """Return the parameter, buffer or constant of a lifted input, None for an input of the user."""
    if target is None:
        return None
    tensor = program.state_dict.get(target)
    return program.constants.get(target) if tensor is None else tensor


def _run(
    program: torch.export.ExportedProgram, fed: list[Any], recorder: Recorder, training: bool
) -> list[Any]:
    """Replay the program on stand-ins; returns its outputs without the buffers that it updates."""
    users = iter(fed)
    inputs = []
    for spec in program.graph_signature.input_specs:
        inputs.append(next(users) if spec.kind is InputKind.USER_INPUT else _tensor_of(program, spec.target))
    with Interceptor(recorder), torch.set_grad_enabled(training):
        results = replay(program.graph_module, inputs, recorder, _PREFIX)
    updated = len(results) - len(program.graph_signature.user_outputs)
    return list(results[updated:])
