"""One context a device and process, and the driver's errors in our words."""

import multiprocessing
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from oracles.children import python

from torchedge.errors import DeviceError, DeviceLostError, DeviceMemoryError, OpenCLError
from torchedge.opencl import compile_kernels, contexts, open_context
from torchedge.opencl.contexts import DeviceContext, clock_offset, record_launches, translated
from torchedge.opencl.memory import allocate_buffer, download
from torchedge.opencl.probes import NO_TIMES
from torchedge.opencl.waiting import wait

cl = pytest.importorskip("pyopencl")

SOURCE = {"seven": "__kernel void seven(__global int *a) { a[get_global_id(0)] = 7; }"}


def seven():
    """Run a kernel in this process; return what it wrote."""
    context = open_context()
    kernel = compile_kernels(context, SOURCE).kernel("seven")
    buffer = allocate_buffer(context, 16, "test")
    kernel.set_args(buffer)
    cl.enqueue_nd_range_kernel(context.queue, kernel, (4,), None)
    found = np.zeros(4, np.int32)
    download(context, context.queue, buffer, found)
    return found.tolist()


def test_a_device_is_opened_once():
    assert open_context() is open_context()
    assert open_context().handle.name.strip().startswith(open_context().device.name[:8])


def test_a_spawned_process_opens_its_own():
    assert seven() == [7] * 4
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(seven) == [7] * 4


def test_a_driver_whose_times_are_wrong_measures_nothing(monkeypatch):
    monkeypatch.setattr(contexts, "remark_of", lambda device: f"its loops end; {NO_TIMES}")
    context = open_context()
    with pytest.raises(DeviceError, match=f"driver.*{NO_TIMES}; use another device"):
        context.new_queue(True)
    assert context.new_queue(False) is context.queue


FORKS = """
import os, sys
from torchedge.errors import OpenCLError
from opencl.test_contexts import seven
if sys.argv[1] == "used":
    seven()
child = os.fork()
if not child:
    try:
        print(seven(), flush=True)
    except OpenCLError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("before", "printed"), [("unused", "[7, 7, 7, 7]"), ("used", "OpenCL was used by process")]
)
def test_a_fork_works_unless_its_parent_has_used_opencl(before, printed):
    assert printed in python("-c", FORKS, before).stdout


def test_too_large_an_allocation_says_what_was_asked_and_what_there_is():
    context = open_context()
    asked = context.device.allocation_bytes + 1
    taken = sum(memory.size for memory in context.allocated)
    kept = [allocate_buffer(context, 1000, "test"), allocate_buffer(context, 24, "test")]
    message = (
        f"weights needs {asked} bytes, .* has {context.device.global_bytes} in all, at most {asked - 1} in "
        f"one allocation, and {taken + 1024} are taken by this process; use"
    )
    with pytest.raises(DeviceMemoryError, match=message) as caught:
        allocate_buffer(context, asked, "weights")
    del kept
    assert sum(memory.size for memory in context.allocated) == taken
    assert caught.value.nbytes == asked


@pytest.mark.parametrize(
    ("status", "nbytes", "kind"),
    [
        ("MEM_OBJECT_ALLOCATION_FAILURE", 8, DeviceMemoryError),
        ("OUT_OF_HOST_MEMORY", 0, DeviceMemoryError),
        ("OUT_OF_RESOURCES", 8, DeviceMemoryError),
        ("OUT_OF_RESOURCES", 0, OpenCLError),
        ("DEVICE_NOT_AVAILABLE", 0, DeviceLostError),
        ("INVALID_COMMAND_QUEUE", 0, DeviceLostError),
        ("INVALID_KERNEL_ARGS", 0, OpenCLError),
    ],
)
def test_errors_of_the_driver_are_told_apart(status, nbytes, kind):
    from oracles.driver_errors import Failure
    from oracles.opencl_devices import GPU

    named = rf"doing this.*{GPU.name} \(driver {GPU.driver}\).*clDoSomething failed.*; (?!.*clDo)"
    with (
        pytest.raises(OpenCLError, match=named) as caught,
        translated("doing this", nbytes=nbytes, device=GPU),
    ):
        raise Failure(status)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, cl.Error)


class Launches:
    """The launches of a run, as an executor names them."""

    def named(self, position):
        return f"launch {position}, kernel k{position}"


def failing_context(statuses, error=None):
    """Return a context whose queue has run launches with these statuses and fails at the marker."""

    class Event:
        def __init__(self, status):
            self._status = status

        @property
        def command_execution_status(self):
            if self._status is None:
                raise cl.LogicError("clGetEventInfo failed: <unknown error -9999>")
            return self._status

    from oracles.opencl_devices import GPU  # processes that import this file have no such path

    marker = error if error is None else Event(None)
    fake = SimpleNamespace(
        Error=cl.Error,
        status_code=cl.status_code,
        command_execution_status=cl.command_execution_status,
        enqueue_marker=lambda queue: marker or Event(-9999),
    )
    context, launches = DeviceContext(GPU, fake, None, None), Launches()
    queue = SimpleNamespace(int_ptr=7, flush=lambda: None)
    record_launches(context, queue, [Event(status) for status in statuses], launches.named)
    return context, queue, launches


def test_a_failed_launch_is_named_and_the_context_is_dead():
    context, queue, launches = failing_context([0, 0, -9999, -14])
    with pytest.raises(
        DeviceLostError, match=r"launch 2, kernel k2: NVIDIA H200 \(driver 580.*-9999.*restart"
    ):
        wait(context, queue)
    with pytest.raises(DeviceLostError, match=r"launch 2, kernel k2.*nothing runs there any more"):
        wait(context, queue)
    assert launches


def test_a_driver_that_says_no_more_leaves_the_run_to_name():
    context, queue, launches = failing_context([None, None, None], error=True)
    with pytest.raises(DeviceLostError, match=r"one of 3 launches from launch 0.* to launch 2.*-9999"):
        wait(context, queue)
    assert launches


@pytest.mark.parametrize("queued", [1_000, 0])
def test_the_clock_of_a_driver_that_gives_no_queued_time_is_that_of_submission(queued):
    """Intel's runtime for processors leaves the first of a marker's times at 0."""
    profile = SimpleNamespace(queued=queued, submit=1_000, start=2_000, end=3_000)
    marker = SimpleNamespace(profile=profile, wait=lambda: None)
    context = SimpleNamespace(
        cl=SimpleNamespace(enqueue_marker=lambda queue: marker, Error=OSError), device=None
    )
    before = time.perf_counter_ns()
    offset = clock_offset(context, None)
    assert before - 1_000 <= offset <= time.perf_counter_ns() - 1_000


def test_a_launch_that_fails_for_memory_says_what_the_device_has_and_the_context_goes_on():
    context, queue, launches = failing_context([0, -4])
    with pytest.raises(
        DeviceMemoryError, match=r"launch 1, kernel k1 finds no memory left, .* in all, .*-9999"
    ):
        wait(context, queue)
    assert not context.lost and launches
