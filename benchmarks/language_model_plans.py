"""Predicted against measured times of generation and of a LoRA step on this machine's OpenCL device.

    python benchmarks/language_model_plans.py --out FOLDER [--lora] [--layers 4] [--hidden 384]

First, launches of Llamas of other sizes, and of steps that train their adapters, are timed and the device's
model of programs is fitted to them: FOLDER/profile. Then `torchedge.plan_lm` predicts the Llama of these
options by it, before it is exported, and the bundle is measured: sums of the shortest times of all launches
by the device's clock, which other work on the machine disturbs least, and medians of the first token, of
later ones and of a training step (--lora).
FOLDER/launches.jsonl is used again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from harness import options_of, print_rows, taken_ms
from llamas import llama, stamps_of

import torchedge
from torchedge.devices import Device, find_device
from torchedge.profiling.campaigns.exported import launches_of
from torchedge.profiling.profile_folders import write_profile
from torchedge.profiling.step_fitting import LAUNCHES, fit_device_programs

SIZES = ((128, 1000, 64), (256, 4000, 256), (512, 8000, 512))
"""Hidden size, vocabulary, and length of the caches of the Llamas that the model of programs is fitted to."""
FORMATS: tuple[Any, ...] = (None, "int8", "int4")
RANK, PROMPT, STEPS = 8, 64, 15


def main() -> None:
    """Print predicted and measured figures of one Llama in each format."""
    parser = options_of(__doc__, layers=4, hidden=384, vocabulary=6000, length=384, tokens=32)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = _fitted(options.out)
    rows: list[tuple[Any, ...]] = []
    for form in FORMATS:
        model = llama(options.hidden, options.layers, options.vocabulary, options.length)
        asked: dict[str, Any] = {"max_length": options.length, "quantize": form}
        plan = torchedge.plan_lm(model, device, **asked, prompt=PROMPT, new_tokens=options.tokens)
        with tempfile.TemporaryDirectory() as folder:
            bundle = torchedge.export_lm(model, device, out=Path(folder) / "lm", **asked)
            first, token = _generated(bundle, options.vocabulary, options.tokens)
            launches = {name: sum(ns) / 1e6 for name, ns, _ in _timed(bundle)}
            exact = bundle.manifest.memory.total_bytes == plan.total_bytes
        for name, ms in launches.items():
            rows.append((form, f"launches of {name}", sum(plan.runs[name].launches_ms), ms, exact))
        rows.append((form, "first token", plan.first_token.value, first, exact))
        rows.append((form, "token", plan.token.value, token, exact))
        if options.lora:
            length = min(128, options.length)
            plan = torchedge.plan_lm(model, device, max_length=length, quantize=form, lora=RANK)
            taken, held = _trained(model, form, length)
            rows.append((form, "LoRA step", plan.step.value, taken, held == plan.total_bytes))
    print_rows(
        ("weights", "", "predicted ms", "measured ms", "ratio", "memory to the byte"),
        [
            (f or "float32", what, f"{p:.2f}", f"{m:.2f}", f"{p / m:.2f}", exact)
            for f, what, p, m, exact in rows
        ],
    )


def _fitted(out: Path) -> Device:
    """Return this machine's processor with a model of programs, measured where there is none."""
    device = find_device("local-cpu")
    if not (out / LAUNCHES).exists():
        points = [point for size in SIZES for form in FORMATS for point in _points(*size, form, device)]
        (out / LAUNCHES).write_text("".join(json.dumps(point) + "\n" for point in points))
    fitted = fit_device_programs(out, device)
    assert fitted is not None
    part, errors = fitted
    print(f"model of programs: latency errs by {errors.mean('latency'):.1f} % on networks left out")
    return write_profile(out / "profile", device, {}, programs=part)


def _points(
    hidden: int, vocabulary: int, length: int, form: str | None, device: Device
) -> list[dict[str, Any]]:
    """Time each method of a Llama, and a step of its adapters, launch by launch and as a whole."""
    points = []
    with tempfile.TemporaryDirectory() as folder:
        model = llama(hidden, 2, vocabulary, length)
        adapted, batch, optimizer = _adapted(model, form, min(length, 256))
        for bundle in (
            torchedge.export_lm(
                model, device, out=Path(folder) / "lm", max_length=length, quantize=cast(Any, form)
            ),
            torchedge.export(
                adapted, batch, device, out=Path(folder) / "train", mode="train", loss="model",
                optimizer=optimizer, onnx=False,
            ),
        ):  # fmt: skip
            for name, shortest, step_ms in _timed(bundle):
                method, mib = bundle.method(name), bundle.manifest.memory.total_bytes / 2**20
                launches: dict[str, Any] = {
                    "kernels": len(method.program.kernels),
                    "latency_ms": step_ms,
                    "memory_mib": mib,
                    "allocated_mib": mib,
                    "launches": launches_of(method, shortest),  # type: ignore[arg-type]
                }
                points.append({"id": f"llama-{hidden}-{form}@{name}", "launches": launches})
    return points


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


def _trained(model: Any, form: Any, length: int) -> tuple[float, int]:  # noqa: ANN401
    """Return the median time of a step of adapters, ms, and the bytes that are held."""
    adapted, batch, optimizer = _adapted(model, form, length)
    with torchedge.Trainer(adapted, batch, optimizer=optimizer) as trainer:
        taken = taken_ms(lambda: trainer.step(batch), STEPS)
        return statistics.median(taken[1:]), trainer.memory.total


def _adapted(model: Any, form: Any, length: int) -> tuple[Any, dict[str, torch.Tensor], torch.optim.AdamW]:  # noqa: ANN401
    """Return a Llama with adapters in all linear layers but the head, a text for it, and their optimizer."""
    import peft

    base = model if form is None else torchedge.quantize(model, form, group=32 if form == "int4" else None)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    return adapted.train(), {"input_ids": ids, "labels": ids}, torch.optim.AdamW(trained)


if __name__ == "__main__":
    main()
