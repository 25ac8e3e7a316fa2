"""Predicted against measured times of generation and of a LoRA step on an OpenCL device of this machine.

    python benchmarks/language_model_plans.py --out FOLDER [--lora] [--layers 4] [--hidden 384]
    python benchmarks/language_model_plans.py --out FOLDER --device nvidia-h200 --known 1024x32000x256 ...

First, launches of Llamas of other sizes (--known), of steps that train their adapters, and of --networks of
torchvision (inference and training) are timed, and the device's model of programs is fitted to them:
FOLDER/profile, or the profile folder --write. Then `torchedge.plan_lm` predicts the Llama of these options by
it, before it is exported, and the bundle is measured: sums of the shortest times of all launches by the
device's clock, which other work on the machine disturbs least, and medians of the first token, of later ones
and of a training step (--lora).
FOLDER/launches.jsonl is used again: points that it holds are not measured; with --fit no other is. With
--known alone nothing is fitted: the device's own profile predicts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import options_of, print_rows, read_rows, taken_ms
from llamas import llama, stamps_of

import torchedge
from torchedge.devices import Device, find_device
from torchedge.profiling.campaigns.exported import launches_of
from torchedge.profiling.profile_folders import write_profile
from torchedge.profiling.step_fitting import LAUNCHES, fit_device_programs
from torchedge.tracing.vision import prepare_torchvision

SIZES = ("128x1000x64", "256x4000x256", "512x8000x512")
"""Hidden size, vocabulary, and length of the caches of the Llamas that the model of programs is fitted to."""
FORMATS: tuple[Any, ...] = (None, "int8", "int4")
RANK, PROMPT, STEPS = 8, 64, 15
PIXELS = 224


def main() -> None:
    """Print predicted and measured figures of one Llama in each format."""
    parser = options_of(__doc__, layers=4, hidden=384, intermediate=0, vocabulary=6000, length=384, tokens=32)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="local-cpu", help="profile of the device that measures")
    parser.add_argument("--known", nargs="*", default=SIZES, metavar="HIDDENxVOCABULARYxLENGTH")
    parser.add_argument("--networks", nargs="*", default=[], help="of torchvision, at batches of 1 and 8")
    parser.add_argument("--write", type=Path, help="profile folder that gets the model of programs")
    parser.add_argument("--formats", nargs="*", default=[form or "float32" for form in FORMATS])
    parser.add_argument("--fit", action="store_true", help="only fit what was measured")
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = find_device(options.device)
    if not options.fit:
        _measure(options.out / LAUNCHES, device, options.known, options.networks)
    if options.fit or options.known or options.networks:
        fitted = fit_device_programs(options.out, device)
        assert fitted is not None
        part, errors = fitted
        print(f"model of programs: latency errs by {errors.mean('latency'):.1f} % on networks left out")
        device = write_profile(options.write or options.out / "profile", device, {}, programs=part)
    if options.fit:
        return
    rows: list[tuple[Any, ...]] = []
    for form in [form for form in FORMATS if (form or "float32") in options.formats]:
        model = llama(
            options.hidden, options.layers, options.vocabulary, options.length, options.intermediate or None
        )
        asked: dict[str, Any] = {"max_length": options.length, "quantize": form}
        asked |= {"lora": RANK} if options.lora else {}
        plan = torchedge.plan_lm(model, device, **asked, prompt=PROMPT, new_tokens=options.tokens)
        with tempfile.TemporaryDirectory() as folder:
            bundle = torchedge.export_lm(model, device, out=Path(folder) / "lm", **asked)
            first, token = _generated(bundle, options.vocabulary, options.tokens)
            timed = _timed(bundle)
            exact = bundle.manifest.memory.total_bytes == plan.total_bytes
        launches = {name: sum(ns) / 1e6 for name, ns, _ in timed}
        for name, ms in launches.items():
            rows.append((form, f"launches of {name}", sum(plan.runs[name].launches_ms), ms, exact))
        rows.append((form, "first token", plan.first_token.value, first, exact))
        rows.append((form, "token", plan.token.value, token, exact))
        if plan.step is not None:
            rows.append((form, "LoRA step", plan.step.value, timed[-1][-1], exact))
    print_rows(
        ("weights", "", "predicted ms", "measured ms", "ratio", "memory to the byte"),
        [
            (f or "float32", what, f"{p:.2f}", f"{m:.2f}", f"{p / m:.2f}", exact)
            for f, what, p, m, exact in rows
        ],
    )


def _measure(path: Path, device: Device, sizes: list[str], networks: list[str]) -> None:
    """Export what is not in the file yet, in processes of their own, and time each method of it."""
    done = {row["id"] for row in read_rows(path)}
    wanted: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
    for name in networks:
        for mode in ("infer", "train"):
            for batch in (1, 8):
                wanted[f"{name}@{mode}-{batch}"] = (_export_network, (name, mode, batch))
    for size in sizes:
        for form in FORMATS:
            for rank in (None, RANK):
                given = (*map(int, size.split("x")), form, rank)
                name = f"llama-{size}@{form or 'float32'}{'-adapters' if rank else ''}"
                wanted[name] = (_export_llama, given)
    workers = max(1, (cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder, path.open("a") as stream:
        with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (2,)) as pool:
            running = {
                name: pool.submit(_compiled, work, *given, device.name, Path(folder) / name)
                for name, (work, given) in wanted.items()
                if name not in done
            }
        for name, export in running.items():
            if export.exception() is not None:
                print(f"{name}: {export.exception()}", flush=True)
                continue
            print(f"timing {name}", file=sys.stderr, flush=True)
            point = _point(torchedge.load_bundle(Path(folder) / name), device)
            stream.writelines(json.dumps({"id": name, "launches": row}) + "\n" for row in point)
            stream.flush()


def _compiled(export: Callable[..., None], *given: Any) -> None:  # noqa: ANN401
    """Export a bundle, and leave its compiled kernels in the cache."""
    export(*given)
    torchedge.load_bundle(given[-1]).place().close()


def _export_network(name: str, mode: Any, batch: int, device: str, out: Path) -> None:  # noqa: ANN401
    prepare_torchvision()
    import torchvision

    model = torchvision.models.get_model(name, weights=None).train(mode == "train")
    options: dict[str, Any] = {}
    if mode == "train":
        options["optimizer"] = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images = torch.zeros(batch, 3, PIXELS, PIXELS)
    torchedge.export(model, images, device, out=out, mode=mode, onnx=False, **options)


def _export_llama(
    hidden: int,
    vocabulary: int,
    length: int,
    form: Any,  # noqa: ANN401
    lora: int | None,
    device: str,
    out: Path,
) -> None:
    model = llama(hidden, 2, vocabulary, length)
    torchedge.export_lm(model, device, out=out, max_length=length, quantize=form, lora=lora)


def _point(bundle: torchedge.Bundle, device: Device) -> list[dict[str, Any]]:
    """Time each method of a bundle, launch by launch and as a whole; memory is what is counted."""
    mib, beside = bundle.manifest.memory.total_bytes / 2**20, device.figures.get("context_mib")
    return [
        {
            "kernels": len(bundle.method(name).program.kernels),
            "latency_ms": step_ms,
            "memory_mib": mib + (beside.value if beside else 0),
            "allocated_mib": mib,
            "launches": launches_of(bundle.method(name), shortest),  # type: ignore[arg-type]
        }
        for name, shortest, step_ms in _timed(bundle)
    ]


def _timed(bundle: torchedge.Bundle) -> list[tuple[str, list[int], float]]:
    """Return each method, the shortest times of its launches in ns, and the median of its steps in ms."""
    rows = []
    with bundle.place(profile=True) as profiled, bundle.place() as plain:
        for name in bundle.methods:
            inputs = [np.zeros(port.shape, port.dtype) for port in bundle.method(name).inputs]
            times, taken = [], []
            for _ in range(STEPS):
                profiled.step(*inputs, method=name)
                times.append([launch.ns for launch in profiled.timings()])
                taken += taken_ms(lambda inputs=inputs, name=name: plain.step(*inputs, method=name), 1)
            rows.append((name, np.maximum(np.min(times, axis=0), 1).tolist(), statistics.median(taken[1:])))
    return rows


def _generated(bundle: torchedge.Bundle, vocabulary: int, count: int) -> tuple[float, float]:
    """Return the medians of the first token's time and of later ones', ms."""
    firsts, tokens = [], []
    for turn in range(6):
        ids = torch.randint(0, vocabulary, (PROMPT,)).tolist()
        bundle.runner.reset()
        stamps = stamps_of(bundle, ids, count)
        if turn:  # the first one warms up
            firsts.append(1e3 * (stamps[1] - stamps[0]))
            tokens += [1e3 * (b - a) for a, b in pairwise(stamps[1:])]
    return statistics.median(firsts), statistics.median(tokens)


if __name__ == "__main__":
    main()
