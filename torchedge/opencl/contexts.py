"""One context and one in-order queue a device; the driver's errors as torchedge's errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod, WeakSet

from torchedge.errors import DeviceError, DeviceLostError, DeviceMemoryError, OpenCLError
from torchedge.opencl.choosing import choose_device
from torchedge.opencl.platforms import ClDevice, handles, load_pyopencl
from torchedge.opencl.probes import NO_TIMES, remark_of
from torchedge.opencl.sharing import check_process, keep_in_forks, kept_in_forks
from torchedge.storage.locks import PROCESS


@dataclass(frozen=True, eq=False)  # with slots, Python 3.10 has no weak references to it
class DeviceContext:
    """An open device: pyopencl's module, context and in-order queue.

    launched: the events of the last run's launches, by the queue's number, and what names them. lost: why no
    command of this context succeeds any more, if so. allocated: the buffers and images that are alive.
    """

    device: ClDevice
    cl: Any
    context: Any
    queue: Any
    launched: dict[int, tuple[Sequence[Any], WeakMethod[Callable[[int], str]]]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    allocated: WeakSet[Any] = field(default_factory=WeakSet)

    @property
    def handle(self) -> Any:
        """Pyopencl's device."""
        return self.context.devices[0]

    def new_queue(self, profile: bool, *, own: bool = False) -> Any:
        """Return the in-order queue; a new one if it measures commands or is to be the caller's own.

        Raises DeviceError: it is to measure, and the driver's times are wrong.
        """
        if not (profile or own):
            return self.queue
        if profile and NO_TIMES in remark_of(self.device):
            raise DeviceError(f"{self.device.described}: {NO_TIMES}; use another device")
        properties = self.cl.command_queue_properties.PROFILING_ENABLE if profile else 0
        with translated("a command queue", device=self.device):
            return keep_in_forks(self.cl.CommandQueue, self.context, properties=properties)


def clock_offset(context: DeviceContext, queue: Any) -> int:
    """Return the host's `time.perf_counter_ns` less the device's clock, of a queue that measures times.

    Intel's runtime for processors gives a marker's time of submission, but 0 as the time it was queued.
    """
    best: tuple[int, int] | None = None
    with translated("reading the device's clock", device=context.device):
        for _ in range(5):
            before = time.perf_counter_ns()
            marker = context.cl.enqueue_marker(queue)
            after = time.perf_counter_ns()
            marker.wait()
            trial = (after - before, (before + after) // 2 - (marker.profile.queued or marker.profile.submit))
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
            check_alive(opened)
            return opened
        cl = load_pyopencl()
        with translated("opening the device", device=chosen):
            context = cl.Context([handles()[chosen.index]])
            opened = DeviceContext(chosen, cl, context, cl.CommandQueue(context))
        _open[chosen.index] = opened
        kept_in_forks.add(opened)
        return opened


def record_launches(
    context: DeviceContext, queue: Any, events: Sequence[Any], named: Callable[[int], str]
) -> None:
    """Note the events of a run, a list that may still grow, for the error of a command that fails.

    named: a method that returns the name of a launch by its position; its object is not kept alive.
    """
    context.launched[queue.int_ptr] = (events, WeakMethod(named))


def check_alive(context: DeviceContext) -> None:
    """Raise DeviceLostError if an earlier command has lost the device."""
    if context.lost:
        raise DeviceLostError(f"{context.lost[0]}; nothing runs there any more: restart the process")


def failure(context: DeviceContext, queue: Any, error: Any) -> OpenCLError:
    """Return the error of a queue whose commands failed, with the launch that failed first.

    error: the driver's, or the negative status of a command. The context counts as lost, except where memory
    was short. Drivers that say no more of any event after a failure leave all launches of the run to name.
    """
    events, method = context.launched.get(queue.int_ptr, ((), None))
    named = (method and method()) or "launch {}".format
    statuses = [_status_of(event) for event in events]
    failed = [k for k, status in enumerate(statuses) if status is None or status < 0]
    place = "waiting for the device"
    if failed and len(failed) < len(statuses):
        place = named(failed[0])
    elif events:
        place = f"one of {len(events)} launches from {named(0)} to {named(len(events) - 1)}"
    device, to_string = context.device, context.cl.status_code.to_string
    if isinstance(error, int):
        message = f"status {error}, {to_string(error, 'unknown status %d')}"
    else:
        message = " ".join(str(error).split())
    codes = [getattr(error, "code", error), *(statuses[k] for k in failed[:1])]
    if _NO_MEMORY & {to_string(code, "status %d") for code in codes if isinstance(code, int)}:
        return DeviceMemoryError(memory_text(place, 0, device, message))
    context.lost.append(f"{place}: {device.described} failed with {message}")
    return DeviceLostError(
        f"{context.lost[0]}; restart the process. A kernel accessed memory outside its tensors, had too few "
        f"resources or took too long, and the driver ended it: {_OTHERWISE}"
    )


def _status_of(event: Any) -> int | None:
    """Return an event's status, negative for a failure; None if the driver does not say."""
    try:
        return int(event.command_execution_status)
    except Exception:
        return None


_OTHERWISE = "update the driver, or choose another device with TORCHEDGE_OPENCL_DEVICE"
_NO_MEMORY = {"MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_HOST_MEMORY", "INVALID_BUFFER_SIZE"}
_LOST = {"DEVICE_NOT_AVAILABLE", "INVALID_COMMAND_QUEUE", "INVALID_CONTEXT", "INVALID_DEVICE"}


@contextmanager
def translated(doing: str, *, device: ClDevice, nbytes: int = 0) -> Iterator[None]:
    """Raise the driver's errors as torchedge's; `doing` and `nbytes`, what it needs, name the request."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, load_pyopencl().Error):
            raise
        raise translation(error, doing, nbytes=nbytes, device=device) from error


def translation(error: Any, doing: str, *, device: ClDevice, nbytes: int = 0) -> OpenCLError:
    """Return a driver's error as DeviceMemoryError, DeviceLostError or OpenCLError."""
    cl = load_pyopencl()
    text = " ".join(str(error).split())
    code = getattr(error, "code", None)
    status = "" if code is None else cl.status_code.to_string(code, "status %d")
    if status in _NO_MEMORY or isinstance(error, cl.MemoryError) or (nbytes and status == "OUT_OF_RESOURCES"):
        return DeviceMemoryError(memory_text(doing, nbytes, device, text), nbytes=nbytes)
    if status in _LOST:
        return DeviceLostError(
            f"{doing}: {device.described} is lost ({text}); restart the process, and look at the driver's log"
        )
    return OpenCLError(f"{doing}: {device.described} reports {text}; {_OTHERWISE}")


def memory_text(doing: str, nbytes: int, device: ClDevice, message: str = "") -> str:
    """Return the text of a DeviceMemoryError: what was asked for, what the device has, what can be done."""
    request = f"needs {nbytes} bytes" if nbytes else "finds no memory left"
    opened = _open.get(device.index)
    taken = sum([memory.size for memory in opened.allocated]) if opened else 0
    reason = f" ({message})" if message else ""
    return (
        f"{doing} {request}, {device.described} has {device.global_bytes} in all, at most "
        f"{device.allocation_bytes} in one allocation, and {taken} are taken by this process{reason}; use "
        "a smaller batch, half storage, or a memory_limit that streams the weights, or free the device"
    )
