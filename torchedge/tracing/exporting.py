"""The fallback of capture: torch.export, whose ATen graph then runs on stand-ins like a model."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode

from torchedge.errors import CaptureError, TorchedgeError, first_line
from torchedge.graphs import ForwardGraph
from torchedge.graphs.graph import Role
from torchedge.storage.locks import PROCESS, logs_ignored, warnings_ignored
from torchedge.tracing.aten_graphs import scope_of
from torchedge.tracing.checkpointing import CheckpointRegion, annotated_checkpoints, region_of
from torchedge.tracing.copies import forget_cached, isolated
from torchedge.tracing.device_answers import answered
from torchedge.tracing.interception import (
    ForwardCall,
    Interceptor,
    batch_of,
    feed,
    loss_index,
    returned_tensors,
    tensors_in,
    with_batch,
)
from torchedge.tracing.joint_graphs import tracing
from torchedge.tracing.objectives import Objective
from torchedge.tracing.programs import scope
from torchedge.tracing.recorder import Recorder, TracedTensor


class _Replay(Interpreter):
    """Runs the nodes of an exported graph in order inside the tracer.

    The nodes' module paths without `prefix` become the operators' scopes.
    """

    def __init__(
        self, module: GraphModule, recorder: Recorder, prefix: str, regions: list[CheckpointRegion]
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.recorder, self.prefix, self.regions = recorder, prefix, regions

    def results(self, inputs: Iterable[Any]) -> Any:
        """Return the arguments of the graph's output node."""
        return self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        region = region_of(n, self.regions)
        with scope(self.recorder, _path_of(n, self.prefix)), self.recorder.autograd.inside(region):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.HigherOrderOperator):
            return target(*args, **kwargs)
        region: AbstractContextManager[Any]
        if target.name() == "wrap_with_set_grad_enabled":
            enabled, module, *inputs = args
            region = torch.set_grad_enabled(enabled)
        elif target.name() == "wrap_with_autocast":
            device, dtype, enabled, cache, module, *inputs = args
            region = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
        else:
            raise CaptureError(
                f"the exported graph holds {target.name()}: control flow that depends on values cannot be "
                "captured"
            )
        with region:
            return _Replay(module, self.recorder, self.prefix, self.regions).results(inputs)


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


class _ResultAndLoss(Objective):
    """The model and its loss as one module to the tensors that the model returns, and the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = _LeafWatch()
        self.answering: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        args, kwargs, targets = self.arguments(tensors)
        with self.answering():
            with self.watch:
                outputs = self.model(*args, **kwargs)
            loss = [self.loss(outputs, *targets)] if callable(self.loss) else []
        return (*tensors_in(outputs, torch.Tensor), *loss)


def export_graph(call: ForwardCall) -> ForwardGraph:
    """Capture a forward pass (and its loss) through torch.export, else raise CaptureError.

    Python's lifetimes are unknown, so the graph has no releases.
    """
    batch = batch_of((call.args, call.kwargs), call.batch_dim)
    recorder = Recorder(tuple, call.fixed_batch, call.accelerator)
    with PROCESS, isolated(call.model, call.training) as model:
        objective = _ResultAndLoss(model, call.args, call.kwargs, call.targets, call.loss)
        objective.answering = partial(answered, call.accelerator, recorder)
        with annotated_checkpoints() as regions:
            program = _exported(objective, batch, call.fixed_batch, call.batch_dim)
    recorder.set_leaves(partial(_leaves, program))
    fed = feed(objective.tensors(), recorder, call.batch_dim)
    inputs = list(range(len(fed)))
    with answered(call.accelerator, recorder):
        results = _run(program, fed, recorder, call.training, regions)
    loss = None if call.loss is None else loss_index(recorder, results.pop())
    returned = [recorder.index_of(t) for t in returned_tensors(results, call.name, torch.Tensor)]
    if objective.watch.seen and call.training:
        recorder.note(_NO_LEAVES)
    graph = recorder.finish(inputs, returned, loss, call.training, call.name, call.notes)
    return dataclasses.replace(graph, releases=None, captured_by="export")


_NO_LEAVES = (
    "the forward pass makes a tensor require gradients (requires_grad_()), which torch.export drops: if no "
    "parameter before it is trained, its step has a longer backward pass and keeps more than is predicted"
)


class _LeafWatch(TorchFunctionMode):
    """Sees whether a model makes one of its intermediate tensors require gradients."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assigned = func == torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
        if assigned or func is torch.Tensor.requires_grad_:
            tensor, wanted = args[0], (*args[1:], *kwargs.values(), True)[0]
            leaf = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
            self.seen = self.seen or bool(wanted and not leaf)
        return func(*args, **kwargs)


def _exported(
    objective: Objective, batch: int | None, fixed_batch: int | None, batch_dim: int
) -> torch.export.ExportedProgram:
    """Run torch.export with a dynamic batch dimension, or none at all for a fixed batch.

    It reads tensors like the example's with the batch size to export at, on the model's own device.
    """
    weights = (*objective.parameters(), *objective.buffers())
    device = next((t.device for t in weights), torch.device("cpu"))
    probes, moving = [], []
    for tensor in objective.tensors():
        sizes = with_batch(tuple(tensor.shape), batch, fixed_batch or _PROBE_BATCH, batch_dim)
        probes.append(torch.zeros(sizes or tensor.shape, dtype=tensor.dtype, device=device))
        place = batch_dim if tensor.dim() > batch_dim else 0
        moving.append({} if sizes is None else {place: torch.export.Dim.DYNAMIC})
    shapes = None if fixed_batch else (tuple(moving),)
    try:
        with _quiet(), tracing(seen=False):
            program = torch.export.export(objective, tuple(probes), dynamic_shapes=shapes, strict=False)
    except TorchedgeError:
        raise
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
    with logs_ignored("torch"), warnings_ignored(), redirect_stderr(io.StringIO()):
        yield


def _leaves(program: torch.export.ExportedProgram) -> Iterator[tuple[str, torch.Tensor, Role]]:
    for spec in reversed(program.graph_signature.input_specs):  # tied parameters get their first name
        tensor = _tensor_of(program, spec.target)
        if isinstance(tensor, torch.Tensor):
            yield str(spec.target).removeprefix(f"{_PREFIX}."), tensor, _ROLES.get(spec.kind, "constant")


def _tensor_of(program: torch.export.ExportedProgram, target: str | None) -> Any:
    """Return the parameter, buffer or constant of a lifted input, None for an input of the user."""
    if target is None:
        return None
    tensor = program.state_dict.get(target)
    return program.constants.get(target) if tensor is None else tensor


def _run(
    program: torch.export.ExportedProgram,
    fed: list[Any],
    recorder: Recorder,
    training: bool,
    regions: list[CheckpointRegion],
) -> list[Any]:
    """Replay the program on stand-ins; returns its outputs without the buffers that it updates."""
    users = iter(fed)
    inputs = [
        next(users) if spec.kind is InputKind.USER_INPUT else _tensor_of(program, spec.target)
        for spec in program.graph_signature.input_specs
    ]
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        with Interceptor(recorder), torch.set_grad_enabled(training):
            results = _Replay(program.graph_module, recorder, _PREFIX, regions).results(inputs)
    finally:  # a graph of torch.vmap enters and leaves its levels by operators
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    updated = len(results) - len(program.graph_signature.user_outputs)
    return list(results[updated:])
