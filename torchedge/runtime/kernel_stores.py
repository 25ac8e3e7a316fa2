"""Streaming by kernels: loading kernels on the second queue, launches with a slot (FlashMem, section 4.4).

The host fills staging buffers while they are mapped; kernels read them once they are unmapped. On devices
with unified memory both sides share the bytes, and the only copy is the kernel's, into the weight's memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchedge.errors import LoweringError
from torchedge.lowering.kernels.loading import (
    VECTOR_BYTES,
    Destination,
    destination_of,
    loading_kernel,
    loading_size,
    slot_numbers,
    with_slot,
)
from torchedge.lowering.programs import Kernel, StoredTensor
from torchedge.lowering.targets import DeviceClass, device_class
from torchedge.opencl import compile_kernels
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.memory import PAGE_BYTES
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.weight_sources import WeightSource
from torchedge.runtime.weight_stores import PRELOAD, READERS, Bytes, Copy, Read, StreamingStore
from torchedge.streaming.schedules import StreamingSchedule

__all__ = ["KernelStore", "Slot", "StagingBuffers", "slots_of"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A launch that carries part of a weight: the tensor, and the launch's kernel with a slot."""

    tensor: int
    kernel: Kernel


def slots_of(schedule: StreamingSchedule) -> dict[int, Slot]:
    """Return the slots of the launches that carry the largest of their transfers themselves.

    Launches without a transfer that kernels can load have none, nor have kernels of another package's text.
    """
    program = schedule.program
    slots: dict[int, Slot] = {}
    for launch, transfers in enumerate(schedule.transfers):
        loadable = [t for t in transfers if _destination(program.tensors[t.tensor]) is not None]
        if not loadable:
            continue
        tensor = max(loadable, key=lambda transfer: transfer.nbytes).tensor
        kernel = program.kernels[program.launches[launch].kernel]
        with contextlib.suppress(LoweringError):
            slots[launch] = Slot(
                tensor, with_slot(kernel, destination_of(program.tensors[tensor]), program.target)
            )
    return slots


def _destination(tensor: StoredTensor) -> Destination | None:
    try:
        return destination_of(tensor)
    except LoweringError:
        return None


class StagingBuffers:
    """Buffers of one size, mapped while the host fills them, unmapped while kernels read them.

    Raises:
        DeviceMemoryError: no memory is left.
    """

    def __init__(self, context: DeviceContext, nbytes: int, count: int = READERS + 1) -> None:
        cl = context.cl
        self._cl, self._size = cl, nbytes // count // PAGE_BYTES * PAGE_BYTES
        self.nbytes = count * (self._size - PAGE_BYTES)  # a buffer may begin within a page
        self._queue = context.new_queue(False, own=True)
        with translated("staging buffers", nbytes=nbytes, device=context.device):
            flags = cl.mem_flags.READ_ONLY | cl.mem_flags.ALLOC_HOST_PTR
            self.buffers = [cl.Buffer(context.context, flags, self._size) for _ in range(count)]
        self._maps: dict[int, Any] = {}
        self._arrays: dict[int, Bytes] = {}
        self._taken: deque[int] = deque()
        self._next = 0
        self._events: dict[int, Sequence[Any]] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def take(self, nbytes: int) -> int | None:
        """Map the next buffer and return its number, None while it is in use."""
        while self._taken and self._completed(self._taken[0]):
            self.wait_for_oldest()
        if len(self._taken) == len(self.buffers):
            return None
        place = self._next
        self._next = (place + 1) % len(self.buffers)
        self._taken.append(place)
        ways = self._cl.map_flags.WRITE_INVALIDATE_REGION  # nothing is copied back
        with translated("mapping a staging buffer"):
            mapped, _ = self._cl.enqueue_map_buffer(
                self._queue, self.buffers[place], ways, 0, (self._size,), np.uint8
            )
        self._maps[place] = mapped.base
        self._arrays[place] = mapped[-mapped.ctypes.data % PAGE_BYTES :]
        return place

    def view(self, place: int, start: int, stop: int) -> Bytes:
        """Return bytes of a mapped buffer, counted from its first whole page."""
        return self._arrays[place][start:stop]

    def hand_over(self, place: int, queue: Any) -> tuple[Any, int]:
        """Unmap a buffer; return the event and the byte of the buffer at which `view` began."""
        begin = self._size - self._arrays.pop(place).size
        return self._maps.pop(place).release(queue), begin

    def retire(self, place: int, event: Any) -> None:
        """Free a buffer once an event, or several, have completed."""
        with self._changed:
            self._events[place] = event if isinstance(event, list) else [event]
            self._changed.notify_all()

    def _completed(self, place: int) -> bool:
        events = self._events.get(place)
        return events is not None and all(event.command_execution_status <= 0 for event in events)

    def wait_for_oldest(self) -> None:
        """Wait until the oldest buffer is free; a launch that carries it may not be enqueued yet."""
        with self._changed:
            while self._taken[0] not in self._events and not self._stopped:
                self._changed.wait()
            place = self._taken.popleft()
            events = self._events.pop(place, [])
        with translated("loading weights"):
            for event in events:
                event.wait()

    def interrupt(self) -> None:
        """End all waits; `clear` allows new ones."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Free all buffers."""
        for place in list(self._maps):
            self.hand_over(place, self._queue)
        self._taken.clear()
        self._events.clear()
        self._stopped = False

    def release(self) -> None:
        """Give the memory back."""
        self.clear()
        with translated("unmapping staging buffers"):
            self._queue.finish()
        self.buffers = []


@dataclass(frozen=True, slots=True)
class _Staged:
    """A carried copy whose bytes lie in an unmapped buffer. others: events of the other copies from there.

    events: of all copies of its read; the launch's own event goes to `number`.
    """

    copy: Copy
    place: int
    offset: int
    ready: Any
    others: list[Any]
    events: list[Any]
    number: int


class KernelStore(StreamingStore):
    """A StreamingStore that loads by kernels.

    slots: launches that carry a copy themselves; a launch then waits for its bytes. `bind` takes their
    kernels before the first run. All other copies are loading kernels on the second queue, or copy commands
    where bytes lie at no multiple of 16.
    """

    _pool: StagingBuffers

    _joins_launches = False  # a slot carries the bytes of its own launch

    def __init__(
        self,
        schedule: StreamingSchedule,
        source: WeightSource,
        memory: DeviceMemory,
        profile: bool,
        targets: Mapping[int, Any],
        slots: Mapping[int, Slot],
    ) -> None:
        super().__init__(schedule, source, memory, profile, targets)
        device = memory.context.device
        self._class: DeviceClass = device_class(device.kind, device.name, device.vendor, device.platform)
        self._slots = slots
        self._kernels: dict[int, tuple[Any, int]] = {}
        self._staged: dict[int, _Staged] = {}
        self._loading: dict[Destination, Any] = {}
        self._carried: dict[int, Copy] = {}
        for read in self._reads:
            slot = slots.get(read.launch)
            for copy in read.copies:
                if slot is not None and copy.tensor == slot.tensor and self._is_loadable(copy):
                    best = self._carried.setdefault(read.launch, copy)
                    if copy.nbytes > best.nbytes:
                        self._carried[read.launch] = copy

    def _new_pool(self, memory: DeviceMemory) -> StagingBuffers:
        return StagingBuffers(memory.context, self.staging_bytes)

    def bind(self, kernels: Mapping[int, tuple[Any, int]]) -> None:
        """Take the kernel object of each launch with a slot, and the position of the slot's first argument.

        The memory of streamed weights is among the targets by now.
        """
        self._kernels = dict(kernels)
        for launch, slot in self._slots.items():  # a slot without a copy loads nothing
            numbers = slot_numbers(self._program.tensors[slot.tensor], 0, 0, 0)
            self._set(launch, self._pool.buffers[0], numbers)

    def _set(self, launch: int, buffer: Any, numbers: Sequence[int]) -> None:
        kernel, first = self._kernels[launch]
        arguments = [buffer, self.targets[self._slots[launch].tensor], *map(np.uint32, numbers)]
        with translated("setting the arguments of a slot"):
            for place, argument in enumerate(arguments, first):
                kernel.set_arg(place, argument)

    # around launches ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the reader threads."""
        self._staged = {}
        super().begin()

    def before(self, launch: int) -> list[Any] | None:
        """Return the events for which a launch waits; those of the bytes that it carries as well."""
        events = super().before(launch)
        if launch not in self._carried:
            return events
        if launch not in self._staged:
            self._queue.flush()
        with self._changed:
            while launch not in self._staged and self._error is None:
                self._changed.wait()
            if launch not in self._staged:
                self._raise_error()
            staged = self._staged[launch]
        numbers = self._numbers(staged.copy, staged.offset)
        self._set(launch, self._pool.buffers[staged.place], numbers)
        return [*(events or []), staged.ready]

    def after(self, launch: int, event: Any) -> None:
        """Free the buffer of a carried copy once the launch has run."""
        super().after(launch, event)
        staged = self._staged.get(launch)
        if staged is not None:
            self._queue.flush()
            staged.events[staged.number] = event
            self._pool.retire(staged.place, [*staged.others, event])

    def abort(self) -> None:
        """Stop the reader threads and wait for what is enqueued."""
        self._pool.interrupt()
        with translated("ending a run", device=self._context.device):
            self._queue.finish()
        super().abort()

    # the loader --------------------------------------------------------------------------------------------

    def _upload(self, read: Read, at: int) -> list[Any]:
        """Hand the bytes of a read over to kernels, and enqueue those that no launch carries."""
        for copy in read.copies:
            self._checked(copy, at)
        carried = self._carried.get(read.launch) if read.launch != PRELOAD else None
        number = next((k for k, copy in enumerate(read.copies) if copy is carried), None)
        waits = number is None or len(read.copies) > 1
        wait_for = self._awaited(read.launch) if waits else []
        if self._stopped:
            return []
        with translated("loading weights", device=self._context.device):
            ready, begin = self._pool.hand_over(at, self._uploads)
            events = [
                ready if k == number else self._enqueue(copy, at, begin + copy.at, wait_for)
                for k, copy in enumerate(read.copies)
            ]
            self._uploads.flush()
        if number is None:
            self._pool.retire(at, events)
        with self._changed:
            if number is not None:
                others = events[:number] + events[number + 1 :]
                copy = read.copies[number]
                offset = begin + copy.at
                self._staged[read.launch] = _Staged(copy, at, offset, ready, others, events, number)
            self._copied += events
            self._changed.notify_all()
        return events

    def _enqueue(self, copy: Copy, at: int, offset: int, wait_for: list[Any]) -> Any:
        """Enqueue one copy from an unmapped buffer, by a loading kernel where possible."""
        cl, target, buffer = self._context.cl, self.targets[copy.tensor], self._pool.buffers[at]
        if self._is_loadable(copy):
            kernel = self._kernel(copy.tensor)
            kernel.set_args(buffer, target, *map(np.uint32, self._numbers(copy, offset)))
            sizes = loading_size(copy.nbytes, self._class)
            return cl.enqueue_nd_range_kernel(self._uploads, kernel, *sizes, wait_for=wait_for)
        if len(copy.place) == 1:
            return cl.enqueue_copy(
                self._uploads,
                target,
                buffer,
                byte_count=copy.nbytes,
                src_offset=offset,
                dst_offset=copy.place[0],
                wait_for=wait_for,
            )
        return cl.enqueue_copy(
            self._uploads,
            target,
            buffer,
            offset=offset,
            origin=copy.place[:2],
            region=copy.place[2:],
            wait_for=wait_for,
        )

    def _kernel(self, tensor: int) -> Any:
        destination = destination_of(self._program.tensors[tensor])
        if destination not in self._loading:
            kernel = loading_kernel(destination, self._class)
            compiled = compile_kernels(self._context, {kernel.name: kernel.source})
            self._loading[destination] = compiled.kernel(kernel.name)
        return self._loading[destination]

    def _is_loadable(self, copy: Copy) -> bool:
        """Whether kernels can load a copy: vectors of 16 bytes, or whole rows of texels."""
        tensor = self._program.tensors[copy.tensor]
        if _destination(tensor) is None or copy.at % VECTOR_BYTES:
            return False
        if tensor.layout.storage == "buffer":
            return copy.place[0] % VECTOR_BYTES == 0
        return copy.place[0] == 0 and copy.place[2] == tensor.layout.extent(tensor.shape)[0]

    def _numbers(self, copy: Copy, offset: int) -> tuple[int, ...]:
        tensor = self._program.tensors[copy.tensor]
        start = copy.place[0]
        if tensor.layout.storage != "buffer":
            start = copy.place[1] * tensor.layout.unit_bytes(tensor.shape, tensor.dtype)
        return slot_numbers(tensor, start, start + copy.nbytes, offset)
