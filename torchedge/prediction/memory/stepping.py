"""Writes the tape of one step of a graph: forward as captured, backward as PyTorch's autograd engine runs it, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchedge.graphs import FLOATING, Graph, Op, Poly, Value
from torchedge.graphs.dims import poly
from torchedge.ops import Call, OpSpec, registry
from torchedge.prediction.memory.optimizers import write_update
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import CATEGORIES, Tape, TapeWriter

WEIGHTS, GRADIENTS, STATE, INPUTS, SAVED, TEMPORARY = range(len(CATEGORIES))
_SCALAR: Poly = (4, 0, 0)
_CLAMPS = frozenset(("hardtanh", "relu6", "clamp"))
_UNKNOWN = OpSpec("unknown", saves=lambda call: tuple(range(len(call.attrs) * 0)))


@dataclass(slots=True)
class Record:
    """What the backward pass of one operator needs."""

    op: Op
    spec: OpSpec
    needs: list[bool]
    call: Call
    saved: list[int]
    position: int


@dataclass(slots=True)
class _Step:
    """State while a tape is written."""

    graph: Graph
    settings: StepSettings
    tape: TapeWriter = field(default_factory=TapeWriter)
    storage: list[int] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)
    grads: dict[int, int] = field(default_factory=dict)
    parameter_grads: dict[int, int] = field(default_factory=dict)
    sizes: list[Poly] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def write_tape(graph: Graph, settings: StepSettings) -> Tape:
    """Return the allocations of one steady-state step (the second or a later one) of a graph under these settings.

    An inference graph (no loss) gets the forward pass only.
    """
    step = _Step(graph, settings)
    _write_persistent(step)
    _write_forward(step)
    if graph.loss is not None and step.differentiable[graph.loss]:
        step.tape.phase = 1
        _write_backward(step)
        step.tape.phase = 2
        trained = [(i, step.sizes[i], grad) for i, grad in step.parameter_grads.items()]
        write_update(step.tape, trained, settings, STATE, TEMPORARY)
    return step.tape.finish()


def _write_persistent(step: _Step) -> None:
    """Weights, buffers, fed inputs, and gradients where they outlive the step; optimizer state comes with the update."""
    tape, settings = step.tape, step.settings
    for index, value in enumerate(step.graph.values):
        size = value.nbytes
        step.sizes.append(size)
        step.storage.append(-1)
        step.differentiable.append(value.trainable)
        if value.role == "activation" or value.alias is not None:
            continue
        category = INPUTS if value.role == "input" else WEIGHTS
        step.storage[index] = tape.keep(size, category, value.name)
        if value.trainable and (settings.zero_grad == "zero" or settings.accumulation > 1):
            step.parameter_grads[index] = tape.keep(size, GRADIENTS, f"{value.name}.grad")


# forward ----------------------------------------------------------------------------------------------------------------


def _write_forward(step: _Step) -> None:
    graph, tape = step.graph, step.tape
    known = registry()
    releases = graph.releases or _last_uses(graph)
    recomputed: dict[int, list[int]] = {}
    for position, op in enumerate(graph.ops):
        tape.owner = position
        spec = known.get(op.kind, _UNKNOWN)
        needs = [i is not None and step.differentiable[i] for i in op.inputs]
        tracked = op.grad and any(n and spec.grad_mode(k) != "none" for k, n in enumerate(needs))
        call = Call(graph.values, op, needs, step.settings.backend, graph.training)
        _allocate_outputs(step, op, tracked)
        saved = _save(step, op, spec, call, tracked)
        if tracked:
            step.records.append(Record(op, spec, needs, call, saved, position))
            if op.region:
                recomputed.setdefault(op.region, []).append(len(step.records) - 1)
        for index in releases[position]:
            if step.storage[index] >= 0 and graph.values[index].role == "activation":
                tape.drop(step.storage[index])


def _allocate_outputs(step: _Step, op: Op, tracked: bool) -> None:
    for index in op.outputs:
        value = step.graph.values[index]
        step.differentiable[index] = tracked and value.dtype in FLOATING
        if value.alias is None:
            step.storage[index] = step.tape.new(step.sizes[index], TEMPORARY, _title(op, value))
        else:
            storage = step.storage[value.alias]
            step.storage[index] = storage
            step.tape.hold(storage)


def _save(step: _Step, op: Op, spec: OpSpec, call: Call, tracked: bool) -> list[int]:
    """Take the references autograd keeps; hidden outputs and scratch that nobody keeps go at once."""
    tape = step.tape
    hidden = [tape.new(poly(n), SAVED, f"{_title(op)} (hidden)") for n in spec.aux(call) if n]
    scratch = [tape.new(poly(n), TEMPORARY, f"{_title(op)} (scratch)") for n in spec.scratch(call) if n]
    for storage in scratch:
        tape.drop(storage)
    if not tracked or op.region:
        for storage in hidden:
            tape.drop(storage)
        return []
    saved = hidden
    for slot in spec.saves(call):
        index = _slot(op, slot)
        if index is None:
            continue
        if op.inplace and slot == 0 and not (op.kind in _CLAMPS and step.settings.clamp_keeps == "output"):
            saved.append(tape.new(step.sizes[index], SAVED, f"{_title(op)} (copy of its input)"))
            continue
        storage = step.storage[index]
        if storage < 0:
            continue
        tape.hold(storage)
        saved.append(storage)
        if tape.category[storage] == TEMPORARY:
            tape.category[storage] = SAVED
    return saved


def _slot(op: Op, slot: int) -> int | None:
    """Resolve `ops.registry.keep`'s coding of inputs and outputs."""
    if slot >= 0:
        return op.inputs[slot] if slot < len(op.inputs) else None
    return op.outputs[-1 - slot] if -1 - slot < len(op.outputs) else None


def _last_uses(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Releases after the last use: for graphs that do not know Python's own lifetimes."""
    last: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for index in (*op.inputs, *op.outputs):
            if index is not None:
                last[index] = position
    kept = {*graph.outputs, graph.loss} if graph.loss is None else {graph.loss}
    releases: list[list[int]] = [[] for _ in graph.ops]
    for index, position in last.items():
        if index not in kept:
            releases[position].append(index)
    return tuple(map(tuple, releases))


# backward ---------------------------------------------------------------------------------------------------------------


def _write_backward(step: _Step) -> None:
    """Run the records in reverse: autograd takes the node made last among those that are ready."""
    tape, graph = step.tape, step.graph
    assert graph.loss is not None
    step.grads[graph.loss] = tape.new(_SCALAR, TEMPORARY, "gradient of the loss")
    offset = len(graph.ops)
    while step.records:
        record = step.records.pop()
        tape.owner = offset + len(graph.ops) - 1 - record.position
        incoming = [step.grads.pop(o, None) for o in record.op.outputs]
        if any(g is not None for g in incoming):
            _backward_of(step, record, next(g for g in incoming if g is not None))
        for storage in record.saved:
            tape.drop(storage)
        for storage in incoming:
            if storage is not None:
                tape.drop(storage)


def _backward_of(step: _Step, record: Record, incoming: int) -> None:
    """Allocate the gradients of one operator's inputs and hand them on."""
    tape, op, spec = step.tape, record.op, record.spec
    scratch = [tape.new(poly(n), TEMPORARY, f"backward of {_title(op)} (scratch)") for n in spec.backward_scratch(record.call) if n]
    made: list[tuple[int, int]] = []
    for slot, index in enumerate(op.inputs):
        if index is None or not record.needs[slot]:
            continue
        mode = spec.grad_mode(slot)
        if mode == "none":
            continue
        shared = mode == "view" or (mode == "pass" and step.graph.values[index].shape == _out_shape(step, op))
        if shared:
            tape.hold(incoming)
            made.append((index, incoming))
        else:
            made.append((index, tape.new(step.sizes[index], TEMPORARY, f"gradient of {step.graph.values[index].name}")))
    for storage in scratch:
        tape.drop(storage)
    for index, storage in made:
        _accumulate(step, index, storage)


def _out_shape(step: _Step, op: Op) -> object:
    return step.graph.values[op.outputs[0]].shape


def _accumulate(step: _Step, index: int, storage: int) -> None:
    """Add a gradient to what has arrived for a value: parameters keep theirs, others wait for their operator."""
    tape, graph = step.tape, step.graph
    value = graph.values[index]
    leaf = value.role == "parameter"
    table = step.parameter_grads if leaf else step.grads
    have = table.get(index)
    if have is None:
        table[index] = storage
        if leaf:
            _adopt(step, index, storage)
        return
    if leaf or (step.settings.sum_in_place and tape.counts[have] == 1):
        tape.drop(storage)
        return
    table[index] = tape.new(step.sizes[index], TEMPORARY, f"gradient of {value.name} (sum)")
    tape.drop(have)
    tape.drop(storage)


def _adopt(step: _Step, index: int, storage: int) -> None:
    """A parameter takes a gradient nobody else holds as it is, and clones one that is shared."""
    tape = step.tape
    if tape.counts[storage] == 1:
        tape.category[storage] = GRADIENTS
        return
    copy = tape.new(step.sizes[index], GRADIENTS, f"{step.graph.values[index].name}.grad")
    tape.drop(storage)
    step.parameter_grads[index] = copy


def _title(op: Op, value: Value | None = None) -> str:
    where = op.scope or (value.name if value is not None else op.kind)
    return f"{where} [{op.kind}]"
