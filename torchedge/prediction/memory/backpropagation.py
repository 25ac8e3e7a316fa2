"""The backward pass as PyTorch's autograd engine runs it.

The node made last first, gradients summed as they meet.
"""

from __future__ import annotations

from torchedge.graphs import Op, Poly
from torchedge.graphs.dims import poly
from torchedge.ops import LoadClass, spec_of
from torchedge.ops.specs import nothing
from torchedge.prediction.memory.stepping import (
    GRADIENTS,
    TEMPORARY,
    WORKSPACE,
    Record,
    Region,
    Step,
    make_call,
    run,
    take_workspace,
    title,
)


def write_backward(step: Step) -> None:
    """Run the records in reverse: autograd takes the node made last among those that are ready."""
    tape, graph = step.tape, step.graph
    assert graph.loss is not None
    step.grads[graph.loss] = tape.new(step.sizes[graph.loss], TEMPORARY, "gradient of the loss")
    step.pending = _pending(step)
    _run_back(step, 0)


def _run_back(step: Step, floor: int) -> None:
    """Run the records above `floor`, the last first."""
    records, tape = step.records, step.tape
    last = 2 * len(step.graph.ops) - 1
    while len(records) > floor:
        record = records.pop()
        if isinstance(record, Region):
            _region_back(step, record, last)
        else:
            tape.owner = last - record.position
            _node_back(step, record)


def _node_back(step: Step, record: Record) -> None:
    """Run one node.

    Make the input gradients, let go of what it was given and had kept, hand the gradients on.
    """
    tape = step.tape
    incoming = [g for g in [step.grads.pop(o, None) for o in record.op.outputs] if g is not None]
    if incoming:
        made = _input_gradients(step, record, incoming[0])
    else:  # a branch that the loss does not see
        made = []
        for index in record.op.inputs:
            if index in step.pending:
                _count_down(step, index)
    for storage in incoming:
        tape.drop(storage)
    for storage in record.saved:
        tape.drop(storage)
    for index, storage in made:
        _accumulate(step, index, storage)


def _input_gradients(step: Step, record: Record, incoming: int) -> list[tuple[int, int]]:
    """Allocate (or share) the gradient of each input that needs one; return values and storages."""
    tape, op, spec = step.tape, record.op, record.spec
    values, sizes = step.graph.values, step.sizes
    scratch: list[int] = []
    if spec.backward_scratch is not nothing:
        call = make_call(step, op, record.needs)
        label = f"backward of {title(op)} (scratch)"
        category = WORKSPACE if spec.load is LoadClass.REUSABLE else TEMPORARY
        scratch = [tape.new(poly(n), category, label) for n in spec.backward_scratch(call) if n]
    made: list[tuple[int, int]] = []
    wide: list[tuple[int, int]] = []
    out = values[op.outputs[0]]
    for slot, index in enumerate(op.inputs):
        if index is None or not record.needs[slot]:
            continue
        mode = spec.grad_mode(slot)
        if mode == "none":
            continue
        value = values[index]
        if mode == "view" or (mode == "pass" and value.shape == out.shape and value.dtype == out.dtype):
            tape.hold(incoming)
            made.append((index, incoming))
            if mode == "view":
                step.viewed.add(incoming)
        elif spec.broadcasts and mode == "new" and value.shape != out.shape:
            wide.append(
                (
                    len(made),
                    tape.new(sizes[op.outputs[0]], TEMPORARY, f"gradient of {value.name} (broadcast)"),
                )
            )
            made.append((index, -1))
        else:
            storage = tape.new(sizes[index], TEMPORARY, f"gradient of {value.name}")
            made.append((index, storage))
            if slot < 2:
                take_workspace(step, op, 1 + slot)
            if mode == "turned" or (mode == "folded" and len(value.shape) > 2):
                step.viewed.add(storage)
    for storage in scratch:
        tape.drop(storage)
    for place, storage in wide:  # the engine sums broadcast dimensions up when the node has returned
        index = made[place][0]
        made[place] = (index, tape.new(sizes[index], TEMPORARY, f"gradient of {values[index].name}"))
        tape.drop(storage)
    return made


def _accumulate(step: Step, index: int, storage: int) -> None:
    """Add a gradient to what has arrived for a value.

    Parameters keep theirs, others wait for their operator.
    """
    value = step.graph.values[index]
    if value.role == "parameter":
        _arrive_at_leaf(step, index, storage)
        return
    have = step.grads.get(index)
    if have is None:
        step.grads[index] = storage
    else:
        _sum(step, index, have, storage)


def _arrive_at_leaf(step: Step, index: int, storage: int) -> None:
    """A parameter used several times gets its gradient when all of its uses have run.

    Until then their sum waits.
    """
    if index not in step.pending:
        _accumulate_leaf(step, index, storage)
        return
    have = step.grads.get(index)
    if have is None:
        step.grads[index] = storage
    else:
        _sum(step, index, have, storage)
    _count_down(step, index)


def _count_down(step: Step, index: int) -> None:
    step.pending[index] -= 1
    if step.pending[index] <= 0 and index in step.grads:
        _accumulate_leaf(step, index, step.grads.pop(index))


def _pending(step: Step) -> dict[int, int]:
    """Return how often each parameter used more than once is used (checkpoint regions left out)."""
    uses: dict[int, int] = {}
    for record in step.records:
        if isinstance(record, Record):
            for slot, index in enumerate(record.op.inputs):
                if index is not None and record.needs[slot] and step.graph.values[index].role == "parameter":
                    uses[index] = uses.get(index, 0) + 1
    return {index: count for index, count in uses.items() if count > 1}


def _sum(step: Step, index: int, have: int, storage: int) -> None:
    """Add a second gradient of a value to the first, which waits in the engine's buffer."""
    tape, value, size = step.tape, step.graph.values[index], step.sizes[index]
    if _sums_in_place(step, have, size):
        tape.drop(storage)
        return
    step.grads[index] = tape.new(size, TEMPORARY, f"gradient of {value.name} (sum)")
    tape.drop(have)
    tape.drop(storage)


def _sums_in_place(step: Step, have: int, size: Poly) -> bool:
    """Add in place only to a gradient that the engine alone holds, that fills its storage and is no view."""
    tape = step.tape
    return (
        step.settings.sum_in_place
        and tape.counts[have] == 1
        and have not in step.viewed
        and tape.sizes[have] == size
    )


def _accumulate_leaf(step: Step, index: int, storage: int) -> None:
    """A parameter adds to the gradient it has, adopts one nobody else holds, clones a shared one."""
    tape = step.tape
    if index in step.parameter_grads:
        tape.drop(storage)
        return
    size = step.sizes[index]
    if tape.counts[storage] == 1 and tape.sizes[storage] == size:
        tape.category[storage] = GRADIENTS
        tape.labels[storage] = f"{step.graph.values[index].name}.grad"
        step.parameter_grads[index] = storage
        return
    step.parameter_grads[index] = tape.new(size, GRADIENTS, f"{step.graph.values[index].name}.grad")
    tape.drop(storage)


# activation checkpointing ----------------------------------------------------------------------------


def _region_back(step: Step, region: Region, last: int) -> None:
    """Run a checkpoint region's forward again, then its backward.

    Without re-entry the second run stops behind the last tensor that autograd keeps, and lets its results go;
    with re-entry it runs to its end and holds results and their gradients until its backward is through
    (torch.utils.checkpoint).
    """
    tape, graph = step.tape, step.graph
    reentrant = step.settings.checkpoint == "reentrant"
    floor = len(step.records)
    held = (
        [step.grads[o] for p in region.positions for o in graph.ops[p].outputs if o in step.grads]
        if reentrant
        else []
    )
    for storage in held:
        tape.hold(storage)
    positions = region.positions if reentrant else _until_last_save(step, region.positions)
    inside: set[int] = set()
    alive: set[int] = set()
    tape.owner = last - region.positions[-1]
    for position in positions:
        op = graph.ops[position]
        run(step, position, op)
        inside.update(op.outputs)
        alive.update(op.outputs)
        for index in step.releases[position]:
            if index in alive:
                alive.discard(index)
                tape.drop(step.storage[index])
    if reentrant:
        held += [step.storage[i] for i in sorted(alive)]
    else:
        _drop_all(step, sorted(alive))
    _mark_remaining(step, region.positions[len(positions) :])
    _run_back(step, floor)
    for storage in (*held, *region.held):
        tape.drop(storage)


def _drop_all(step: Step, indices: list[int]) -> None:
    for index in indices:
        step.tape.drop(step.storage[index])


def _until_last_save(step: Step, positions: list[int]) -> list[int]:
    """Return a region's positions up to the last operator that keeps something for backward."""
    for end in range(len(positions), 0, -1):
        op = step.graph.ops[positions[end - 1]]
        if _keeps(step, op):
            return positions[:end]
    return positions


def _keeps(step: Step, op: Op) -> bool:
    spec = spec_of(op.kind)
    needs = [i is not None and step.differentiable[i] for i in op.inputs]
    if True not in needs:
        return False
    call = make_call(step, op, needs)
    return bool(spec.saves(call)) or bool(spec.aux(call))


def _mark_remaining(step: Step, positions: list[int]) -> None:
    """Operators behind the early stop left their nodes in the first run: record them without storages."""
    for position in positions:
        op = step.graph.ops[position]
        needs = [i is not None and step.differentiable[i] for i in op.inputs]
        if True in needs:
            step.records.append(Record(op, spec_of(op.kind), needs, [], position))
