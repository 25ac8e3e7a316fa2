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
_PROCESSES = 256
"""Processes of a device that are asked for."""


@dataclass(frozen=True, slots=True)
class MemoryGauge:
    """Reads a driver's figure of the memory in use, in bytes. source: whose figure, and of what."""

    source: str
    read: Callable[[], int]


def memory_gauge(context: DeviceContext) -> MemoryGauge | None:
    """Return the gauge of a device; None where its driver offers no figure.

    On NVIDIA's devices it counts this process, or the whole device where the driver lists processes under
    other numbers (in containers); on processors the resident set of this process.
    """
    device = context.device
    if device.kind == "cpu":
        return MemoryGauge("resident set", _resident_bytes) if _RESIDENT.exists() else None
    if "cl_nv_device_attribute_query" not in device.extensions:
        return None
    try:
        place = (context.handle.get_info(_PCI_BUS), context.handle.get_info(_PCI_SLOT))
        return _nvidia_gauge(ctypes.CDLL("libnvidia-ml.so.1"), place)
    except (OSError, AttributeError, context.cl.Error):  # no library, an older one, or no such property
        return None


def _resident_bytes() -> int:
    """Return the resident set, less what the C library holds free (glibc keeps freed memory for later)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(_RESIDENT.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# NVIDIA's management library --------------------------------------------------------------------------------


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("numbers", ctypes.c_uint * 2),
        ("text", ctypes.c_char * 32),
    )


_UNKNOWN = 2**64 - 1


def _nvidia_gauge(library: Any, place: tuple[int, int]) -> MemoryGauge | None:
    """Return the gauge of the device at a bus and slot of PCI, None where the library has none there."""
    if library.nvmlInit_v2():
        return None
    handle = _nvidia_device(library, place)
    if handle is None:
        return None

    def own_bytes() -> int | None:
        count, processes = ctypes.c_uint(_PROCESSES), (_Process * _PROCESSES)()
        if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
            return None
        sizes = [p.used for p in processes[: count.value] if p.pid == os.getpid() and p.used != _UNKNOWN]
        return sizes[0] if sizes else None

    def device_bytes() -> int:
        memory = _Memory()
        library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return int(memory.used)

    if own_bytes() is None:
        return MemoryGauge("NVML, whole device", device_bytes)
    return MemoryGauge("NVML, this process", lambda: own_bytes() or 0)


def _nvidia_device(library: Any, place: tuple[int, int]) -> Any:
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, pci = ctypes.c_void_p(), _Pci()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        if not library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)) and (pci.bus, pci.device) == place:
            return handle
    return None
