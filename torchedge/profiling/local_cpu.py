"""Measures this machine's processor and writes its profile, `profiles/local-cpu` in the user's folder.

Seven probes of a few seconds: the system's cores and memory, a large matrix product in float32 and bfloat16,
a streaming copy, a tiny operator, the memory of a training process beside its tensors, and training steps of
three small networks. Then a campaign measures memory (resident, of the whole process) and latency of drawn
networks, in float32 and under autocast, and a fit turns the profile's predictions from assumed into measured
ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from torchedge import __version__
from torchedge.devices import KNOWN_FIGURES, LOCAL_DEVICE, Device, find_device, write_device
from torchedge.devices.catalog import memory_mib, usable_cores
from torchedge.devices.device import DEVICE_FILE, measured_figure
from torchedge.errors import DeviceError, MissingExtraError, ProfileError, TorchedgeError
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling.campaigns.expansion import PLAN, Listener, read_jobs
from torchedge.profiling.campaigns.plans import CampaignPlan
from torchedge.profiling.campaigns.recording import CampaignJournal
from torchedge.profiling.campaigns.running import Campaign, OtherMachineError, run_campaign
from torchedge.profiling.campaigns.transports import open_transport
from torchedge.profiling.device_fits import DeviceFit, Watcher, fit
from torchedge.profiling.topologies import PROBE
from torchedge.storage import data_folder, read_toml, user_folder
from torchedge.storage.documents import writing
from torchedge.storage.replacing import make_folder
from torchedge.texts import rounded
from torchedge.textures.coefficients import TABLE as KERNELS
from torchedge.tracing.capturing import capture

COMMAND = f"torchedge profile {LOCAL_DEVICE}"
PROBES = (
    "processor",
    "matrix product",
    "bfloat16 product",
    "streaming copy",
    "tiny operator",
    "process memory",
    "training steps",
)

_MIB = 2**20
_PRODUCT_SIDES = (512, 1024, 2048, 3072)
_PRODUCT_SECONDS, _SECONDS = 6.0, 1.0
_COPY_MIB = (64, 256, 512)
_BATCH, _SIDE, _CLASSES, _STEPS = 8, 64, 10, 5

_PROCESS = """
import os, torch
from torch import nn
from torch.utils.benchmark import Timer
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.zeros(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
try:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
except OSError:
    import resource, sys
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(resident)
"""
"""A training process with negligible tensors: its memory is the part of any process beside its tensors."""


def measure_local_cpu(start: Callable[[str], Any] = lambda _: None) -> Device:
    """Measure this machine and write its profile; return the device as read back.

    start: called with the name of each probe before it runs. Takes about 20 s.
    Raises DeviceError where a probe fails and ProfileError where the user's folder cannot be written.
    """
    start(PROBES[0])
    name, cores, (memory, available) = PROBE.processor()[:120], usable_cores(), memory_mib()
    versions = f"torch {torch.__version__}, torchedge {__version__}"
    where = f"{COMMAND}, {datetime.now(timezone.utc):%Y-%m-%d}, {versions}, {name}"
    threads = torch.get_num_threads()
    figures: dict[str, tuple[float, str]] = {}

    def add(key: str, value: float, how: str) -> None:
        figures[key] = (value, f"{where}: {how}")

    add("memory_mib", memory, "memory of the system, or of this process's control group where that is less")
    add("compute_units", cores, "cores this process may run on")
    if available is not None:
        add("usable_memory_mib", available, "available memory when measured, this process's own included")
    start(PROBES[1])
    rate, side = matrix_rate()
    add("peak_fp32_gflops", rate, f"best of several products of {side} x {side} matrices, {threads} threads")
    start(PROBES[2])
    rate, side = matrix_rate(torch.bfloat16)
    add("peak_bf16_matrix_gflops", rate, f"the same of {side} x {side} in bfloat16, {threads} threads")
    start(PROBES[3])
    bandwidth, copied = copy_rate(memory)
    best = f"best of several copies of {copied} MiB, read and written bytes"
    add("bandwidth_gb_s", bandwidth, f"{best}; a lower bound")
    add("measured_bandwidth_gb_s", bandwidth, best)
    start(PROBES[4])
    add("launch_overhead_us", tiny_operator_us(), "median time of adding two numbers, eager")
    start(PROBES[5])
    add("context_mib", process_mib(), "resident memory of a process that has trained a tiny network")
    device = _write(name, figures)
    start(PROBES[6])
    how = f"geometric mean over three small networks at batch {_BATCH}, {threads} threads"
    add("step_time_ratio", step_time_ratio(device), how)
    return _write(name, figures)


def measure_networks(plan: CampaignPlan, listener: Listener, *, hurry: bool) -> Path:
    """Measure memory and latency of a plan's networks on this machine's processor; return the dataset.

    An interrupted measurement continues; a finished one of the same plan, or one of another machine, begins
    anew. hurry: fewer steps a point. Raises MissingExtraError without scikit-learn, and without torchvision
    where the plan names networks.
    """
    needs = [("scikit-learn", "sklearn", "fit"), *[("torchvision",) * 2 + ("vision",)] * bool(plan.networks)]
    for library, module, extra in needs:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError.of(library, extra=extra, purpose="profiling")
    folder = user_folder() / "profiling" / LOCAL_DEVICE
    with writing(folder, "set TORCHEDGE_HOME to a folder you may write"):
        if _finished(folder, plan):
            shutil.rmtree(folder)
        make_folder(folder)
    job = Campaign(folder, plan, LOCAL_DEVICE, "local", "cpu", hurry=hurry)
    transport = open_transport("local", None, folder / "device")
    try:
        summary = run_campaign(job, transport, listener)
    except OtherMachineError:
        shutil.rmtree(folder)
        summary = run_campaign(job, transport, listener)
    if summary.unsteady:
        listener.note(
            f"the steps of {summary.unsteady} of {summary.points} points differ by over half, as on a "
            "machine that does other work: close it and run the same command again"
        )
    return folder


def fit_machine(dataset: Path, watcher: Watcher) -> DeviceFit:
    """Fit this machine's measured profile to `measure_networks`; InputError where no figure is usable."""
    out = user_folder() / "profiles" / LOCAL_DEVICE
    return fit(dataset, LOCAL_DEVICE, out, accuracy=False, force=True, keep_unusable=False, progress=watcher)


def _finished(folder: Path, plan: CampaignPlan) -> bool:
    """Whether every point of a plan was measured into a folder."""
    if not (folder / PLAN).is_file():
        return False
    with contextlib.suppress(TorchedgeError), CampaignJournal(folder) as journal:
        skipped = {job["skipped"] for job in read_jobs(folder) if "skipped" in job}
        return journal.done.keys() >= set(plan.points(skipped))
    return True  # damaged


def _write(name: str, measured: dict[str, tuple[float, str]]) -> Device:
    """Put the measured figures into the packaged template and write the profile."""
    template = data_folder("profiles") / LOCAL_DEVICE / "device.toml"
    document = dict(read_toml(template))
    figures: dict[str, Any] = dict(document.get("figures", {}))  # type: ignore[call-overload]
    figures.pop("step_time_ratio", None)  # an assumed one; the measured one follows
    for key, (value, source) in measured.items():
        whole = KNOWN_FIGURES[key].whole or value >= 1000
        figures[key] = measured_figure(key, round(value) if whole else rounded(value), source)
    document |= {
        "title": name,
        "notes": f"This machine, measured by `{COMMAND}`. Delete the folder to go back to the template.",
        "figures": figures,
        "software": {"pytorch": torch.__version__, "python": platform.python_version()},
    }
    folder = user_folder() / "profiles" / LOCAL_DEVICE
    with writing(folder, "set TORCHEDGE_HOME to a folder you may write"):
        make_folder(folder)
    with contextlib.suppress(ProfileError):  # no earlier file, or a damaged one
        earlier = read_toml(folder / DEVICE_FILE).get("profile")
        if isinstance(earlier, dict) and KERNELS in earlier:  # of `torchedge profile --kernels`
            document["profile"] = {KERNELS: earlier[KERNELS]}
    write_device(document, folder)
    return find_device(LOCAL_DEVICE)


# probes -----------------------------------------------------------------------------------------------------


def matrix_rate(dtype: torch.dtype = torch.float32) -> tuple[float, int]:
    """Return the best rate of square products in GFLOP/s, and the side that reached it."""
    rates: dict[float, int] = {}
    deadline = time.perf_counter() + _PRODUCT_SECONDS
    for side in _PRODUCT_SIDES:
        a, b, out = (torch.ones(side, side, dtype=dtype) for _ in range(3))
        rates[2 * side**3 / min(_times("torch.mm(a, b, out=out)", a=a, b=b, out=out)) / 1e9] = side
        if time.perf_counter() > deadline:
            break
    return max(rates.items())


def copy_rate(memory: float) -> tuple[float, int]:
    """Return the best bandwidth of a copy in GB/s (bytes read plus written), and the MiB copied.

    Sizes are larger than caches and small beside the memory; the largest one counts.
    """
    size = [size for size in _COPY_MIB if size == _COPY_MIB[0] or 8 * size <= memory][-1]
    source, target = (torch.zeros(size * _MIB // 4) for _ in range(2))
    return 2 * size * _MIB / min(_times("target.copy_(source)", source=source, target=target)) / 1e9, size


def tiny_operator_us() -> float:
    """Return the median time of one tiny eager operator in microseconds."""
    return 1e6 * statistics.median(_times("torch.add(x, x)", x=torch.ones(1)))


def _times(statement: str, **names: torch.Tensor) -> list[float]:
    """Return the times of a statement that runs again and again with all threads, in seconds."""
    timer = Timer(statement, globals={"torch": torch, **names}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_SECONDS).times


def process_mib() -> float:
    """Return the resident MiB of a fresh process that has trained a tiny network; DeviceError if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS], capture_output=True, text=True, timeout=120, check=True
        )
        return int(done.stdout.split()[-1]) / _MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        last = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise DeviceError(
            f"measuring a training process failed ({last[-1] if last else type(error).__name__}); expected "
            "`import torch` to work in a fresh process of this Python: check the installation"
        ) from error


# training steps ---------------------------------------------------------------------------------------------


def _block(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def small_networks() -> dict[str, nn.Module]:
    """Return plain, bottleneck and depthwise convolutional networks for 64 x 64 inputs."""
    plain = [*_block(3, 32, 3, 2), *_block(32, 64, 3), *_block(64, 128, 3, 2), *_block(128, 128, 3)]
    narrow = [*_block(3, 64, 7, 2), *_block(64, 32, 1), *_block(32, 32, 3), *_block(32, 128, 1)]
    deep = [*_block(3, 32, 3, 2), *_block(32, 32, 3, 1, 32), *_block(32, 64, 1), *_block(64, 64, 3, 2, 64)]
    widths = {"plain": (plain, 128), "bottleneck": (narrow, 128), "depthwise": (deep, 64)}
    return {
        name: nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))
        for name, (layers, width) in widths.items()
    }


def step_ms(model: nn.Module) -> float:
    """Return the median time of a training step on this processor (SGD with momentum), ms; one warm-up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(_BATCH, 3, _SIDE, _SIDE), torch.zeros(_BATCH, dtype=torch.long)
    times = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def step_time_ratio(device: Device) -> float:
    """Return measured over analytic step time on this machine, the geometric mean over `small_networks`.

    device: the machine's figures without an earlier ratio. The random state is restored.
    """
    logs = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, model in small_networks().items():
            graph = capture(model, input_size=(3, _SIDE, _SIDE), name=name)
            estimate = predict_graph(graph, _BATCH, device, StepSettings()).latency.value
            logs.append(log(step_ms(model) / estimate))
    return exp(statistics.mean(logs))
