"""`torchedge predict`, `advise`, `simulate`, `report` and `features`: what a step of a model takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli import options
from torchedge.cli.console import (
    DOES_NOT_FIT,
    Progress,
    answer,
    json_wanted,
    print_json,
    print_notes,
    print_table,
    print_wrapped,
)
from torchedge.cli.language_rows import print_language_rows
from torchedge.cli.options import MODEL_HELP, PICTURE, command
from torchedge.errors import InputError
from torchedge.storage.amounts import mib_of
from torchedge.storage.pictures import save_picture
from torchedge.texts import number, span

if TYPE_CHECKING:
    from torchedge.graphs.graph import Mode
    from torchedge.prediction.memory.simulation import MemoryProfile
    from torchedge.prediction.results import Prediction

_OF_THE_STEP = (
    "batch_size", "mode", "input_size", "seq_len", "optimizer", "amp", "accumulation", "compile",
    "reduce_overhead",
)  # fmt: skip
"""Options that a script or a bundle decides itself."""
_COLUMNS = 5
"""Batch sizes beside each other in a breakdown."""
_LEAST_MIB = 0.05
"""Parts of the memory below this are not printed."""


@command(
    "predict",
    notes=MODEL_HELP,
    examples=[
        "torchedge predict resnet50 --batch-size 32 --device jetson-tx2",
        "torchedge predict resnet50 -b 8,16,32 -d jetson-tx2 --max-batch-size",
        "torchedge predict nets.py:small --memory-limit 4GiB --optimizer adamw --amp bfloat16",
        "torchedge predict model.onnx --mode infer --json",
        "torchedge predict hf:config.json -b 8 --seq-len 512 --optimizer adamw",
        "torchedge predict training --device my-phone",
        "torchedge predict train.py --device jetson-tx2 -- --epochs 3",
    ],
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@options.batch_sizes
@options.device
@options.operator_us
@options.step
@click.option("--compile", is_flag=True, help="The step runs under torch.compile.")
@click.option("--reduce-overhead", is_flag=True, help="The same in this mode, with CUDA graphs.")
@options.fit
@click.option("--max-batch-size", is_flag=True, help="Also print the largest batch size that fits.")
@click.option(
    "--trace",
    type=options.OutputFile(".json"),
    metavar="FILE",
    help="Write the step on the lanes of host and device as a Perfetto trace (.json).",
)
def predict(
    models: tuple[str, ...],
    batch_size: tuple[int, ...],
    device: str | None,
    operator_us: float | None,
    mode: Mode,
    input_size: tuple[int, ...] | None,
    seq_len: int | None,
    memory_limit: str | None,
    confidence: float,
    max_batch_size: bool,
    trace: Path | None,
    reduce_overhead: bool,
    **step: Any,  # noqa: ANN401 - optimizer, amp, accumulation, compile
) -> int:
    """Predict memory and latency of a training step or an inference.

    Nothing is run: device memory (Γ, of an inference γ) and latency (Φ, φ) come with 90 % intervals. --json
    prints an object for one prediction and a list for several. The exit status is 3 if a run does not fit.

    MODEL may be an exported bundle: its own step is predicted, by the programs that were measured on the
    device (`torchedge campaign run --runner`). Without --device it is that of the export.

    MODEL may be a training script, with its arguments behind --: it runs on the CPU up to its first update,
    and the step that it would run is predicted. Files that it writes up to there stay.
    """
    from torchedge.api import Predictor
    from torchedge.tracing.capturing import CaptureRequest, capture_each
    from torchedge.tracing.sequence_lengths import LengthFamily

    compiled = step.pop("compile") or reduce_overhead
    if (Path(models[0]) / "manifest.json").is_file():
        others = (*_OF_THE_STEP, "max_batch_size", "operator_us", "confidence", "trace")
        options.refuse_given(others, "with a bundle, whose step is as it was exported; leave it out")
        return _predict_bundles(models, device, memory_limit)
    if models[0].endswith(".py") and Path(models[0]).is_file():
        return _predict_script(models, device, operator_us, memory_limit, confidence, trace)
    words = [text for text in models if text.startswith("-")]
    if words:
        raise InputError(
            f"{words[0]} is no model; expected arguments behind -- of a training script alone: name the "
            "script first (train.py), or omit them"
        )
    if trace is not None and len(models) * len(batch_size) > 1:
        raise InputError(
            f"--trace is given with {len(models)} x {len(batch_size)} predictions (models, batch sizes); "
            "expected one: name one model and one batch size"
        )
    predictor = Predictor(device)
    if operator_us is not None:
        predictor = Predictor(predictor.device.on_host(operator_us))
    documents: list[dict[str, Any]] = []
    for place, text in enumerate(models):
        graphs: Sequence[Any]
        request = CaptureRequest(
            text,
            mode=mode,
            input_size=input_size,
            device=predictor.device,
            compiled=compiled,
            recorded=reduce_overhead,
        )
        if seq_len is None:  # one graph serves all batch sizes, unless the model needs one for each
            request = replace(request, amp=step["amp"], partitioned=True)
            with options.unsuitable_size(input_size):
                graphs = capture_each(request, batch_size)
        else:
            module, label = options.load_named(text)
            with options.unsuitable_size(input_size):
                graphs = [LengthFamily(replace(request, model=module, name=label))] * len(batch_size)
        predictions = [
            predictor.predict(graph, size, seq_len=seq_len, **step)
            for graph, size in zip(graphs, batch_size, strict=True)
        ]
        shown = step if mode == "train" else {**step, "optimizer": None}
        rows = [{**p.to_dict(), **shown, **_verdict(p, memory_limit, confidence)} for p in predictions]
        if max_batch_size:
            for row, p in zip(rows, predictions, strict=True):
                row["max_batch_size"] = p.max_batch_size(memory_limit, confidence=confidence)
        if trace is not None:
            _write_trace(predictions[0], trace)
        documents += rows
        if not json_wanted():
            print("\n" * (place > 0), end="")
            _print(predictions, rows)
    if json_wanted():
        print_json(documents[0] if len(documents) == 1 else documents)
    return 0 if all(row["fits"] for row in documents) else DOES_NOT_FIT


def _predict_bundles(folders: Sequence[str], device: str | None, memory_limit: str | None) -> int:
    """Predict a step of each of some bundles."""
    from torchedge.bundles.bundle import Bundle

    limit = None if memory_limit is None else mib_of(memory_limit)
    documents = []
    for bundle in map(Bundle.open, folders):
        for method in bundle.methods:
            p = bundle.predict(device, method=method)
            document = {
                "model": bundle.manifest.model, "mode": bundle.manifest.mode, "method": method,
                "device": p.device, "memory": asdict(p.memory), "latency": asdict(p.latency),
                "device_bytes": p.device_bytes, "launches": len(p.launches_ms),
                "provenance": str(p.provenance), "notes": list(p.notes),
                "fits": limit is None or p.memory.value <= limit,
            }  # fmt: skip
            documents.append(document)
            if not json_wanted():
                gamma, phi = ("Γ", "Φ") if bundle.trains else ("γ", "φ")
                name = bundle.manifest.model + f", {method}" * (len(bundle.methods) > 1)
                print(f"{name} on {p.device}, {len(p.launches_ms)} launches ({p.provenance})")
                print(f"  memory {gamma}   {p.memory}; {number(p.device_bytes / 2**20)} MiB on the device")
                print(f"  latency {phi}  {p.latency}")
                print_notes(p.notes)
    if json_wanted():
        print_json(documents[0] if len(documents) == 1 else documents)
    return 0 if all(document["fits"] for document in documents) else DOES_NOT_FIT


def _predict_script(
    words: tuple[str, ...],
    device: str | None,
    operator_us: float | None,
    memory_limit: str | None,
    confidence: float,
    trace: Path | None,
) -> int:
    """Predict the step of a training script; the script decides about what is no option of the device."""
    from torchedge.api import choose_device
    from torchedge.integrations.scripts import watch_script

    options.refuse_given(
        (*_OF_THE_STEP, "max_batch_size"),
        f"with the script {words[0]}, which decides it itself; leave it out, or pass the script's own option "
        "behind --",
    )
    chosen = choose_device(device)
    chosen = chosen if operator_us is None else chosen.on_host(operator_us)
    with contextlib.redirect_stdout(sys.stderr):
        watched = watch_script(words[0], words[1:], chosen)
        prediction = watched.prediction
    if trace is not None:
        _write_trace(prediction, trace)
    settings = {
        "optimizer": str(watched.settings.optimizer),
        "amp": None,
        "accumulation": watched.settings.accumulation,
    }
    row = {**prediction.to_dict(), **settings, **_verdict(prediction, memory_limit, confidence)}
    answer(row, lambda: _print([prediction], [row]))
    return 0 if row["fits"] else DOES_NOT_FIT


def _write_trace(prediction: Prediction, path: Path) -> None:
    assert prediction.timeline is not None  # only one that was read from a file has none
    prediction.timeline.trace(path)


def _verdict(prediction: Prediction, memory_limit: str | None, confidence: float) -> dict[str, Any]:
    """Return whether a prediction fits a limit (None: the device's memory), as plain data."""
    return {
        "memory_limit_mib": prediction.device_memory_mib if memory_limit is None else mib_of(memory_limit),
        "confidence": confidence,
        "needed_mib": prediction.needed_mib(confidence),
        "fits": prediction.fits(memory_limit, confidence=confidence),
    }


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
        _print_one(first)
        verdict = "fits" if row["fits"] else "does not fit"
        print_wrapped(
            f"{verdict} into {number(row['memory_limit_mib'])} MiB: needs up to "
            f"{number(row['needed_mib'])} MiB at {100 * row['confidence']:g} % confidence"
        )
    else:
        _print_several(predictions, rows, letters)
    if "max_batch_size" in row:
        limit = number(row["memory_limit_mib"])
        print(f"largest batch size that fits into {limit} MiB: {row['max_batch_size'] or 'none'}")
    print_wrapped(str(first.provenance), first="provenance: ")
    _print_remarks(predictions)


def _print_one(prediction: Prediction) -> None:
    body = [
        [name, number(e.value), e.unit, span(e.low, e.high), f"  {meaning}"]
        for name, e, meaning in prediction.figures
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
    cached = predictions[0].device_kind == "gpu"
    taken = "memory that the run takes from the device" if cached else "resident memory of the process"
    parts = "reserved are those of PyTorch's allocator" if cached else "by tensors"
    print_wrapped(
        f"{memory} is the {taken} (MiB), {latency} the time of a step (ms), each with its 90 % interval; "
        f"allocated {'and ' * cached}{parts} (MiB)."
    )
    saturate = any(p.saturates for p in predictions)
    if saturate:
        print_wrapped(
            f"{memory} stops at the most that the board shows as taken; needed is all that the run asks "
            "for, and decides whether it fits."
        )
    print()
    head = ["batch", f"{memory} MiB", "90 %", f"{latency} ms", "90 %", "allocated"]
    head += ["reserved"] * cached + ["needed"] * saturate + ["fits"]
    body = [
        [
            str(p.batch_size),
            number(p.memory.value),
            span(p.memory.low, p.memory.high),
            number(p.latency.value),
            span(p.latency.low, p.latency.high),
            number(p.allocated.value),
            *([number(p.reserved.value)] * cached),
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
    from torchedge.prediction.range_remarks import range_remark

    for remark in dict.fromkeys(remark for p in predictions for remark in p.unsupported_remarks):
        print_wrapped(remark, rest="  ")
    outside = dict.fromkeys(name for p in predictions for name in p.out_of_range)
    if outside:
        sizes = [str(p.batch_size) for p in predictions if p.out_of_range]
        at = f" at batch {', '.join(sizes)}" if len(predictions) > 1 else ""
        print_wrapped(range_remark(outside), first=f"out of range{at}: ", rest="  ")
    print_notes(*(p.notes for p in predictions))


# advise -----------------------------------------------------------------------------------------------------


@command(
    "advise",
    notes=MODEL_HELP,
    examples=[
        "torchedge advise resnet50 --batch-size 256 --device jetson-tx2",
        "torchedge advise vit_b_16 -b 64 -d nvidia-h200 --memory-limit 8GiB --optimizer adamw --json",
        "torchedge advise hf:config.json -b 1 --seq-len 512 -d adreno-740 --memory-limit 3GiB",
    ],
)
@click.argument("model")
@options.batch_size
@options.device
@options.input_size
@options.seq_len
@options.optimizer
@options.amp
@options.fit
@click.option(
    "--runtime/--no-runtime",
    default=True,
    help="Plan torchedge's own runtime for a language model (minutes for a large one).",
)
def advise(
    model: str,
    batch_size: int,
    device: str | None,
    memory_limit: str | None,
    runtime: bool,
    **settings: Any,  # noqa: ANN401 - of torchedge.advise
) -> int:
    """Find settings under which a training step fits a device.

    Combined are gradient accumulation, autocast, optimizers with less state, activation
    checkpointing and training the last layer alone; an update always takes --batch-size samples. Each comes
    with its memory and time. Nothing is run. The exit status is 3 if no setting fits.

    For a language model of transformers torchedge's own runtime follows, with weights in float32, int8 and
    int4 that are streamed where the memory does not hold them: a step of adapters (LoRA) of rank 16, and
    generation of one text. A step of adapters that fits counts as a setting that fits.
    """
    from torchedge import api
    from torchedge.bundles.language_advice import LanguageAdvice, count_stages

    module, label = options.load_named(model)
    chosen = api.choose_device(device)
    stages = count_stages(module, chosen, settings["amp"], runtime=runtime)
    with Progress(stages, f"advise {label}") as progress, options.unsuitable_size(settings["input_size"]):
        advice = api.advise(
            module,
            batch_size,
            chosen,
            memory_limit=memory_limit,
            runtime=runtime,
            progress=progress.begin,
            **settings,
        )

    def show() -> None:
        rows = advice.runtime if isinstance(advice, LanguageAdvice) else ()
        trains = isinstance(advice, LanguageAdvice) and advice.trains
        within = f"{number(advice.memory_limit_mib)} MiB at {100 * settings['confidence']:g} % confidence"
        print_wrapped(f"{label}: updates of {batch_size} samples on {advice.device}, within {within}")
        print()
        print_table(*advice.rows())
        if not any(setting.fits for setting in advice.settings):
            way = ": take smaller batches, or a smaller model"
            if any(row.plan is not None for row in rows):
                does = "trains adapters" if trains else "only generates"
                way = f"; torchedge's own runtime {does} within the limit"
            print_wrapped(f"no setting{' of PyTorch' * trains} fits, this one needs least{way}")
        if rows:
            print()
            texts = f"{batch_size} text{'s' * (batch_size > 1)}"
            more = f", torchedge's own runtime: a step of adapters on {texts}, generation of one"
            print_language_rows(advice.device, {label: rows}, more)
        print_notes(advice.notes)

    answer(advice.to_dict(), show)
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
@options.step
@click.option("--plot", type=PICTURE, metavar="FILE", help="Draw memory over the step (.png, .svg, .pdf).")
@click.option("--evaluate", type=options.whole(), help="Batch size of an evaluation between steps.")
@click.option("--empty-cache", is_flag=True, help="With --evaluate: empty the allocator's cache around it.")
def simulate(model: str, plot: Path | None, **settings: Any) -> None:  # noqa: ANN401 - of torchedge.simulate
    """Show when a step's memory peaks, and which tensors fill it.

    Tensor by tensor, with a replay of PyTorch's caching allocator; nothing is fitted.
    """
    from torchedge import api

    with options.unsuitable_size(settings["input_size"]):
        profile = api.simulate(model, **settings)
    if plot is not None:
        save_picture(profile.plot(), plot)
    answer(_memory_document(profile), lambda: print(profile), drawn=plot)


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


# report -----------------------------------------------------------------------------------------------------


@command(
    "report",
    notes=MODEL_HELP,
    examples=[
        "torchedge report resnet50 --batch-size 32 --device jetson-tx2 --html report.html",
        "torchedge report nets.py:small -b 8 --memory-limit 4GiB --optimizer adamw --html small.html",
    ],
)
@click.argument("model")
@click.option("--html", type=options.OutputFile(".html", ".htm"), required=True, help="File to write.")
@options.batch_size
@options.device
@options.step
@options.fit
def report(
    model: str,
    html: Path,
    memory_limit: str | None,
    confidence: float,
    **settings: Any,  # noqa: ANN401 - of torchedge.report
) -> int:
    """Write a prediction as one HTML page.

    It shows memory over the step with what fills it, memory by batch size, settings that fit, layers, and the
    prediction with its intervals. The file stands alone: no server, no network, no script. Nothing is run.
    The exit status is 3 if the step does not fit.
    """
    from torchedge import api

    with Progress(5, f"report {model}") as progress, options.unsuitable_size(settings["input_size"]):
        prediction = api.report(
            model,
            out=html,
            memory_limit=memory_limit,
            confidence=confidence,
            progress=progress.begin,
            **settings,
        )
    step = {name: settings[name] for name in ("optimizer", "amp", "accumulation")}
    step["optimizer"] = step["optimizer"] if prediction.mode == "train" else None
    row = {**prediction.to_dict(), **step, **_verdict(prediction, memory_limit, confidence)}
    answer(row, lambda: _print([prediction], [row]), written=html)
    return 0 if row["fits"] else DOES_NOT_FIT


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
def features(model: str, batch_size: tuple[int, ...], **settings: Any) -> None:  # noqa: ANN401 - of torchedge.features
    """Print the prediction features of a model.

    They are closed forms of its layers' shapes.
    """
    from torchedge.prediction.feature_sets import features

    module, label = options.load_named(model)
    table = features(module, list(batch_size), **settings)
    several = len(batch_size) > 1
    document = {
        "model": label,
        "feature_set": table.feature_set,
        "batch_size": batch_size if several else batch_size[0],
        "features": dict(zip(table.names, table.values.T if several else table.values[0], strict=True)),
    }

    def show() -> None:
        print_wrapped(f"{label}: {len(table.names)} features of {table.feature_set}")
        for start in range(0, len(batch_size), _COLUMNS - 1):
            part = slice(start, start + _COLUMNS - 1)
            columns = zip(table.names, table.values[part].T, strict=True)
            print()
            print_table(
                ["batch", *map(str, batch_size[part])],
                [[name, *map(_exact, figures)] for name, figures in columns],
            )

    answer(document, show)


def _exact(value: float) -> str:
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
