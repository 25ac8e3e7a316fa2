"""Writes the tape of one step of a graph.

Forward as captured, backward as PyTorch's autograd engine runs it, optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torchedge.graphs import FLOATING, Graph, Op, Poly, Value
from torchedge.graphs.dims import poly
from torchedge.ops import Call, OpSpec, spec_of
from torchedge.ops.convolution import explicit_padding, spread
from torchedge.ops.specs import nothing
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.decomposition import decompose
from torchedge.prediction.memory.optimizers import Trained, keep_state, write_update
from torchedge.prediction.memory.rewriting import last_uses
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import CATEGORIES, PERSISTENT, Tape, TapeWriter
from torchedge.prediction.memory.workspaces import PHASES, convolution_geometry

WEIGHTS, GRADIENTS, STATE, INPUTS, SAVED, TEMPORARY, WORKSPACE = range(len(CATEGORIES))
_CLAMPS = frozenset(("hardtanh", "relu6", "clamp"))


@dataclass(slots=True)
class Record:
    """What the backward pass of one operator needs."""

    op: Op
    spec: OpSpec
    needs: list[bool]
    saved: list[int]
    position: int


@dataclass(slots=True)
class Region:
    """An activation-checkpoint region.

    Its operators' positions and the storages it keeps to run them again.
    """

    positions: list[int]
    held: list[int]


@dataclass(slots=True)
class Step:
    """State while a tape is written."""

    graph: Graph
    settings: StepSettings
    releases: tuple[tuple[int, ...], ...]
    tape: TapeWriter = field(default_factory=TapeWriter)
    storage: list[int] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)
    grads: dict[int, int] = field(default_factory=dict)
    parameter_grads: dict[int, int] = field(default_factory=dict)
    state: dict[int, list[int]] = field(default_factory=dict)
    sizes: list[Poly] = field(default_factory=list)
    viewed: set[int] = field(default_factory=set)
    pending: dict[int, int] = field(default_factory=dict)
    records: list[Record | Region] = field(default_factory=list)


def write_tape(graph: Graph, settings: StepSettings, first: bool = False) -> Tape:
    """Return the allocations of one steady-state step, the second or a later one, of a graph.

    first: the very first step instead, which finds neither gradients nor optimizer state and makes them. An
    inference graph (no loss) gets the forward pass only.
    """
    step = run_step(graph, settings, first)
    names = [(op.kind, op.scope) for op in step.graph.ops]
    operators = (*names, *reversed(names), ("update", ""))
    tape = step.tape.finish(remaining(step), operators, settings.workspaces)
    if tape.scratch is None or first or graph.loss is None:
        return tape
    before = write_tape(graph, settings, first=True)
    # A parameter that gets no gradient has no state after the first step.
    return replace(tape, first=before) if len(before.remaining) == len(tape.persistent) else tape


def run_step(graph: Graph, settings: StepSettings, first: bool = False) -> Step:
    """Write a step and return all that is known at its end, the tape's sizes as the graph gives them."""
    from torchedge.prediction.memory.backpropagation import write_backward

    graph = decompose(lower_precision(graph, settings), settings)
    step = Step(graph, settings, last_uses(graph))
    _write_persistent(step, first)
    _write_forward(step)
    if graph.loss is not None and step.differentiable[graph.loss]:
        step.tape.phase = 1
        write_backward(step)
        step.tape.phase = 2
        step.tape.owner = 2 * len(graph.ops)
        trained: Trained = [(i, step.sizes[i], g) for i, g in sorted(step.parameter_grads.items())]
        write_update(step.tape, trained, step.state, settings, STATE, TEMPORARY)
    return step


def _write_persistent(step: Step, first: bool) -> None:
    """Weights, buffers, fed inputs, and what outlives a step.

    Optimizer state, and gradients that are not freed.
    """
    tape, settings = step.tape, step.settings
    values = step.graph.values
    trains = step.graph.loss is not None
    step.storage = [-1] * len(values)
    trainable = []
    for index, value in enumerate(values):
        size = value.nbytes
        step.sizes.append(size)
        step.differentiable.append(value.trainable)
        if value.role == "activation" or value.alias is not None:
            continue
        step.storage[index] = tape.keep(size, INPUTS if value.role == "input" else WEIGHTS, value.name)
        if value.trainable:
            trainable.append(index)
    if settings.blas_workspace_mib and multiplies(step.graph):
        held = int(settings.blas_workspace_mib * 2**20) // (1 if trains else 2)
        tape.keep((held, 0, 0), WORKSPACE, "BLAS workspace")
    if not trains:
        return
    for op in step.graph.ops:
        if op.scope == "loss" and op.kind == "zeros" and not op.inputs:  # the targets, which a user feeds
            index = op.outputs[0]
            step.storage[index] = tape.keep(step.sizes[index], INPUTS, "target")
    if first:
        return
    if settings.zero_grad == "zero" or settings.accumulation > 1:
        for index in trainable:
            step.parameter_grads[index] = tape.keep(
                step.sizes[index], GRADIENTS, f"{values[index].name}.grad"
            )
    for index in trainable:
        step.state[index] = keep_state(tape, step.sizes[index], values[index].name, settings, STATE)


def multiplies(graph: Graph) -> bool:
    """Return whether a graph multiplies matrices: the libraries which that needs take memory of their own."""
    return any(spec_of(op.kind).work.multiplies_matrices for op in graph.ops)


def remaining(step: Step) -> list[int]:
    """Return the storages that the next step finds, in the order in which it lists them."""
    tape = step.tape
    kept = [s for s in tape.persistent if tape.category[s] in (WEIGHTS, INPUTS, WORKSPACE)]
    if step.settings.zero_grad == "zero" or step.settings.accumulation > 1:
        kept += [g for _, g in sorted(step.parameter_grads.items())]
    for _, storages in sorted(step.state.items()):
        kept += storages
    return kept


# forward ---------------------------------------------------------------------------------------------


def _write_forward(step: Step) -> None:
    graph, tape = step.graph, step.tape
    regions: dict[int, Region] = {}
    outside: dict[int, set[int]] = {}
    for position, op in enumerate(graph.ops):
        tape.owner = position
        if op.region and op.grad and graph.loss is not None:
            region = regions.get(op.region)
            if region is None:
                region = regions[op.region] = Region([], [])
                outside[op.region] = set()
                step.records.append(region)
            region.positions.append(position)
            _keep_inputs(step, op, region, outside[op.region])
            run(step, position, op, saving=False)
        else:
            run(step, position, op)
        for index in step.releases[position]:
            storage = step.storage[index]
            if storage >= 0 and graph.values[index].role == "activation":
                tape.drop(storage)


def _keep_inputs(step: Step, op: Op, region: Region, seen: set[int]) -> None:
    """Keep what a checkpoint region reads from outside; `seen` holds the values met in it so far."""
    for index in op.inputs:
        if index is not None and index not in seen:
            seen.add(index)
            if step.graph.values[index].role == "activation" and step.storage[index] >= 0:
                step.tape.hold(step.storage[index])
                region.held.append(step.storage[index])
    seen.update(op.outputs)


def run(step: Step, position: int, op: Op, saving: bool = True) -> None:
    """Write one operator's forward call; a record for backward follows where autograd keeps one."""
    spec = spec_of(op.kind)
    differentiable = step.differentiable
    needs = [i is not None and differentiable[i] for i in op.inputs]
    tracked = (
        op.grad and True in needs and any(n and spec.grad_mode(k) != "none" for k, n in enumerate(needs))
    )
    values, tape, storage = step.graph.values, step.tape, step.storage
    for index in op.outputs:
        value = values[index]
        differentiable[index] = tracked and value.dtype in FLOATING
        if value.alias is not None:
            shared = storage[value.alias]
            storage[index] = shared
            tape.hold(shared)
        elif storage[index] < 0 or not saving or value.role == "activation":
            if storage[index] >= 0 and tape.counts[storage[index]] >= PERSISTENT // 2:
                continue  # a target: there before the step
            storage[index] = tape.new(step.sizes[index], TEMPORARY, title(op, value))
    saved = _save(step, op, spec, needs, tracked and saving)
    if tracked and saving:
        step.records.append(Record(op, spec, needs, saved, position))


def _save(step: Step, op: Op, spec: OpSpec, needs: list[bool], keeping: bool) -> list[int]:
    """Take the references autograd keeps; hidden outputs and scratch that nobody keeps go at once."""
    tape = step.tape
    call: Call | None = None
    saved: list[int] = []
    take_workspace(step, op, 0)
    if spec.aux is not nothing or spec.scratch is not nothing:
        call = make_call(step, op, needs)
        saved = [tape.new(poly(n), SAVED, f"{title(op)} (hidden)") for n in spec.aux(call) if n]
        scratch = [tape.new(poly(n), TEMPORARY, f"{title(op)} (scratch)") for n in spec.scratch(call) if n]
        for storage in scratch:
            tape.drop(storage)
    if not keeping:
        for storage in saved:
            tape.drop(storage)
        return []
    slots = getattr(spec.saves, "constant", None)
    if slots is None:
        slots = spec.saves(call or make_call(step, op, needs))
    for slot in slots:
        index = _slot(op, slot)
        if index is None:
            continue
        if op.inplace and slot == 0 and not (op.kind in _CLAMPS and step.settings.clamp_keeps == "output"):
            saved.append(tape.new(step.sizes[index], SAVED, f"{title(op)} (copy of its input)"))
            continue
        storage = step.storage[index]
        if storage < 0:
            continue
        tape.hold(storage)
        saved.append(storage)
        if tape.category[storage] == TEMPORARY:
            tape.category[storage] = SAVED
    return saved


def take_workspace(step: Step, op: Op, phase: int) -> None:
    """Book the workspace that the device's library takes for one phase of a convolution, if it is known."""
    if step.settings.workspaces is None or step.settings.amp is not None or op.kind != "conv2d":
        return
    call = make_call(step, op, [])
    x, weight, y = *call.ins[:2], call.outs[0]
    if x is None or weight is None or len(x) != len(weight):  # a sample without batch dimension
        return
    stride = spread(op.attrs.get("stride", 1), len(weight) - 2)
    before, _ = explicit_padding(op.attrs, weight[2:])
    geometry = convolution_geometry((x, weight, y), op.attrs.get("groups", 1), stride, before)
    if geometry is not None:
        label = f"workspace of {title(op)} ({PHASES[phase]})"
        step.tape.take(phase, tuple([poly(entry) for entry in geometry]), WORKSPACE, label)


def make_call(step: Step, op: Op, needs: list[bool]) -> Call:
    """Return the call of an operator as its rules see it."""
    settings = step.settings
    return Call(step.graph.values, op, needs, settings.backend, step.graph.training, settings.winograd_tile)


def _slot(op: Op, slot: int) -> int | None:
    """Resolve `ops.specs.keep`'s coding of inputs and outputs."""
    if slot >= 0:
        return op.inputs[slot] if slot < len(op.inputs) else None
    return op.outputs[-1 - slot] if -1 - slot < len(op.outputs) else None


def title(op: Op, value: Value | None = None) -> str:
    """Return how a storage made by an operator is called in reports."""
    where = op.scope or (value.name if value is not None else op.kind)
    return f"{where} [{op.kind}]"
