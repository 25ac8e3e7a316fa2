"""Finding devices by name, alias or folder, the user's profiles before the packaged ones. Torch-free."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from torchedge.devices.device import DEVICE_FILE, Device, Figure, Provenance, freeze, read_device, weakest
from torchedge.errors import (
    DeviceError,
    InputError,
    ProfileError,
    TorchedgeWarning,
    check_path,
    checked_call,
    shown,
)
from torchedge.storage import data_folder, read_toml, resolve_inside, user_folder

LOCAL_DEVICE = "local-cpu"
"""The device that stands for this machine's processor: the last resort of the default."""

DEVICE_VARIABLE = "TORCHEDGE_DEVICE"
CONFIG_FILE = "config.toml"
TRANSFER_TABLE = "transfer"
"""The table of `[profile]` that says how well a device's latency is scaled to others."""
HOSTS_TABLE = "hosts"
"""The table of `[profile]` that says how fast the hosts are that a device was met in."""

MAX_NAME = 255
MAX_PROFILES = 1024
BOARD_FILE = Path("/proc/device-tree/model")
MEMORY_TOLERANCE = 0.25

_PHONE_GPUS = re.compile(
    r"adreno|qualcomm|mali|immortalis|powervr|imagination|samsung|xclipse|\barm\b", re.IGNORECASE
)

# Words that drivers and boards add around the name of a device.
_NOISE = frozenset({
    "nvidia", "geforce", "qualcomm", "arm", "gpu", "tm", "r", "opencl", "developer", "kit", "engineering",
    "reference",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profiles:
    """The devices found, sorted by name, and one line for each folder that could not be read."""

    devices: tuple[Device, ...]
    problems: tuple[str, ...]


def profile_roots() -> tuple[Path, ...]:
    """Return the folders that hold profiles, in search order: the user's, then the packaged one."""
    return (user_folder() / "profiles", data_folder("profiles"))


@checked_call()
def find_device(name: str | Path) -> Device:
    """Return a device by its name or an alias (any case), or by the path of its profile folder.

    A name is looked for in the user's profiles, then in the packaged ones, first as a name, then as an alias.
    What contains a path separator, or is a `Path`, is a folder; so is a name that no profile bears and that
    holds a `device.toml`. A name that stands for a family of devices ("adreno") is announced with a warning.

    Raises:
        DeviceError: no such device; the message suggests the nearest names.
        ProfileError: its profile is malformed.
        InputError: `name` is no text, empty or over-long, or can be no path here.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise InputError(f"device is {shown(name)}; expected a path, or a name of `torchedge devices`")
    if not isinstance(name, str) or any(separator in name for separator in (os.sep, os.altsep or os.sep)):
        return _read_folder(check_path("device", name))
    wanted = name.strip()
    if not wanted or len(wanted.encode(errors="replace")) > MAX_NAME or not wanted.isprintable():
        raise InputError(
            f"device {name[:40]!r}: expected a name of 1 to {MAX_NAME} characters; see torchedge devices"
        )
    folder = wanted.lower()
    if folder not in (".", ".."):
        for root in profile_roots():
            if (root / folder / DEVICE_FILE).is_file():
                return _read_member(root, folder)
    profiles = scan_profiles()
    key = _words(wanted)
    for device in profiles.devices:
        if key and key in _keys(device):
            _announce(wanted, device, profiles)
            return device
    if (Path(wanted) / DEVICE_FILE).is_file():
        return _read_folder(Path(wanted))
    raise DeviceError(_unknown(wanted, profiles))


def _announce(name: str, device: Device, profiles: Profiles) -> None:
    """Warn where a name is that of a family ("adreno") and stands for one of its devices."""
    family = [other.name for other in profiles.devices if other.name.startswith(f"{name.lower()}-")]
    if len(family) > 1 and device.name in family:
        warnings.warn(
            f"device {name!r} stands for {device.name}; name one of {', '.join(family)} for another",
            TorchedgeWarning,
            stacklevel=3,
        )


@checked_call()
def list_devices() -> tuple[Device, ...]:
    """Return every device that has a readable profile, sorted by name.

    A profile of the user's hides the packaged one of the same name. A folder that cannot be read is left out
    with a warning; `scan_profiles` returns these lines instead.
    """
    profiles = scan_profiles()
    for problem in profiles.problems:
        warnings.warn(problem, TorchedgeWarning, stacklevel=2)
    return profiles.devices


def scan_profiles() -> Profiles:
    """Read all profiles; what is malformed becomes a line in `problems` and hides nothing else."""
    devices: dict[str, Device] = {}
    broken: dict[str, str] = {}
    for root in profile_roots():
        for folder in _subfolders(root):
            if folder in devices or folder in broken:
                continue
            try:
                devices[folder] = _read_member(root, folder)
            except ProfileError as error:
                broken[folder] = str(error)
    return Profiles(
        tuple(devices[name] for name in sorted(devices)), tuple(broken[name] for name in sorted(broken))
    )


def match_device(gpu_name: str, memory_mib: float | None = None) -> Device | None:
    """Return the device whose name, title or alias is the name that a driver reports, or None.

    Vendor words, case and punctuation do not count: 'NVIDIA GeForce RTX 3090' and 'rtx-3090' are the same,
    while 'RTX 3090 Ti' is another card. Whole boards share a driver name ('Orin' is the GPU of the Orin Nano,
    NX and AGX): give `memory_mib`, the memory that the driver reports, and a profile whose memory differs by
    over a quarter does not match.
    """
    key = _words(gpu_name[:MAX_NAME])
    if not key:
        return None
    for device in scan_profiles().devices:
        if key in _keys(device) and _same_memory(device, memory_mib):
            return device
    return None


def is_phone_gpu(*names: str) -> bool:
    """Whether a GPU is a phone's, by the words of its profile or driver: vendor, device, platform."""
    return _PHONE_GPUS.search(" ".join(names)) is not None


def prediction_provenance(device: Device, mode: str) -> Provenance:
    """Return the provenance of a device's predictions of a mode, "train" or "infer", from its profile alone.

    A prediction is of a memory and a time: where one of them was not measured, it is assumed.
    """
    tables = [device.profile.get(name) for name in ("training", "inference")]
    table = tables[("train", "infer").index(mode)]
    if not isinstance(table, Mapping) or not table.get("memory_rows"):
        return Provenance.ASSUMED
    fitted = Provenance(table.get("provenance", Provenance.PUBLIC_DATA.value))
    if table.get("latency_rows"):
        return fitted
    derived = any(isinstance(t, Mapping) and t.get("latency_rows") for t in tables)
    relative = device.profile.get("relative")
    if derived or relative is None or transfer_error(find_device(str(relative))) is None:
        return Provenance.ASSUMED
    return weakest((fitted, Provenance.TRANSFERRED))


def transfer_error(device: Device) -> float | None:
    """Return the half-width, in log, of 90 % intervals of latency scaled from a device; None: not known.

    Raises ProfileError where its profile states one that is no number between 0 and 10.
    """
    return (
        None if TRANSFER_TABLE not in device.profile else _number(device, TRANSFER_TABLE, "latency_error", 10)
    )


def usual_host(device: Device) -> tuple[float, float] | None:
    """Return the `eager_operator_us` of the median host that a device was met in; None: not known.

    Beside it the half-width, in log, of the interval around it that nine of ten hosts lie in. Raises
    ProfileError where the profile states something else than two numbers.
    """
    if HOSTS_TABLE not in device.profile:
        return None
    return _number(device, HOSTS_TABLE, "operator_us", 1e6), _number(device, HOSTS_TABLE, "spread", 10)


def _number(device: Device, table: str, name: str, most: float) -> float:
    """Return a number of a table of `[profile]`; raises ProfileError unless it lies between 0 and a limit."""
    given = device.profile[table]
    value = given.get(name) if isinstance(given, Mapping) else None
    if isinstance(value, (int, float)) and 0 < value < most:
        return float(value)
    raise ProfileError(
        f"{device.folder / DEVICE_FILE}: profile.{table}.{name} is {str(value)[:40]!r}; expected a number "
        f"between 0 and {most:g}; correct the file"
    )


def board_name() -> str | None:
    """Return what the device tree calls this board ('NVIDIA Jetson TX2 Developer Kit'), or None."""
    try:
        with BOARD_FILE.open("rb") as file:
            text = file.read(256).split(b"\0")[0].decode("utf-8", "replace").strip()
    except OSError:
        return None
    return text or None


def default_device_name() -> str | None:
    """Return the device that the user chose: `$TORCHEDGE_DEVICE`, else `device` in `config.toml`, else None.

    None means: ask the driver for the GPU's name (`match_device`), and fall back on `LOCAL_DEVICE`. The
    config file lies in `user_folder()`.

    Raises:
        ProfileError: the config file is not TOML.
        InputError: its `device` is not a text.
    """
    chosen = os.environ.get(DEVICE_VARIABLE, "").strip()
    if chosen:
        return chosen
    config = user_folder() / CONFIG_FILE
    if not config.is_file():
        return None
    device = read_toml(config).get("device")
    if device is None:
        return None
    if not isinstance(device, str) or not device.strip():
        raise InputError(
            f"{config}: device: got {str(device)[:40]!r}, expected the name of a device; "
            'write device = "NAME" with a name of torchedge devices'
        )
    return device.strip()


def _words(name: str) -> str:
    """Reduce a name to its distinctive part: lower case words without vendors and punctuation."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return " ".join([word for word in words if word not in _NOISE] or words)


def _keys(device: Device) -> frozenset[str]:
    return frozenset(_words(name) for name in (device.name, device.title, *device.aliases))


def _same_memory(device: Device, memory_mib: float | None) -> bool:
    known = device.figures.get("memory_mib")
    if memory_mib is None or known is None:
        return True
    return abs(memory_mib - known.value) <= MEMORY_TOLERANCE * known.value


def _subfolders(root: Path) -> Iterator[str]:
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith((".", "_")))
    except OSError:
        return
    for name in names[:MAX_PROFILES]:
        if (root / name / DEVICE_FILE).is_file():
            yield name


def _read_member(root: Path, folder: str) -> Device:
    """Read one of a root's profiles, whose folder must lie inside the root and bear the device's name."""
    device = _read_folder(resolve_inside(root, folder))
    if device.name != folder:
        raise ProfileError(
            f"{device.folder / DEVICE_FILE}: name: got {device.name!r}, expected {folder!r} as its folder; "
            "rename either"
        )
    return device


def _read_folder(folder: Path) -> Device:
    path = resolve_inside(folder, DEVICE_FILE)
    if path.parent == (data_folder("profiles") / LOCAL_DEVICE).resolve():
        device = _stored(path)
        cores, (wide, half) = usable_cores(), _operations_a_cycle()
        where = "this machine's system"
        figures = {
            "compute_units": Figure(
                cores, "1", Provenance.MEASURED, f"{where}: cores this process may run on"
            ),
            "peak_fp32_gflops": Figure(
                _GHZ * cores * wide,
                "GFLOP/s",
                Provenance.ASSUMED,
                f"{cores} cores of {wide} single-precision operations a cycle at {_GHZ:g} GHz; measure the "
                "machine to replace it",
            ),
        }
        if half:
            figures["peak_bf16_matrix_gflops"] = replace(
                figures["peak_fp32_gflops"],
                value=_GHZ * cores * half,
                source=f"{cores} cores of {half} bfloat16 operations a cycle at {_GHZ:g} GHz; measure them",
            )
        with contextlib.suppress(DeviceError):
            source = f"{where}: physical pages, within the limit of the process's control group"
            figures["memory_mib"] = Figure(round(memory_mib()[0], 1), "MiB", Provenance.MEASURED, source)
        return replace(device, figures=freeze({**device.figures, **figures}))  # type: ignore[arg-type]
    return _stored(path)


def _stored(path: Path) -> Device:
    folder = path.parent
    try:
        status = path.stat()
    except OSError as error:
        raise DeviceError(
            f"{folder}: holds no {DEVICE_FILE} ({error.strerror}), expected a profile folder; check the path"
        ) from error
    return _cached(path.parent, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _cached(folder: Path, modified: int, size: int) -> Device:
    """Read a profile once as long as its file stays as it is: `modified` and `size` are part of the key."""
    del modified, size
    return read_device(folder)


def _unknown(name: str, profiles: Profiles) -> str:
    names = {
        alias.lower(): device.name for device in profiles.devices for alias in (device.name, *device.aliases)
    }
    near = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.5)
    suggestions = list(dict.fromkeys(names[item] for item in near))[:3]
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "see torchedge devices for all."
    broken = f" ({len(profiles.problems)} profiles could not be read)" if profiles.problems else ""
    return (
        f"device {name[:80]!r} is unknown{broken}, expected a name, an alias or a profile folder; {hint} "
        f"To add one, put a {DEVICE_FILE} into {profile_roots()[0] / 'NAME'}"
    )


# this machine -----------------------------------------------------------------------------------------------

_MIB = 2**20


_GHZ = 3
"""An assumed clock under load."""


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def _operations_a_cycle() -> tuple[int, int]:
    """Return the operations of a core in a cycle: in float32, and in bfloat16 (0 where it has none).

    Two fused units, of eight lanes with AVX2, else of four. Processors with AVX-512 reach about the
    same: a lower clock, or half the units. In bfloat16 AVX-512 computes twice as many, and AMX eight times.
    """
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        flags.update(Path("/proc/cpuinfo").read_text(errors="replace").split())
    wide = 32 if {"avx2", "fma"} <= flags else 16
    return wide, wide * (8 if "amx_bf16" in flags else 2 if "avx512_bf16" in flags else 0)


def memory_mib() -> tuple[float, float | None]:
    """Return the MiB of memory, and of available memory (None where the system does not report it).

    A limit of this process's control group counts as the memory.
    Raises DeviceError: the system does not report its memory.
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
