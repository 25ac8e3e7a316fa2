"""The executor: a Program's memory on a device, its launches with their arguments set, one call a step."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from torchedge.errors import InputError, KernelCheckError, OpenCLError
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.limits import check_limits, limits_of
from torchedge.lowering.programs import Program
from torchedge.opencl import ClDevice, DeviceContext, compile_kernels, open_context
from torchedge.opencl.contexts import translated, translation
from torchedge.opencl.memory import allocate_buffer, download, fill, upload
from torchedge.opencl.platforms import check_process
from torchedge.runtime.arenas import ArenaMemory, allocate_arena
from torchedge.runtime.tensors import Array, DeviceTensor, allocate_tensor, check_same

KEPT = frozenset({"parameter", "buffer", "state", "constant"})
"""Roles of tensors that stay on the device from step to step."""

SHARED = KEPT - {"constant"}
"""Roles whose names mean the same tensor in every program of a model; constants are numbered in each."""

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
    """Runs a Program on an OpenCL device.

    device: what `torchedge.opencl.choose_device` takes. profile: `timings` tells how long each launch took.
    checks: memory that no launch has written holds NaN, the arena's plan is verified, and kernels built with
    checks are asked after each launch. shared: an executor on the same device whose parameters, buffers and
    states of the same names are used in place of own ones; it gives `profile` too. placed: memory of the
    caller's, by tensor, in place of own memory (see `place`).

    Raises:
        DeviceError: no such device, or one that lacks what the program needs.
        DeviceMemoryError: it has too little memory. KernelBuildError: a kernel does not compile.
        InputError: a shared tensor differs.
    """

    def __init__(
        self,
        program: Program,
        device: ClDevice | str | int | None = None,
        *,
        profile: bool = False,
        checks: bool = False,
        shared: Executor | None = None,
        placed: Mapping[str, Any] | None = None,
    ) -> None:
        self.program = program
        self._placed = dict(placed or {})
        self.context: DeviceContext = open_context(device) if shared is None else shared.context
        self._profile: bool = profile if shared is None else shared._profile
        self._checks = checks
        self._lock = threading.Lock()
        self._events: list[Any] = []
        check_limits(program, limits_of(self.context.device))
        if checks:
            check_arena(program, self.context.device.base_alignment)
        self._queue: Any = shared._queue if shared is not None else self.context.new_queue(profile)
        self._tensors: dict[str, DeviceTensor] = self._residents({} if shared is None else shared._tensors)
        self._arena: ArenaMemory | None = allocate_arena(self.context, program)
        if checks and self._arena.buffer is not None:
            fill(self.context, self._queue, self._arena.buffer, 0xFF)
        self._words = self._check_words()
        self._calls = self._bind()
        self._fed = [self._tensors[name] for name in _names(program, program.inputs, without_hyper=True)]
        self._returned = [self._tensors[name] for name in _names(program, program.outputs)]
        self._awaited = [held for held in self._tensors.values() if held.tensor.role in KEPT] + [
            self._tensors[name] for name in _names(program, program.hyperparameters.values())
        ]

    # what a step is made of --------------------------------------------------------------------------------

    def _residents(self, theirs: Mapping[str, DeviceTensor]) -> dict[str, DeviceTensor]:
        """Return the tensors that outlive a step, by name."""
        found: dict[str, DeviceTensor] = {}
        for tensor in self.program.tensors:
            if tensor.role == "intermediate":
                continue
            if tensor.name in found:
                raise InputError(
                    f"program {self.program.name} has two tensors called {tensor.name}; rename one of them"
                )
            if tensor.name in self._placed:
                found[tensor.name] = DeviceTensor(tensor, self._placed[tensor.name], written=True)
                continue
            if tensor.role in SHARED and tensor.name in theirs:
                check_same(tensor, theirs[tensor.name].tensor)
                found[tensor.name] = theirs[tensor.name]
                continue
            found[tensor.name] = allocate_tensor(self.context, tensor)
            if tensor.role == "state":
                start = np.full(tensor.shape, tensor.fill, tensor.dtype)
                found[tensor.name].write(self.context, self._queue, start)
        return found

    def _check_words(self) -> Any:
        """Return the buffer in which kernels with checks report."""
        words = allocate_buffer(self.context, 4 * _WORDS, "check words")
        fill(self.context, self._queue, words, 0)
        return words

    def _bind(self) -> list[tuple[Any, tuple[int, ...], tuple[int, ...] | None]]:
        """Return (kernel with its arguments set, global size, local size) of each launch."""
        kernels = self.program.kernels
        compiled = compile_kernels(self.context, _sources(self.program))
        calls = []
        for position, launch in enumerate(self.program.launches):
            kernel = compiled.kernel(kernels[launch.kernel].name)
            arguments = [self._memory(index) for index in launch.tensors]
            if kernels[launch.kernel].checks:
                arguments.append(self._words)
            with translated(self._named(position)):
                kernel.set_args(*arguments)
            calls.append((kernel, launch.global_size, launch.local_size))
        return calls

    def _memory(self, index: int) -> Any:
        tensor = self.program.tensors[index]
        if tensor.role == "intermediate":
            return self._arena.memory[index] if self._arena else None
        return self._tensors[tensor.name].memory

    def _named(self, position: int) -> str:
        launch = self.program.launches[position]
        where = f" of {launch.scope}" if launch.scope else ""
        return f"launch {position}, kernel {self.program.kernels[launch.kernel].name}{where}"

    @cached_property
    def _uses(self) -> dict[str, list[tuple[int, int]]]:
        """Launch and argument of every use of a tensor that is no intermediate, by its name."""
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self._tensors}
        for position, launch in enumerate(self.program.launches):
            for argument, index in enumerate(launch.tensors):
                tensor = self.program.tensors[index]
                if tensor.role != "intermediate":
                    found[tensor.name].append((position, argument))
        return found

    # the user's side ---------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, object]) -> None:
        """Write parameters, buffers, states and constants by name; raises what `write` raises."""
        for name, array in tensors.items():
            self.write(name, array)

    def load_packed(self, tensors: Iterable[tuple[str, Array]]) -> None:
        """Write parameters, buffers, states and constants that lie as the device holds them, by name."""
        for name, held in tensors:
            self._find(name).write_packed(self.context, self._queue, held)

    def run(self, *inputs: object) -> list[Array]:
        """Run one step and return its outputs; see `step`."""
        return self.step(*inputs)

    def step(self, *inputs: object, read: bool = True) -> list[Array]:
        """Run one step on `inputs`, in the program's order without hyperparameters.

        read: wait, and return the outputs; without it the launches are only handed to the device, and the
        list is empty.

        Raises:
            InputError: too few or many inputs, a wrong shape or dtype, or a parameter that was never loaded.
            KernelCheckError: with checks, an access outside a tensor. OpenCLError: the driver fails.
        """
        self._check_ready()
        self._check_inputs(inputs)
        with self._lock:
            for tensor, array in zip(self._fed, inputs, strict=True):
                tensor.write(self.context, self._queue, array)
            self._enqueue()
            if not read:
                self._queue.flush()
                return []
            return [tensor.read(self.context, self._queue) for tensor in self._returned]

    def place(self, name: str, memory: Any) -> None:
        """Let a tensor lie in memory of the caller's, laid out as the program says, from the next step on."""
        held = self._find(name)
        if held.memory is memory:
            return
        held.memory, held.written = memory, True
        for position, argument in self._uses[name]:
            with translated(self._named(position)):
                self._calls[position][0].set_arg(argument, memory)

    def launch(self) -> None:
        """Hand one step to the device, on what lies there."""
        self._check_ready()
        with self._lock:
            self._enqueue()
            self._queue.flush()

    def finish(self) -> None:
        """Wait until everything that was launched has run."""
        self._queue.finish()

    def read(self, name: str) -> Array:
        """Return what a parameter, buffer, state, constant, input or output holds."""
        return self._find(name).read(self.context, self._queue)

    def write(self, name: str, array: object) -> None:
        """Write a parameter, buffer, state, constant, input or output."""
        self._find(name).write(self.context, self._queue, array)

    def set(self, name: str, value: float) -> None:
        """Set a hyperparameter, which keeps its value until it is set again."""
        if name not in self.program.hyperparameters:
            known = ", ".join(self.program.hyperparameters) or "none"
            raise InputError(f"{name!r} is no hyperparameter of this program, expected one of: {known}")
        self.write(self.program.tensors[self.program.hyperparameters[name]].name, value)

    def timings(self) -> list[LaunchTime]:
        """Return when each launch of the last step ran; raises InputError without `profile`."""
        if not self._profile:
            raise InputError("this executor measures no times; make it with profile=True")
        with translated("reading times"):
            self._queue.finish()
            times = [(event.profile.start, event.profile.end) for event in self._events]
        found = []
        for position, (start, end) in enumerate(times):
            launch = self.program.launches[position]
            kernel = self.program.kernels[launch.kernel]
            found.append(LaunchTime(position, kernel.name, kernel.kind, launch.scope, start, end))
        return found

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory that tensors hold from step to step: all but the arena."""
        return sum(held.memory.size for held in self._tensors.values())

    @property
    def arena_bytes(self) -> int:
        """Bytes of device memory that intermediates share, as allocated."""
        return self._arena.nbytes if self._arena else 0

    def close(self) -> None:
        """Give the memory back; tensors that another executor shares live on there."""
        self._calls, self._events, self._fed, self._returned, self._awaited = (
            [],
            [],
            [],
            [],
            [],
        )  # kernels first
        self._tensors, self._arena, self._words = {}, None, None

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # inside ------------------------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        enqueue, queue, call = self.context.cl.enqueue_nd_range_kernel, self._queue, None
        self._events = []
        try:
            if not (self._profile or self._checks):
                for call in self._calls:
                    enqueue(queue, *call)
                return
            for position, call in enumerate(self._calls):
                self._events.append(enqueue(queue, *call))
                if self._checks:
                    self._check_launch(position)
        except self.context.cl.Error as error:
            doing = "running a step" if call is None else self._named(self._calls.index(call))
            raise translation(error, doing, device=self.context.device) from error

    def _check_launch(self, position: int) -> None:
        """Wait for a launch; raise KernelCheckError if its kernel has found an access outside a tensor."""
        self._queue.finish()
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

    def _check_inputs(self, inputs: tuple[object, ...]) -> None:
        if len(inputs) != len(self._fed):
            names = ", ".join(held.tensor.name for held in self._fed)
            raise InputError(
                f"program {self.program.name} got {len(inputs)} inputs, expected {len(self._fed)} ({names})"
            )

    def _check_ready(self) -> None:
        check_process()
        self._check_open()
        if self._awaited:
            missing = [held.tensor.name for held in self._awaited if not held.written]
            if missing:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                raise InputError(
                    f"program {self.program.name}: nothing was written to {', '.join(missing[:5])}{more}; "
                    "load parameters with load(), set hyperparameters with set()"
                )
            self._awaited = []

    def _check_open(self) -> None:
        if self._arena is None:
            raise OpenCLError(f"the executor of {self.program.name} is closed; make another one")

    def _find(self, name: str) -> DeviceTensor:
        self._check_open()
        if name not in self._tensors:
            import difflib

            near = difflib.get_close_matches(name, self._tensors, 3)
            hint = f"did you mean {', '.join(near)}?" if near else "intermediates are not kept"
            raise InputError(f"program {self.program.name} keeps no tensor {name!r}; {hint}")
        return self._tensors[name]


def _names(program: Program, indices: Iterable[int], *, without_hyper: bool = False) -> list[str]:
    left_out = set(program.hyperparameters.values()) if without_hyper else set()
    return [program.tensors[index].name for index in indices if index not in left_out]


def _sources(program: Program) -> dict[str, str]:
    found: dict[str, str] = {}
    for kernel in program.kernels:
        if found.setdefault(kernel.name, kernel.source) != kernel.source:
            raise InputError(
                f"program {program.name} has two kernels called {kernel.name}; rename one of them"
            )
    return found
