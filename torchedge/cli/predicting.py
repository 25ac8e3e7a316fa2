"""`torchedge predict`: memory and latency of models at batch sizes on a device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import MODEL_HELP, add_json, add_model, add_step, confidence, positive_mib, sizes
from torchedge.cli.output import number, print_json, print_table, print_wrapped, span

if TYPE_CHECKING:
    from torchedge.prediction.results import Prediction

NAME = "predict"
SUMMARY = "memory and latency of a training step or inference"
DESCRIPTION = f"""\
Predict what one training step (or inference) takes from a device, without
running it: device memory (Γ, for inference γ) and latency (Φ, φ) with 90 %
intervals.

{MODEL_HELP}

With --limit the exit status is 3 if a run does not fit. --json prints one
object for one prediction and a list for several."""

_COLUMNS = 5
"""How many batch sizes stand beside each other in a breakdown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument(
        "--batch-size", "-b", type=sizes, default=(1,), metavar="N[,N...]", help="one or several (default 1)"
    )
    parser.add_argument("--device", "-d", help="name, alias or profile folder; see `torchedge devices`")
    add_model(parser)
    add_step(parser)
    parser.add_argument(
        "--limit", type=positive_mib, metavar="MIB", help="memory to fit into (default: the device's)"
    )
    parser.add_argument(
        "--confidence",
        type=confidence,
        metavar="P",
        help="with which a run that fits has to fit (default 0.95)",
    )
    parser.add_argument(
        "--max-batch-size", action="store_true", help="also find the largest batch size that fits"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predict and print; return 0, or 3 where a limit is given and a run does not fit."""
    from torchedge.api import Predictor
    from torchedge.cli import DOES_NOT_FIT
    from torchedge.cli.loading import capture_named, check_mode
    from torchedge.prediction.results import CONFIDENCE

    check_mode(arguments.mode)
    asked = arguments.confidence or CONFIDENCE
    predictor = Predictor(arguments.device)
    documents: list[dict[str, Any]] = []
    fitting = True
    for place, text in enumerate(arguments.models):
        graphs = capture_named(
            text, mode=arguments.mode, input_size=arguments.input_size, batch_sizes=arguments.batch_size
        )
        found = [
            predictor.predict(
                graph,
                batch,
                optimizer=arguments.optimizer,
                amp=arguments.amp,
                accumulation=arguments.accumulation,
            )
            for graph, batch in zip(graphs, arguments.batch_size, strict=True)
        ]
        rows = [_document(prediction, arguments, asked) for prediction in found]
        fitting = fitting and all(row["fits"] for row in rows)
        documents += rows
        if not arguments.json:
            print("\n" * (place > 0), end="")
            _print(found, rows, arguments)
    if arguments.json:
        print_json(documents[0] if len(documents) == 1 else documents)
    return DOES_NOT_FIT if arguments.limit is not None and not fitting else 0


def _document(prediction: Prediction, arguments: argparse.Namespace, asked: float) -> dict[str, Any]:
    """Return a prediction as plain data, with the verdict and the settings of the step."""
    limit = arguments.limit if arguments.limit is not None else prediction.device_memory_mib
    verdict: dict[str, Any] = {
        "optimizer": arguments.optimizer if prediction.mode == "train" else None,
        "amp": arguments.amp,
        "accumulation": arguments.accumulation,
        "limit_mib": limit,
        "confidence": asked,
        "required_mib": prediction.required_mib(asked),
        "fits": prediction.fits(arguments.limit, confidence=asked),
    }
    if arguments.max_batch_size:
        verdict["max_batch_size"] = prediction.max_batch_size(arguments.limit, confidence=asked)
    return {**prediction.to_dict(), **verdict}


# tables -----------------------------------------------------------------------------------------------------


def _print(found: list[Prediction], rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    first = found[0]
    training = first.mode == "train"
    step = "training step" if training else "inference"
    extras = [arguments.optimizer] if training else []
    extras += [f"amp {arguments.amp}"] if arguments.amp else []
    extras += [f"{arguments.accumulation} micro-batches"] if arguments.accumulation > 1 else []
    batch = f", batch {first.batch_size}" if len(found) == 1 else ""
    print_wrapped(", ".join([f"{first.model}{batch}: {step} on {first.device}", *extras]))
    if len(found) == 1:
        _print_one(first, rows[0])
    else:
        _print_several(found, rows)
    print_wrapped(str(first.provenance), first="provenance: ")
    _print_remarks(found)


def _print_one(prediction: Prediction, row: dict[str, Any]) -> None:
    memory, latency = _letters(prediction)
    lines = (
        (f"memory {memory}", prediction.memory, "what the run takes from the device"),
        ("reserved", prediction.reserved, "of that by PyTorch's allocator"),
        ("allocated", prediction.allocated, "of that by tensors"),
        (f"latency {latency}", prediction.latency, "one step" if prediction.mode == "train" else "one batch"),
    )
    body = [[name, number(e.value), e.unit, span(e.low, e.high), f"  {says}"] for name, e, says in lines]
    print()
    width = max(len(line[1]) for line in body), max(len("90 % interval"), *(len(line[3]) for line in body))
    print(f"{'':<12}{'':>{width[0]}}      {'90 % interval':>{width[1]}}")
    for name, value, unit, interval, says in body:
        print(f"{name:<12}{value:>{width[0]}} {unit:<4} {interval:>{width[1]}}{says}")
    print()
    print("memory by what holds it")
    total = max(prediction.memory.value, 1e-9)
    parts = [(name, part) for name, part in prediction.breakdown.items() if part >= 0.05]
    for name, part in parts:
        bar = "#" * round(28 * part / total)
        print(
            f"  {name.replace('_', ' '):<18}{number(part):>8} MiB {100 * part / total:4.0f} % {bar}".rstrip()
        )
    print()
    _print_verdict(row)


def _print_verdict(row: dict[str, Any]) -> None:
    verdict = "fits" if row["fits"] else "does not fit"
    text = (
        f"{verdict} into {number(row['limit_mib'])} MiB: stays below {number(row['required_mib'])} MiB "
        f"at {100 * row['confidence']:g} % confidence"
    )
    print_wrapped(text)
    _print_largest(row)


def _print_largest(row: dict[str, Any]) -> None:
    if "max_batch_size" in row:
        limit = number(row["limit_mib"])
        print(f"largest batch size that fits into {limit} MiB: {row['max_batch_size'] or 'none'}")


def _print_several(found: list[Prediction], rows: list[dict[str, Any]]) -> None:
    memory, latency = _letters(found[0])
    print_wrapped(
        f"{memory} is the memory the run takes from the device (MiB), {latency} the time of one step (ms), "
        "each with its 90 % interval; allocated and reserved are PyTorch's allocator's (MiB)."
    )
    print()
    head = ["batch", f"{memory} MiB", "90 %", f"{latency} ms", "90 %", "allocated", "reserved", "fits"]
    body = [
        [
            str(p.batch_size),
            number(p.memory.value),
            span(p.memory.low, p.memory.high),
            number(p.latency.value),
            span(p.latency.low, p.latency.high),
            number(p.allocated.value),
            number(p.reserved.value),
            "yes" if row["fits"] else "no",
        ]
        for p, row in zip(found, rows, strict=True)
    ]
    print_table(head, body, left=0)
    print()
    for start in range(0, len(found), _COLUMNS):
        _print_breakdowns(found[start : start + _COLUMNS])
    row = rows[0]
    print(f"fits: into {number(row['limit_mib'])} MiB at {100 * row['confidence']:g} % confidence")
    _print_largest(row)


def _print_breakdowns(found: list[Prediction]) -> None:
    names = [n for n in found[0].breakdown if any(p.breakdown[n] >= 0.05 for p in found)]
    head = ["memory, MiB, at batch", *(str(p.batch_size) for p in found)]
    print_table(head, [[n.replace("_", " "), *(number(p.breakdown[n]) for p in found)] for n in names])
    print()


def _print_remarks(found: list[Prediction]) -> None:
    """Print once what is said of any of the predictions."""
    for kind in dict.fromkeys(kind for p in found for kind in p.unsupported):
        print_wrapped(
            f"{kind}: nothing is known of this operator, so the figures leave it out",
            first="not counted: ",
            rest="  ",
        )
    outside = dict.fromkeys(name for p in found for name in p.out_of_range)
    if outside:
        batches = [str(p.batch_size) for p in found if p.out_of_range]
        at = f" at batch {', '.join(batches)}" if len(found) > 1 else ""
        why = "outside what the profile was fitted on, so the figures are extrapolated"
        print_wrapped(f"{', '.join(outside)}{at}: {why}", first="out of range: ", rest="  ")
    for note in dict.fromkeys(note for p in found for note in p.notes):
        print_wrapped(note, first="note: ", rest="  ")


def _letters(prediction: Prediction) -> tuple[str, str]:
    return ("Γ", "Φ") if prediction.mode == "train" else ("γ", "φ")
