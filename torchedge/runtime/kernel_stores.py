"""Streaming by kernels: loading kernels on the second queue, launches with a slot (FlashMem, section 4.4).

The host fills staging buffers while they are mapped; kernels read them once they are unmapped. On devices
with unified memory both sides share the bytes, and the only copy is the kernel's, into the weight's memory.
"""

from __future__ import annotations

import contextlib
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
from torchedge.opencl.memory import PAGE_BYTES, counted_buffer
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.staging import READERS, Bytes, Place
from torchedge.runtime.weight_reads import Copy
from torchedge.runtime.weight_stores import StreamingStore, WeightStream
from torchedge.streaming.schedules import StreamingSchedule


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


@dataclass(frozen=True, slots=True, eq=False)
class BoundSlot:
    """A launch's slot: the tensor, pyopencl's kernel, and the position of the slot's first argument."""

    tensor: int
    kernel: Any
    first: int


class StagingBuffers:
    """Buffers of one size, mapped while the host fills them, unmapped while kernels read them.

    Raises:
        DeviceMemoryError: no memory is left.
    """

    def __init__(self, context: DeviceContext, nbytes: int, count: int = READERS + 1) -> None:
        cl = context.cl
        self._cl, self._size = cl, nbytes // count // PAGE_BYTES * PAGE_BYTES
        self.nbytes = count * (self._size - PAGE_BYTES)  # a buffer may begin within a page
        self._queue, self._device = context.new_queue(False, own=True), context.device
        with translated("staging buffers", nbytes=nbytes, device=context.device):
            flags = cl.mem_flags.READ_ONLY | cl.mem_flags.ALLOC_HOST_PTR
            self.buffers = [counted_buffer(context, flags, self._size) for _ in range(count)]
        self._maps: dict[int, Any] = {}
        self._arrays: dict[int, Bytes] = {}

    def places(self, sizes: Sequence[int]) -> tuple[Place, ...]:
        """Take one buffer after the other."""
        count = len(self.buffers)
        return tuple([Place(number % count, max(0, number + 1 - count)) for number in range(len(sizes))])

    def open(self, at: int, events: Sequence[Any]) -> None:
        """Wait until a buffer is free, and map it."""
        ways = self._cl.map_flags.WRITE_INVALIDATE_REGION  # nothing is copied back
        with translated("mapping a staging buffer", device=self._device):
            for event in events:
                event.wait()
            mapped, _ = self._cl.enqueue_map_buffer(
                self._queue, self.buffers[at], ways, 0, (self._size,), np.uint8
            )
        self._maps[at] = mapped.base
        self._arrays[at] = mapped[-mapped.ctypes.data % PAGE_BYTES :]

    def view(self, at: int, start: int, stop: int) -> Bytes:
        """Return bytes of a mapped buffer, counted from its first whole page."""
        return self._arrays[at][start:stop]

    def hand_over(self, at: int, queue: Any) -> tuple[Any, int]:
        """Unmap a buffer; return the event and the byte of the buffer at which `view` began."""
        begin = self._size - self._arrays.pop(at).size
        return self._maps.pop(at).release(queue), begin

    def clear(self) -> None:
        """Unmap all buffers."""
        for at in list(self._maps):
            self.hand_over(at, self._queue)

    def release(self) -> None:
        """Give the memory back."""
        self.clear()
        with translated("unmapping staging buffers", device=self._device):
            self._queue.finish()
        self.buffers = []


class KernelStore(StreamingStore):
    """A StreamingStore that loads by kernels.

    slots: of the launches that carry a copy themselves, which wait for its bytes. All other copies are
    loading kernels on the second queue, or copy commands where bytes lie at no multiple of 16.
    """

    _pool: StagingBuffers

    _joins_launches = False  # a slot carries the bytes of its own launch

    def __init__(self, stream: WeightStream, slots: Mapping[int, BoundSlot]) -> None:
        super().__init__(stream)
        device = stream.memory.context.device
        self._class: DeviceClass = device_class(device.kind, device.name, device.vendor, device.platform)
        self._slots = slots
        for slot in slots.values():  # one without a copy loads nothing
            self._set(slot, self._pool.buffers[0], slot_numbers(self._program.tensors[slot.tensor], 0, 0, 0))
        self._loading: dict[Destination, Any] = {}
        self._carried = self._largest()
        self._carrying = set(self._carried.values())
        self._ready: Any = None  # the bytes of the present read are unmapped
        self._begin_at = 0  # byte of a buffer at which they begin
        self._staged: dict[int, tuple[int, Any]] = {}  # (byte, event) of a carried copy whose bytes are there

    def _largest(self) -> dict[int, int]:
        """Return the copy, by its number, that each launch with a slot carries."""
        largest: dict[int, int] = {}
        for number, (copy, _) in enumerate(self._stream.copies):
            slot = self._slots.get(copy.launch)
            if slot is not None and copy.tensor == slot.tensor and self._is_loadable(copy):
                best = largest.setdefault(copy.launch, number)
                if copy.nbytes > self._stream.copies[best][0].nbytes:
                    largest[copy.launch] = number
        return largest

    def _new_pool(self, memory: DeviceMemory) -> StagingBuffers:
        return StagingBuffers(memory.context, self.staging_bytes)

    def _set(self, slot: BoundSlot, buffer: Any, numbers: Sequence[int]) -> None:
        arguments = [buffer, self._targets[slot.tensor], *map(np.uint32, numbers)]
        with translated("setting the arguments of a slot", device=self._context.device):
            for place, argument in enumerate(arguments, slot.first):
                slot.kernel.set_arg(place, argument)

    # around launches ---------------------------------------------------------------------------------------

    def before(self, launch: int) -> list[Any] | None:
        """Return the events for which a launch waits; that of the bytes that it carries as well."""
        number = self._carried.get(launch)
        if number is None:
            return super().before(launch)
        copy, read = self._stream.copies[number]
        if self._cursor < self._stream.ends[read]:
            self._advance(self._stream.ends[read], wait=True)
        offset, ready = self._staged.pop(number)
        buffer = self._pool.buffers[self._stream.places[read]]
        self._set(self._slots[launch], buffer, self._numbers(copy, offset))
        return [*(super().before(launch) or []), ready]

    def after(self, launch: int, event: Any) -> None:
        """Free the buffer of a carried copy once the launch has run."""
        number = self._carried.get(launch)
        if number is not None:
            read = self._stream.copies[number][1]
            events = self.log.loads[read].events
            events[number - self._stream.ends[read]] = event
            self._queue.flush()
            self._submit(self._stream.freed[read], list(events))
        super().after(launch, event)

    def end(self) -> None:
        """Check that the weights were the right ones."""
        super().end()
        self._awaited += self._launched[-1:]

    # reads and copies --------------------------------------------------------------------------------------

    def _start(self, number: int) -> Any:
        """Enqueue a copy whose bytes are there by a kernel, unless a launch carries it."""
        copy, read = self._pass.copies[number]
        at = self._pass.places[read]
        if number == self._pass.ends[read] - len(self._pass.reads[read].copies):  # the first of its read
            for other in self._pass.reads[read].copies:
                self._check(other, at)
            self._ready, self._begin_at = self._pool.hand_over(at, self._uploads)
        offset = self._begin_at + copy.at
        if self._pass is self._stream and number in self._carrying:
            self._staged[number] = offset, self._ready
            return self._ready
        return self._enqueue(copy, at, offset, self._wait_for(copy.launch))

    def _free(self, number: int, events: list[Any]) -> None:
        stop = self._pass.ends[number]
        own = range(stop - len(self._pass.reads[number].copies), stop)
        if self._pass is self._stream and not self._carrying.isdisjoint(own):
            return  # the launch that carries a copy frees the buffer
        super()._free(number, events)

    def _enqueue(self, copy: Copy, at: int, offset: int, wait_for: list[Any] | None) -> Any:
        """Enqueue one copy from an unmapped buffer, by a loading kernel where possible."""
        cl, target, buffer = self._context.cl, self._targets[copy.tensor], self._pool.buffers[at]
        if self._is_loadable(copy):
            kernel = self._kernel(copy.tensor)
            kernel.set_args(buffer, target, *map(np.uint32, self._numbers(copy, offset)))
            device = self._context.device
            largest = min(device.work_group, device.work_item_sizes[0])
            sizes = loading_size(copy.nbytes, self._class, largest)
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
