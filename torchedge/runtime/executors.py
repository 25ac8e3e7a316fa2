"""The executor: a Program's memory on a device, its launches with their arguments set, one call a step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchedge.arrays import Array
from torchedge.errors import (
    DivisionError,
    IndexRangeError,
    InputError,
    KernelCheckError,
    OpenCLError,
    check_rate,
    did_you_mean,
)
from torchedge.graphs import RESIDENT_ROLES, SHARED_ROLES
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.arenas import common_arena, total_bytes
from torchedge.lowering.kernels.loading import LoadingWay
from torchedge.lowering.kernels.offsets import UNIT_BYTES, OffsetKernel, offset_kernels
from torchedge.lowering.limits import check_limits
from torchedge.lowering.programs import Arena, Program, StoredTensor
from torchedge.lowering.targets import limits_of
from torchedge.notices import noticed
from torchedge.opencl import ClDevice, DeviceContext, compile_kernels, open_context
from torchedge.opencl.build_processes import TrialRun
from torchedge.opencl.compiling import CompiledKernels
from torchedge.opencl.contexts import record_launches, translated, translation
from torchedge.opencl.memory import download, upload
from torchedge.opencl.memory_gauges import admit, memory_gauge
from torchedge.opencl.sharing import is_fork, kept_in_forks, serialised
from torchedge.opencl.waiting import wait
from torchedge.runtime.kernel_stores import BoundSlot, KernelStore
from torchedge.runtime.measured_runs import DriverMemory, MeasuredRun, measured_run
from torchedge.runtime.memory import ArenaMemory, DeviceMemory, DeviceTensor, check_same
from torchedge.runtime.weight_sources import WeightSource
from torchedge.runtime.weight_stores import PRELOADED, StreamingStore, StreamTurns, WeightStore, WeightStream
from torchedge.storage.locks import cached_property
from torchedge.streaming.commands import Slot, resolve, slots_of
from torchedge.streaming.schedules import Loads, StreamingSchedule

_WORDS = 4


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """When one launch of the last step ran, by the device's own clock in nanoseconds."""

    launch: int
    kernel: str
    kind: str
    scope: str
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        """How long it ran."""
        return self.end_ns - self.start_ns


class Executor:
    """Runs a Program on an OpenCL device, with all weights there or streaming them.

    program: a Program, whose weights `load` writes; or a StreamingSchedule with a `source` of its weights: a
    `FileSource(path, {name: (offset, bytes)})`, or an `ArraysSource({name: packed array})`. The executor
    loads the weights that the schedule preloads at once and the others in every run, by the schedule's
    `loads`, or by those that follow from the places of the source, and closes the source.
    loading: how streamed weights get into their memory, by "copy" commands or "kernel"s on a second queue, or
    where a launch loads some beside its work by that launch's "slot" (`streaming.capacities.loading_way`).

    device: as in `torchedge.opencl.choose_device`. profile: measure the time of each launch (`timings`).
    checks: memory that no launch has written holds NaN, the arena's plan is verified, and the reports of
    kernels made with checks are read after each launch. shared: executors on the same device whose tensors of
    the same names are used instead of own ones, the first one's first; `profile` is the same as there.
    Where the first one streams, its staging memory is used, and weights that are there are not loaded again.
    shared_roles: roles of those tensors. in_turn: arenas of all programs, this one's among them, that run one
    at a time in the memory that the first of `shared` allocates. placed: memory by tensor name to use instead
    of own memory (see `place`). whole_arena: launches get the arena as one buffer with the offsets of its
    tensors, not parts of it; None: where weights are not streamed and the device is no processor.

    Threads may share an executor and those that share its tensors: their calls run one after the other.

    Raises:
        DeviceError: no such device, or a limit of the device is exceeded.
        DeviceMemoryError: the device has too little memory. KernelBuildError: a kernel does not compile.
        InputError: a shared tensor differs, or the source lacks a weight. ProfileError: a weight cannot be
        read.
    """

    _store: WeightStore = PRELOADED
    _arena: ArenaMemory | None = None
    _words: Any = None
    _tensors: dict[str, DeviceTensor]
    _theirs: dict[str, DeviceTensor]

    def __init__(
        self,
        program: Program | StreamingSchedule,
        device: ClDevice | str | int | None = None,
        *,
        source: WeightSource | None = None,
        loading: LoadingWay = "copy",
        profile: bool = False,
        checks: bool = False,
        shared: Executor | Sequence[Executor] | None = None,
        shared_roles: Collection[str] = SHARED_ROLES,
        in_turn: Sequence[Arena] = (),
        placed: Mapping[str, Any] | None = None,
        whole_arena: bool | None = None,
    ) -> None:
        schedule = program if isinstance(program, StreamingSchedule) else None
        self.program = program if isinstance(program, Program) else program.program
        if (schedule is None) != (source is None):
            what = "a source without a schedule" if schedule is None else "a schedule without a source"
            raise InputError(
                f"the executor got {what}; pass a StreamingSchedule and a source= of its weights"
            )
        self._placed = dict(placed or {})
        owners = (shared,) if isinstance(shared, Executor) else tuple(shared or ())
        self._theirs = {name: held for each in reversed(owners) for name, held in each._tensors.items()}
        self._shared_roles = shared_roles
        owner = owners[0] if owners else None
        self._common = common_arena(in_turn) if in_turn else None
        self._profile: bool = profile if owner is None else owner._profile
        self._checks = checks
        self._lock: Any = threading.RLock() if owner is None else owner._lock
        self._events: list[Any] = []
        kept_in_forks.add(self)
        try:
            self._open(schedule, source, device, owner, loading, whole_arena)
        except BaseException:
            self._release()
            if source is not None:
                source.close()
            raise

    def _open(
        self,
        schedule: StreamingSchedule | None,
        source: WeightSource | None,
        device: ClDevice | str | int | None,
        owner: Executor | None,
        loading: LoadingWay,
        whole_arena: bool | None,
    ) -> None:
        """Compile the kernels, allocate, and load what a schedule preloads."""
        self.context: DeviceContext = open_context(device) if owner is None else owner.context
        staging = 0 if schedule is None else schedule.staging_bytes
        check_limits(self.program, limits_of(self.context.device), staging)
        if self._checks:
            streamed = {} if schedule is None else schedule.streamed
            check_arena(self.program, self.context.device.base_alignment, streamed)
        theirs = owner._arena if owner and self._common else None
        turns = owner._store.turns if owner and isinstance(owner._store, StreamingStore) else None
        arena = 0 if theirs else total_bytes(self._common or self.program.arena)
        self._admit(0 if turns else staging, arena)
        queue = None if owner else self.context.new_queue(self._profile)
        self.memory: DeviceMemory = owner.memory if owner else DeviceMemory(self.context, queue)
        self._queue: Any = self.memory.queue
        loads, slots = None, dict[int, Slot]()
        if schedule is not None and source is not None:
            schedule = self._without_loaded(schedule, source.places)
            loads = schedule.loads if loading == "copy" else None
            loads = loads or resolve(schedule, source.places, by_kernels=loading != "copy")
            slots = slots_of(self.program, loads) if loading == "slot" else {}
        kernels = self._kernels(schedule, whole_arena)
        trials = _trials(self.program, kernels) if schedule is None else []
        with noticed(f"building the kernels of {self.program.name}"):
            compiled = compile_kernels(self.context, _sources(self.program, kernels, slots), trials=trials)
        self._gauge = memory_gauge(self.context) if self._profile and schedule is not None else None
        self._before_bytes = 0 if self._gauge is None else self._gauge.read()
        self._tensors = self._residents()
        in_parts = [launch for launch in self.program.launches if not kernels[launch.kernel].moved]
        parts = {index for launch in in_parts for index in launch.tensors}
        self._arena = self.memory.allocate_arena(
            self.program, parts, common=self._common, owner=theirs, poisoned=self._checks
        )
        if any(kernel.checks for kernel in self.program.kernels):
            self._words = self.memory.allocate_bytes(4 * _WORDS, "check words")
        self._calls = self._bind(compiled, kernels, slots)
        if schedule is not None and source is not None and loads is not None:
            self._preload(schedule, source, loads, loading, slots, turns)
        names, hyper = [t.name for t in self.program.tensors], self.program.hyperparameters.values()
        self._fed = [self._tensors[names[i]] for i in self.program.inputs if i not in hyper]
        self._returned = [self._tensors[names[i]] for i in self.program.outputs]
        flags = [t for t in self._tensors.values() if t.tensor.role == "output"]
        self._checked = [t for t in flags if t.tensor.indices or t.tensor.divisor]
        self._last_check = max(self._writing({t.tensor.name for t in self._checked}), default=-1)
        self._awaited = [t for t in self._tensors.values() if t.tensor.role in RESIDENT_ROLES] + [
            self._tensors[names[i]] for i in hyper
        ]

    # memory and launches -----------------------------------------------------------------------------------

    def _admit(self, staging: int, shared: int) -> None:
        """Raise DeviceMemoryError where the device or the host has too little memory for the program."""
        own = [
            tensor
            for tensor in self.program.residents
            if tensor.name not in self._placed
            and not (tensor.role in self._shared_roles and tensor.name in self._theirs)
        ]
        needed = sum(tensor.nbytes for tensor in own) + shared + staging
        # Beside the device's memory: outputs as arrays, and one tensor at a time on its way there.
        outputs = sum(self.program.tensors[index].nbytes for index in self.program.outputs)
        beside = outputs + max((tensor.nbytes for tensor in own), default=0)
        admit(self.context.device, needed, beside, f"program {self.program.name}")

    def _without_loaded(self, schedule: StreamingSchedule, places: Collection[str]) -> StreamingSchedule:
        """Return a schedule that preloads only what no other executor has loaded.

        places: names of what the source has; constants that it lacks are written as without a schedule.
        """
        tensors = schedule.program.tensors
        theirs = {name for name, held in self._theirs.items() if held.written}
        mine = [
            index
            for index in schedule.preload
            if not (tensors[index].role in self._shared_roles and tensors[index].name in theirs)
            and not (tensors[index].role == "constant" and tensors[index].name not in places)
        ]
        if len(mine) == len(schedule.preload):
            return schedule
        return replace(schedule, preload=tuple(mine), loads=None)

    def _preload(
        self,
        schedule: StreamingSchedule,
        source: WeightSource,
        loads: Loads,
        loading: LoadingWay,
        slots: Mapping[int, Slot],
        turns: StreamTurns | None,
    ) -> None:
        """Make the store of a schedule, and load what stays from run to run."""
        targets = {index: self._memory_of(index) for index in (*schedule.preload, *schedule.streamed)}
        stream = WeightStream(schedule, source, targets, self.memory, self._profile, turns)
        bound = {}
        for position, slot in slots.items():
            launch = self.program.launches[position]
            own = len(launch.tensors) + self.program.kernels[launch.kernel].checks + len(launch.sizes)
            bound[position] = BoundSlot(slot.copy, self._calls[position][0], own)
        store = StreamingStore(stream, loads) if loading == "copy" else KernelStore(stream, loads, bound)
        self._store = store
        store.preload()
        for index in schedule.preload:
            self._tensors[schedule.program.tensors[index].name].written = True

    def _residents(self) -> dict[str, DeviceTensor]:
        """Return all tensors outside the arena, by name."""
        tensors: dict[str, DeviceTensor] = {}
        for tensor in self.program.residents:
            if tensor.name in tensors:
                raise InputError(
                    f"program {self.program.name} has two tensors called {tensor.name}; rename one of them"
                )
            if tensor.name in self._placed:
                tensors[tensor.name] = DeviceTensor(tensor, self._placed[tensor.name], written=True)
            elif tensor.role in self._shared_roles and tensor.name in self._theirs:
                check_same(tensor, self._theirs[tensor.name].tensor)
                tensors[tensor.name] = self._theirs[tensor.name]
            else:
                own = tensors[tensor.name] = DeviceTensor(tensor, self.memory.allocate(tensor))
                if tensor.role == "state":
                    self.memory.write(own, np.full(tensor.shape, tensor.fill, tensor.dtype))
        return tensors

    def _kernels(self, schedule: StreamingSchedule | None, whole_arena: bool | None) -> list[OffsetKernel]:
        """Return the form of each kernel that runs: with the offsets of its tensors in the arena, or without.

        Without where copies run beside launches: a buffer and its parts may not be used at the same time.
        """
        if whole_arena is None:
            whole_arena = self.context.device.kind != "cpu"
        if whole_arena and schedule is None:
            return offset_kernels(self.program, self.context.handle.max_parameter_size)
        return [OffsetKernel(kernel, ()) for kernel in self.program.kernels]

    def _bind(
        self, compiled: CompiledKernels, kernels: Sequence[OffsetKernel], slots: Mapping[int, Slot]
    ) -> list[tuple[Any, tuple[int, ...], tuple[int, ...] | None]]:
        """Return (kernel with its arguments set, global size, local size) of each launch.

        slots: of launches that run with their slot.
        """
        assert self._arena is not None
        arena, calls = self.program.arena, []
        for position, launch in enumerate(self.program.launches):
            form = kernels[launch.kernel]
            chosen = slots[position].kernel if position in slots else form.kernel
            kernel = compiled.kernel(chosen.name)
            inside = {
                place: arena.place(launch.tensors[place])
                for place in form.moved
                if launch.tensors[place] in arena.offset
            }
            arguments: list[Any] = [
                self._arena.buffers[inside[place][0]] if place in inside else self._memory_of(index)
                for place, index in enumerate(launch.tensors)
            ]
            if form.kernel.checks:
                arguments.append(self._words)
            arguments += map(np.int32, launch.sizes)
            arguments += [np.uint32(inside.get(place, (0, 0))[1] // UNIT_BYTES) for place in form.moved]
            with translated(self._named(position), device=self.context.device):
                for place, argument in enumerate(arguments):
                    kernel.set_arg(place, argument)
            calls.append((kernel, launch.global_size, launch.local_size))
        return calls

    def _memory_of(self, index: int) -> Any:
        if self._arena is not None and index in self._arena.memory:
            return self._arena.memory[index]
        return self._tensors[self.program.tensors[index].name].memory

    def _named(self, position: int) -> str:
        launch = self.program.launches[position]
        where = f" of {launch.scope}" if launch.scope else ""
        return f"launch {position}, kernel {self.program.kernels[launch.kernel].name}{where}"

    @cached_property
    def _uses(self) -> dict[str, list[tuple[int, int]]]:
        """Launch and argument of every use of a tensor that is no intermediate, by its name."""
        uses: dict[str, list[tuple[int, int]]] = {name: [] for name in self._tensors}
        for position, launch in enumerate(self.program.launches):
            for argument, index in enumerate(launch.tensors):
                name = self.program.tensors[index].name
                if name in uses and not self.program.arena.holds(index):
                    uses[name].append((position, argument))
        return uses

    # the user's side ---------------------------------------------------------------------------------------

    @serialised
    def load(self, tensors: Mapping[str, object]) -> None:
        """Write parameters, buffers, states and constants by name; raises what `write` raises."""
        for name, array in tensors.items():
            self.write(name, array)

    @serialised
    def load_packed(self, tensors: Iterable[tuple[str, Array]]) -> None:
        """Write parameters, buffers, states and constants that are packed by their layouts, by name."""
        for name, packed in tensors:
            self.memory.write_packed(self._find(name), packed)

    @serialised
    def run(self, *inputs: object) -> list[Array]:
        """Run the program on `inputs`, in its order without hyperparameters, and return its outputs.

        Raises:
            InputError: too few or many inputs, a wrong shape or dtype, or a parameter that was never loaded.
            IndexRangeError: an input holds an index out of range, or the step computed one.
            DivisionError: the step has divided whole numbers by zero.
            KernelCheckError: with checks, an access outside a tensor. OpenCLError: the driver fails.
        """
        self._check_ready()
        if len(inputs) != len(self._fed):
            names = ", ".join(t.tensor.name for t in self._fed)
            raise InputError(
                f"program {self.program.name} got {len(inputs)} inputs, expected {len(self._fed)} ({names})"
            )
        for tensor, array in zip(self._fed, inputs, strict=True):
            self.memory.write(tensor, array, later=True)
        self._enqueue()
        return self.memory.read_all(self._returned)

    @serialised
    def place(self, name: str, memory: Any) -> None:
        """Use other memory for a tensor from the next step on; its content is in the tensor's layout."""
        tensor = self._find(name)
        if tensor.memory is memory:
            return
        tensor.memory, tensor.written = memory, True
        for position, argument in self._uses[name]:
            with translated(self._named(position), device=self.context.device):
                self._calls[position][0].set_arg(argument, memory)

    @serialised
    def launch(self) -> None:
        """Enqueue one step on the inputs that are on the device; raises as `run` does."""
        self._check_ready()
        self._enqueue()
        self._queue.flush()

    @serialised
    def run_observed(self, observe: Callable[[int, int, Array], object]) -> None:
        """Run a step on the inputs that are on the device, and pass on what each launch writes.

        observe: gets launch, tensor (an index of the program's list) and array. Needs whole_arena=False.
        """
        self._check_ready()
        for position, call in enumerate(self._calls):
            launch = self.program.launches[position]
            with translated(self._named(position), device=self.context.device):
                self.context.cl.enqueue_nd_range_kernel(self._queue, *call)
            for index, access in zip(launch.tensors, self.program.kernels[launch.kernel].access, strict=True):
                if access != "read":
                    written = DeviceTensor(self.program.tensors[index], self._memory_of(index))
                    observe(position, index, self.memory.read(written))

    @serialised
    def finish(self) -> None:
        """Wait until everything that was launched has run."""
        wait(self.context, self._queue)

    @serialised
    def read(self, name: str) -> Array:
        """Return the content of a parameter, buffer, state, constant, input or output."""
        return self.memory.read(self._find(name))

    @serialised
    def write(self, name: str, array: object) -> None:
        """Write a parameter, buffer, state, constant, input or output."""
        self.memory.write(self._find(name), array)

    @serialised
    def set(self, name: str, value: float) -> None:
        """Set a hyperparameter, which keeps its value until it is set again.

        Raises InputError for a name that the program does not have, and for a value that is no learning rate.
        """
        if name not in self.program.hyperparameters:
            known = ", ".join(self.program.hyperparameters) or "none"
            raise InputError(f"{name!r} is no hyperparameter of this program, expected one of: {known}")
        number = self.program.hyperparameters[name]
        self.write(self.program.tensors[number].name, check_rate(name, value))

    @serialised
    def timings(self) -> list[LaunchTime]:
        """Return when each launch of the last step ran; raises InputError without `profile`."""
        if not self._profile:
            raise InputError("this executor measures no times; create it with profile=True")
        with translated("reading times", device=self.context.device):
            wait(self.context, self._queue)
            times = [(event.profile.start, event.profile.end) for event in self._events]
        launches = []
        for position, (start, end) in enumerate(times):
            launch = self.program.launches[position]
            kernel = self.program.kernels[launch.kernel]
            launches.append(LaunchTime(position, kernel.name, kernel.kind, launch.scope, start, end))
        return launches

    @serialised
    def measured(self) -> MeasuredRun:
        """Return times and memory of the initialisation and the last run of a streaming executor.

        Raises InputError: the executor does not stream, was created without profile=True, or has not run.
        """
        if not isinstance(self._store, StreamingStore) or not self._profile or not self._events:
            raise InputError(
                "there is no measured run; create the executor of a StreamingSchedule with profile=True, and "
                "run it"
            )
        store, times = self._store, [(time.start_ns, time.end_ns) for time in self.timings()]
        driver = None
        if self._gauge is not None:
            driver = DriverMemory(self._gauge.source, self._before_bytes, self._gauge.read())
        return measured_run(
            store.schedule,
            self.context.device.name,
            store.preload_log,
            store.log,
            times,
            self.allocated,
            driver,
        )

    @property
    def allocated(self) -> dict[str, int]:
        """Bytes of device memory by kind, as allocated: "buffers", "images" and "staging"."""
        arena = [] if self._arena is None else [*self._arena.buffers, *self._arena.images]
        own = [*[tensor.memory for tensor in self._tensors.values()], *arena, self._words]
        sizes = {"buffers": 0, "images": 0, "staging": self._store.staging_bytes}
        for memory in own:
            if memory is not None:
                image = isinstance(memory, self.context.cl.Image)
                sizes["images" if image else "buffers"] += memory.size
        return sizes

    @property
    def schedule(self) -> StreamingSchedule | None:
        """The schedule by which weights are streamed, if any."""
        return self._store.schedule if isinstance(self._store, StreamingStore) else None

    @property
    def own_bytes(self) -> int:
        """Bytes of device memory that it allocated, staging memory included."""
        theirs = {id(held) for held in self._theirs.values()}
        sizes = [int(held.memory.size) for held in self._tensors.values() if id(held) not in theirs]
        store = self._store
        staging = store.staging_bytes if isinstance(store, StreamingStore) and store.owns else 0
        return sum(sizes) + staging + (self.arena_bytes if self.owns_arena else 0)

    @property
    def owns_arena(self) -> bool:
        """Whether its arena is no other executor's."""
        return self._arena is not None and self._arena.owner is None

    @property
    def held(self) -> list[StoredTensor]:
        """The tensors outside the arena."""
        return [held.tensor for held in self._tensors.values()]

    def missing(self) -> list[str]:
        """Return the names of tensors that were never loaded."""
        return [held.tensor.name for held in self._awaited if not held.written]

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory of all tensors but the intermediates."""
        return sum(tensor.memory.size for tensor in self._tensors.values())

    @property
    def arena_bytes(self) -> int:
        """Bytes of device memory that intermediates share, as allocated."""
        return self._arena.nbytes if self._arena else 0

    @serialised
    def close(self) -> None:
        """Free the memory; tensors that another executor shares stay."""
        self._release()

    def _release(self) -> None:
        self._store.close()
        self._store = PRELOADED
        self._calls, self._events = [], []  # kernels first
        self._fed, self._returned, self._awaited, self._checked = [], [], [], []
        self._tensors, self._theirs = {}, {}
        self._arena = self._words = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not (sys.is_finalizing() or is_fork()):  # the end of the process frees everything
            self._release()

    # inside ------------------------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        enqueue, queue, store = self.context.cl.enqueue_nd_range_kernel, self._queue, self._store
        before, after, recorded = store.before, store.after, self._profile or self._checks
        self._events, position = [], -1
        record_launches(self.context, queue, self._events, self._named)
        try:
            if store is PRELOADED and not recorded:  # nothing but the launches
                for call in self._calls:
                    position += 1
                    self._events.append(enqueue(queue, *call))
                    if position == self._last_check:
                        self._check_computed()
                return
            store.begin()
            for position, call in enumerate(self._calls):
                event = enqueue(queue, *call, None, before(position))
                self._events.append(event)
                after(position, event)
                if self._checks:
                    self._check_launch(position)
                if position == self._last_check:
                    self._check_computed()
            store.end()
        except BaseException as error:
            self._store.abort()
            if self._store is not PRELOADED:  # wait for what the step has enqueued
                with translated("ending a step", device=self.context.device):
                    wait(self.context, self._queue)
            if not isinstance(error, self.context.cl.Error):
                raise
            doing, nbytes = "running a step", 0
            if position >= 0:
                launch = self.program.launches[position]
                doing = f"{self._named(position)},"
                nbytes = sum(self.program.tensors[index].nbytes for index in {*launch.tensors})
            raise translation(error, doing, nbytes=nbytes, device=self.context.device) from error

    def _check_launch(self, position: int) -> None:
        """Wait for a launch; raise KernelCheckError if its kernel has found an access outside a tensor."""
        wait(self.context, self._queue)
        launch = self.program.launches[position]
        if not self.program.kernels[launch.kernel].checks:
            return
        words = np.zeros(_WORDS, np.int32)
        download(self.context, self._queue, self._words, words)
        code, index, low, high = map(int, words)
        if code:
            upload(self.context, self._queue, self._words, np.zeros(_WORDS, np.int32))
            names = [self.program.tensors[i].name for i in launch.tensors]
            tensor = names[code - 1] if 0 < code <= len(names) else f"access {code}"
            raise KernelCheckError(
                f"{self._named(position)}: {tensor} is accessed at {index}, expected {low} to {high - 1}; "
                "the lowering of this operator is wrong: report it with this message"
            )

    def _check_computed(self) -> None:
        """Raise IndexRangeError or DivisionError where a flag of the step is set.

        The launches that update weights come later, and do not run.
        """
        for flag in self._checked:
            if self.memory.read(flag):
                name = flag.tensor.name.lstrip("~")
                state = (
                    "load the weights again: this step has updated some of them"
                    if self.updates_before_checks
                    else "this step has updated nothing"
                )
                if flag.tensor.divisor:
                    raise DivisionError(
                        f"program {self.program.name}: ZeroDivisionError: whole numbers are divided by zero "
                        f"at {name}; expected divisors other than 0: correct the data or the model; {state}"
                    )
                raise IndexRangeError(
                    f"program {self.program.name}: {name}, computed by the model, holds an index out of "
                    f"range; expected indices {flag.tensor.indices}: correct the data or the model; {state}"
                )

    @cached_property
    def updates_before_checks(self) -> bool:
        """Whether a step has updated parameters or the optimizer's state when a check of it raises.

        Programs that are lowered now compute what is checked first, unless it depends on an update.
        """
        trained = {
            t.name
            for t in self.program.tensors
            if t.role == "parameter" or (t.role == "state" and t.dtype.startswith("float"))
        }
        return any(position <= self._last_check for position in self._writing(trained))

    def _writing(self, names: Collection[str]) -> list[int]:
        """Return the launches that write to tensors."""
        program = self.program
        return [
            position
            for position, launch in enumerate(program.launches)
            for index, access in zip(launch.tensors, program.kernels[launch.kernel].access, strict=True)
            if access != "read" and program.tensors[index].name in names
        ]

    def _check_ready(self) -> None:
        self._check_open()
        if self._awaited:
            missing = self.missing()
            if missing:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                raise InputError(
                    f"program {self.program.name}: nothing was written to {', '.join(missing[:5])}{more}; "
                    "load parameters with load(), set hyperparameters with set()"
                )
            self._awaited = []

    def _check_open(self) -> None:
        if self._arena is None:
            raise OpenCLError(f"the executor of {self.program.name} is closed; create another one")

    def _find(self, name: str) -> DeviceTensor:
        self._check_open()
        if name not in self._tensors:
            hint = did_you_mean(name, self._tensors, "what lies in the arena is for launches only", most=3)
            raise InputError(f"program {self.program.name} has no tensor {name!r}; {hint}")
        return self._tensors[name]


def _sources(program: Program, kernels: Sequence[OffsetKernel], slots: Mapping[int, Slot]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for kernel in (*[form.kernel for form in kernels], *[slot.kernel for slot in slots.values()]):
        if sources.setdefault(kernel.name, kernel.source) != kernel.source:
            raise InputError(
                f"program {program.name} has two kernels called {kernel.name}; rename one of them"
            )
    return sources


def _trials(program: Program, kernels: Sequence[OffsetKernel]) -> list[TrialRun]:
    """Return a run of each kernel and work-group whose tensors all lie in buffers."""
    trials: dict[tuple[str, tuple[int, ...]], TrialRun] = {}
    for launch in program.launches:
        form, tensors = kernels[launch.kernel], [program.tensors[index] for index in launch.tensors]
        if launch.local_size is not None and all(t.layout.storage == "buffer" for t in tensors):
            buffers = [max(1, t.nbytes) for t in tensors] + [4 * _WORDS] * form.kernel.checks
            numbers = (*launch.sizes, *[0 for _ in form.moved])
            run = TrialRun(form.kernel.name, launch.local_size, tuple(buffers), numbers)
            trials.setdefault((run.kernel, run.local_size), run)
    return list(trials.values())


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time of all launches of one kernel in the last run."""

    kernel: str
    kind: str
    launches: int
    ms: float
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program: its kernels and launches, its memory, and its times where measured.

    arena_bytes: memory of the intermediates. resident_bytes: all other memory, part of which other programs
    may share. times: of the last run, the longest first; empty unless profiled. notes: such as which
    activations are computed again.
    """

    name: str
    device: str
    kernels: int
    launches: int
    arena_bytes: int
    resident_bytes: int
    times: tuple[KernelTime, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ms(self) -> float:
        """Device time of the last run's launches; 0 unless profiled."""
        return sum(time.ms for time in self.times)

    def __str__(self) -> str:
        head = (
            f"{self.name} on {self.device}: {self.kernels} kernels, {self.launches} launches, arena "
            f"{self.arena_bytes / 2**20:.1f} MiB, resident {self.resident_bytes / 2**20:.1f} MiB"
            f"{''.join(f'; {note}' for note in self.notes)}"
        )
        if not self.times:
            return head
        lines = [f"{head}, {self.ms:.2f} ms in the last run"]
        for time in self.times[:12]:
            where = ", ".join(time.scopes[:2]) + (", ..." if len(time.scopes) > 2 else "")
            lines.append(f"  {time.ms:9.3f} ms  {time.launches:4d} x {time.kernel}  {where}".rstrip())
        if len(self.times) > 12:
            rest = sum(time.ms for time in self.times[12:])
            lines.append(f"  {rest:9.3f} ms  in {len(self.times) - 12} other kernels")
        return "\n".join(lines)


def report_on(executor: Executor, *, profiled: bool) -> ProgramReport:
    """Return the report of an executor; `profiled`: it was made with profile=True and has run."""
    program = executor.program
    return ProgramReport(
        program.name,
        executor.context.device.name,
        len(program.kernels),
        len(program.launches),
        executor.arena_bytes,
        executor.resident_bytes,
        kernel_times(executor.timings()) if profiled else (),
        program.notes,
    )


def kernel_times(timings: Iterable[LaunchTime]) -> tuple[KernelTime, ...]:
    """Return the kernels of a run by their time, longest first."""
    runs: dict[str, list[LaunchTime]] = {}
    for time in timings:
        runs.setdefault(time.kernel, []).append(time)
    times = [
        KernelTime(
            name,
            own[0].kind,
            len(own),
            sum(time.ns for time in own) / 1e6,
            tuple(dict.fromkeys(time.scope for time in own if time.scope)),
        )
        for name, own in runs.items()
    ]
    return tuple(sorted(times, key=lambda time: -time.ms))
