"""One context and one in-order queue a device; the driver's errors as torchedge's errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchedge.errors import DeviceLostError, DeviceMemoryError, OpenCLError
from torchedge.opencl.choosing import choose_device
from torchedge.opencl.platforms import ClDevice, handles, load_pyopencl
from torchedge.opencl.sharing import check_process
from torchedge.storage.locks import PROCESS


@dataclass(frozen=True, slots=True, eq=False)
class DeviceContext:
    """An open device: pyopencl's module, context and in-order queue."""

    device: ClDevice
    cl: Any
    context: Any
    queue: Any

    @property
    def handle(self) -> Any:
        """Pyopencl's device."""
        return self.context.devices[0]

    def new_queue(self, profile: bool, *, own: bool = False) -> Any:
        """Return the in-order queue; a new one if it measures commands or is to be the caller's own."""
        if not (profile or own):
            return self.queue
        properties = self.cl.command_queue_properties.PROFILING_ENABLE if profile else 0
        with translated(f"a queue of {self.device.name}"):
            return self.cl.CommandQueue(self.context, properties=properties)


def clock_offset(context: DeviceContext, queue: Any) -> int:
    """Return the host's `time.perf_counter_ns` less the device's clock, of a queue that measures times."""
    best: tuple[int, int] | None = None
    with translated("reading the device's clock", device=context.device):
        for _ in range(5):
            before = time.perf_counter_ns()
            marker = context.cl.enqueue_marker(queue)
            after = time.perf_counter_ns()
            marker.wait()
            trial = (after - before, (before + after) // 2 - marker.profile.queued)
            best = trial if best is None else min(best, trial)
    assert best is not None
    return best[1]


_open: dict[int, DeviceContext] = {}


def open_context(device: ClDevice | str | int | None = None) -> DeviceContext:
    """Return this process's context of a device (see `choose_device`), opening it on first use.

    Raises:
        DeviceError: there is no such device.
        MissingExtraError: pyopencl is not installed.
        OpenCLError: the driver does not open it, or it was opened before a fork.
    """
    with PROCESS:
        chosen = device if isinstance(device, ClDevice) else choose_device(device)
        opened = _open.get(chosen.index)
        if opened is not None and opened.device == chosen:
            check_process()
            return opened
        cl = load_pyopencl()
        with translated(f"opening {chosen.name}"):
            context = cl.Context([handles()[chosen.index]])
            opened = DeviceContext(chosen, cl, context, cl.CommandQueue(context))
        _open[chosen.index] = opened
        return opened


_NO_MEMORY = {"MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_HOST_MEMORY", "INVALID_BUFFER_SIZE"}
_LOST = {"DEVICE_NOT_AVAILABLE", "INVALID_COMMAND_QUEUE", "INVALID_CONTEXT", "INVALID_DEVICE"}


@contextmanager
def translated(doing: str, *, nbytes: int = 0, device: ClDevice | None = None) -> Iterator[None]:
    """Raise the driver's errors as torchedge's; `doing` and `nbytes` name the request."""
    cl = load_pyopencl()
    try:
        yield
    except cl.Error as error:
        raise translation(error, doing, nbytes=nbytes, device=device) from error


def translation(
    error: Any,
    doing: str,
    *,
    nbytes: int = 0,
    device: ClDevice | None = None,
) -> OpenCLError:
    """Return a driver's error as DeviceMemoryError, DeviceLostError or OpenCLError."""
    cl = load_pyopencl()
    text = " ".join(str(error).split())
    code = getattr(error, "code", None)
    status = "" if code is None else cl.status_code.to_string(code, "status %d")
    if status in _NO_MEMORY or isinstance(error, cl.MemoryError) or (nbytes and status == "OUT_OF_RESOURCES"):
        return DeviceMemoryError(_memory_text(doing, nbytes, device, text), nbytes=nbytes)
    if status in _LOST:
        return DeviceLostError(
            f"{doing}: the device is lost ({text}); restart the process, and look at the driver's log"
        )
    return OpenCLError(f"{doing}: the OpenCL driver reports {text}")


def _memory_text(doing: str, nbytes: int, device: ClDevice | None, message: str) -> str:
    request = f"{nbytes} bytes requested" if nbytes else "no memory left"
    limits = (
        f", {device.name} has {device.global_bytes}, at most {device.allocation_bytes} in one allocation"
        if device
        else ""
    )
    return f"{doing}: {request}{limits} ({message}); use a smaller batch or half storage, or free the device"
