"""Gauges: the resident set grows by what is touched; NVIDIA's figures through a stand-in of its library."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from torchedge.opencl import list_opencl_devices, open_context
from torchedge.opencl.memory_gauges import _nvidia_gauge, memory_gauge

MIB = 2**20


def test_the_resident_set_grows_by_what_is_touched():
    if not any(device.kind == "cpu" for device in list_opencl_devices()):
        pytest.skip("needs an OpenCL device that is a processor")
    gauge = memory_gauge(open_context("cpu"))
    assert gauge is not None and gauge.source == "resident set"
    before = gauge.read()
    block = np.ones(64 * MIB, np.uint8)
    assert 0.9 * block.nbytes < gauge.read() - before < 1.5 * block.nbytes


class Library:
    """Answers as pynvml does: two devices, with 3 and 5 MiB in use; processes of the second one."""

    def __init__(self, processes):
        self.processes = processes

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index + 1

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(bus=16 * handle, device=0)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(1 + 2 * handle) * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        assert handle == 2
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]


@pytest.mark.parametrize(
    ("processes", "source", "used"),
    [
        ([(1, 9 * MIB), (os.getpid(), 4 * MIB)], "NVML, this process", 4 * MIB),
        ([(1, 9 * MIB)], "NVML, whole device", 5 * MIB),
        ([(os.getpid(), None)], "NVML, whole device", 5 * MIB),
        ([], "NVML, whole device", 5 * MIB),
    ],
)
def test_nvidia_counts_the_process_or_the_device(processes, source, used):
    gauge = _nvidia_gauge(Library(processes), (32, 0))
    assert (gauge.source, gauge.read()) == (source, used)


def test_devices_that_the_library_does_not_have_are_not_gauged():
    assert _nvidia_gauge(Library([]), (99, 0)) is None


def test_a_driver_without_the_library_has_no_gauge():
    pynvml = pytest.importorskip("pynvml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(9)))
        context = SimpleNamespace(
            device=SimpleNamespace(kind="gpu", extensions=("cl_nv_device_attribute_query",)),
            handle=SimpleNamespace(get_info=lambda number: 0),
            cl=SimpleNamespace(Error=OSError),
        )
        assert memory_gauge(context) is None
