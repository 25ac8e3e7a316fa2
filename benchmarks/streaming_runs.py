"""Run streaming plans and measure them: `python benchmarks/streaming_runs.py MODEL ... --device PROFILE`.

For each model: a bundle with random weights is exported to `--folder` (kept, so that a second call goes
on), then run with all weights preloaded, streamed within `--share` of that memory, and by the naive
strategies, all by the same executor. Printed: whether outputs are the same bits; memory allocated (in
brackets: what the driver counts more than before), and predicted; the integrated latency (initialisation and
first run, from binaries of kernels that are there) with direct reads, past the page cache, and with plain
reads of a cached file, and the prediction; and how much longer the naive strategies take than the solver's
plan within the memory that they take. Latencies are medians of `--rounds`, taken in turn. Rows go to `--json`
as they are measured, with all figures; models in it are skipped. Each model runs in a process of its own.

`--bits` runs each model twice preloaded, from a cached file, and twice streamed, the second time past the
page cache. It prints whether the outputs are the same bits, memory and latency of the last run of each, and
what the stages before took: building the model, exporting it, and compiling its kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import apart, options_of, print_rows, read_rows, write_rows
from llamas import filled, uninitialised

import torchedge
from torchedge.bundles.bundle import Bundle, Runner
from torchedge.devices import Device, Figure, Provenance, find_device
from torchedge.errors import LimitError
from torchedge.opencl import compile_kernels, open_context
from torchedge.profiling.load_measuring import host_us
from torchedge.runtime.weight_sources import Reads
from torchedge.storage.amounts import with_unit
from torchedge.streaming.planning import StreamingPlan, plan_program
from torchedge.streaming.plans import STRATEGIES
from torchedge.tracing.paper_models import PAPER_MODELS
from torchedge.tracing.vision import import_torchvision, prepare_torchvision

MIB = 2**20
SHARE = 0.22
ROOM = 1.1
"""Of the smallest memory limit that works, where `--share` is too little."""
PROBES = 3
"""Runs from which predictions take rates and the times of launches, as medians."""
NOMINAL_GB_S = 1.0
"""Of a disk, until it is measured."""
HOST = "host_launch_us", "host_transfer_us"
STREAMED, PRELOADED = "streamed", "preload-all"


def small_unet() -> tuple[torch.nn.Module, Any]:
    """Stable Diffusion 1.5's UNet with half as many channels, on latents of 16x16."""
    prepare_torchvision()
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=16, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(160, 320, 640, 640)
    )
    model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    example = {
        "sample": torch.empty(1, 4, 16, 16),
        "timestep": torch.zeros(1, dtype=torch.int64),
        "encoder_hidden_states": torch.empty(1, 77, 768),
        "return_dict": False,
    }
    return model, example


def whisper_tiny() -> tuple[torch.nn.Module, Any]:
    """Whisper as large as "tiny", encoder and decoder, on 30 s of audio and four tokens."""
    prepare_torchvision()
    import transformers

    halves = {"layers": 4, "attention_heads": 6, "ffn_dim": 1536}
    sizes = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in halves.items()}
    config = transformers.WhisperConfig(d_model=384, use_cache=False, attn_implementation="eager", **sizes)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    example = {"input_features": torch.empty(1, 80, 3000), "decoder_input_ids": tokens}
    return transformers.WhisperForConditionalGeneration(config), example


SMALLER = {"sd-unet-half": small_unet, "whisper-tiny": whisper_tiny}
"""Models beside FlashMem's that fit small machines."""


def built(name: str, batch: int, length: int | None, side: int | None) -> tuple[torch.nn.Module, Any]:
    """Return a model with weights and its example."""
    with uninitialised():
        if name in PAPER_MODELS or name in SMALLER:
            model, example = {**PAPER_MODELS, **SMALLER}[name]()
        else:
            model = import_torchvision().models.get_model(name, weights=None)
            example = (torch.empty(1, 3, side or 224, side or 224),)

    def sized(tensor: object) -> object:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        shape = [batch, *tensor.shape[1:]]
        if length is not None and tensor.dim() == 2:
            shape[1] = length
        if side is not None and tensor.dim() == 4:
            shape[2:] = [side, side]
        generator = torch.Generator().manual_seed(1)
        if tensor.is_floating_point():
            return torch.rand(shape, generator=generator, dtype=tensor.dtype)
        return torch.randint(1000, shape, generator=generator, dtype=tensor.dtype)

    example = torch.utils._pytree.tree_map(sized, dict(example) if isinstance(example, Mapping) else example)
    return filled(model), example


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same bytes."""
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def setting(text: str) -> tuple[str, int, int | None]:
    """Return name, batch size and number of tokens of NAME, NAME@BATCH or NAME@BATCHxTOKENS."""
    name, _, sizes = text.partition("@")
    batch, _, length = (sizes or "1").partition("x")
    return name, int(batch), int(length) if length else None


def measured_device(
    device: Device, rates: Mapping[str, float], host: tuple[float, float] | None = None
) -> Device:
    """Return a profile with the rates, and the host's times (us), that were measured just before."""
    values = [(name, value, "GB/s") for name, value in rates.items()]
    values += [(name, value, "us") for name, value in zip(HOST, host or (), strict=False)]
    figures = {
        name: Figure(value, unit, Provenance.MEASURED, "benchmarks/streaming_runs.py")
        for name, value, unit in values
    }
    return replace(device, figures={**device.figures, **figures})


def run(
    bundle: Bundle, plan: StreamingPlan, reads: Reads, options: argparse.Namespace, inputs: list[np.ndarray]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Place a bundle, run it once, and return outputs and figures."""
    start = time.perf_counter()
    schedules = {"infer": plan.schedule}
    with Runner(
        bundle, options.opencl, schedules=schedules, reads=reads, loading=options.loading, profile=True
    ) as runner:
        outputs = runner.step(*inputs)
        wall = 1000 * (time.perf_counter() - start)
        figures = runner.measured()
        memory = figures.memory
        launches = [launch.end_ms - launch.start_ms for launch in figures.launches]
        return outputs, {
            "wall_ms": wall,
            "initialisation_ms": figures.initialisation_ms,
            "latency_ms": figures.latency_ms,
            "stall_ms": figures.stall_ms,
            "read_mib": figures.read_bytes / MIB,
            "allocated_mib": figures.allocated_bytes / MIB,
            **({} if figures.driver is None else {"driver_mib": figures.driver.grown_bytes / MIB}),
            "in_use_peak_mib": memory.peak.total / MIB,
            "in_use_average_mib": memory.average.total / MIB,
            "copies": [(copy.end_ms - copy.start_ms, copy.nbytes) for copy in figures.copies],
            "reads": [(read.start_ms, read.end_ms, read.nbytes) for read in figures.reads],
            "launch_ms": launches,
        }


def exported(
    name: str, device: Device, options: argparse.Namespace
) -> tuple[Bundle, list[np.ndarray], dict[str, float]]:
    """Return a model's bundle, exported unless it is there, its inputs, and the seconds that this took."""
    folder = Path(options.folder) / f"{name}-{options.side}-{options.precision}"
    begun = time.perf_counter()
    model, example = built(*setting(name), options.side)
    leaves = [x for x in torch.utils._pytree.tree_leaves(example) if isinstance(x, torch.Tensor)]
    inputs = [leaf.numpy() for leaf in leaves]
    building = time.perf_counter() - begun
    if not folder.exists():
        torchedge.export(model, example, device=device, out=folder, onnx=False, precision=options.precision)
    exporting = time.perf_counter() - begun - building
    return Bundle.open(folder), inputs, {"building_s": building, "exporting_s": exporting}


def planned(
    bundle: Bundle,
    device: Device,
    nbytes: float,
    **settings: Any,  # noqa: ANN401
) -> tuple[StreamingPlan, int]:
    """Return a plan within so many bytes, or, where they are too little, within what works; and the limit."""
    limit = int(nbytes)
    try:
        return plan_program(bundle.program, device, memory_limit=with_unit(limit), **settings), limit
    except LimitError as error:  # inputs, outputs and intermediates are most of the memory
        limit = int(ROOM * (error.works_bytes or 0))
    return plan_program(bundle.program, device, memory_limit=with_unit(limit), **settings), limit


def bits(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return whether a model streamed gives the same bits as preloaded, and what that took."""
    device = find_device(options.device)
    bundle, inputs, seconds = exported(name, device, options)
    known = measured_device(device, {"disk_read_gb_s": NOMINAL_GB_S})
    begun = time.perf_counter()
    kernels = {kernel.name: kernel.source for kernel in bundle.program.kernels}
    compile_kernels(open_context(options.opencl), kernels)
    compiling = time.perf_counter() - begun
    whole = plan_program(bundle.program, known, strategy=STRATEGIES[PRELOADED])
    begun = time.perf_counter()
    plan, limit = planned(bundle, known, options.share * whole.schedule.memory.total_bytes)
    planning = time.perf_counter() - begun
    for _ in range(2):  # drivers compile in the first run
        reference, preloaded = run(bundle, whole, "plain", options, inputs)
    same, streamed = True, preloaded
    for reads in ("plain", "direct"):
        outputs, streamed = run(bundle, plan, reads, options, inputs)
        same &= all(same_bits(a, b) for a, b in zip(outputs, reference, strict=True))
    return {
        "model": name,
        "same_bits": same,
        "finite": all(bool(np.isfinite(x).all()) for x in reference if x.dtype.kind == "f"),
        "launches": len(bundle.program.launches),
        "kernels": len(kernels),
        "weights_mib": bundle.manifest.files["weights.safetensors"].nbytes / MIB,
        "streamed_weights": plan.streamed_weights,
        "limit_mib": limit / MIB,
        "memory_mib": [preloaded["allocated_mib"], streamed["allocated_mib"]],
        "driver_mib": [preloaded.get("driver_mib"), streamed.get("driver_mib")],
        "latency_ms": [preloaded["latency_ms"], streamed["latency_ms"]],
        **seconds,
        "compiling_s": compiling,
        "planning_s": planning,
    }


def memory_text(allocated: float, driver: float | None) -> str:
    """Return the MiB that a run allocated, and in brackets how many more the driver counted."""
    return f"{allocated:,.1f}" + ("" if driver is None else f" ({driver:,.1f})")


BITS = (
    *("model", "weights, MiB", "launches", "kernels", "weights streamed", "same bits"),
    *("memory, MiB: preloaded", "streamed", "first run, ms: preloaded", "streamed", "building, s"),
    *("exporting, s", "kernels, s", "planning, s"),
)


def print_bits(rows: list[dict[str, Any]]) -> None:
    """Print the figures of `bits` as a table."""
    print_rows(BITS, [cells(row, bits_cells) for row in rows])


def bits_cells(row: dict[str, Any]) -> list[object]:
    """Return a row of that table."""
    same = ("yes" if row["same_bits"] else "NO") + ("" if row["finite"] else ", not finite")
    memory = [memory_text(*sizes) for sizes in zip(row["memory_mib"], row["driver_mib"], strict=True)]
    figures = [row["model"], f"{row['weights_mib']:,.0f}", row["launches"], row["kernels"]]
    figures += [row["streamed_weights"], same, *memory, *(f"{ms:,.0f}" for ms in row["latency_ms"])]
    seconds = [f"{row[f'{stage}_s']:.0f}" for stage in ("building", "exporting", "compiling")]
    return [*figures, *seconds, f"{row['planning_s']:.1f}"]


def cells(row: dict[str, Any], of: Callable[[dict[str, Any]], list[object]]) -> list[object]:
    """Return a row of a table; of a model that failed, why."""
    return [row["model"], row["error"][:300]] if "error" in row else of(row)


def reading_rate(figures: Mapping[str, Any]) -> float:
    """Return the GB/s of a run's reads, from the start of the first to the end of the last."""
    reads = figures["reads"]
    return sum(nbytes for *_, nbytes in reads) / (reads[-1][1] - reads[0][0]) / 1e6


def copying_rate(figures: Mapping[str, Any]) -> float:
    """Return the GB/s of a run's copies."""
    taken = sum(ms for ms, _ in figures["copies"]) or 1e-9
    return sum(nbytes for _, nbytes in figures["copies"]) / taken / 1e6


def case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one model."""
    device = find_device(options.device)
    bundle, inputs, _ = exported(name, device, options)
    nominal = measured_device(device, {"disk_read_gb_s": NOMINAL_GB_S})
    probe = plan_program(bundle.program, nominal, strategy=STRATEGIES[PRELOADED])
    reference, _ = run(bundle, probe, "direct", options, inputs)  # builds the kernels
    probes = [run(bundle, probe, "direct", options, inputs)[1] for _ in range(PROBES)]
    launch_ms = [statistics.median(times) for times in zip(*[x["launch_ms"] for x in probes], strict=True)]
    rates = {
        "disk_read_gb_s": statistics.median([reading_rate(x) for x in probes]),
        "unified_to_texture_gb_s": statistics.median([copying_rate(x) for x in probes]),
    }
    host = host_us(open_context(options.opencl))
    known = measured_device(device, rates, host)
    settings: dict[str, Any] = {"launch_ms": launch_ms, "m_peak": None}
    started = time.perf_counter()
    ours, limit = planned(bundle, known, options.share * probe.schedule.memory.total_bytes, **settings)
    plans = {STREAMED: ours}
    planning = time.perf_counter() - started
    for strategy, solve in STRATEGIES.items():
        naive = plans[strategy] = plan_program(bundle.program, known, strategy=solve, **settings)
        if strategy != PRELOADED:  # the solver with the memory that the strategy takes
            total = naive.schedule.memory.total_bytes
            plans[f"as {strategy}"] = plan_program(
                bundle.program, known, memory_limit=with_unit(total), **settings
            )
    row: dict[str, Any] = {
        "model": name,
        "launches": len(bundle.program.launches),
        "weights_mib": bundle.manifest.files["weights.safetensors"].nbytes / MIB,
        "kernels_ms": sum(launch_ms),
        **rates,
        "host_us": host,
        "limit_mib": limit / MIB,
        "planning_s": planning,
        "status": plans[STREAMED].status,
        "plans": {},
    }
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    same = dict.fromkeys(plans, True)
    for reads in ("direct", "plain"):
        for _ in range(options.rounds):
            for strategy, plan in plans.items():  # in turn: other load on the machine meets all of them
                outputs, once = run(bundle, plan, reads, options, inputs)
                same[strategy] &= all(same_bits(a, b) for a, b in zip(outputs, reference, strict=True))
                del once["reads"], once["copies"], once["launch_ms"]
                rounds.setdefault((strategy, reads), []).append(once)
    for strategy, plan in plans.items():
        row["plans"][strategy] = {
            "predicted_mib": plan.schedule.memory.total_bytes / MIB,
            "predicted_ms": plan.timeline.latency_ms,
            "predicted_initialisation_ms": plan.timeline.initialisation_ms,
            "same_bits": same[strategy],
            **{
                reads: {
                    key: statistics.median(once[key] for once in rounds[strategy, reads])
                    for key in rounds[strategy, reads][0]
                }
                for reads in ("direct", "plain")
            },
        }
    return row


RUNS = (
    *("model", "weights", "same bits", "memory, MiB: preloaded", "streamed", "ratio", "predicted"),
    *("direct, ms: preloaded", "streamed", "ratio", "always-next", "same-type", "predicted, ms"),
    *("warm, ms: preloaded", "streamed", "ratio"),
)


def ratios_of(row: dict[str, Any]) -> dict[str, float]:
    """Return preloading's figures over those of streaming, and naive plans' latencies over ours."""
    plans = row["plans"]
    full, ours = plans[PRELOADED], plans[STREAMED]
    ratios = {"memory": full["direct"]["allocated_mib"] / ours["direct"]["allocated_mib"]}
    for key, reads in (("direct", "direct"), ("warm", "plain")):
        ratios[key] = full[reads]["latency_ms"] / ours[reads]["latency_ms"]
    for key in ("always-next", "same-type"):
        ratios[key] = plans[key]["direct"]["latency_ms"] / plans[f"as {key}"]["direct"]["latency_ms"]
    return ratios


def run_cells(row: dict[str, Any]) -> list[object]:
    """Return a row of the table of runs."""
    full, ours = row["plans"][PRELOADED], row["plans"][STREAMED]
    ratios = {key: f"{ratio:.2f}" for key, ratio in ratios_of(row).items()}
    driver = [plan["direct"].get("driver_mib") for plan in (full, ours)]
    memory = [
        memory_text(plan["direct"]["allocated_mib"], grown)
        for plan, grown in zip((full, ours), driver, strict=True)
    ]
    direct, warm = ([f"{plan[r]['latency_ms']:,.0f}" for plan in (full, ours)] for r in ("direct", "plain"))
    figures = [row["model"], f"{row['weights_mib']:,.0f}", "yes" if ours["same_bits"] else "NO", *memory]
    figures += [ratios["memory"], f"{ours['predicted_mib']:,.1f}", *direct, ratios["direct"]]
    predicted = f"{ours['predicted_ms']:,.0f} of {direct[1]}"
    return [*figures, ratios["always-next"], ratios["same-type"], predicted, *warm, ratios["warm"]]


def print_runs(rows: list[dict[str, Any]]) -> None:
    """Print the figures as a table, and geometric means of the ratios."""
    print_rows(RUNS, [cells(row, run_cells) for row in rows])
    ratios = [ratios_of(row) for row in rows if "error" not in row]
    means = (
        {key: statistics.geometric_mean([each[key] for each in ratios]) for key in ratios[0]}
        if ratios
        else {}
    )
    print("geometric means: " + ", ".join(f"{key} {mean:.2f}" for key, mean in means.items()))


def main() -> None:
    """Measure the models of the command line."""
    parser = options_of(__doc__)
    parser.add_argument("models", nargs="+", help="NAME[@BATCH[xTOKENS]] of FlashMem's or torchvision's")
    parser.add_argument("--device", default="local-cpu", help="profile to lower and plan for")
    parser.add_argument("--opencl", help="OpenCL device to run on")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--side", type=int, help="height and width of images")
    parser.add_argument("--loading", choices=["copy", "kernel", "slot"], default="copy")
    parser.add_argument("--share", type=float, default=SHARE, help="memory limit, of preloading's memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", action="store_true", help="only compare outputs, bit for bit")
    parser.add_argument("--folder", default="bundles", help="where bundles are kept")
    parser.add_argument("--json", help="default: streaming_runs.jsonl, or streaming_bits.jsonl")
    options = parser.parse_args()
    options.json = options.json or f"streaming_{'bits' if options.bits else 'runs'}.jsonl"
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    file, shown = Path(options.json), print_bits if options.bits else print_runs
    rows = read_rows(file)
    for name in options.models:
        if any(row["model"] == name and "error" not in row for row in rows):
            continue
        row = apart(bits if options.bits else case, name, options)
        row = {"model": name, "error": row} if isinstance(row, str) else row
        rows = [*[r for r in rows if r["model"] != name], row]
        write_rows(file, rows)
        shown([row])
    shown(rows)


if __name__ == "__main__":
    main()
