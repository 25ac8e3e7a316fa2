"""The profile of a device without Python, through the native runner: limits, kernels, loads, disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torchedge.devices import Device, find_device
from torchedge.profiling.kernel_cases import cases
from torchedge.profiling.kernel_fitting import figures_of, fit_kernels
from torchedge.profiling.kernel_measuring import RemoteBench, measure_kernels
from torchedge.profiling.load_fitting import fit_device_loads
from torchedge.profiling.profile_folders import write_profile
from torchedge.profiling.remote_devices import ask_device, describe_there
from torchedge.profiling.remote_loads import RemoteLoads, measure_loads_there
from torchedge.profiling.remote_runs import RemoteRunner


def profile_there(
    name: str,
    remote: RemoteRunner,
    folder: Path,
    rows: Mapping[str, Path],
    *,
    command: str,
    quick: bool = False,
    bar: Callable[[int, str], Any],
) -> Device:
    """Measure a device, fit its profile and return it; the same call continues what was interrupted.

    folder: of the profile. rows: the journals of what is measured, "kernels", "loads" or both. command: named
    as the source of figures. bar: returns the context of a progress bar for so many steps, whose `begin` is
    called with the title of each.

    Raises:
        DeviceError: the device is lost, or states no limits.
        ProfileError: a journal is none, or of another device.
    """
    there = ask_device(remote)
    device = describe_there(folder, name, there, command)
    if "kernels" in rows:
        bench, file = RemoteBench(remote, there), rows["kernels"]
        with bar(2 * _count(cases(bench.traits, quick=quick)), "measuring kernels") as progress:
            measure_kernels(file, bench, command=command, quick=quick, step=progress.begin)
        part = figures_of(fit_kernels(file, device, folder), device)
        device = write_profile(folder, device, {}, kernels=part)
    if "loads" in rows:
        loads, file = RemoteLoads(remote, there, device), rows["loads"]
        with bar(_count(loads.tasks(quick)), "measuring loads") as progress:
            measure_loads_there(file, loads, command, quick=quick, step=progress.begin)
        write_profile(folder, device, {}, loading=fit_device_loads(file, device, folder))
    return find_device(folder)


def _count(items: Iterable[object]) -> int:
    return sum(1 for _ in items)
