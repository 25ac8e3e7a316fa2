"""Points of a campaign on a device without Python: each is exported here and runs there as a bundle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchedge.bundles.bundle import Bundle
from torchedge.bundles.exporting import Request, make_bundle
from torchedge.devices import Device
from torchedge.errors import DeviceError, TorchedgeError, clipped
from torchedge.graphs import Mode
from torchedge.graphs.training_steps import TrainingStep
from torchedge.profiling.remote_devices import RemoteDevice
from torchedge.profiling.remote_runs import RemoteRunner, RunError, scratch_bundle
from torchedge.profiling.topologies import PROBE, set_up
from torchedge.storage.tensors import write_tensors
from torchedge.streaming.schedules import works_of
from torchedge.texts import rounded

Row = dict[str, Any]

STEP_SECONDS, LEAST_STEPS, MOST_STEPS = 2.0, 5, 200
"""Time of the steps of a point, and bounds of their number."""

TIMES = 5
"""Most runs of each launch for its time."""

_MIB = 2**20


def measure_points(
    jobs: Iterable[Mapping[str, Any]], device: Device, there: RemoteDevice, remote: RemoteRunner
) -> Iterator[Row]:
    """Yield the rows of a campaign: "start" and "point" of each of the jobs' points.

    device: the profile that they are exported for. Raises DeviceError if the device is lost.
    """
    for job in jobs:
        for mode, batch in job["points"]:
            label = {"job": job["id"], "mode": mode, "batch_size": batch}
            yield {**label, "row": "start"}
            with scratch_bundle() as folder:
                row = _row(job, mode, batch, device, there, remote, folder)
            yield {**row, **label, "row": "point"}


def _row(
    job: Mapping[str, Any],
    mode: Mode,
    batch: int,
    device: Device,
    there: RemoteDevice,
    remote: RemoteRunner,
    folder: Path,
) -> Row:
    """Return the figures of a point, or the reason for none."""
    try:
        bundle = export_point(job, mode, batch, device, folder)
    except DeviceError as error:  # beyond a limit of the device
        return {"fits": 0, "reason": clipped(str(error))}
    except (
        TorchedgeError,
        RuntimeError,
        ValueError,
        TypeError,
    ) as error:  # one network does not end a campaign
        return {"fits": None, "reason": clipped(f"{type(error).__name__}: {error}")}
    try:
        return _measured(bundle, there, remote, folder.with_name("inputs.safetensors"))
    except RunError as error:
        return {
            "fits": 0 if error.killed or "too little memory" in str(error) else None,
            "reason": clipped(str(error)),
        }


def export_point(job: Mapping[str, Any], mode: Mode, batch: int, device: Device, folder: Path) -> Bundle:
    """Write the step of a point as a bundle."""
    model = set_up(PROBE.build(job["build"]), job)
    example = torch.zeros(batch, *job["input_size"])
    step = TrainingStep()
    if mode == "train":
        step = TrainingStep(optimizer=PROBE.make_optimizer(job.get("optimizer", "sgd"), model.parameters()))
    request = Request(model.train(mode == "train"), example, mode, step, 0, job["network"], onnx=False)
    return make_bundle(request, device, folder, progress=lambda _: None, trust=True)


def _measured(bundle: Bundle, there: RemoteDevice, remote: RemoteRunner, inputs: Path) -> Row:
    """Run a bundle: once to compile its kernels, then for its figures, then launch by launch."""
    draw = np.random.default_rng(0)
    write_tensors(inputs, {port.name: port.drawn(draw) for port in bundle.inputs})

    def run(steps: int, *words: str) -> Mapping[str, Any]:
        given = ["--steps", str(steps), "--figures", *words]
        return remote.measure(bundle.path, bundle.manifest, given, inputs=inputs)

    first = run(2)
    steps = int(min(max(1e3 * STEP_SECONDS / max(first["step_ms"], 1e-3), LEAST_STEPS), MOST_STEPS))
    figures = run(steps + 1)  # the first step touches memory for the first time
    timed = run(1, "--times", str(TIMES))
    resident = figures["peak_bytes"] + (figures["allocated_bytes"] if there.gpu else 0)
    return {
        "fits": 1, "reason": "", "steps": steps, "memory_mib": round(resident / _MIB, 3),
        "allocated_mib": round(figures["allocated_bytes"] / _MIB, 3), "reserved_mib": None,
        "latency_ms": _short(figures["median_step_ms"]),
        "latency_p10_ms": _short(figures["lower_quartile_step_ms"]),
        "latency_p90_ms": _short(figures["upper_quartile_step_ms"]),
        "launches": {
            "kernels": len(bundle.program.kernels),
            "latency_ms": _short(figures["median_step_ms"]),
            "memory_mib": round(resident / _MIB, 3),
            "allocated_mib": round(figures["allocated_bytes"] / _MIB, 3),
            "launches": launches_of(bundle, timed["launch_ns"]),
        },
    }  # fmt: skip


def launches_of(bundle: Bundle, launch_ns: Iterable[int]) -> list[list[Any]]:
    """Return the launches of a step: kind, class, FLOPs, bytes read and written, items, group, ms."""
    program = bundle.program
    kinds = [program.kernels[launch.kernel].kind for launch in program.launches]
    return [
        [kind, work.load_class, work.flops, work.input_bytes, work.output_bytes, work.work_items,
         work.group_items, _short(ns / 1e6)]
        for kind, work, ns in zip(kinds, works_of(program), launch_ns, strict=True)
    ]  # fmt: skip


def _short(number: float) -> float:
    return rounded(number, 6)
