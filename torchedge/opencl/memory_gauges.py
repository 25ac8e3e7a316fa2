"""Memory in use and memory that is free, as drivers and the host tell, and whether a program's need fits."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchedge.errors import DeviceMemoryError
from torchedge.opencl.contexts import DeviceContext, memory_text
from torchedge.opencl.platforms import ClDevice

_PCI_BUS, _PCI_SLOT = 0x4008, 0x4009  # of cl_nv_device_attribute_query
_RESIDENT, _MEMINFO, _CGROUP = Path("/proc/self/statm"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGauge:
    """Reads a driver's figure of the memory in use, in bytes. source: whose figure, and of what."""

    source: str
    read: Callable[[], int]


def memory_gauge(context: DeviceContext) -> MemoryGauge | None:
    """Return the gauge of a device; None where its driver offers no figure.

    On NVIDIA's devices (with pynvml: `torchedge[nvidia]`) it counts this process, or the whole device where
    the driver lists processes under other numbers (in containers); on processors the resident set of this
    process.
    """
    device = context.device
    if device.kind == "cpu":
        return MemoryGauge("resident set", _resident_bytes) if _RESIDENT.exists() else None
    if "cl_nv_device_attribute_query" not in device.extensions:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        place = (context.handle.get_info(_PCI_BUS), context.handle.get_info(_PCI_SLOT))
        return _nvidia_gauge(pynvml, place)
    except (pynvml.NVMLError, context.cl.Error):  # no library of the driver, or no such property
        return None


def _resident_bytes() -> int:
    """Return the resident set, less what the C library holds free (glibc keeps freed memory for later)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(_RESIDENT.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _nvidia_gauge(nvml: Any, place: tuple[int, int]) -> MemoryGauge | None:
    """Return the gauge of the device at a bus and slot of PCI, None where the library has none there.

    nvml: the module pynvml. Raises its NVMLError.
    """
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    places = [nvml.nvmlDeviceGetPciInfo(handle) for handle in handles]
    handle = next((h for h, pci in zip(handles, places, strict=True) if (pci.bus, pci.device) == place), None)
    if handle is None:
        return None

    def own_bytes() -> int | None:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)

    def device_bytes() -> int:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)

    if own_bytes() is None:
        return MemoryGauge("NVML, whole device", device_bytes)
    return MemoryGauge("NVML, this process", lambda: own_bytes() or 0)


def admit(device: ClDevice, device_bytes: int, host_bytes: int, what: str) -> None:
    """Raise DeviceMemoryError where a device or the host has less memory than `what` needs.

    Drivers hand out memory that is not there (PoCL's buffers are the host's pages, taken when they are
    written): a program that is too large would be killed in the middle of a step. So it is refused before.
    device_bytes: of all its tensors on the device. host_bytes: of the arrays that the host holds beside them.
    On processors both are the host's.
    """
    if device_bytes > device.global_bytes:
        raise DeviceMemoryError(memory_text(what, device_bytes, device), nbytes=device_bytes)
    needed = host_bytes + (device_bytes if device.kind == "cpu" else 0)
    free = free_host_bytes()
    if free is not None and needed > free:
        raise DeviceMemoryError(memory_text(what, needed, device, f"the host has {free} free"), nbytes=needed)


def free_host_bytes() -> int | None:
    """Return the memory that this process may still take, in bytes; None where the system does not say.

    The least of the system's available memory and of what is left of the control group's limit.
    """
    left: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        left.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        most, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
        left.append(max(0, most - used + cached))
    return min(left, default=None)
