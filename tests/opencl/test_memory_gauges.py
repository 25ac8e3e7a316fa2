"""Gauges: the resident set grows by what is touched; NVIDIA's figures through a stand-in of its library."""

import os

import numpy as np
import pytest

from torchedge.opencl import open_context
from torchedge.opencl.memory_gauges import _nvidia_gauge, memory_gauge

MIB = 2**20


def test_the_resident_set_grows_by_what_is_touched():
    pytest.importorskip("pyopencl")
    gauge = memory_gauge(open_context("cpu"))
    assert gauge is not None and gauge.source == "resident set"
    before = gauge.read()
    block = np.ones(64 * MIB, np.uint8)
    assert 0.9 * block.nbytes < gauge.read() - before < 1.5 * block.nbytes


class Library:
    """Answers as libnvidia-ml does: two devices, with 3 and 5 MiB in use; processes of the second one."""

    def __init__(self, processes, status=0):
        self.processes, self.status = processes, status

    def nvmlInit_v2(self):
        return self.status

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle, pci):
        pci._obj.bus, pci._obj.device = 16 * handle.value, 0
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.used = (1 + 2 * handle.value) * MIB
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, processes):
        assert handle.value == 2 and count._obj.value == len(processes)
        for place, (pid, used) in enumerate(self.processes):
            processes[place].pid, processes[place].used = pid, used
        count._obj.value = len(self.processes)
        return 0


@pytest.mark.parametrize(
    ("processes", "source", "used"),
    [
        ([(1, 9 * MIB), (os.getpid(), 4 * MIB)], "NVML, this process", 4 * MIB),
        ([(1, 9 * MIB)], "NVML, whole device", 5 * MIB),
        ([(os.getpid(), 2**64 - 1)], "NVML, whole device", 5 * MIB),
        ([], "NVML, whole device", 5 * MIB),
    ],
)
def test_nvidia_counts_the_process_or_the_device(processes, source, used):
    gauge = _nvidia_gauge(Library(processes), (32, 0))
    assert (gauge.source, gauge.read()) == (source, used)


def test_devices_that_the_library_does_not_have_are_not_gauged():
    assert _nvidia_gauge(Library([]), (99, 0)) is None
    assert _nvidia_gauge(Library([], status=9), (32, 0)) is None
