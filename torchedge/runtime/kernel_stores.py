"""Streaming by kernels: loading kernels on the second queue, launches with a slot (FlashMem, section 4.4).

The host fills staging buffers while they are mapped; kernels read them once they are unmapped. On devices
with unified memory both sides share the bytes, and the only copy is the kernel's, into the weight's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchedge.lowering.kernels.loading import (
    Destination,
    destination_of,
    loading_kernel,
    loading_size,
    slot_numbers,
)
from torchedge.lowering.targets import DeviceClass, device_class
from torchedge.opencl import compile_kernels
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.memory import PAGE_BYTES, counted_buffer
from torchedge.runtime.memory import DeviceMemory
from torchedge.runtime.staging import Bytes
from torchedge.runtime.weight_stores import StreamingStore, WeightStream
from torchedge.streaming.commands import PARTS, is_loadable
from torchedge.streaming.schedules import Copy, Loads


@dataclass(frozen=True, slots=True, eq=False)
class BoundSlot:
    """A launch's slot: the number of its copy, pyopencl's kernel, and the slot's first argument."""

    copy: int
    kernel: Any
    first: int


class StagingBuffers:
    """Buffers of one size, mapped while the host fills them, unmapped while kernels read them.

    Without unified memory a buffer is mapped and unmapped while no launch runs: on NVIDIA's driver (580) a
    launch read what its buffer held before, although it waited for the bytes, where they came by another
    queue beside a long launch; mapped or written, in host memory or the device's alike. launches: their
    queue.

    Raises DeviceMemoryError: no memory is left.
    """

    def __init__(self, context: DeviceContext, nbytes: int, launches: Any) -> None:
        cl = context.cl
        self._launches = None if context.handle.host_unified_memory else launches
        self._cl, self.part_bytes = cl, nbytes // PARTS // PAGE_BYTES * PAGE_BYTES
        self._queue, self._device = context.new_queue(False, own=True), context.device
        with translated("staging buffers", nbytes=nbytes, device=context.device):
            flags = cl.mem_flags.READ_ONLY | cl.mem_flags.ALLOC_HOST_PTR
            self.buffers = [counted_buffer(context, flags, self.part_bytes) for _ in range(PARTS)]
        self._maps: dict[int, Any] = {}
        self._arrays: dict[int, Bytes] = {}

    def buffer(self, at: int) -> tuple[int, int]:
        """Return the buffer of a place, by number, and the byte there, counted from its first whole page."""
        return divmod(at, self.part_bytes)

    def open(self, at: int, events: Sequence[Any]) -> None:
        """Wait until a buffer is free, and map it."""
        number = at // self.part_bytes
        ways = self._cl.map_flags.WRITE_INVALIDATE_REGION  # nothing is copied back
        with translated("mapping a staging buffer", device=self._device):
            for event in events:
                event.wait()
            self._await_launches()
            mapped, _ = self._cl.enqueue_map_buffer(
                self._queue, self.buffers[number], ways, 0, (self.part_bytes,), np.uint8
            )
        self._maps[number] = mapped.base
        self._arrays[number] = mapped[-mapped.ctypes.data % PAGE_BYTES :]

    def view(self, at: int, nbytes: int) -> Bytes:
        """Return bytes of a mapped buffer."""
        number, start = self.buffer(at)
        return self._arrays[number][start : start + nbytes]

    def hand_over(self, number: int, queue: Any) -> tuple[Any, int]:
        """Unmap a buffer; return the event and the byte of its first whole page."""
        begin = self.part_bytes - self._arrays.pop(number).size
        self._await_launches()
        released = self._maps.pop(number).release(queue)
        if self._launches is not None:
            released.wait()
        return released, begin

    def _await_launches(self) -> None:
        if self._launches is not None:
            self._launches.finish()

    def clear(self) -> None:
        """Unmap all buffers."""
        for number in list(self._maps):
            self.hand_over(number, self._queue)[0].wait()

    def release(self) -> None:
        """Give the memory back."""
        with translated("unmapping staging buffers", device=self._device):
            self.clear()
        self.buffers = []


class KernelStore(StreamingStore):
    """A StreamingStore that loads by kernels.

    slots: of the launches that carry a copy themselves, which wait for its bytes. All other copies are
    loading kernels on the second queue, or copy commands where bytes lie at no multiple of 16.
    """

    _pool: StagingBuffers

    def __init__(self, stream: WeightStream, loads: Loads, slots: Mapping[int, BoundSlot]) -> None:
        super().__init__(stream, loads)
        device = stream.memory.context.device
        self._class: DeviceClass = device_class(device.kind, device.name, device.vendor, device.platform)
        self._slots, self._carried = slots, {slot.copy for slot in slots.values()}
        self._loading: dict[Destination, Any] = {}
        self._carrier: list[Any] = []  # the event of the last launch that carried a copy
        self._ready: Any = None  # the bytes of the present read are unmapped
        self._begin_at = 0  # the byte of its buffer at which they begin
        self._staged: dict[int, tuple[int, Any]] = {}  # (byte, event) of copies whose launch is to come

    def _new_pool(self, memory: DeviceMemory, uploads: Any) -> StagingBuffers:
        return StagingBuffers(memory.context, self.staging_bytes, memory.queue)

    # around launches ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first reads."""
        self._staged, self._carrier = {}, []
        super().begin()

    def before(self, launch: int) -> list[Any] | None:
        """Return the events for which a launch waits; that of the bytes that it carries as well."""
        slot = self._slots.get(launch)
        if slot is None:
            return super().before(launch)
        if self._cursor <= slot.copy:
            self._advance(slot.copy + 1, wait=True)
        copy = self._stream[slot.copy][0]
        offset, ready = self._staged[slot.copy]
        buffer = self._pool.buffers[self._pool.buffer(copy.at)[0]]
        arguments = [buffer, self._targets[copy.tensor], *map(np.uint32, self._numbers(copy, offset))]
        with translated("setting the arguments of a slot", device=self._context.device):
            for place, argument in enumerate(arguments, slot.first):
                slot.kernel.set_arg(place, argument)
        return [*(super().before(launch) or []), ready]

    def after(self, launch: int, event: Any) -> None:
        """Free the buffer of a carried copy once the launch has run."""
        slot = self._slots.get(launch)
        if slot is not None:
            del self._staged[slot.copy]
            self.log.events[slot.copy], self._carrier = event, [event]
            self._queue.flush()
            self._submit()
        super().after(launch, event)

    def end(self) -> None:
        """Check that the weights were the right ones."""
        super().end()
        self.turns.awaited = [*self.turns.awaited, *self._launched[-1:]]

    # reads and copies --------------------------------------------------------------------------------------

    def _freeing(self, count: int) -> list[Any] | None:
        """Return the events after which the first `count` copies have ended, those in slots included."""
        events = super()._freeing(count)
        if not events or any(number < count for number in self._staged):
            return events if count == 0 else None
        return [*events, *self._carrier]

    def _start(self, number: int) -> Any:
        """Enqueue a copy whose bytes are there by a kernel, unless a launch carries it."""
        copy, read = self._copies[number]
        place, at = self._pool.buffer(copy.at)
        if number == 0 or self._copies[number - 1][1] != read:  # the first of its read
            for other in self._reads[read].copies:
                self._check(other)
            self._ready, self._begin_at = self._pool.hand_over(place, self._uploads)
            before = self._ready
        else:
            before = self._copied[-1]
        offset = self._begin_at + at
        if self._running and number in self._carried:
            self._staged[number] = offset, self._ready
            return before  # copies on the second queue up to this one
        return self._enqueue(copy, self._pool.buffers[place], offset, self._wait_for(copy))

    def _enqueue(self, copy: Copy, buffer: Any, offset: int, wait_for: list[Any] | None) -> Any:
        """Enqueue one copy from an unmapped buffer, by a loading kernel where possible."""
        cl, target = self._context.cl, self._targets[copy.tensor]
        if is_loadable(self._program.tensors[copy.tensor], copy):
            kernel = self._kernel(copy.tensor)
            kernel.set_args(buffer, target, *map(np.uint32, self._numbers(copy, offset)))
            device = self._context.device
            largest = min(device.work_group, device.work_item_sizes[0])
            sizes = loading_size(copy.nbytes, self._class, largest)
            return cl.enqueue_nd_range_kernel(self._uploads, kernel, *sizes, wait_for=wait_for)
        sides: dict[str, Any] = {"byte_count": copy.nbytes, "src_offset": offset, "dst_offset": copy.place[0]}
        if len(copy.place) > 1:
            sides = {"offset": offset, "origin": copy.place[:2], "region": copy.place[2:]}
        return cl.enqueue_copy(self._uploads, target, buffer, **sides, wait_for=wait_for)

    def _kernel(self, tensor: int) -> Any:
        destination = destination_of(self._program.tensors[tensor])
        if destination not in self._loading:
            kernel = loading_kernel(destination, self._class)
            compiled = compile_kernels(self._context, {kernel.name: kernel.source})
            self._loading[destination] = compiled.kernel(kernel.name)
        return self._loading[destination]

    def _numbers(self, copy: Copy, offset: int) -> tuple[int, ...]:
        tensor = self._program.tensors[copy.tensor]
        start = copy.place[0]
        if tensor.layout.storage != "buffer":
            start = copy.place[1] * tensor.layout.unit_bytes(tensor.shape, tensor.dtype)
        return slot_numbers(tensor, start, start + copy.nbytes, offset)
