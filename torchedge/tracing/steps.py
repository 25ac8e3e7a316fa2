"""`capture_step`: model, loss and optimizer to one Step of ATen operators, through AOTAutograd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import chain
from traceback import extract_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.nn import functional as F

from torchedge.errors import CaptureError, InputError, TorchedgeError, check_whole, first_line
from torchedge.graphs.graph import Role
from torchedge.graphs.steps import UPDATES, GraphBuilder, Step, Term
from torchedge.graphs.training_steps import Loss, TrainingStep, as_tuple, check_loss
from torchedge.storage.locks import PROCESS, logs_ignored
from torchedge.tracing.aten_graphs import add_nodes, form_of
from torchedge.tracing.capturing import checked_model
from torchedge.tracing.copies import Draws, isolated
from torchedge.tracing.decompositions import decompositions
from torchedge.tracing.joint_graphs import JointGraph, faked, plain_kernels, trace_joint, tracing
from torchedge.tracing.objectives import Objective, public_name
from torchedge.tracing.optimizers import OptimizerPart, Trained, add_updates, check_kind, check_optimizer
from torchedge.tracing.plain_tensors import check_tensors
from torchedge.tracing.quantizing import whole_weights
from torchedge.tracing.random_numbers import Randomness
from torchedge.tracing.recorder import DTYPE_NAMES
from torchedge.tracing.rehearsals import ForwardState, StateChangedError, rehearse
from torchedge.tracing.repeated_layers import Layers, Record, continue_graph, find_layers, record_run

_LOG = logging.getLogger(__name__)
_FAKES = "torch._subclasses.fake_tensor"
"""The logger of errors of shapes, which are raised as well."""

ACCUMULATED = "accumulated."
"""Before a parameter's name: the state that holds the sum of its gradients."""

_SEED_MASK = 0x7FFFFFFF
_READS_VALUES = frozenset(
    ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
)


@dataclass(frozen=True)
class CapturedStep:
    """A captured step and the contents of its values before the first call.

    tensors: data by value name of parameters, buffers and constants, of hyperparameters ("lr"), and of states
    that the optimizer has already; they share memory with the model and the optimizer. Other states start
    from `Step.initial`. accumulating: the step of the batches whose gradients are only summed, with values of
    the same names (None if every batch updates). output_names: names of the tensors that the model returns,
    from its keys. rebuild: puts them into the model's result.
    """

    step: Step
    tensors: Mapping[str, torch.Tensor]
    accumulating: Step | None
    output_names: tuple[str, ...]
    rebuild: Callable[[Sequence[torch.Tensor]], Any]


def capture_step(
    model: torch.nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    gradients: bool = True,
    accumulation: int = 1,
    training: bool | None = None,
    keep: Collection[str] = frozenset(),
    seed: int | None = None,
    name: str | None = None,
) -> CapturedStep:
    """Capture one call of `model(*args, **kwargs)`, with a loss and an optimizer one whole training step.

    args: a tensor, or a tuple of any pytrees; kwargs: keyword arguments. Only shapes and dtypes of tensors
    count, and nothing is computed; the step is for these shapes. The step's inputs are the tensors among args
    and kwargs, then those among targets.
    loss: as in `TrainingStep`. None: an inference, whose outputs are the tensors the model returns.
    optimizer: one of `optimizers._RULES`; its parameters are updated, every other one counts as frozen,
    and the only output is the loss. None: the outputs are the loss and the gradient of each parameter that
    requires one, called ``gradient.NAME``.
    gradients: False for an inference that computes the loss alone (validation).
    accumulation: gradients of so many batches are added up, each divided by their number, before one update
    (TMModel trains with batches of one and updates after 32).
    training: capture in train mode (True) or in eval mode (False); None: in the model's present mode.
    keep: ATen base names of operators not to decompose.
    seed: of dropout and other random operators, by default `torch.initial_seed()`; its lower 31 bits count.
    The model does not change. Raises InputError for unusable arguments and
    CaptureError with the reason if the model cannot be captured.
    """
    model = checked_model(model)
    for what, tree in (
        ("input", as_tuple(args)),
        ("input", dict(kwargs or {})),
        ("target", as_tuple(targets)),
    ):
        check_tensors(tree, what, values=False)
    gradients = gradients and loss is not None
    _check_choices(loss, optimizer, accumulation, gradients)
    title = name or type(model).__name__
    seed = _SEED_MASK & (torch.initial_seed() if seed is None else seed)

    def captured(trace: Callable[..., JointGraph | None]) -> CapturedStep | None:
        draws = Draws()
        with PROCESS, isolated(model, training, draws) as twin:
            objective = Objective(twin, as_tuple(args), dict(kwargs or {}), as_tuple(targets), loss)
            objective.state = ForwardState({"model": twin, "loss": loss}, draws)
            trained = _trained(objective, optimizer) if gradients else None
            joint = trace(objective, trained, keep)
            if joint is None:
                return None
            capture = _Capture(objective, joint, seed)
            return capture.training(title, optimizer, accumulation) if gradients else capture.inference(title)

    step = captured(_traced_in_part) if find_layers(model) is not None else None
    step = captured(_traced) if step is None else step
    assert step is not None
    return step


def check_step(step: TrainingStep, function: str) -> None:
    """Raise InputError for settings of a step that captured steps do not have."""
    step.refuse(
        function,
        amp="enter torch.autocast in the model's forward, or convert the model",
        dtype="convert the model: model.to(torch.float32)",
        checkpointing="switch it on in the model: model.gradient_checkpointing_enable()",
        compile="its kernels are compiled anyway: leave it out",
    )


def _check_choices(loss: Any, optimizer: Any, accumulation: Any, gradients: bool) -> None:
    if loss is not None:
        check_loss(loss)
    if optimizer is not None:
        check_kind(optimizer)
    if optimizer is not None and not gradients:
        raise InputError(
            'there is an optimizer without a loss to differentiate; expected loss=, a callable or "model"'
        )
    if check_whole("accumulation", accumulation) > 1 and optimizer is None:
        raise InputError(
            f"accumulation is {accumulation} without an optimizer; expected optimizer= beside it"
        )


def _trained(objective: Objective, optimizer: torch.optim.Optimizer | None) -> set[int]:
    """Return the ids of the parameters to differentiate by; raises InputError if there are none."""
    parameters = list(objective.parameters())
    wanted = {id(p) for p in parameters if p.requires_grad}
    if not wanted:
        raise InputError(
            "the model has no parameter that requires a gradient; expected some to train "
            "(requires_grad_(True)), or loss=None for inference"
        )
    if optimizer is None:
        return wanted
    check_optimizer(optimizer, parameters)
    wanted &= {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not wanted:
        raise InputError(
            "no parameter of the optimizer requires a gradient; expected some that do (requires_grad_(True))"
        )
    return wanted


def _traced(objective: Objective, trained: set[int] | None, keep: Collection[str]) -> JointGraph:
    """Trace on fake tensors, with the backward unless `trained` is None.

    An exception of the model becomes an error of one line.
    """
    table, gradients = decompositions(keep), trained is not None

    def traced_now(fakes: list[torch.Tensor]) -> JointGraph:
        state = objective.state
        done = (lambda: None) if state is None else state.check_backward
        return trace_joint(objective, fakes, table, gradients=gradients, traced=done)

    def fake() -> AbstractContextManager[tuple[FakeTensorMode, list[torch.Tensor]]]:
        return faked(objective, trained or (), objective.tensors())

    try:
        with logs_ignored(_FAKES):
            with suppress(StateChangedError), fake() as (_, fakes):
                return traced_now(fakes)
            # AOTAutograd leaves tensors of its own in modules that stand in two places (tied embeddings).
            with fake() as (mode, fakes):
                assert objective.state is not None
                with mode, torch.set_grad_enabled(gradients), tracing(seen=True), plain_kernels():
                    sources = [*fakes, *objective.parameters(), *objective.buffers()]
                    rehearse(objective.state.anew(accepted=False), lambda: objective.run(fakes), sources)
                objective.state = objective.state.anew(accepted=True)
                return traced_now(fakes)
    except TorchedgeError:
        raise
    except Exception as error:
        raise _explained(error, objective) from error


def _traced_in_part(
    objective: Objective, trained: set[int] | None, keep: Collection[str]
) -> JointGraph | None:
    """Trace a few of many equal layers alone; None where the others do not compute the same."""
    layers = find_layers(objective)
    assert layers is not None
    try:
        with layers.cut():
            joint = _traced(objective, trained, keep)
            assert objective.state is not None
            if objective.state.draws.count:
                return None
            state = objective.state.anew(accepted=True)
            with state.watched():
                short = _recorded(objective, trained, layers)
            try:
                with layers.cut(len(layers.modules)):
                    full = _recorded(objective, trained, layers)
            finally:
                state.restore()
        return continue_graph(joint, layers, objective) if full.repeats(short) else None
    except Exception as error:  # whatever the model raises without some of its layers
        _LOG.debug("all layers of %s are traced: %s", type(objective.model).__name__, first_line(error))
        return None


def _recorded(objective: Objective, trained: set[int] | None, layers: Layers) -> Record:
    """Return the operators of one run on fake tensors."""
    with (
        faked(objective, trained or (), objective.tensors()) as (mode, fakes),
        mode,
        torch.set_grad_enabled(trained is not None),
        tracing(seen=True),
        plain_kernels(),
        whole_weights(),
    ):
        record = record_run(layers, objective.weights(), fakes, lambda: objective.run(fakes))
    record.returned += objective.output_names
    return record


def _explained(error: Exception, objective: Objective) -> TorchedgeError:
    reason, kind = first_line(error), type(error).__name__
    name, part = type(objective.model).__name__, objective.running
    if kind in _READS_VALUES:
        calls = [f.name for f in extract_tb(error.__traceback__) if f.filename == F.__file__]
        step = (
            "use torch.where, or make the choice an argument"
            if part == name
            else "pass a loss of tensor operators alone: torch.where in place of if, no checks of values"
        )
        return CaptureError(
            f"{part} decides by values of tensors ({': '.join([*calls[:1], reason])}), which are unknown "
            f"during capture; {step}"
        )
    if isinstance(error, TypeError) and "argument" in reason:
        text = reason.replace("NoneType", "None")
        return InputError(f"{text}; expected inputs and targets that {name} and its loss take")
    if ".numpy() is not supported" in reason:
        return CaptureError(
            f"{part} leaves PyTorch by .numpy(), where a capture cannot follow; expected tensor operations"
        )
    if "entirely functional graph" in reason:
        return CaptureError(
            f"{part} writes into a tensor that is neither a parameter nor a buffer; register it "
            "(register_buffer), so that the step can update it"
        )
    if isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor):
        owners = chain(objective.model.parameters(), objective.model.buffers())
        if any(error.name in vars(tensor) for tensor in owners):
            return CaptureError(
                f"{part} reads {error.name!r}, an attribute of a parameter or buffer, which a capture does "
                "not follow; expected an attribute of its module: make it one"
            )
        reason = reason.replace(f"'{type(error.obj).__name__}'", "'Tensor'")
    return CaptureError(
        f"{part} raised {kind} on the example: {reason}; expected an example that PyTorch runs"
    )


def _filled(node: Node, number: float) -> torch.Tensor:
    """Return a tensor like the node's, filled with a number."""
    form = node.meta["val"]
    return torch.full((), number, dtype=form.dtype).expand(form.shape)


class _Capture:
    """Builds steps from a traced objective."""

    def __init__(self, objective: Objective, joint: JointGraph, seed: int) -> None:
        self.objective, self.joint = objective, joint
        self.builder = GraphBuilder()
        self.randomness = Randomness(self.builder, seed)
        self.data: dict[str, torch.Tensor] = {}
        self.bound: dict[Node, int] = {}
        weights = objective.weights()
        self.places: dict[int, int] = {}
        trained = {id(weights[name]) for name in joint.gradients}
        holders: tuple[tuple[Role, Mapping[Node, str]], ...] = (
            ("parameter", joint.parameters), ("buffer", joint.buffers)
        )  # fmt: skip
        for role, nodes in holders:
            for node, name in nodes.items():
                tensor = weights[name]
                if id(tensor) not in self.places:  # tied tensors have several names and one value
                    trains = id(tensor) in trained
                    index = self.builder.add(public_name(name), *form_of(node), role=role, trainable=trains)
                    self.places[id(tensor)] = index
                    self.data[self.builder.values[index].name] = tensor.detach()
                self.bound[node] = self.places[id(tensor)]
        self.inputs: list[int] = []
        named = zip(objective.input_names(), objective.tensors(), joint.inputs, strict=True)
        for title, leaf, used in named:
            self.inputs.append(self.builder.add(title, tuple(leaf.shape), DTYPE_NAMES[leaf.dtype], "input"))
            if used is not None:
                self.bound[used] = self.inputs[-1]

    def inference(self, title: str) -> CapturedStep:
        """Return the inference step: its outputs are the tensors that the model returns."""
        returned, updates = self._run(1.0)
        named = zip(self.joint.outputs, self.objective.output_names, strict=True)
        outputs = {name: index for place, name in named if (index := returned[place]) is not None}
        step = self._finished(self.builder, list(outputs.values()), updates, title)
        return self._captured(step, output_names=tuple(outputs))

    def training(
        self, title: str, optimizer: torch.optim.Optimizer | None, accumulation: int
    ) -> CapturedStep:
        """Return the training step: its outputs are the loss, and the gradients without an optimizer."""
        returned, updates = self._run(1.0 / accumulation)
        loss = returned[self.joint.outputs[0]]
        gradients = self._gradients(returned)
        if loss is None or not gradients:
            raise InputError(f"no gradient flows from the loss of {title} to its parameters")
        self.builder.rename(loss, "loss")
        if optimizer is None:
            for value, gradient in gradients.items():
                self.builder.rename(gradient, f"gradient.{self.builder.values[value].name}")
            outputs = [loss, *gradients.values()]
            return self._captured(self._finished(self.builder, outputs, updates, title))
        accumulating = None
        if accumulation > 1:
            sums = {value: self._accumulator(value, gradient) for value, gradient in gradients.items()}
            added = [*updates, *sums.values()]
            accumulating = self._finished(self.builder.copy(), [loss], added, title)
            gradients = {value: total for value, (_, total) in sums.items()}
            updates += [(state, self._zeros(state)) for state, _ in sums.values()]
        part = self._optimized(optimizer, gradients, dict(updates))
        self.data.update(part.tensors)
        written = {old for old, _ in part.updates}
        updates = [*[pair for pair in updates if pair[0] not in written], *part.updates]
        step = self._finished(self.builder, [loss], updates, title, part=part)
        return self._captured(step, accumulating)

    def _run(self, scale: float) -> tuple[list[int | None], list[tuple[int, int]]]:
        """Add the traced nodes with the gradient `scale` at the loss; returns their results and updates."""
        tangents = {
            node: _filled(node, 0.0 if of is None else scale) for node, of in self.joint.tangents.items()
        }
        returned = add_nodes(
            self.builder, self.joint.module, {**self.bound, **tangents}, self.data, self.randomness
        )
        updates = self.randomness.updates()
        for node, place in self.joint.mutated.items():
            after = returned[place]
            if after is not None and self.builder.values[self.bound[node]].role != "input":
                updates.append((self.bound[node], after))
        return returned, updates

    def _gradients(self, returned: Sequence[int | None]) -> dict[int, int]:
        """Return the gradient of each parameter's value: for tied parameters the sum over their names."""
        gradients: dict[int, int] = {}
        for node, name in self.joint.parameters.items():
            gradient = returned[self.joint.gradients[name]] if name in self.joint.gradients else None
            if gradient is not None:
                value = self.bound[node]
                total = gradients.get(value)
                gradients[value] = gradient if total is None else self._sum(total, gradient)
        return gradients

    def _sum(self, one: int, other: int) -> int:
        return (Term(self.builder, one, UPDATES) + Term(self.builder, other)).value

    def _accumulator(self, parameter: int, gradient: int) -> tuple[int, int]:
        """Add a state for the sum of gradients; returns it and the sum after this batch."""
        value = self.builder.values[parameter]
        state = self.builder.add(f"{ACCUMULATED}{value.name}", value.shape, value.dtype, "state")
        return state, self._sum(state, gradient)

    def _zeros(self, state: int) -> int:
        value = self.builder.values[state]
        attrs = {"size": value.shape, "fill_value": 0.0, "dtype": value.dtype}
        return self.builder.like(state, "full", attrs, UPDATES, f"{value.name}.zero")

    def _optimized(
        self, optimizer: torch.optim.Optimizer, gradients: Mapping[int, int], current: Mapping[int, int]
    ) -> OptimizerPart:
        trained = {
            identity: Trained(
                self.builder.values[value].name, value, current.get(value, value), gradients[value]
            )
            for identity, value in self.places.items()
            if value in gradients
        }
        return add_updates(self.builder, optimizer, trained)

    def _finished(
        self,
        builder: GraphBuilder,
        outputs: Sequence[int],
        updates: Sequence[tuple[int, int]],
        title: str,
        part: OptimizerPart | None = None,
    ) -> Step:
        part = OptimizerPart() if part is None else part
        step = builder.finish(
            self.inputs,
            outputs,
            updates=updates,
            hyperparameters=part.hyperparameters,
            initial={**self.randomness.initial, **part.initial},
            name=title,
        )
        return step.with_early_updates()

    def _captured(
        self, step: Step, accumulating: Step | None = None, output_names: tuple[str, ...] = ()
    ) -> CapturedStep:
        steps = [step] if accumulating is None else [step, accumulating]
        names = {value.name for s in steps for value in s.values if value.role != "activation"}
        tensors = {n: t for n, t in self.data.items() if n in names}
        return CapturedStep(step, tensors, accumulating, output_names, self.objective.rebuilder())
