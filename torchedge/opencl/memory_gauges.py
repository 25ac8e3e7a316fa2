"""The memory that a driver says is in use: NVIDIA's management library, or the resident set on processors."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchedge.opencl.contexts import DeviceContext

_PCI_BUS, _PCI_SLOT = 0x4008, 0x4009  # of cl_nv_device_attribute_query
_RESIDENT = Path("/proc/self/statm")


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
