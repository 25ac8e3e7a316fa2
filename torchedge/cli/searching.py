"""`torchedge search`: the best candidate of a space within a device's limits."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli import options
from torchedge.cli.console import DOES_NOT_FIT, Progress, answer, print_notes, print_wrapped
from torchedge.cli.options import (
    BATCH_SIZES,
    CONFIDENCE,
    PATH,
    SIZE,
    WHOLE,
    command,
    load_named,
    number_from,
    refuse_given,
)
from torchedge.errors import InputError, described

if TYPE_CHECKING:
    from torchedge.searching.driver import Search, SearchProgress
    from torchedge.searching.spaces import SearchSpace

_MS = number_from(0.001, 1e9, name="MS")
_OF_PRUNINGS = ("input_size", "round_to")
_LIMITS = ("training_memory", "inference_memory", "training_latency", "inference_latency")


@command(
    "search",
    examples=[
        "torchedge search ofa-resnet50 --training-memory 3300 --inference-latency 45 -d jetson-tx2",
        "torchedge search resnet18 --training-memory 1800 --device jetson-tx2 --out found",
        "torchedge search nets.py:MySpace --training-latency 500 --score nets.py:accuracy --workers -1",
        "torchedge search resnet18 --training-memory 1800 -d jetson-tx2 --out found --resume",
    ],
)
@click.argument("space")
@click.option("--training-memory", type=SIZE, help="Most training memory Γ (MiB, or 4GiB).")
@click.option("--inference-memory", type=SIZE, help="Most inference memory γ (MiB, or 4GiB).")
@click.option("--training-latency", type=_MS, help="Longest training step Φ (ms).")
@click.option("--inference-latency", type=_MS, help="Longest inference φ (ms).")
@options.device
@click.option("--batch-size", "-b", type=WHOLE, default=32, help="Samples in a batch of training.")
@click.option("--inference-batch-size", type=WHOLE, default=1, help="Samples in a batch of inference.")
@options.optimizer
@options.amp
@click.option(
    "--confidence", type=CONFIDENCE, help="Confidence of staying within limits. [default: predicted figures]"
)
@click.option(
    "--score",
    metavar="SCORE",
    help="Score: gflops, weights or FILE.py:NAME. [default: a stand-in for accuracy]",
)
@click.option(
    "--image-sizes", type=BATCH_SIZES, help="Image sizes of ofa-resnet50. [default: 128,144,...,224]"
)
@click.option(
    "--input-size",
    type=options.SHAPE,
    metavar="CxHxW",
    help="Shape of one sample of a model to prune. [default: 3x224x224]",
)
@click.option("--round-to", type=WHOLE, default=8, help="Prune to multiples of this number of channels.")
@click.option("--population", type=WHOLE, default=100, help="Candidates of a generation.")
@click.option("--iterations", type=WHOLE, default=500, help="Generations.")
@click.option("--mutation", type=float, metavar="P", default=0.1, help="Chance that a gene mutates.")
@click.option("--seed", type=int, metavar="N", default=0, help="Seed of the evolution.")
@click.option("--workers", type=int, metavar="N", default=1, help="Processes; -1 for all cores.")
@click.option("--out", "-o", type=PATH, metavar="FOLDER", help="Folder of the journal and the results.")
@click.option("--resume", is_flag=True, help="Continue the search in the folder.")
def search(
    space: str,
    score: str | None,
    image_sizes: tuple[int, ...] | None,
    input_size: tuple[int, ...] | None,
    round_to: int,
    out: Path | None,
    resume: bool,
    iterations: int,
    **asked: Any,  # noqa: ANN401 - the limits, and options of torchedge.search
) -> int:
    """Search a space of networks for the best one within limits.

    The search is an evolution; the best candidate has the highest score of those whose predicted memory and
    latency stay within the limits. The exit status is 3 if none does.

    SPACE is ofa-resnet50 (sub-networks of Once-for-All's ResNet-50), FILE.py:NAME (a torchedge.SearchSpace of
    your own; the file is run), or a model to prune, group of channels by group: a torchvision or timm name,
    file.py:factory, or an .onnx or .pt2 file.

    Without --score, the score is a stand-in: forward GFLOPs (gflops), or for prunings the share of the
    weights that stays (weights). FILE.py:NAME is a function of a list of encodings that returns as many
    numbers.

    With --out, every candidate is recorded in FOLDER/journal.jsonl while the search runs, and result.json,
    winner.json and a front-FIGURE.csv for each limit are written. After an interruption --resume continues
    and ends with the same result. --workers needs torchedge[search].
    """
    from torchedge import api

    limits = {name: value for name in _LIMITS if (value := asked.pop(name)) is not None}
    if not limits:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in _LIMITS)
        raise InputError(f"no limit is given; expected one or more of {names}")
    journal = _journal(out, resume)
    candidates = _space(space, image_sizes, input_size, round_to)
    function, meaning = _score(score, candidates)
    with Progress(iterations, f"searching {candidates.name}") as progress:
        result = api.search(
            candidates,
            limits,
            function,
            iterations=iterations,
            journal=journal,
            progress=partial(_show_search, progress),
            **asked,
        )
    if out is not None:
        _write(out, result)
    answer(result.to_dict(), lambda: _print(result, meaning), written=out)
    return 0 if result.feasible else DOES_NOT_FIT


# what is asked for ------------------------------------------------------------------------------------------


def _journal(folder: Path | None, resume: bool) -> Path | None:
    if folder is None:
        if resume:
            raise InputError("--resume is given without --out; add --out FOLDER, the folder of the search")
        return None
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out is {folder}, which is a file; expected a folder, or the name of a new one")
    journal = folder / "journal.jsonl"
    if journal.exists() and not resume:
        raise InputError(f"{folder} holds a search already; add --resume to continue it, or choose another")
    return journal


def _space(
    text: str, image_sizes: tuple[int, ...] | None, input_size: tuple[int, ...] | None, round_to: int
) -> SearchSpace:
    from torchedge.searching.spaces import SearchSpace

    if text.lower() in ("ofa-resnet50", "ofa_resnet50"):
        from torchedge.searching.ofa_resnet50 import OFAResNet50Space

        refuse_given(_OF_PRUNINGS, f"with {text}, which is no model to prune; omit it")
        return OFAResNet50Space(image_sizes) if image_sizes else OFAResNet50Space()
    if image_sizes:
        raise InputError("--image-sizes belongs to ofa-resnet50; give --input-size for a model to prune")
    path, _, name = text.rpartition(":")
    if path.endswith(".py"):
        from torchedge.tracing.sources import python_attribute

        space = python_attribute(Path(path), name)
        if isinstance(space, type) and issubclass(space, SearchSpace):
            space = space()
        if isinstance(space, SearchSpace):
            refuse_given(_OF_PRUNINGS, f"with {text}, which is no model to prune; omit it")
            return space
    from torchedge.searching.pruning_space import PruningSpace

    model, label = load_named(text)
    return PruningSpace(model, input_size or (3, 224, 224), round_to=round_to, name=label)


def _score(text: str | None, space: SearchSpace) -> tuple[Callable[[Sequence[Any]], Any], str]:
    """Return the score and its meaning."""
    from torchedge.searching.driver import gflops_score
    from torchedge.searching.pruning_space import PruningSpace

    pruning = isinstance(space, PruningSpace)
    chosen = text or ("weights" if pruning else "gflops")
    if chosen == "gflops":
        return gflops_score(space), "log10 of forward GFLOPs, a stand-in for accuracy (--score sets yours)"
    if chosen == "weights":
        if not isinstance(space, PruningSpace):
            raise InputError("--score weights belongs to prunings; give gflops or FILE.py:NAME")
        return (
            space.kept_norm,
            "share of the weights that stays, a stand-in for accuracy (--score sets yours)",
        )
    path, _, name = chosen.rpartition(":")
    if not path.endswith(".py"):
        raise InputError(f"--score is {chosen!r}; expected gflops, weights or FILE.py:NAME")
    from torchedge.tracing.sources import python_attribute

    function = python_attribute(Path(path), name)
    if not callable(function):
        raise InputError(
            f"{path}: {name} is {described(function)}; expected a function of a list of encodings"
        )
    return function, f"{Path(path).name}:{name}"


def _show_search(progress: Progress, state: SearchProgress) -> None:
    best = "none within the limits yet" if state.best is None else f"best {state.best:.5g}"
    progress.note(f"{state.evaluated:,} candidates, {best}")
    if state.iteration:
        progress.step()


# what came out ----------------------------------------------------------------------------------------------


def _write(folder: Path, result: Search) -> None:
    from torchedge.storage.documents import plain, write_bytes, write_json

    document = result.to_dict()
    write_json(folder / "result.json", document)
    if result.best is not None:
        winner = {k: document[k] for k in ("space", "device", "constraints", "best", "predictions")}
        write_json(folder / "winner.json", winner)
    for name, front in result.fronts.items():
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["score", *result.constraints, "encoding"])
        for candidate in front:
            figures = [candidate.figures[n] for n in result.constraints]
            table.writerow([candidate.score, *figures, json.dumps(plain(candidate.encoding))])
        write_bytes(folder / f"front-{name}.csv", text.getvalue().encode())


def _print(result: Search, meaning: str) -> None:
    for line in str(result).splitlines():
        print_wrapped(line, rest="    ")
    print_wrapped(f"score: {meaning}", rest="  ")
    provenance = {str(p.provenance) for p in result.predictions.values()}
    print_wrapped(", ".join(sorted(provenance)), first="provenance: ")
    print_notes(*(p.notes for p in result.predictions.values()))
