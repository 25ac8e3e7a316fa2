"""Waiting for queues: an interrupt (Ctrl-C) ends it, which no driver's own waiting allows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torchedge.opencl.contexts import DeviceContext, check_alive, failure

_SHORT = 5e-4
"""Seconds in which a thread asks for the state of a GPU's commands."""
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


def wait(context: DeviceContext, queue: Any) -> None:
    """Wait until a queue has run all its commands, so that an interrupt (Ctrl-C) ends the waiting.

    Where this thread waited in the driver, a kernel without an end would take the process with it. So another
    thread waits there, at once for a processor: Intel's runtime computes on waiting threads, and without one
    a core idles. For a GPU this thread first asks for the state for a moment: a short wait ends sooner so.

    Raises:
        DeviceLostError: a command of the queue failed, or an earlier one did; it names the launch.
        DeviceMemoryError: the driver ran out of memory.
    """
    check_alive(context)
    complete = context.cl.command_execution_status.COMPLETE
    try:
        marker = context.cl.enqueue_marker(queue)
        queue.flush()
        ended = time.perf_counter() + (0.0 if context.device.kind == "cpu" else _SHORT)
        while (status := marker.command_execution_status) > complete and time.perf_counter() < ended:
            _give_way()
        if status > complete:
            _waiter().run(marker.wait)
        while (status := marker.command_execution_status) > complete:  # a driver whose waiting ends early
            time.sleep(1e-4)
    except context.cl.Error as error:
        raise failure(context, queue, error) from error
    if status < 0:
        raise failure(context, queue, status)


def drain(context: DeviceContext, *queues: Any) -> None:
    """Wait until queues have run all their commands; raises the driver's errors.

    Mesa's rusticl 22.3.6 returns from clFinish at once where clFlush came last, with commands still running:
    so this waits for a command of its own.
    """
    for queue in queues:
        context.cl.enqueue_marker(queue).wait()


_Calls = SimpleQueue[Callable[[], object] | None]
_Results = SimpleQueue[BaseException | None]


class _Waiter:
    """A thread that makes one call after the other for the thread that has it."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._results: _Results = SimpleQueue()
        work = (self._calls, self._results)
        threading.Thread(target=_work, args=work, name="opencl-wait", daemon=True).start()

    def __del__(self) -> None:
        self._calls.put(None)

    def run(self, call: Callable[[], object]) -> None:
        """Make a call and wait for its end. After an interrupt the thread is left to its call."""
        self._calls.put(call)
        try:
            error = self._results.get()
        except BaseException:
            del _own.waiter
            raise
        if error is not None:
            raise error


def _work(calls: _Calls, results: _Results) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except Exception as error:
            results.put(error)
        else:
            results.put(None)
        del call


_own = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _own.__dict__.clear())  # where no such thread runs


def _waiter() -> _Waiter:
    """Return the waiting thread of the thread that asks."""
    if not hasattr(_own, "waiter"):
        _own.waiter = _Waiter()
    waiter: _Waiter = _own.waiter
    return waiter
