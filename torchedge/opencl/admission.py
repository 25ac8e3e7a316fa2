"""Admission: whether a program's memory fits a device and the host, before any of it is allocated.

Drivers hand out memory that is not there (PoCL's buffers are the host's pages, taken when they are written),
so a program that is too large is killed in the middle of a step instead of refused.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from torchedge.errors import DeviceMemoryError
from torchedge.opencl.platforms import ClDevice

__all__ = ["admit", "free_host_bytes"]

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def admit(device: ClDevice, device_bytes: int, host_bytes: int, what: str) -> None:
    """Raise DeviceMemoryError where a device or the host has less memory than `what` needs.

    device_bytes: of all its tensors on the device. host_bytes: of the arrays that the host holds beside them.
    On processors both are the host's.
    """
    _check(what, device_bytes, device.global_bytes, f"{device.name} has {device.global_bytes} in all")
    needed = host_bytes + (device_bytes if device.kind == "cpu" else 0)
    free = free_host_bytes()
    if free is not None:
        _check(what, needed, free, f"the host has {free} free")


def _check(what: str, needed: int, available: int, where: str) -> None:
    if needed > available:
        raise DeviceMemoryError(
            f"{what} needs {needed} bytes, {where}; use a smaller batch, half storage, or a memory_limit "
            "that streams its weights",
            nbytes=needed,
        )


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
