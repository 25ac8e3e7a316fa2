"""Writes the tape of one step of a graph: forward pass, backward pass, optimizer.

The forward pass runs as captured. The backward pass runs as PyTorch's autograd engine runs it: the node that
was recorded last comes first, and gradients that meet are summed. The optimizer follows torch.optim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torchedge.graphs import ForwardGraph, Op, Value
from torchedge.graphs.footprints import (
    CONJUGATED,
    FILLS,
    IN_ORDER,
    LAZY,
    MISSING,
    PLAIN,
    Footprint,
    FootprintEvent,
    UpdateFootprint,
)
from torchedge.graphs.graph import BACKWARD, STEP_EVENTS, UPDATE
from torchedge.graphs.sizes import Poly, poly
from torchedge.ops import Call, Work, spec_of
from torchedge.ops.convolution import explicit_padding, spread, winograd_workspace
from torchedge.ops.gradients import gradient_needs, is_differentiated, makes_leaf, record_ends
from torchedge.ops.kernels import kernel
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.decomposition import decompose, images_last
from torchedge.prediction.memory.rewriting import releases_of, without_bodies
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import CATEGORIES, PERSISTENT, Tape, TapeWriter
from torchedge.prediction.memory.workspaces import (
    NAMES,
    PHASES,
    SUM,
    convolution_geometry,
    convolution_kind,
    sum_geometry,
)

WEIGHTS, GRADIENTS, STATE, INPUTS, SAVED, TEMPORARY, WORKSPACE = range(len(CATEGORIES))
_CLAMPS = frozenset(("hardtanh", "relu6", "clamp"))
_CONVOLUTIONS = frozenset(("conv1d", "conv2d"))
_ADDED_TO_ROWS = frozenset(("linear", "addmm", "add", "sub", "mul"))
"""Operators with an input that is the same for all rows of the result, whose gradient is a sum over them."""
_STATE = "optimizer state"
_BLAS = ("BLAS workspace", "BLAS workspace of the backward pass")


def write_tape(graph: ForwardGraph, settings: StepSettings, first: bool = False) -> Tape:
    """Return the allocations of one steady-state step, the second or a later one, of a graph.

    first: the very first step instead, which starts without gradients and optimizer state and allocates them.
    An inference graph (no loss) gets the forward pass only.
    """
    step = write_step(graph, settings, first)
    names = [(op.kind, op.scope) for op in step.graph.ops]
    operators = (*names, *reversed(names), ("update", ""))
    tape = step.tape.finish(step.remaining(), operators, settings.workspaces)
    if first or not replays_first(graph, settings):
        return tape
    before, left = written(graph, settings, first=True)
    whole = step.tape.after(before, left).finish([], (), settings.workspaces)
    return replace(tape, from_start=whole)


def replays_first(graph: ForwardGraph, settings: StepSettings) -> bool:
    """Return whether the first step is replayed before the steady one whose peaks count.

    It is where workspaces of convolutions were measured.
    """
    return graph.loss is not None and settings.workspaces is not None and bool(settings.workspaces.forests)


def written(graph: ForwardGraph, settings: StepSettings, *, first: bool) -> tuple[TapeWriter, list[int]]:
    """Return the closed writer of a step's tape, and the storages that are alive at its end."""
    step = write_step(graph, settings, first)
    left = step.remaining()
    step.tape.close(left)
    return step.tape, left


def write_step(graph: ForwardGraph, settings: StepSettings, first: bool = False) -> StepWriter:
    """Write a step as `write_tape` does; return its writer, whose tape has sizes as the graph gives them.

    A whole step has its backward passes and updates among its operators.
    """
    step = StepWriter(graph, settings)
    if graph.is_whole_step and not first:
        step.left_gradients = write_step(graph, settings, first=True).left_gradients
    step.write_persistent(first)
    step.write_forward()
    if graph.is_whole_step:
        step.left_gradients = frozenset(step._parameter_gradients)
        step.forget_unused()
    elif step.graph.loss is not None:
        if step.differentiable[step.graph.loss]:
            step._run_all_back(step.graph.loss)
            step.write_update(first)
        step.forget_unused()
    return step


def multiplies(graph: ForwardGraph) -> bool:
    """Return whether a graph multiplies matrices: the libraries which that needs take memory of their own."""
    return any(spec_of(op.kind).work.multiplies_matrices for op in graph.ops)


@dataclass(slots=True)
class _Record:
    """An operator of the forward pass whose backward pass will run; `saved`: the storages it keeps.

    numbers: the storage of each number of its footprint.
    """

    op: Op
    footprint: Footprint
    needs: list[bool]
    saved: list[int]
    position: int
    numbers: dict[int, int] = field(default_factory=dict)

    def differentiated(self) -> list[int]:
        """Return the inputs that get a gradient, one as often as it gets one."""
        return _given(self.op, self.needs, self.footprint)


@dataclass(slots=True)
class _Region:
    """An activation-checkpoint region: positions of its operators, storages it keeps to run them again.

    depth: the number of regions around it.
    stored: outputs of operators whose results a selective checkpoint stores, by value.
    """

    reentrant: bool
    positions: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)
    depth: int = 0
    seen: set[int] = field(default_factory=set)


class StepWriter:
    """Writes one step of a graph to a tape; `graph` is the graph as the framework runs it."""

    def __init__(self, graph: ForwardGraph, settings: StepSettings) -> None:
        self.graph = decompose(without_bodies(lower_precision(graph, settings)), settings)
        self.settings = settings
        self.tape = TapeWriter()
        self.differentiable = gradient_needs(self.graph)
        self._sliced = {op.inputs[1] for op in self.graph.ops if op.kind == "copy_slices"}
        self._lies_last = images_last(self.graph, settings.attention == "fused")
        self._sizes = [value.nbytes for value in self.graph.values]
        self._storage = [-1] * len(self.graph.values)
        self._releases = releases_of(self.graph)
        self._held = _held(self.graph, self._releases)
        self._forgotten = record_ends(self.graph, self.differentiable, self._releases)
        self._records: list[_Record | _Region] = []
        self._gradients: dict[int, int] = {}
        self._parameter_gradients: dict[int, int] = {}
        self._pending_uses: dict[int, int] = {}
        self._viewed: set[int] = set()
        self._permuted: set[int] = set()  # gradients whose strides are not those of their parameter
        self._conjugated: set[int] = set()  # values whose waiting gradient is a conjugated view
        self._state: dict[int, list[int]] = {}
        self._blas: list[int] = []
        self._blas_size = (int(settings.blas_workspace_mib * 2**20) // len(_BLAS), 0, 0)
        self._multiplied: set[int] = set()
        self._trained: set[int] = set()
        self._kept: list[int] = []  # what the loss keeps beyond the step
        self._kept_by: dict[int, dict[int, int]] = {}  # of that, by operator: storages by number
        self._kept_before: list[int] = []
        self._first = False
        self.left_gradients: frozenset[int] = frozenset()
        """Parameters of a whole step whose gradients stay for the next one."""
        self._updates: list[UpdateFootprint] = []
        self._began: set[int] = set()  # optimizers that have made their state
        self._updated: frozenset[int] | None = None
        if graph.loss is not None and settings.optimizer != "none":
            for replay in settings.replays:
                update, self._updated = replay.update(self.graph, settings.foreach)
                self._updates.append(update)

    def write_persistent(self, first: bool) -> None:
        """Keep storages beyond a step: weights, buffers, inputs, optimizer state, gradients not freed."""
        tape, settings, values, self._first = self.tape, self.settings, self.graph.values, first
        trains = self.graph.loss is not None
        trainable = []
        for index, value in enumerate(values):
            if value.role == "activation" or value.alias is not None:
                continue
            category = INPUTS if value.role == "input" else WEIGHTS
            self._storage[index] = tape.keep(self._sizes[index], category, value.name)
            if value.trainable:
                trainable.append(index)
        for value in self.graph.unread:
            tape.keep(value.nbytes, WEIGHTS, value.name)
        for op in self.graph.ops if trains else ():
            if op.footprint is not None and not first and self._keeps(op):
                for number in op.footprint.kept:
                    label = f"{_title(op)} (kept by the last loss)"
                    storage = tape.keep(self._size_of(op, op.footprint, number), SAVED, label)
                    tape.counts[storage] = 1
                    self._kept_before.append(storage)
            if op.scope == "loss" and op.kind == "zeros" and not op.inputs:  # the targets, which a user feeds
                index = op.outputs[0]
                self._storage[index] = tape.keep(self._sizes[index], INPUTS, "target")
        if settings.blas_workspace_mib and not first and multiplies(self.graph):
            self._blas = [tape.keep(self._blas_size, WORKSPACE, name) for name in _BLAS[: 1 + trains]]
        if first or not trains:
            return
        for index in filter(self._has_gradient, trainable):
            name = f"{values[index].name}.grad"
            storage = self._parameter_gradients[index] = tape.keep(self._sizes[index], GRADIENTS, name)
            if self.graph.is_whole_step:  # which may free it
                tape.counts[storage] = 1
        states = [(update.owners[k], n, k) for n, update in enumerate(self._updates) for k in update.states]
        for _, place, number in sorted(states, key=lambda state: state[:2]):  # as `remaining` lists them
            update = self._updates[place]
            storage = tape.keep(update.sizes[number], STATE, self._state_name(update, number))
            self._own_state(update, number, storage)

    def _own_state(self, update: UpdateFootprint, number: int, storage: int) -> None:
        """Count a state with its parameter (-1: with none alone)."""
        self._state.setdefault(update.owners[number], []).append(storage)

    def _state_name(self, update: UpdateFootprint, number: int) -> str:
        owner, kind = update.owners[number], update.states[number]
        return f"{self.graph.values[owner].name}.{kind}" if owner >= 0 else _STATE

    def remaining(self) -> list[int]:
        """Return the storages that are alive for the next step, in the order in which it lists them."""
        tape = self.tape
        storages = [s for s in tape.persistent if tape.category[s] in (WEIGHTS, INPUTS)] + self._blas
        for index, gradient in sorted(self._parameter_gradients.items()):
            if self._keeps_gradient(index) or self.graph.is_whole_step:
                storages.append(gradient)
        for _, state in sorted(self._state.items()):
            storages += state
        return storages + self._kept

    def forget_unused(self) -> None:
        """Take back workspaces that no product used, and what parameters without a gradient do not have."""
        storages = {storage for phase, storage in enumerate(self._blas) if phase not in self._multiplied}
        self._blas = [storage for storage in self._blas if storage not in storages]
        self._trained |= self._gradients.keys()
        replayed = {-1} if self._trained else set[int]()
        for index in self._state.keys() - self._trained - replayed:
            storages.update(self._state.pop(index))
        for index in self._parameter_gradients.keys() - self._trained:
            storages.add(self._parameter_gradients.pop(index))
        self.tape.persistent = [storage for storage in self.tape.persistent if storage not in storages]

    def _has_gradient(self, index: int) -> bool:
        """Whether a parameter has a gradient when a later step begins."""
        return index in self.left_gradients if self.graph.is_whole_step else self._keeps_gradient(index)

    def _keeps_gradient(self, index: int) -> bool:
        """Whether a parameter's gradient outlives the step; `optimizer.zero_grad` frees its own alone."""
        if self.settings.zero_grad == "zero" or self.settings.accumulation > 1:
            return True
        return self._updated is not None and index not in self._updated

    # forward ------------------------------------------------------------------------------------------------

    def write_forward(self) -> None:
        """Run the operators in order; checkpoint regions keep their inputs only."""
        graph, tape = self.graph, self.tape
        regions: dict[int, _Region] = {}
        trained = {_regions_of(op)[0] for op in graph.ops if op.region and op.grad}
        ends = {_regions_of(op)[0]: position for position, op in enumerate(graph.ops) if op.region}
        for position, op in enumerate(graph.ops):
            tape.owner = position
            if op.kind in STEP_EVENTS:
                self._write_event(op)
                self._free(position)
                tape.phase = 0
                continue
            number = _regions_of(op)[0] if op.region and graph.loss is not None else 0
            if number > 0 or (number and number in trained):  # what runs without gradients runs again
                region = regions.get(number)
                if region is None:
                    region = regions[number] = _Region(number < 0)
                    self._records.append(region)
                region.positions.append(position)
                self._keep_inputs(op, region)
                self._run(position, op, saving=False)
                if op.stored:
                    self._store(op, region)
                is_over = position == ends[number] and number > 0
                if is_over and self._run_again(region) == (0, 0):  # autograd keeps nothing that refers to it
                    self._drop_all(region.inputs)
                    region.inputs.clear()
            else:
                self._run(position, op)
            self._free(position)
        self._drop_all(self._kept_before)

    def _free(self, position: int) -> None:
        """Free what Python and autograd release behind an operator."""
        for index in self._releases[position]:
            storage = self._storage[index]
            if storage >= 0 and self.graph.values[index].role == "activation":
                self.tape.drop(storage)
        if position in self._forgotten:
            self._forget({*self._forgotten[position]})

    def _forget(self, positions: Collection[int]) -> None:
        """Free what autograd keeps of operators that no gradient reaches."""
        kept: list[_Record | _Region] = []
        for record in self._records:
            if isinstance(record, _Record) and record.position in positions:
                self._drop_all(record.saved)
            else:
                kept.append(record)
        self._records = kept

    def _store(self, op: Op, region: _Region) -> None:
        """Let a selective checkpoint store an operator's outputs."""
        for index in op.outputs:
            storage = region.stored[index] = self._storage[index]
            self.tape.hold(storage)
            self.tape.category[storage] = SAVED

    def _keep_inputs(self, op: Op, region: _Region) -> None:
        """Keep the outside values that a checkpoint region reads."""
        seen = region.seen  # the region's values so far
        for index in op.inputs:
            if index is not None and index not in seen:
                seen.add(index)
                if self.graph.values[index].role == "activation" and self._storage[index] >= 0:
                    self.tape.hold(self._storage[index])
                    region.inputs.append(self._storage[index])
        seen.update(op.outputs)

    def _run(
        self,
        position: int,
        op: Op,
        saving: bool = True,
        stored: Mapping[int, int] = MappingProxyType({}),
        *,
        stops: bool = False,
    ) -> None:
        """Write one operator's forward call; a record for backward follows where autograd keeps one.

        stored: the outputs that a selective checkpoint stored in the first run, which it gives up here.
        stops: the call ends where autograd has kept its last tensor.
        """
        recorded = saving and is_differentiated(op, self.differentiable)
        values, tape, storage = self.graph.values, self.tape, self._storage
        needs = self._needs(op) if recorded else [False] * len(op.inputs)
        footprint = self._footprint(op, needs)
        present = [index for index in (*op.inputs, *op.outputs) if index is not None]
        tensors = dict(zip(footprint.tensors, present, strict=False))  # a number's last tensor: an output
        numbers: dict[int, int] = {}
        for number, index in zip(footprint.tensors, present, strict=False):
            if index in op.outputs:
                alias, before = values[index].alias, storage[index]
                if index in stored:
                    storage[index] = stored[index]
                elif alias is not None:
                    storage[index] = storage[alias]
                    tape.hold(storage[index])
                elif before < 0 or tape.counts[before] < PERSISTENT // 2:  # no target, which exists before
                    storage[index] = -1
            if storage[index] >= 0:
                numbers[number] = storage[index]
        is_stored = not stored.keys().isdisjoint(op.outputs)
        asking = footprint.asking if stops and recorded else None
        for event in footprint.forward if asking is None else footprint.forward[:asking]:
            number = abs(event) - 1
            if is_stored and number not in footprint.saved:
                continue  # it does not run again: autograd's record needs what it keeps
            if event < 0:
                tape.drop(numbers.pop(number))
            elif number not in numbers:
                label = _title(op, values[tensors[number]]) if number in tensors else f"{_title(op)} (hidden)"
                numbers[number] = tape.new(self._size_of(op, footprint, number), TEMPORARY, label)
        for number in [*numbers] if asking is not None else ():
            if number not in tensors and number not in footprint.saved:
                tape.drop(numbers.pop(number))
        for number, index in tensors.items():
            storage[index] = numbers.get(number, storage[index])
        if saving and self.graph.loss is not None and makes_leaf(op):
            for index in op.outputs:  # the loss refers to it and to its gradient until the step ends
                tape.hold(storage[index])
        if footprint.kept and not tape.phase and self._keeps(op):
            kept = self._kept_by[position] = {number: numbers[number] for number in footprint.kept}
            self._kept += kept.values()
            for one in kept.values():
                tape.hold(one)
        self._start_blas(op)
        self._take_workspace(op, 0)
        if not recorded:
            self._drop_all([numbers[n] for n in dict.fromkeys(footprint.saved) if n not in tensors])
            return
        self._records.append(self._recorded(position, op, footprint, needs, numbers))

    def _recorded(
        self, position: int, op: Op, footprint: Footprint, needs: list[bool], numbers: dict[int, int]
    ) -> _Record:
        """Return the record of an operator, which keeps what its footprint says."""
        tape, saved = self.tape, [numbers[number] for number in footprint.saved]
        for number, storage in zip(footprint.saved, saved, strict=True):
            if number in footprint.tensors:
                tape.hold(storage)
            if tape.category[storage] == TEMPORARY:
                tape.category[storage] = SAVED
        return _Record(op, footprint, needs, saved, position, numbers)

    def _keeps(self, op: Op) -> bool:
        """Whether the loss keeps what `ctx` of a custom function has: a reentrant checkpoint drops it."""
        return op.region >= 0 and is_differentiated(op, self.differentiable)

    def _start_blas(self, op: Op) -> None:
        """Let cuBLAS take the workspace of the pass's thread at its first product of matrices."""
        phase = self.tape.phase
        if spec_of(op.kind).work not in (Work.PRODUCT, Work.ADDED_PRODUCT) or phase in self._multiplied:
            return
        self._multiplied.add(phase)
        if self._first and self._blas_size[0]:
            self._blas.append(self.tape.new(self._blas_size, WORKSPACE, _BLAS[phase]))

    def _footprint(self, op: Op, needs: list[bool]) -> Footprint:
        """Return the memory of an operator: of the library's kernel, or as PyTorch ran it on meta tensors.

        Where neither is known, autograd keeps every input.
        """
        call, rule = self._call(op, needs), spec_of(op.kind).memory
        if op.inplace and op.kind in _CLAMPS and self.settings.clamp_keeps == "output":
            return kernel(call, (-1,))
        footprint = None if rule is None else rule(call)
        if footprint is None:
            footprint = op.footprint
        return kernel(call, range(len(needs)) if True in needs else ()) if footprint is None else footprint

    def _size_of(self, op: Op, footprint: Footprint, number: int) -> Poly:
        """Return the bytes of a storage of a footprint."""
        size = footprint.sizes[number]
        if size.place < 0:
            c0, c1, c2 = size.elements
            return (c0 * size.item_size, c1 * size.item_size, c2 * size.item_size)
        index = [i for i in (*op.inputs, *op.outputs) if i is not None][size.place]
        if not size.item_size:
            return self._sizes[index]
        (c0, c1, c2), item = self.graph.values[index].numel, size.item_size
        return (c0 * item, c1 * item, c2 * item)

    def _replay_back(self, record: _Record, incoming: Sequence[int | None]) -> None:
        """Write the backward call of an operator."""
        tape, op, footprint = self.tape, record.op, record.footprint
        if footprint.arrivals:
            arrival = [
                MISSING if gradient is None else LAZY if output in self._conjugated else PLAIN
                for output, gradient in zip(op.outputs, incoming, strict=True)
            ]
            footprint = dict(footprint.arrivals).get(tuple(arrival), footprint)
        if self._conjugated:
            self._conjugated.difference_update(op.outputs)
        numbers = {number: record.numbers[number] for number in footprint.saved}
        for number, gradient in zip(footprint.gradients, incoming, strict=False):
            if gradient is not None and number >= 0:
                numbers[number] = gradient
            elif number >= 0 and op.kind == "custom_function":  # a tensor of zeros in its place
                label = f"backward of {_title(op)}"
                numbers[number] = tape.new(self._size_of(op, footprint, number), TEMPORARY, label)
            elif gradient is not None:
                tape.drop(gradient)
        inputs = [index for index in op.inputs if index is not None]
        slots = [slot for slot, index in enumerate(op.inputs) if index is not None]
        places = {n: place for event, n, place, _ in footprint.backward if event is FootprintEvent.GRADIENT}
        scratch: list[int] = []
        if self.settings.winograd_tile and op.kind == "conv2d":
            label = f"backward of {_title(op)} (scratch)"
            sizes = winograd_workspace(self._call(op, record.needs))
            scratch = [tape.new(poly(size), WORKSPACE, label) for size in sizes]
        ready: dict[int, list[tuple[int, bool]]] = {}
        waiting = Counter(index for index in record.differentiated() if index in self._pending_uses)
        for event, number, place, order in footprint.backward:
            if event is FootprintEvent.NEW:
                slot = slots[places[number]] if number in places else -1
                sums = self._summed_rows(op, slot)
                if sums and op.region > 0 and op.kind not in _CONVOLUTIONS:
                    # The engine sums once the call is over, which alone held what a checkpoint gave it.
                    for kept in dict.fromkeys(footprint.saved):
                        if kept in numbers and kept not in ready:
                            tape.drop(numbers.pop(kept))
                label = f"backward of {_title(op)}"
                if slot >= 0:
                    label = f"gradient of {self.graph.values[inputs[places[number]]].name}"
                numbers[number] = tape.new(self._size_of(op, footprint, number), TEMPORARY, label)
                if 0 <= slot < 2:
                    self._take_workspace(op, 1 + slot)
                if number in places:
                    self._start_blas(op)
                if sums:
                    tape.take(NAMES.index(SUM), sums, WORKSPACE, f"partial sums of {_title(op)}")
            elif number not in numbers:  # of an output whose gradient the loss does not need
                continue
            elif event is FootprintEvent.GRADIENT:
                if not record.needs[slots[place]]:
                    continue
                if place or op.outputs[0] not in self._sliced:
                    ready.setdefault(number, []).append((inputs[place], bool(order & CONJUGATED)))
                waiting[inputs[place]] -= 1
                if not order & FILLS:
                    self._viewed.add(numbers[number])
                if not order & IN_ORDER:
                    self._permuted.add(numbers[number])
            else:
                self._pass_on(numbers.pop(number), ready.pop(number, []))
        self._drop_all(scratch)
        for number in [*numbers]:
            self._pass_on(numbers.pop(number), ready.pop(number, []))
        self._drop_all(record.saved[len(footprint.saved) :])  # what writing into a view left to this node
        for index in waiting.elements():  # of an input whose gradient this call does not give
            self._count_down(index)

    def _pass_on(self, storage: int, receivers: Sequence[tuple[int, bool]]) -> None:
        """Give a gradient's storage to the values that it belongs to; free it if there are none.

        receivers: the values, and whether each gets a conjugated view of it.
        """
        if not receivers:
            self.tape.drop(storage)
            return
        for _ in receivers[1:]:
            self.tape.hold(storage)
        for index, conjugated in receivers:
            self._accumulate(index, storage, conjugated)

    def _needs(self, op: Op) -> list[bool]:
        return [i is not None and self.differentiable[i] for i in op.inputs]

    def _take_workspace(self, op: Op, phase: int) -> None:
        """Write the workspace that the device's library takes for one phase of a convolution, if known."""
        if self.settings.workspaces is None or op.kind not in _CONVOLUTIONS:
            return
        call = self._call(op, [])
        x, weight, y = *call.ins[:2], call.outs[0]
        if x is None or weight is None or len(x) != len(weight):  # a sample without batch dimension
            return
        stride = spread(op.attrs.get("stride", 1), len(weight) - 2)
        before, _ = explicit_padding(op.attrs, weight[2:])
        dtype = self.graph.values[op.outputs[0]].dtype
        kind = convolution_kind(len(stride), dtype, self._lies_last(op.inputs[0]))
        geometry = convolution_geometry((x, weight, y), op.attrs.get("groups", 1), stride, before, kind)
        if geometry is not None:
            label, name = f"workspace of {_title(op)} ({PHASES[phase]})", NAMES.index(kind + PHASES[phase])
            self.tape.take(name, tuple([poly(entry) for entry in geometry]), WORKSPACE, label)

    def _summed_rows(self, op: Op, slot: int) -> tuple[Poly, ...]:
        """Return the geometry of the sum that gives the gradient of an input that all rows share, or nothing.

        Kernels that torch.compile generates keep no partial sums.
        """
        if slot < 0 or self.settings.workspaces is None or self.graph.partition is not None:
            return ()
        of_channels = op.kind in _CONVOLUTIONS and slot == 2
        if not of_channels and op.kind not in _ADDED_TO_ROWS:
            return ()
        call = self._call(op, [])
        part, whole = call.ins[slot], call.outs[0]
        of_images = len(whole) == 4 and self._lies_last(op.inputs[0])
        if part is None or (of_channels and not of_images):
            return ()
        part = (*part, 1, 1) if of_channels else part
        geometry = sum_geometry(part, whole, 1 if of_images else -1)
        return () if geometry is None else tuple([poly(entry) for entry in geometry])

    def _call(self, op: Op, needs: list[bool]) -> Call:
        """Return the call of an operator as its rules see it."""
        settings, graph = self.settings, self.graph
        return Call(graph.values, op, needs, settings.backend, graph.training, settings.winograd_tile)

    def _drop_all(self, storages: list[int]) -> None:
        for storage in storages:
            self.tape.drop(storage)

    # whole steps --------------------------------------------------------------------------------------------

    def _write_event(self, op: Op) -> None:
        """Write a backward pass or an update of a whole step, or the end of gradients."""
        if op.kind == BACKWARD:
            (loss,) = op.inputs
            if loss is not None and self.differentiable[loss]:
                self._pass_back(loss, retains=bool(op.attrs["retain"]))
        elif op.kind == UPDATE:
            if self._updates:
                number = op.attrs["optimizer"]
                self._step(self._updates[number], self._first and number not in self._began)
                self._began.add(number)
        else:
            ended = [i for i in self._parameter_gradients if self.graph.values[i].name in op.attrs["names"]]
            self._drop_all([self._parameter_gradients.pop(index) for index in ended])

    def _pass_back(self, loss: int, *, retains: bool) -> None:
        """Run the records that lead to a loss; all others stay, and with `retains` these as well."""
        reached, records = self._reached(loss), self._records
        self._records, stays = [], list[_Record | _Region]()
        for record, leads in zip(records, reached, strict=True):
            if leads:
                self._records.append(record)
            if leads and retains:
                for storage in record.saved if isinstance(record, _Record) else record.inputs:
                    self.tape.hold(storage)
            if retains or not leads:
                stays.append(_again(record) if leads else record)
        self._run_all_back(loss)
        self._records = stays

    def _reached(self, loss: int) -> list[bool]:
        """Return for each record whether a gradient of the loss reaches it."""
        values, storages = self.graph.values, list(range(len(self.graph.values)))
        for index, value in enumerate(values):
            if value.alias is not None:
                storages[index] = storages[value.alias]
        reached, read, leads = {loss}, {storages[loss]}, [False] * len(self._records)
        for place in range(len(self._records) - 1, -1, -1):
            record = self._records[place]
            ops = (
                [record.op]
                if isinstance(record, _Record)
                else [self.graph.ops[position] for position in reversed(record.positions)]
            )
            for op in ops:
                if not reached.isdisjoint(op.outputs) or (op.inplace and storages[op.outputs[0]] in read):
                    inputs = _differentiated(op, self._needs(op))
                    reached.update(op.outputs, inputs)
                    read.update([storages[index] for index in inputs])
                    leads[place] = True
        return leads

    # backward: the autograd engine --------------------------------------------------------------------------

    def _run_all_back(self, loss: int) -> None:
        self.tape.phase = 1
        self._gradients[loss] = self.tape.new(self._sizes[loss], TEMPORARY, "gradient of the loss")
        self._pending_uses = self._count_uses(self._records)
        self._run_back(0)

    def _run_back(self, floor: int) -> None:
        """Run the records above `floor` in reverse: of the nodes that are ready, the last recorded first."""
        last = 2 * len(self.graph.ops) - 1
        while len(self._records) > floor:
            record = self._records.pop()
            if isinstance(record, _Region):
                self._region_back(record, last)
            else:
                self.tape.owner = last - record.position
                self._node_back(record)

    def _node_back(self, record: _Record) -> None:
        """Run one node: compute input gradients, drop its own and the saved tensors, pass gradients on."""
        popped = [self._gradients.pop(output, None) for output in record.op.outputs]
        incoming = [gradient for gradient in popped if gradient is not None]
        if not incoming:  # a branch that the loss does not see
            for index in record.differentiated():
                if index in self._pending_uses:
                    self._count_down(index)
            self._drop_all(record.saved)
        elif record.op.kind == "copy_slices":
            self._copy_slices_back(record, incoming[0])
        else:
            self._replay_back(record, popped)

    def _copy_slices_back(self, record: _Record, incoming: int) -> None:
        """Copy the gradient of a tensor, and again the slice for the node of what was written there.

        The gradient itself stays until that node has run.
        """
        tape, (whole, part), stays = self.tape, record.op.inputs, [incoming]
        assert whole is not None and part is not None
        copies = [tape.new(self._sizes[i], TEMPORARY, f"gradient of {self.graph.values[i].name}")
                  for i in (whole, part)]  # fmt: skip
        for index, needed, storage in zip((whole, part), record.needs, copies, strict=True):
            if needed:
                self._accumulate(index, storage)
            else:
                stays.append(storage)
        writes = self._records[-1] if self._records else None
        if isinstance(writes, _Record) and part in writes.op.outputs:
            writes.saved += stays
        else:
            self._drop_all(stays)

    def _accumulate(self, index: int, storage: int, conjugated: bool = False) -> None:
        """Add a gradient to those that have arrived for a value; a parameter keeps the sum.

        A parameter used several times gets its gradient when all of its uses have run.
        """
        is_parameter = self.graph.values[index].role == "parameter"
        if is_parameter and index not in self._pending_uses:
            self._give_to_parameter(index, storage)
            return
        waiting = self._gradients.get(index)
        if waiting is None:
            self._gradients[index] = storage
            if conjugated:
                self._conjugated.add(index)
        else:
            self._sum(index, waiting, storage, conjugated)
        if is_parameter:
            self._count_down(index)

    def _count_down(self, index: int) -> None:
        self._pending_uses[index] -= 1
        if self._pending_uses[index] <= 0 and index in self._gradients:
            self._give_to_parameter(index, self._gradients.pop(index))

    def _count_uses(self, records: Sequence[_Record | _Region]) -> dict[int, int]:
        """Return the uses of each parameter that one run of the engine reads more than once.

        A reentrant checkpoint runs an engine of its own, which gives a parameter its gradients when it ends.
        """
        read: list[int] = []
        for record in records:
            if isinstance(record, _Record):
                read += record.differentiated()
            elif not record.reentrant:
                for position in record.positions:
                    op = self.graph.ops[position]
                    needs = self._needs(op)
                    read += _given(op, needs, self._footprint(op, needs))
        values = self.graph.values
        return {i: count for i, count in Counter(read).items() if count > 1 and values[i].role == "parameter"}

    def _sum(self, index: int, waiting: int, storage: int, conjugated: bool) -> None:
        """Add a second gradient of a value to the first, which waits in the engine's buffer.

        The sum is in place only if the engine alone holds the first one, which fills its storage and is no
        view. Conjugated views are copied before.
        """
        tape, size = self.tape, self._sizes[index]
        views = (index in self._conjugated) + conjugated
        self._conjugated.discard(index)
        label = f"gradient of {self.graph.values[index].name}"
        copies = [tape.new(size, TEMPORARY, f"{label} (copy)") for _ in range(views)]
        in_place = (
            self.settings.sum_in_place
            and tape.counts[waiting] == 1
            and waiting not in self._viewed
            and tape.sizes[waiting] == size
        )
        if not in_place:
            self._gradients[index] = tape.new(size, TEMPORARY, f"{label} (sum)")
            tape.drop(waiting)
        self._drop_all([*copies, storage])

    def _give_to_parameter(self, index: int, storage: int) -> None:
        """Let a parameter add a gradient to its own, adopt one that nothing shares, or clone it.

        A gradient is cloned as well where its strides are not the parameter's.
        """
        tape = self.tape
        self._trained.add(index)
        if index in self._parameter_gradients:
            tape.drop(storage)
            return
        size, label = self._sizes[index], f"{self.graph.values[index].name}.grad"
        if tape.counts[storage] == 1 and tape.sizes[storage] == size and storage not in self._permuted:
            tape.category[storage] = GRADIENTS
            tape.labels[storage] = label
            self._parameter_gradients[index] = storage
            return
        self._parameter_gradients[index] = tape.new(size, GRADIENTS, label)
        tape.drop(storage)

    # activation checkpointing -------------------------------------------------------------------------------

    def _region_back(self, region: _Region, last: int) -> None:
        """Run a checkpoint region's forward again, then its backward.

        Without re-entry the second run begins when a node asks for a tensor that autograd keeps, which nodes
        of casts and sums do not; it stops at the last such tensor, and frees its results. With re-entry it
        runs to its end, keeps results and their gradients until its backward is complete
        (torch.utils.checkpoint), and gives parameters their gradients itself.
        A region inside of this one runs its operators here, and keeps nothing but what it reads, which this
        region gives it once.
        """
        tape, graph = self.tape, self.graph
        reentrant = region.reentrant
        floor = len(self._records)
        storages: list[int] = []
        runs = end = len(region.positions)
        if reentrant:
            outputs = [output for position in region.positions for output in graph.ops[position].outputs]
            storages = [self._gradients[output] for output in outputs if output in self._gradients]
        else:
            runs, end = self._run_again(region)
            for position in region.positions[end:]:
                self._record_unrun(position, graph.ops[position])
            self._run_back(floor)
        for storage in storages:
            tape.hold(storage)
        before = [] if reentrant or not end else self._gradients_before(region.positions[end - 1])
        alive: set[int] = set()
        tape.owner = last - region.positions[-1]
        inner: dict[int, _Region] = {}
        for place, position in enumerate(region.positions[:runs]):
            op = graph.ops[position]
            saving = place < end and self._enter_inner(position, region, inner)
            replaced = [self._storage[index] for index in op.outputs if index in self._held]
            stops = not reentrant and place == end - 1 == runs - 1
            self._run(position, op, saving, region.stored, stops=stops)
            self._drop_all(replaced)
            alive.update([index for index in op.outputs if index not in self._held])
            for index in self._releases[position]:
                if index in alive and self._storage[index] >= 0:
                    tape.drop(self._storage[index])
                alive.discard(index)
        for position in region.positions[runs:end]:
            if self._enter_inner(position, region, inner):
                self._record_unrun(position, graph.ops[position])
        for part in inner.values():
            if self._run_again(part) == (0, 0):
                self._drop_all(part.inputs)
                part.inputs.clear()
        results = [self._storage[index] for index in sorted(alive) if self._storage[index] >= 0]
        if not reentrant:
            self._drop_all([*results, *before])
            self._take_first_attributes(floor)
            if not region.depth:
                self._run_back(floor + self._first_asking(floor))
            self._drop_all(region.inputs)
            self._run_back(floor)
            return
        uses, self._pending_uses = self._pending_uses, self._count_uses(self._records[floor:])
        waiting = {index: self._gradients.pop(index) for index in uses if index in self._gradients}
        self._run_back(floor)
        self._gradients.update(waiting)
        self._pending_uses = uses
        self._drop_all([*storages, *results, *region.inputs])

    def _gradients_before(self, position: int) -> list[int]:
        """Take what the backward of a custom function makes before it asks a checkpoint for a tensor.

        PyTorch gives it zeros in place of gradients that do not arrive: of results without a gradient.
        """
        op = self.graph.ops[position]
        if op.kind != "custom_function" or not is_differentiated(op, self.differentiable):
            return []
        footprint, inputs = self._footprint(op, self._needs(op)), len([i for i in op.inputs if i is not None])
        absent = {inputs + k for k, number in enumerate(footprint.gradients) if number < 0}
        made: list[int] = []
        for event, number, _, _ in footprint.backward:
            if event is not FootprintEvent.NEW or footprint.sizes[number].place not in absent:
                break
            size = self._size_of(op, footprint, number)
            made.append(self.tape.new(size, TEMPORARY, f"backward of {_title(op)}"))
        return made

    def _enter_inner(self, position: int, region: _Region, inner: dict[int, _Region]) -> bool:
        """Add an operator to the region directly inside of another that runs it, if any; return if none."""
        op = self.graph.ops[position]
        path = _regions_of(op)[region.depth + 1 :]
        if not path:
            return True
        part = inner.get(path[0])
        if part is None:
            part = inner[path[0]] = _Region(False, depth=region.depth + 1)
            self._records.append(part)
        part.positions.append(position)
        self._keep_inputs(op, part)
        return False

    def _run_again(self, region: _Region) -> tuple[int, int]:
        """Return how many operators of a region run again, and how many up to the last that keeps a tensor.

        It runs if it keeps an output; its inputs are kept before it runs, as those of a region inside are,
        whether that region keeps anything else or not.
        """
        positions, depth = region.positions, region.depth + 1
        paths = [_regions_of(self.graph.ops[position])[depth:][:1] for position in positions]
        last_inside = max([paths.index(path) for path in {*paths} if path], default=0)
        for end in range(len(positions), 0, -1):
            op = self.graph.ops[positions[end - 1]]
            if is_differentiated(op, self.differentiable):
                footprint = self._footprint(op, self._needs(op))
                known = {*footprint.tensors[: sum([index is not None for index in op.inputs])]}
                asked = _asked(footprint)
                if asked and paths[end - 1]:
                    return max(paths.index(paths[end - 1]), last_inside), end
                if asked:
                    runs = op.inplace or op.kind == "custom_function" or not known.issuperset(asked)
                    return max(end - 1 + runs, last_inside), end
        return 0, 0

    def _first_asking(self, floor: int) -> int:
        """Return the number, above `floor`, of the first record that asks a checkpoint for a tensor.

        Its backward, the last to ask, drops the inputs of the checkpoint: nodes before it refer to none.
        """
        for number, record in enumerate(self._records[floor:]):
            if isinstance(record, _Region) or _asked(record.footprint):
                return number
        return 0

    def _take_first_attributes(self, floor: int) -> None:
        """Let nodes above `floor` have the attributes of `ctx` of the first run; drop those of the second."""
        for record in self._records[floor:]:
            if isinstance(record, _Record) and (first := self._kept_by.get(record.position)):
                for place, number in enumerate(record.footprint.saved):
                    if number in first:
                        self.tape.hold(first[number])
                        self.tape.drop(record.saved[place])
                        record.saved[place] = record.numbers[number] = first[number]

    def _record_unrun(self, position: int, op: Op) -> None:
        """Record an operator that does not run again: its node of the first run keeps inputs at most."""
        if not is_differentiated(op, self.differentiable):
            return
        needs = self._needs(op)
        footprint = self._footprint(op, needs)
        storages = [self._storage[index] for index in op.inputs if index is not None]
        numbers = dict(zip(footprint.tensors, storages, strict=False)) | self._kept_by.get(position, {})
        for number in footprint.kept:
            if number not in footprint.tensors:
                self.tape.hold(numbers[number])
        self._records.append(self._recorded(position, op, footprint, needs, numbers))

    # the optimizer ------------------------------------------------------------------------------------------

    def write_update(self, first: bool) -> None:
        """Run the optimizer's step as PyTorch ran it, and free the gradients where `zero_grad` does.

        Parameters without a gradient have neither state nor temporaries.
        """
        for update in self._updates:
            self._step(update, first)
        trained = sorted(self._parameter_gradients)
        self._drop_all([self._parameter_gradients[i] for i in trained if not self._keeps_gradient(i)])

    def _step(self, update: UpdateFootprint, first: bool) -> None:
        """Run the step of an optimizer, the very first or a later one."""
        self.tape.phase, self.tape.owner = 2, 2 * len(self.graph.ops)
        owners = {-1, *self._parameter_gradients}
        numbers: dict[int, int] = {}
        for event in update.first if first else update.later:
            number = abs(event) - 1
            if update.owners[number] not in owners:
                continue
            if event < 0:
                self.tape.drop(numbers.pop(number))
            elif number in update.states:
                storage = self.tape.new(update.sizes[number], STATE, self._state_name(update, number))
                self._own_state(update, number, storage)
            else:
                numbers[number] = self.tape.new(update.sizes[number], TEMPORARY, "optimizer temporary")


def _held(graph: ForwardGraph, releases: Sequence[Sequence[int]]) -> set[int]:
    """Return what Python keeps of a checkpoint beyond the step, and replaces where it runs again."""
    made = {index for op in graph.ops if op.region for index in op.outputs}
    if made and graph.releases is not None:
        made.difference_update(graph.outputs, *releases)
        return made
    return set()


def _again(record: _Record | _Region) -> _Record | _Region:
    """Return a record that a later backward pass runs once more."""
    if isinstance(record, _Record):
        return replace(record, saved=[*record.saved], numbers={**record.numbers})
    return replace(record, inputs=[*record.inputs], stored={**record.stored})


def _asked(footprint: Footprint) -> set[int]:
    """Return the tensors that a node asks for in its backward: attributes of `ctx` are there without it."""
    return {*footprint.saved} - {*footprint.kept}


def _regions_of(op: Op) -> tuple[int, ...]:
    return (*op.outer, op.region)


def _differentiated(op: Op, needs: Sequence[bool]) -> list[int]:
    spec = spec_of(op.kind)
    return [
        i for slot, i in enumerate(op.inputs) if i is not None and needs[slot] and spec.differentiates(slot)
    ]


def _given(op: Op, needs: Sequence[bool], footprint: Footprint) -> list[int]:
    """Return the inputs that get a gradient, one as often as the backward call gives it one."""
    given = _differentiated(op, needs)
    if footprint.repeated:
        inputs = [index for index in op.inputs if index is not None]
        given += [inputs[place] for place in footprint.repeated if inputs[place] in given]
    return given


def _title(op: Op, value: Value | None = None) -> str:
    """Return the label of a storage that an operator allocates."""
    where = op.scope or (value.name if value is not None else op.kind)
    return f"{where} [{op.kind}]"
