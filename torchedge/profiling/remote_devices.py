"""What a device without Python states about itself, asked of the native runner and a shell there."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torchedge import __version__
from torchedge.devices import Device, Provenance, find_device, write_device
from torchedge.devices.device import DEVICE_FILE, measured_figure
from torchedge.errors import DeviceError, ProfileError, TorchedgeError
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor
from torchedge.lowering.targets import DeviceClass, device_class
from torchedge.profiling.remote_runs import RemoteRunner
from torchedge.storage import read_toml
from torchedge.textures.layouts import row_major

PROBE = "torchedge-run"

_SYSTEM = (
    "echo kernel $(uname -srm); echo memory $(sed -n 's/^MemTotal: *//p' /proc/meminfo); "
    "echo processor $(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1); "
    "if command -v getprop > /dev/null; then echo model $(getprop ro.product.manufacturer) "
    "$(getprop ro.product.model); echo android $(getprop ro.build.version.release); "
    "echo serial $(getprop ro.serialno); else echo serial $(cat /etc/machine-id 2> /dev/null); fi"
)
"""A word and what it names, a line each; Android has getprop, other systems a machine-id."""

_NOTHING = """\
__kernel void te_nothing(__global const float* restrict from, __global float* restrict out) {
  if (get_global_id(0) == 1)
    out[0] = from[0];
}
"""

_Size = Annotated[int, Meta(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the driver states, as `torchedge-run` prints it under "limits"; sizes of images: 0 without any."""

    name: str
    vendor: str
    platform: str
    opencl: str
    type: _Size
    unified: bool
    compute_units: Annotated[int, Meta(ge=1, le=2**20)]
    clock_mhz: _Size
    memory_bytes: _Size
    allocation_bytes: _Size
    local_bytes: _Size
    base_alignment: _Size
    work_group: Annotated[int, Meta(ge=1, le=2**20)]
    work_item_sizes: tuple[_Size, _Size, _Size]
    image_width: _Size
    image_height: _Size
    pitch_alignment: _Size
    image_from_buffer: bool
    half: bool
    double: bool
    warp: _Size


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """A device behind a runner: the driver's limits, its version, and facts of the system by name."""

    limits: DeviceLimits
    driver: str
    system: Mapping[str, str]

    @property
    def gpu(self) -> bool:
        """Whether it is a GPU: its memory is then no part of the runner's resident set."""
        return bool(self.limits.type & 4)

    @property
    def device_class(self) -> DeviceClass:
        """The class that programs are lowered for."""
        limits = self.limits
        return device_class("gpu" if self.gpu else "cpu", limits.name, limits.vendor, limits.platform)

    @property
    def machine(self) -> str:
        """A short hash of all that makes it another machine."""
        parts = [self.limits.name, self.limits.platform, self.driver, self.system.get("serial", "")]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The device's name with that of the phone or board."""
        model = self.system.get("model", "")
        return f"{self.limits.name} ({model})"[:120] if model else self.limits.name[:120]

    @property
    def memory_mib(self) -> int:
        """Memory of the system, or of a device that has its own."""
        words = self.system.get("memory", "").split()
        if (self.limits.unified or not self.gpu) and words and words[0].isdecimal():
            return max(1, int(words[0]) // 1024)
        return max(1, self.limits.memory_bytes >> 20)

    def environment(self, command: str) -> dict[str, Any]:
        """Return the row "environment" of a campaign on it."""
        return {
            "row": "environment", "probe": f"{PROBE} of torchedge {__version__}", "device": "opencl",
            "device_name": self.title, "driver": self.driver, "platform": self.limits.platform,
            "memory_meter": "resident set and device memory" if self.gpu else "resident set",
            "memory_total_mib": self.memory_mib, "machine": self.machine, **self.system_facts(),
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "command": command,
        }  # fmt: skip

    def system_facts(self) -> dict[str, str]:
        """The system's facts without its serial number."""
        return {
            name: text for name, text in self.system.items() if name in ("kernel", "android", "processor")
        }


def ask_device(remote: RemoteRunner) -> RemoteDevice:
    """Ask a device what it is; the runner is copied there.

    Raises:
        DeviceError: it cannot be reached, or the runner or its driver do not work there.
        ProfileError: the runner is of another version.
    """
    out = StoredTensor("out", (1,), "float32", "state", row_major(1))
    source = StoredTensor("in", (1,), "float32", "input", row_major(1))
    kernel = Kernel("te_nothing", _NOTHING, ("read", "write"))
    program = Program("limits", (source, out), (kernel,), (Launch(0, (0, 1), (1,)),), (0,), (), Arena(0))
    document = remote.measure_program(program)
    try:
        limits = msgspec.convert(document["limits"], DeviceLimits, strict=True)
        driver = msgspec.convert(document["driver"], str)
    except (KeyError, msgspec.ValidationError) as error:
        raise ProfileError(
            f"{remote.program}: describes a device in another form ({error}); build this version's runner"
        ) from error
    system = {}
    for line in remote.transport.ask(_SYSTEM).splitlines():
        word, _, text = line.strip().partition(" ")
        if text.isprintable() and text.strip():
            system[word] = text.strip()[:200]
    return RemoteDevice(limits, driver, system)


def device_called(name: str) -> Device | None:
    """Return the device of a name, None where there is none."""
    with contextlib.suppress(TorchedgeError):
        device = find_device(name)
        return device if device.name == name else None
    return None


def states_limits(device: Device) -> bool:
    """Whether a profile has the limits that the device itself has stated."""
    figure = device.figures.get("max_work_group_size")
    return figure is not None and figure.provenance is Provenance.MEASURED


def describe_there(folder: Path, name: str, device: RemoteDevice, command: str) -> Device:
    """Write a device.toml of what a device states into a profile folder, and read it back.

    Figures that the device states replace those of a profile that is there, which keeps what was fitted, or
    of a known device of that name.

    Raises:
        DeviceError: the folder's profile has another name.
        ProfileError: the folder cannot be written, or its profile is damaged.
    """
    document: dict[str, Any] = {}
    if (folder / DEVICE_FILE).is_file():
        document = dict(read_toml(folder / DEVICE_FILE))
        if document.get("name") != name:
            raise DeviceError(
                f"{folder}: describes {str(document.get('name'))[:60]!r}; expected {name}: choose another "
                "folder"
            )
    elif (known := device_called(name)) is not None:
        document = {
            key: entry for key, entry in read_toml(known.folder / DEVICE_FILE).items() if key != "profile"
        }
    limits, mib = device.limits, 2**20
    stated = {
        "memory_mib": device.memory_mib,
        "compute_units": limits.compute_units,
        "max_work_group_size": limits.work_group,
        "clock_mhz": limits.clock_mhz,
        "local_memory_kib": limits.local_bytes / 1024,
        "max_allocation_mib": limits.allocation_bytes // mib,
        "max_image_width": limits.image_width,
        "max_image_height": limits.image_height,
        "image_pitch_alignment_px": limits.pitch_alignment,
        "image_base_alignment_bytes": limits.base_alignment,
    }
    where = f"{command} on {datetime.now(timezone.utc):%Y-%m-%d}: {limits.name}, driver {device.driver}"
    measured = {"provenance": str(Provenance.MEASURED), "source": " ".join(where.split())[:500]}
    figures = {n: measured_figure(n, value, measured["source"]) for n, value in stated.items() if value}
    facts = {"half_arithmetic": limits.half, "image_from_buffer": limits.image_from_buffer}
    kind = "gpu" if device.gpu else "cpu"
    document = {
        "title": device.title,
        "kind": kind,
        "vendor": limits.vendor[:120] or "unknown",
        "memory": "unified" if limits.unified or not device.gpu else "dedicated",
        "aliases": [limits.name[:120]],
        "notes": "Written from the report of its driver; add further facts of the device.",
        **document,
        "name": name,
        "figures": {**document.get("figures", {}), **figures},
        "facts": {
            **document.get("facts", {}),
            **{key: {"value": value, **measured} for key, value in facts.items()},
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_device(document, folder)
    return find_device(folder)
