"""How a device is chosen: by what is asked, else the first, in order of merit, whose probe succeeds."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence

from torchedge.errors import DeviceError, TorchedgeWarning
from torchedge.opencl.drivers import driver_advice, is_added
from torchedge.opencl.platforms import KINDS, ClDevice, list_opencl_devices
from torchedge.opencl.probes import fault_of, remark_of, tried_now

DEVICE_VARIABLE = "TORCHEDGE_OPENCL_DEVICE"
"""Environment variable of the default device: a number, a type or a part of a name."""

SIMULATORS = frozenset({"Oclgrind"})
"""Platforms that run kernels to check them: a default only where nothing else is there."""

Probe = Callable[[ClDevice], str]


def choose_device(
    query: str | int | None = None,
    devices: Sequence[ClDevice] | None = None,
    probe: Probe | None = None,
    remark: Probe | None = None,
) -> ClDevice:
    """Return one OpenCL device.

    query: an index, a type ("gpu", "cpu", ...) or a part of a device's, platform's or vendor's name;
    None: `$TORCHEDGE_OPENCL_DEVICE`, else the first GPU, else the first accelerator, else the first device.
    devices: those to choose from, by default this machine's. probe: returns why a device cannot be used, or
    an empty text; by default `probes.fault_of` for this machine's devices, and every one of `devices` can.
    remark: returns what a device does wrong, by default `probes.remark_of` or nothing. Among those of a type,
    and where nothing is asked, one that cannot be used is skipped with a warning, and one with a remark is
    used where there is no other. A device with a remark is used with a warning.

    Raises:
        DeviceError: there is no such device, a name fits several, or none that fits can be used.
        MissingExtraError: pyopencl is not installed.
    """
    known = list_opencl_devices() if devices is None else list(devices)
    usable = probe or (fault_of if devices is None else lambda device: "")
    doubt = remark or (remark_of if devices is None else lambda device: "")
    device = _chosen(query, known, usable, doubt)
    if text := doubt(device):
        _warn(f"OpenCL device {_named(device)}: {text}; use another device for what matters")
    return device


def _chosen(query: str | int | None, known: Sequence[ClDevice], usable: Probe, remark: Probe) -> ClDevice:
    asked = os.environ.get(DEVICE_VARIABLE) or None if query is None else query
    if asked is None:
        return _first_usable(sorted(known, key=_merit), usable, remark)
    wanted = str(asked).strip().casefold()
    if wanted in KINDS:
        matches = sorted((device for device in known if device.kind == wanted), key=_stands_back)
        if matches:
            return _first_usable(matches, usable, remark)
    elif re.fullmatch(r"-?\d+", wanted):
        matches = [device for device in known if device.index == int(wanted)]
    else:
        matches = [d for d in known if wanted in f"{d.name}\n{d.platform}\n{d.vendor}".casefold()]
    if len(matches) == 1:
        if fault := usable(matches[0]):
            raise DeviceError(f"OpenCL device {asked!r} cannot be used: {_refusal(matches[0], fault)}")
        return matches[0]
    names = "; ".join(f"{device.index}: {device.name} ({device.kind})" for device in known)
    what = f"fits {len(matches)} devices" if matches else "fits no device"
    raise DeviceError(f"OpenCL device {asked!r} {what}; expected one of {names}; name one by its number")


def remedy(device: ClDevice) -> str:
    """Return what a user can do about a device whose probe fails."""
    if device.kind == "cpu":
        return driver_advice()
    return "install a newer driver of it, or choose another device (torchedge devices --opencl)"


def _merit(device: ClDevice) -> tuple[object, ...]:
    simulated, added = _stands_back(device)
    return (simulated, KINDS.index(device.kind), added, device.index)


def _stands_back(device: ClDevice) -> tuple[bool, bool]:
    """Sort simulators last, and Intel's runtime from pip behind the other drivers of its type."""
    return device.platform in SIMULATORS, is_added(device.platform)


_warned: set[str] = set()  # warnings that were given


def _first_usable(devices: Sequence[ClDevice], probe: Probe, remark: Probe) -> ClDevice:
    """Return the first device that can be used and has no remark, else the first that can be used.

    It warns of those before it: when one is tried, and in every process where the device that is used is of
    another type.
    """
    refused: dict[ClDevice, str] = {}
    doubtful: list[ClDevice] = []
    for device in devices:
        if fault := probe(device):
            refused[device] = _refusal(device, fault)
        elif remark(device):
            doubtful.append(device)
        else:
            break
    else:
        if not doubtful:
            raise DeviceError(f"no OpenCL device can be used: {'; '.join(refused.values())}")
        device = doubtful[0]
    for other, why in refused.items():
        if other.kind != device.kind or tried_now(other):
            _warn(f"skipped OpenCL device {why}")
    return device


def _warn(text: str) -> None:
    """Warn, once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, TorchedgeWarning, stacklevel=4)


def _named(device: ClDevice) -> str:
    return f"{device.name} (device {device.index}, driver {device.driver} of {device.platform})"


def _refusal(device: ClDevice, fault: str) -> str:
    return f"{_named(device)}: {fault}; {remedy(device)}; then try it again by: torchedge devices --opencl"
