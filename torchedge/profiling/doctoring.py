"""`torchedge doctor`: what of this machine torchedge can use, and the one command that mends each gap."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchedge.devices import board_name, default_device_name, find_device, is_jetson, scan_profiles
from torchedge.errors import TorchedgeError, first_line
from torchedge.storage.folders import cache_folder, user_folder

Verdict = Literal["works", "missing", "broken"]
"""works; missing: optional and not there; broken: there, but it cannot be used."""

_EXTRAS = {
    "vision": ("torchvision", "models by name"),
    "fit": ("sklearn", "fitting a device's profile"),
    "plan": ("scipy", "streaming plans"),
    "onnx": ("onnx", "ONNX files"),
    "nvidia": ("pynvml", "the memory of NVIDIA GPUs"),
    "plots": ("matplotlib", "pictures"),
    "search": ("joblib", "searches in several processes"),
}
"""Extra -> the module that it brings, and what needs it."""
_CPU_WHEELS = "--index-url https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, its state, and the command that mends it (empty where there is none)."""

    subject: str
    verdict: Verdict
    detail: str
    command: str = ""


def examine() -> list[Finding]:
    """Look at everything; what fails in an unforeseen way is a finding too."""
    findings: list[Finding] = []
    for look in (_python, _torch, _torchvision, _gpu, _opencl, _profiles, _folders, _extras):
        try:
            findings += look()
        except Exception as error:  # a broken installation may raise anything
            name = look.__name__.strip("_")
            findings.append(Finding(name, "broken", f"{type(error).__name__}: {first_line(error)}"))
    return findings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip(words: str) -> str:
    return f"{Path(sys.executable).name or 'python'} -m pip install {words}"


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("Python", "works", f"{version} on {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Finding]:
    import torch

    cuda = torch.version.cuda
    build = (
        f"for CUDA {cuda}" if cuda else f"for ROCm {torch.version.hip}" if torch.version.hip else "for CPUs"
    )
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < (2, 6):
        detail = f"{torch.__version__}; expected 2.6 or newer"
        yield Finding("PyTorch", "broken", detail, _pip("--upgrade torch"))
        return
    yield Finding("PyTorch", "works", f"{torch.__version__}, built {build}")


def _torchvision() -> Iterator[Finding]:
    """Look whether the compiled operators of torchvision load: they do beside one PyTorch alone."""
    version = _version("torchvision")
    if version is None:
        return
    import torch

    own = torch.__version__
    mend = (
        f"--force-reinstall --no-deps torchvision {_CPU_WHEELS if torch.version.cuda is None else ''}".strip()
    )
    required = next(
        (line for line in importlib.metadata.requires("torchvision") or () if line.startswith("torch=")), ""
    )
    wanted = required.partition("==")[2].split(";")[0].strip()
    if wanted and wanted.split("+")[0] != own.split("+")[0]:
        detail = f"{version} was built for PyTorch {wanted}, and {own} is installed"
        yield Finding("torchvision", "broken", detail, _pip("--upgrade torch torchvision"))
    elif _loads_operators():
        yield Finding("torchvision", "works", f"{version}, which fits PyTorch {own}")
    else:
        detail = (
            f"{version}: its compiled operators do not load beside PyTorch {own} (another build); models work"
        )
        yield Finding("torchvision", "broken", detail, _pip(mend))


def _loads_operators() -> bool:
    """Return whether a fresh process imports torchvision: this one may have declared operators for it."""
    import subprocess

    run = [sys.executable, "-c", "import torchvision"]
    return subprocess.run(run, capture_output=True, timeout=120, check=False).returncode == 0


def _gpu() -> Iterator[Finding]:
    import torch

    names = _nvml_names()
    board = board_name()
    if is_jetson(board):
        yield Finding("Jetson", "works", str(board))
    if torch.cuda.is_available():
        listed = ", ".join(torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count()))
        yield Finding("GPU", "works", listed)
    elif isinstance(names, list) and names:
        detail = f"{', '.join(names)} with driver, but this PyTorch has no CUDA"
        yield Finding("GPU", "broken", detail, _pip("--force-reinstall torch"))
    elif Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        yield Finding("GPU", "broken", f"an NVIDIA device without a usable driver: {names}", "nvidia-smi")
    else:
        yield Finding("GPU", "missing", "no NVIDIA GPU; predictions for one need none")


def _nvml_names() -> list[str] | str:
    """Return the names of NVIDIA's GPUs as their driver gives them, else why there are none."""
    try:
        import pynvml
    except ImportError:
        return "pynvml is not installed"
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
            return [name.decode() if isinstance(name, bytes) else str(name) for name in names]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return first_line(error)


def _opencl() -> Iterator[Finding]:
    if importlib.util.find_spec("pyopencl") is None:
        yield Finding(
            "OpenCL", "missing", "pyopencl: training and running kernels", _pip("'torchedge[opencl]'")
        )
        return
    if fault := _fault_of_import("pyopencl"):
        mend = _pip("--force-reinstall --no-deps pyopencl")
        yield Finding("OpenCL", "broken", f"pyopencl does not load: {fault}", mend)
        return
    from torchedge.opencl import list_opencl_devices
    from torchedge.opencl.choosing import remedy
    from torchedge.opencl.probes import fault_of

    try:
        devices = list_opencl_devices()
    except TorchedgeError as error:
        yield Finding("OpenCL", "broken", first_line(error), _pip("'pyopencl[pocl]'"))
        return
    faults = [fault_of(device, again=True) for device in devices]
    for device, fault in zip(devices, faults, strict=True):
        name = f"{device.name} ({device.kind}, {device.platform})"
        if not fault:
            yield Finding("OpenCL", "works", name)
            continue
        verdict: Verdict = "broken" if all(faults) else "missing"  # where another one works, it is not needed
        yield Finding("OpenCL", verdict, f"{name}: {fault}", remedy(device).rpartition("run: ")[2])


def _profiles() -> Iterator[Finding]:
    from torchedge.prediction.profiles import load_models

    profiles = scan_profiles()
    problems = [*profiles.problems]
    for device in profiles.devices:
        for mode in ("train", "infer"):
            try:
                load_models(device, mode)
            except TorchedgeError as error:
                problems.append(f"{device.name}: {first_line(error)}")
    if profiles.devices:
        yield Finding("profiles", "works", f"{len(profiles.devices)} devices")
    for problem in dict.fromkeys(problems):
        yield Finding("profiles", "broken", problem, _pip("--force-reinstall torchedge"))
    chosen = default_device_name()
    if chosen is not None:
        try:
            find_device(chosen)
        except TorchedgeError as error:
            yield Finding("default device", "broken", first_line(error), "torchedge devices")
        else:
            yield Finding("default device", "works", chosen)


def _folders() -> Iterator[Finding]:
    places: dict[str, Callable[[], Path]] = {"cache folder": cache_folder, "profile folder": user_folder}
    for subject, place in places.items():
        folder = place()
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        fault = _fault_of_writing(nearest)
        variable = "TORCHEDGE_CACHE" if subject == "cache folder" else "TORCHEDGE_HOME"
        if fault:
            yield Finding(
                subject, "broken", f"{folder}: {fault}", f"export {variable}=/a/folder/you/can/write"
            )
        else:
            yield Finding(subject, "works", str(folder))


def _fault_of_writing(folder: Path) -> str:
    """Return why nothing can be written into a folder, empty where it can."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".torchedge-doctor-")
    except OSError as error:
        return error.strerror or str(error)
    os.close(handle)
    os.unlink(name)
    return ""


def _extras() -> Iterator[Finding]:
    for extra, (module, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(f"[{extra}]", "missing", f"{module}: {purpose}", _pip(f"'torchedge[{extra}]'"))
        elif fault := "" if module == "torchvision" else _fault_of_import(module):
            mend = _pip(f"--force-reinstall --no-deps {_DISTRIBUTIONS.get(module, module)}")
            yield Finding(f"[{extra}]", "broken", f"{module} does not load: {fault}", mend)
        else:
            yield Finding(f"[{extra}]", "works", purpose)


def _fault_of_import(module: str) -> str:
    """Return why a package that is installed cannot be imported, empty where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a damaged package may raise anything
        return first_line(error)
    return ""


_DISTRIBUTIONS = {"sklearn": "scikit-learn", "pynvml": "nvidia-ml-py"}
"""What pip calls the package of a module, where the names differ."""
