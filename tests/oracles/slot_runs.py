"""Launches of a program one by one, with and without a loading slot, every tensor in memory of its own."""

import numpy as np

from torchedge.lowering.kernels.loading import (
    destination_of,
    loading_kernel,
    loading_size,
    slot_numbers,
    with_slot,
)
from torchedge.opencl import compile_kernels, open_context
from torchedge.opencl.memory import allocate_image, download, upload
from torchedge.runtime.memory import DeviceMemory, DeviceTensor

GUARD = 64
"""Bytes around the source that no kernel may copy."""


def content(tensor, seed=0):
    """Return a tensor's packed content: any bits without NaNs, infinities and subnormal numbers."""
    random = np.random.default_rng(seed)
    array = (
        random.standard_normal(tensor.shape)
        if "float" in tensor.dtype
        else random.integers(0, 5, tensor.shape)
    )
    return tensor.layout.pack(np.asarray(array).astype(tensor.dtype))


class SlotRuns:
    """Runs launches on a device; all tensors hold random numbers."""

    def __init__(self, device=None):
        self.context = open_context(device)
        self.memory = DeviceMemory(self.context, self.context.queue)

    def tensor(self, stored, packed=None):
        own = DeviceTensor(stored, self.memory.allocate(stored))
        self.memory.write_packed(own, content(stored) if packed is None else packed)
        return own

    def larger(self, stored):
        """Return an image with more and longer rows than a tensor: slots of an arena may be larger."""
        width, height = stored.layout.extent(stored.shape)
        return DeviceTensor(
            stored, allocate_image(self.context, width + 3, height + 2, stored.dtype, "a slot")
        )

    def launch(self, kernel, arguments, global_size, local_size):
        compiled = compile_kernels(self.context, {kernel.name: kernel.source}).kernel(kernel.name)
        if kernel.checks:
            words = self.memory.allocate_bytes(16, "check words")
            host = sum(1 for _ in kernel.access)
            arguments = [*arguments[:host], words, *arguments[host:]]
        compiled.set_args(*arguments)
        self.context.cl.enqueue_nd_range_kernel(self.context.queue, compiled, global_size, local_size)
        if kernel.checks:
            report = np.empty(4, np.int32)
            self.context.cl.enqueue_copy(self.context.queue, report, words)
            assert not report.any()

    def slot_of(self, target, start, stop, shift=0):
        """Return a slot's arguments, and the check of its target after the launch."""
        packed = content(target, 1)
        source = np.frombuffer(
            np.random.default_rng(2).bytes(GUARD + shift + packed.nbytes + GUARD), np.uint8
        ).copy()
        given = packed.reshape(-1).view(np.uint8)[start:stop]
        source[GUARD + shift : GUARD + shift + stop - start] = given
        own = (
            self.larger(target)
            if target.layout.storage == "image"
            else DeviceTensor(target, self.memory.allocate(target))
        )
        upload(self.context, self.context.queue, own.memory, np.zeros_like(packed))
        flags = self.context.cl.mem_flags
        buffer = self.context.cl.Buffer(
            self.context.context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=source
        )
        numbers = [np.uint32(n) for n in slot_numbers(target, start, stop, GUARD + shift)]

        def check():
            expected = np.zeros(packed.nbytes, np.uint8)
            expected[start:stop] = given
            actual = np.zeros_like(packed)
            own_bytes = read(self, own, actual).reshape(-1).view(np.uint8)
            assert np.array_equal(own_bytes, expected)

        return [buffer, own.memory, *numbers], check

    def compare(self, program, target, start, stop, shift=0):
        """Assert that each launch computes the same with a slot, which loads the target's bytes."""
        for launch in program.launches:
            kernel = program.kernels[launch.kernel]
            results = []
            for loads in (False, True):
                tensors = {n: self.tensor(program.tensors[n]) for n in launch.tensors}
                arguments = [tensors[n].memory for n in launch.tensors]
                arguments += map(np.int32, launch.sizes)
                chosen, check = kernel, None
                if loads:
                    slot, check = self.slot_of(target, start, stop, shift)
                    chosen, arguments = (
                        with_slot(kernel, destination_of(target), program.target),
                        arguments + slot,
                    )
                self.launch(chosen, arguments, launch.global_size, launch.local_size)
                written = [n for n, use in zip(launch.tensors, kernel.access, strict=True) if use != "read"]
                results.append([read(self, tensors[n], content(program.tensors[n])) for n in written])
                if check:
                    check()
            for plain, loaded in zip(*results, strict=True):
                assert plain.tobytes() == loaded.tobytes(), kernel.name

    def load(self, target, start, stop, device_class):
        """Assert that a loading kernel loads the target's bytes."""
        slot, check = self.slot_of(target, start, stop)
        sizes = loading_size(stop - start, device_class)
        self.launch(loading_kernel(destination_of(target), device_class), slot, *sizes)
        check()


def read(runs, own, like):
    """Return the packed content of a tensor on the device."""
    packed = np.empty_like(like)
    download(runs.context, runs.context.queue, own.memory, packed)
    return packed
