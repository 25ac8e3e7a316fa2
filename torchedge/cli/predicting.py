"""`torchedge predict`, `advise`, `simulate` and `features`: what a step takes, and features of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli import options
from torchedge.cli.console import DOES_NOT_FIT, MIB, Progress, answer, print_json, print_table, print_wrapped
from torchedge.cli.options import CONFIDENCE, MODEL_HELP, PATH, SIZE, WHOLE, capture_named, command
from torchedge.storage.pictures import check_picture, save_picture
from torchedge.texts import number, span

if TYPE_CHECKING:
    from torchedge.graphs.graph import Mode
    from torchedge.prediction.memory.simulation import MemoryProfile
    from torchedge.prediction.results import Prediction

_COLUMNS = 5
"""Batch sizes beside each other in a breakdown."""
_LEAST_MIB = 0.05
"""Parts of the memory below this are not printed."""


_seq_len = click.option("--seq-len", type=WHOLE, help="Length of the sequences of a model that reads any.")


@command(
    "predict",
    notes=MODEL_HELP,
    examples=[
        "torchedge predict resnet50 --batch-size 32 --device jetson-tx2",
        "torchedge predict resnet50 -b 8,16,32 -d jetson-tx2 --max-batch-size",
        "torchedge predict nets.py:small --memory-limit 4GiB --optimizer adamw --amp bfloat16",
        "torchedge predict model.onnx --mode infer --json",
        "torchedge predict hf:config.json -b 8 --seq-len 512 --optimizer adamw",
    ],
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@options.batch_sizes
@options.device
@options.mode
@options.input_size
@_seq_len
@options.optimizer
@options.amp
@options.accumulation
@click.option("--memory-limit", type=SIZE, help="Memory to fit into: MiB, or 4GiB. [default: the device's]")
@click.option("--confidence", type=CONFIDENCE, default=0.95, help="Confidence required of 'fits'.")
@click.option("--max-batch-size", is_flag=True, help="Also print the largest batch size that fits.")
def predict(
    models: tuple[str, ...],
    batch_size: tuple[int, ...],
    device: str | None,
    mode: Mode,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    optimizer: str,
    amp: str | None,
    accumulation: int,
    memory_limit: int | None,
    confidence: float,
    max_batch_size: bool,
    as_json: bool,
) -> int:
    """Predict memory and latency of a training step or an inference.

    Nothing is run: device memory (Γ, of an inference γ) and latency (Φ, φ) come with 90 % intervals. --json
    prints an object for one prediction and a list for several. The exit status is 3 if a run does not fit.
    """
    from torchedge.api import Predictor, capture_lengths

    predictor = Predictor(device)
    asked = _Asked(None if memory_limit is None else memory_limit / MIB, confidence, max_batch_size)
    documents: list[dict[str, Any]] = []
    for place, text in enumerate(models):
        graphs: Sequence[Any]
        if seq_len is None:
            graphs = capture_named(text, mode=mode, input_size=input_size, batch_sizes=batch_size)
        else:
            graphs = [capture_lengths(options.load_named(text)[0], mode=mode)] * len(batch_size)
        predictions = [
            predictor.predict(
                graph, size, seq_len=seq_len, optimizer=optimizer, amp=amp, accumulation=accumulation
            )
            for graph, size in zip(graphs, batch_size, strict=True)
        ]
        step = {
            "optimizer": optimizer if mode == "train" else None,
            "amp": amp,
            "accumulation": accumulation,
        }
        rows = [{**p.to_dict(), **step, **asked.verdict(p)} for p in predictions]
        documents += rows
        if not as_json:
            print("\n" * (place > 0), end="")
            _print(predictions, rows)
    if as_json:
        print_json(documents[0] if len(documents) == 1 else documents)
    return 0 if all(row["fits"] for row in documents) else DOES_NOT_FIT


@dataclass(frozen=True, slots=True)
class _Asked:
    """The limit in MiB (None: the device's), the confidence, and whether to search the largest batch size."""

    limit: float | None
    confidence: float
    largest: bool

    def verdict(self, prediction: Prediction) -> dict[str, Any]:
        """Return whether a prediction fits, as plain data."""
        limit = self.limit if self.limit is not None else prediction.device_memory_mib
        verdict: dict[str, Any] = {
            "memory_limit_mib": limit,
            "confidence": self.confidence,
            "required_mib": prediction.required_mib(self.confidence),
            "fits": prediction.fits(self.limit, confidence=self.confidence),
        }
        if self.largest:
            verdict["max_batch_size"] = prediction.max_batch_size(self.limit, confidence=self.confidence)
        return verdict


def _print(predictions: list[Prediction], rows: list[dict[str, Any]]) -> None:
    first, row = predictions[0], rows[0]
    step = "training step" if first.mode == "train" else "inference"
    extras = [row["optimizer"]] if row["optimizer"] else []
    extras += [f"amp {row['amp']}"] if row["amp"] else []
    extras += [f"accumulation {row['accumulation']}"] if row["accumulation"] > 1 else []
    batch = f", batch {first.batch_size}" if len(predictions) == 1 else ""
    print_wrapped(", ".join([f"{first.model}{batch}: {step} on {first.device}", *extras]))
    letters = ("Γ", "Φ") if first.mode == "train" else ("γ", "φ")
    print()
    if len(predictions) == 1:
        _print_one(first, letters)
        verdict = "fits" if row["fits"] else "does not fit"
        print_wrapped(
            f"{verdict} into {number(row['memory_limit_mib'])} MiB: needs up to "
            f"{number(row['required_mib'])} MiB at {100 * row['confidence']:g} % confidence"
        )
    else:
        _print_several(predictions, rows, letters)
    if "max_batch_size" in row:
        limit = number(row["memory_limit_mib"])
        print(f"largest batch size that fits into {limit} MiB: {row['max_batch_size'] or 'none'}")
    print_wrapped(str(first.provenance), first="provenance: ")
    _print_remarks(predictions)


def _print_one(prediction: Prediction, letters: tuple[str, str]) -> None:
    everything = "all that the run takes from the device"
    memory = [(f"memory {letters[0]}", prediction.memory, everything)]
    if prediction.saturates:
        memory = [
            (f"memory {letters[0]}", prediction.memory, "the most that the board shows as taken"),
            ("needed", prediction.needed, "all that the run asks for; decides whether it fits"),
        ]
    lines = (
        *memory,
        ("reserved", prediction.reserved, "of that by PyTorch's allocator"),
        ("allocated", prediction.allocated, "of that by tensors"),
        (f"latency {letters[1]}", prediction.latency, "a step" if prediction.mode == "train" else "a batch"),
    )
    body = [
        [name, number(e.value), e.unit, span(e.low, e.high), f"  {meaning}"] for name, e, meaning in lines
    ]
    columns = max(len(line[1]) for line in body), max(len("90 % interval"), *(len(line[3]) for line in body))
    print(f"{'':<12}{'':>{columns[0]}}      {'90 % interval':>{columns[1]}}")
    for name, value, unit, interval, meaning in body:
        print(f"{name:<12}{value:>{columns[0]}} {unit:<4} {interval:>{columns[1]}}{meaning}")
    print()
    print(f"{'needed ' * prediction.saturates}memory by what fills it")
    total = max(prediction.needed.value, 1e-9)
    for name, part in prediction.breakdown.items():
        if part >= _LEAST_MIB:
            bar = "#" * round(28 * part / total)
            print(f"  {name:<18}{number(part):>8} MiB {100 * part / total:4.0f} % {bar}".rstrip())
    print()


def _print_several(
    predictions: list[Prediction], rows: list[dict[str, Any]], letters: tuple[str, str]
) -> None:
    memory, latency = letters
    print_wrapped(
        f"{memory} is the memory that the run takes from the device (MiB), {latency} the time of a step "
        "(ms), each with its 90 % interval; allocated and reserved are those of PyTorch's allocator (MiB)."
    )
    saturate = any(p.saturates for p in predictions)
    if saturate:
        print_wrapped(
            f"{memory} stops at the most that the board shows as taken; needed is all that the run asks "
            "for, and decides whether it fits."
        )
    print()
    head = ["batch", f"{memory} MiB", "90 %", f"{latency} ms", "90 %", "allocated", "reserved"]
    head += ["needed"] * saturate + ["fits"]
    body = [
        [
            str(p.batch_size),
            number(p.memory.value),
            span(p.memory.low, p.memory.high),
            number(p.latency.value),
            span(p.latency.low, p.latency.high),
            number(p.allocated.value),
            number(p.reserved.value),
            *([number(p.needed.value)] * saturate),
            "yes" if row["fits"] else "no",
        ]
        for p, row in zip(predictions, rows, strict=True)
    ]
    print_table(head, body, left=0)
    print()
    for start in range(0, len(predictions), _COLUMNS):
        several = predictions[start : start + _COLUMNS]
        names = [n for n in several[0].breakdown if any(p.breakdown[n] >= _LEAST_MIB for p in several)]
        head = ["memory, MiB, at batch", *(str(p.batch_size) for p in several)]
        print_table(head, [[n, *(number(p.breakdown[n]) for p in several)] for n in names])
        print()
    limit, confidence = number(rows[0]["memory_limit_mib"]), 100 * rows[0]["confidence"]
    print(f"fits: into {limit} MiB at {confidence:g} % confidence")


def _print_remarks(predictions: list[Prediction]) -> None:
    """Print each remark on any of the predictions once."""
    for remark in dict.fromkeys(remark for p in predictions for remark in p.unsupported_remarks):
        print_wrapped(remark, rest="  ")
    outside = dict.fromkeys(name for p in predictions for name in p.out_of_range)
    if outside:
        sizes = [str(p.batch_size) for p in predictions if p.out_of_range]
        at = f" at batch {', '.join(sizes)}" if len(predictions) > 1 else ""
        why = "outside the range that the profile was fitted on, so the figures are extrapolated"
        print_wrapped(f"{', '.join(outside)}{at}: {why}", first="out of range: ", rest="  ")
    for note in dict.fromkeys(note for p in predictions for note in p.notes):
        print_wrapped(note, first="note: ", rest="  ")


# advise -----------------------------------------------------------------------------------------------------


@command(
    "advise",
    notes=MODEL_HELP,
    examples=[
        "torchedge advise resnet50 --batch-size 256 --device jetson-tx2",
        "torchedge advise vit_b_16 -b 64 -d nvidia-h200 --memory-limit 8GiB --optimizer adamw --json",
    ],
)
@click.argument("model")
@options.batch_size
@options.device
@options.input_size
@_seq_len
@options.optimizer
@options.amp
@click.option("--memory-limit", type=SIZE, help="Memory to fit into: MiB, or 4GiB. [default: the device's]")
@click.option("--confidence", type=CONFIDENCE, default=0.95, help="Confidence required of 'fits'.")
def advise(
    model: str,
    batch_size: int,
    device: str | None,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    optimizer: str,
    amp: str | None,
    memory_limit: int | None,
    confidence: float,
    as_json: bool,
) -> int:
    """Find settings under which a training step fits a device.

    Combined are gradient accumulation, autocast, optimizers with less state, activation
    checkpointing and training the last layer alone; an update always takes --batch-size samples. Each comes
    with its memory and time. Nothing is run. The exit status is 3 if no setting fits.
    """
    from torchedge import api

    module, label = options.load_named(model)
    with Progress(3, f"advise {label}") as progress, options.unsuitable_size(input_size):
        advice = api.advise(
            module,
            batch_size,
            device=device,
            limit_mib=None if memory_limit is None else memory_limit / MIB,
            confidence=confidence,
            input_size=input_size,
            seq_len=seq_len,
            optimizer=optimizer,
            amp=amp,
            progress=progress.begin,
        )
    if as_json:
        print_json(advice.to_dict())
        return 0 if advice.fits else DOES_NOT_FIT
    limit = f"{number(advice.limit_mib)} MiB at {100 * confidence:g} % confidence"
    print_wrapped(f"{label}: updates of {batch_size} samples on {advice.device}, within {limit}")
    print()
    head, rows = advice.rows()
    print_table(head, rows)
    if not advice.fits:
        print_wrapped("no setting fits; this one needs least: take smaller batches, or a smaller model")
    for note in advice.notes:
        print_wrapped(note, first="note: ", rest="  ")
    return 0 if advice.fits else DOES_NOT_FIT


# simulate ---------------------------------------------------------------------------------------------------


@command(
    "simulate",
    notes=MODEL_HELP,
    examples=[
        "torchedge simulate resnet50 --batch-size 32",
        "torchedge simulate resnet50 -b 32 --device jetson-tx2 --plot step.png",
        "torchedge simulate resnet50 -b 32 --evaluate 256 --empty-cache",
    ],
)
@click.argument("model")
@options.batch_size
@click.option(
    "--device", "-d", type=options.DEVICE, help="Device whose PyTorch to simulate. [default: today's on CUDA]"
)
@options.mode
@options.input_size
@_seq_len
@options.optimizer
@options.amp
@options.accumulation
@click.option("--plot", type=PATH, metavar="FILE", help="Draw memory over the step (.png, .svg, .pdf).")
@click.option("--evaluate", type=options.Whole(), help="Batch size of an evaluation between steps.")
@click.option("--empty-cache", is_flag=True, help="With --evaluate: empty the allocator's cache around it.")
def simulate(
    model: str,
    batch_size: int,
    device: str | None,
    mode: Mode,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    optimizer: str,
    amp: str | None,
    accumulation: int,
    plot: Path | None,
    evaluate: int | None,
    empty_cache: bool,
    as_json: bool,
) -> None:
    """Show when a step's memory peaks, and which tensors fill it.

    Tensor by tensor, with a replay of PyTorch's caching allocator; nothing is fitted.
    """
    from torchedge import api

    if plot is not None:
        check_picture("--plot", plot)
    with options.unsuitable_size(input_size):
        profile = api.simulate(
            model,
            batch_size,
            device=device,
            mode=mode,
            input_size=input_size,
            optimizer=optimizer,
            amp=amp,
            accumulation=accumulation,
            seq_len=seq_len,
            evaluate=evaluate,
            empty_cache=empty_cache,
        )
    if plot is not None:
        save_picture(profile.plot(), plot)
    answer(_memory_document(profile), lambda: print(profile), as_json, drawn=plot)


def _memory_document(profile: MemoryProfile) -> dict[str, object]:
    return {
        "model": profile.name,
        "batch_size": profile.batch_size,
        "optimizer": str(profile.settings.optimizer),
        "amp": profile.settings.amp,
        "accumulation": profile.settings.accumulation,
        "allocated_mib": profile.allocated_mib,
        "reserved_mib": profile.reserved_mib,
        "live_mib": profile.live_mib,
        "peak": {"phase": profile.peak.phase, "kind": profile.peak.kind, "scope": profile.peak.scope},
        "breakdown": dict(profile.breakdown),
        "largest": [{"tensor": label, "mib": mib} for label, mib in profile.largest],
        "unsupported": list(profile.unsupported),
        "stages": [asdict(stage) for stage in profile.stages],
    }


# features ---------------------------------------------------------------------------------------------------


@command(
    "features",
    notes=MODEL_HELP,
    examples=["torchedge features resnet50 --batch-size 1,32", "torchedge features nets.py:small --json"],
)
@click.argument("model")
@options.batch_sizes
@click.option("--feature-set", metavar="NAME", help="A registered feature set. [default: perf4sight]")
@options.input_size
@options.mode
def features(
    model: str,
    batch_size: tuple[int, ...],
    feature_set: str | None,
    input_size: tuple[int, ...] | None,
    mode: Mode,
    as_json: bool,
) -> None:
    """Print the prediction features of a model.

    They are closed forms of its layers' shapes.
    """
    from torchedge.prediction.feature_sets import features

    module, label = options.load_named(model)
    table = features(module, list(batch_size), feature_set=feature_set, input_size=input_size, mode=mode)
    values = table.values.tolist()
    if as_json:
        columns = values[0] if len(batch_size) == 1 else [list(c) for c in zip(*values, strict=True)]
        print_json(
            {
                "model": label,
                "feature_set": table.feature_set,
                "batch_size": batch_size[0] if len(batch_size) == 1 else list(batch_size),
                "features": dict(zip(table.names, columns, strict=True)),
            }
        )
        return
    print_wrapped(f"{label}: {len(table.names)} features of {table.feature_set}")
    for start in range(0, len(batch_size), _COLUMNS - 1):
        part = range(start, min(start + _COLUMNS - 1, len(batch_size)))
        head = ["batch", *(str(batch_size[i]) for i in part)]
        print()
        print_table(
            head, [[name, *(_exact(values[i][f]) for i in part)] for f, name in enumerate(table.names)]
        )


def _exact(value: float) -> str:
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
