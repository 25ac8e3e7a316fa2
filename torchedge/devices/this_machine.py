"""The memory of this machine, as its system reports it. Torch-free."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torchedge.errors import DeviceError

_MIB = 2**20


def memory_mib() -> tuple[float, float | None]:
    """Return the MiB of memory, and of available memory (None where the system does not report it).

    A limit of this process's control group counts as the memory.

    Raises:
        DeviceError: the system does not report its memory.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _MIB
    except (ValueError, OSError, AttributeError) as error:
        raise DeviceError(
            "this system does not report its memory; expected POSIX: write the profile by hand"
        ) from error
    available = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        available = kib / 1024 + own / _MIB
    for limit in _group_limits():
        total = min(total, limit)
    return total, None if available is None else min(available, total)


def _group_limits() -> list[float]:
    """Return the memory limits of this process's control group in MiB, where there are any."""
    limits = []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text()) / _MIB)
    return [limit for limit in limits if limit >= 64]
