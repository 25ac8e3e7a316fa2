"""A program that does not fit is refused before it is allocated; an endless kernel can be interrupted."""

import re
from dataclasses import replace

import numpy as np
import pytest
from oracles.children import python
from oracles.small_programs import pointwise, program, tensor, vector_add

from torchedge.errors import DeviceMemoryError
from torchedge.opencl import memory_gauges

pytest.importorskip("pyopencl")

import pyopencl
from oracles.driver_errors import Failure

from torchedge.opencl import choose_device, open_context
from torchedge.opencl.probes import remark_of
from torchedge.runtime import Executor


def many_outputs(count, size):
    """Each output is below the largest allocation; all of them are far above all memory."""
    names = [f"z{n}" for n in range(count)]
    kernel = pointwise("copy", "b[0] = a[0];", ["read", "write"])
    return program(
        [tensor("x", (1,), "input"), *[tensor(name, (size,), "output") for name in names]],
        [kernel],
        [("copy", ["x", name], [1]) for name in names],
    )


def test_the_sum_of_all_tensors_counts_and_not_only_the_largest(monkeypatch):
    device = open_context().device
    size = min(device.allocation_bytes // 8, 2**30)  # elements that 32 bits count
    count = 2 * device.global_bytes // (4 * size) + 1
    with pytest.raises(
        DeviceMemoryError, match=r"program small needs \d+ bytes, .* has \d+ in all"
    ) as caught:
        Executor(many_outputs(count, size))
    assert caught.value.nbytes == 4 * size * count + 4
    monkeypatch.setattr(memory_gauges, "free_host_bytes", lambda: 10_000)
    needed = 144_004 if device.kind == "cpu" else 80_000  # a processor's memory is the host's
    with pytest.raises(DeviceMemoryError, match=rf"needs {needed} bytes, .* \(the host has 10000 free\)"):
        Executor(many_outputs(4, 4_000), device.index)
    Executor(vector_add(100)).close()


def test_states_and_the_arena_count_too():
    device = replace(open_context().device, global_bytes=1000, kind="gpu")
    memory_gauges.admit(device, 1000, 10, "program p")
    with pytest.raises(DeviceMemoryError, match=rf"program p needs 1001 bytes, {device.name[:3]}.* has 1000"):
        memory_gauges.admit(device, 1001, 10, "program p")
    with pytest.raises(DeviceMemoryError, match="the host has"):
        memory_gauges.admit(device, 10, 2**62, "program p")


def test_a_system_that_says_nothing_refuses_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_gauges, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory_gauges, "_CGROUP", tmp_path)
    assert memory_gauges.free_host_bytes() is None
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 100\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory_gauges.free_host_bytes() == 400
    (tmp_path / "memory.max").write_text("max")
    assert memory_gauges.free_host_bytes() is None


ENDLESS = """
import os, signal, sys, threading
import numpy as np
from oracles.small_programs import pointwise, program, tensor
from torchedge.runtime import Executor

spin = "volatile __global float *v = (volatile __global float*)b; do { v[0] = a[i]; } while (v[0] < 1e30f);"
made = program(
    [tensor("x", (4,), "input"), tensor("z", (4,), "output")],
    [pointwise("spin", spin, ["read", "write"])],
    [("spin", ["x", "z"], [4])],
    ["x"],
    ["z"],
)
executor = Executor(made)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    executor.run(np.zeros(4, np.float32))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""


def test_an_endless_kernel_can_be_interrupted():
    if "loops end" in (remark := remark_of(choose_device())):
        pytest.skip(f"no kernel is endless here: {remark}")
    assert python("-c", ENDLESS).stdout == "interrupted\n"


@pytest.mark.parametrize(
    "status", ["OUT_OF_RESOURCES", "MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_HOST_MEMORY"]
)
def test_a_launch_for_which_a_driver_has_no_memory(status):
    class Short:
        """Pyopencl whose driver takes no launch."""

        def enqueue_nd_range_kernel(self, *arguments):
            raise Failure(status)

        def __getattr__(self, name):
            return getattr(pyopencl, name)

    with Executor(vector_add(100)) as executor:
        plain, arrays = executor.context, [np.ones(100, np.float32)] * 2
        executor.context = replace(plain, cl=Short())
        message = (
            rf"launch 0, kernel \w+, needs 1200 bytes, {re.escape(plain.device.name)} \(driver .*\) has "
            rf"{plain.device.global_bytes} in all, at most {plain.device.allocation_bytes} in one allocation"
            r", and \d+ are taken by this process \(clDoSomething failed\); use a smaller batch"
        )
        with pytest.raises(DeviceMemoryError, match=message) as caught:
            executor.run(*arrays)
        assert caught.value.nbytes == 1200
        executor.context = plain
        np.testing.assert_array_equal(executor.run(*arrays)[0], 2.0)
