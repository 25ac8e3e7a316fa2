"""`torchedge search`: the best candidate of a space within a device's limits."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import MODEL_HELP, add_json, confidence, positive_mib, shape, sizes, whole
from torchedge.cli.console import Progress, number, plain, print_json, print_table, print_wrapped
from torchedge.errors import InputError

if TYPE_CHECKING:
    from torchedge.searching.driver import SearchProgress
    from torchedge.searching.results import Search
    from torchedge.searching.spaces import SearchSpace

NAME = "search"
SUMMARY = "search a space of networks for the best one within limits"
DESCRIPTION = f"""\
Search a space by evolution for the candidate with the highest score whose
predicted memory and latency are within hard limits.

SPACE is ofa-resnet50 (the sub-networks of Once-for-All's ResNet-50),
FILE.py:NAME (a torchedge.SearchSpace of your own; the file is run), or a MODEL
to prune, channel group by channel group.
{MODEL_HELP}

The score is a stand-in unless you give yours: forward GFLOPs, or for prunings
the share of the weights that stays. FILE.py:NAME is a function of a list of
encodings that returns as many numbers.

With --out every candidate is recorded in FOLDER/journal.jsonl while the search
runs; --resume goes on after an interruption and ends with the same result.
FOLDER gets result.json, winner.json and a front-FIGURE.csv for each limit. The
exit status is 3 where no candidate is within the limits. --workers needs
torchedge[search]."""

_LIMITS = (
    ("training-memory", "MIB", "most training memory Γ"),
    ("inference-memory", "MIB", "most inference memory γ"),
    ("training-latency", "MS", "longest training step Φ"),
    ("inference-latency", "MS", "longest inference φ"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("space", metavar="SPACE")
    for name, unit, text in _LIMITS:
        parser.add_argument(
            f"--{name}", type=positive_mib if unit == "MIB" else positive_ms, metavar=unit, help=text
        )
    parser.add_argument("--device", "-d", help="name, alias or profile folder; see `torchedge devices`")
    parser.add_argument(
        "--batch-size", "-b", type=whole, default=32, metavar="N", help="in training (default 32)"
    )
    parser.add_argument(
        "--inference-batch-size", type=whole, default=1, metavar="N", help="in inference (default 1)"
    )
    parser.add_argument("--optimizer", default="sgd-momentum", metavar="NAME", help="as in predict")
    parser.add_argument(
        "--confidence",
        type=confidence,
        metavar="P",
        help="stay within the limits with it (default: as predicted)",
    )
    parser.add_argument("--score", metavar="SCORE", help="gflops, weights or FILE.py:NAME")
    _add_space(parser)
    _add_evolution(parser)
    parser.add_argument("--out", "-o", type=Path, metavar="FOLDER", help="where journal and results go")
    parser.add_argument("--resume", action="store_true", help="go on with the search that FOLDER holds")
    add_json(parser)


def _add_space(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image-sizes", type=sizes, metavar="N,...", help="of ofa-resnet50 (default 128,144,...,224)"
    )
    parser.add_argument("--input-size", type=shape, metavar="CxHxW", help="of a model to prune (3x224x224)")
    parser.add_argument(
        "--round-to", type=whole, default=8, metavar="N", help="kept channels are multiples of it (default 8)"
    )


def _add_evolution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--population", type=whole, default=100, metavar="N", help="(default 100)")
    parser.add_argument("--iterations", type=whole, default=500, metavar="N", help="(default 500)")
    parser.add_argument(
        "--mutation", type=float, default=0.1, metavar="P", help="chance of each gene (default 0.1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default 0)")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes, -1 for all cores (default 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search and print; return 0, or 3 where no candidate is within the limits."""
    from torchedge.api import search
    from torchedge.cli.console import DOES_NOT_FIT

    limits = _limits(arguments)
    journal = _journal(arguments)
    space = _space(arguments)
    score, says = _score(arguments.score, space)
    label = f"searching {space.name}"
    with Progress(arguments.iterations, label) as progress:
        found = search(
            space,
            limits,
            score,
            device=arguments.device,
            batch_size=arguments.batch_size,
            inference_batch_size=arguments.inference_batch_size,
            optimizer=arguments.optimizer,
            confidence=arguments.confidence,
            population=arguments.population,
            iterations=arguments.iterations,
            mutation=arguments.mutation,
            seed=arguments.seed,
            workers=arguments.workers,
            journal=journal,
            progress=_telling(progress),
        )
    if arguments.out is not None:
        _write(arguments.out, found)
    if arguments.json:
        print_json(found.to_dict())
    else:
        _print(found, says)
        if arguments.out is not None:
            print_wrapped(f"written to {arguments.out}")
    return 0 if found.feasible else DOES_NOT_FIT


def positive_ms(text: str) -> float:
    """Return a positive number of milliseconds."""
    try:
        return positive_mib(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of milliseconds") from None


# what is asked for ------------------------------------------------------------------------------------------


def _limits(arguments: argparse.Namespace) -> dict[str, float]:
    names = [name.replace("-", "_") for name, _, _ in _LIMITS]
    limits = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if not limits:
        options = ", ".join(f"--{name}" for name, _, _ in _LIMITS)
        raise InputError(f"no limit is given; expected one or more of {options}")
    return limits


def _journal(arguments: argparse.Namespace) -> Path | None:
    folder: Path | None = arguments.out
    if folder is None:
        if arguments.resume:
            raise InputError("--resume needs --out FOLDER, the folder of the search to go on with")
        return None
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; expected a folder, or a name for a new one")
    journal = folder / "journal.jsonl"
    if journal.exists() and not arguments.resume:
        raise InputError(f"{folder} holds a search already; add --resume to go on with it, or choose another")
    return journal


def _space(arguments: argparse.Namespace) -> SearchSpace:
    from torchedge.searching.spaces import SearchSpace

    text: str = arguments.space
    if text.lower() in ("ofa-resnet50", "ofa_resnet50"):
        from torchedge.searching.ofa_resnet50 import OFAResNet50Space

        return OFAResNet50Space(arguments.image_sizes) if arguments.image_sizes else OFAResNet50Space()
    if arguments.image_sizes:
        raise InputError("--image-sizes belongs to ofa-resnet50; give --input-size for a model to prune")
    path, _, name = text.rpartition(":")
    if path.endswith(".py"):
        from torchedge.tracing.sources import python_attribute

        made = python_attribute(Path(path), name)
        if isinstance(made, type) and issubclass(made, SearchSpace):
            made = made()
        if isinstance(made, SearchSpace):
            return made
    from torchedge.cli.options import load_named
    from torchedge.searching.pruning_space import PruningSpace

    model, label = load_named(text)
    size = arguments.input_size or (3, 224, 224)
    return PruningSpace(model, size, round_to=arguments.round_to, name=label)


def _score(text: str | None, space: SearchSpace) -> tuple[Callable[[Sequence[Any]], Any], str]:
    """Return the score and what it is."""
    from torchedge.searching.pruning_space import PruningSpace
    from torchedge.searching.scores import gflops_score

    pruning = isinstance(space, PruningSpace)
    chosen = text or ("weights" if pruning else "gflops")
    if chosen == "gflops":
        return gflops_score(space), "log10 of forward GFLOPs, a stand-in for accuracy (--score gives yours)"
    if chosen == "weights":
        if not isinstance(space, PruningSpace):
            raise InputError("--score weights belongs to prunings; give gflops or FILE.py:NAME")
        return (
            space.kept_norm,
            "share of the weights that stays, a stand-in for accuracy (--score gives yours)",
        )
    path, _, name = chosen.rpartition(":")
    if not path.endswith(".py"):
        raise InputError(f"--score is {chosen!r}; expected gflops, weights or FILE.py:NAME")
    from torchedge.tracing.sources import python_attribute

    made = python_attribute(Path(path), name)
    if not callable(made):
        raise InputError(
            f"{path}: {name} is a {type(made).__name__}; expected a function of a list of encodings"
        )
    return made, f"{Path(path).name}:{name}"


def _telling(progress: Progress) -> Callable[[SearchProgress], None]:
    def tell(state: SearchProgress) -> None:
        best = "none within the limits yet" if state.best is None else f"best {state.best:.5g}"
        progress.note(f"{state.evaluated:,} candidates, {best}")
        if state.iteration:
            progress.step()

    return tell


# what came out ----------------------------------------------------------------------------------------------


def _write(folder: Path, found: Search) -> None:
    from torchedge.storage import write_json
    from torchedge.storage.documents import write_bytes

    document: dict[str, Any] = plain(found.to_dict())
    write_json(folder / "result.json", document)
    if found.best is not None:
        winner = {k: document[k] for k in ("space", "device", "constraints", "best", "predictions")}
        write_json(folder / "winner.json", winner)
    for name, front in found.fronts.items():
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["score", *found.constraints, "encoding"])
        for candidate in front:
            figures = [candidate.figures[n] for n in found.constraints]
            table.writerow([candidate.score, *figures, json.dumps(plain(candidate.encoding))])
        write_bytes(folder / f"front-{name}.csv", text.getvalue().encode())


def _print(found: Search, says: str) -> None:
    counts = found.counts
    print_wrapped(
        f"{found.space.name} on {found.device}: {counts.evaluated:,} candidates in {found.seconds:.0f} s, "
        f"{counts.valid:,} within the limits"
    )
    rejected = ", ".join(f"{n.replace('_', ' ')} {c:,}" for n, c in counts.rejected.items() if c)
    if rejected:
        print_wrapped(rejected, first="rejected by: ", rest="  ")
    if found.best is None:
        print("no candidate is within the limits")
        for violation in found.violations:
            print_wrapped(str(violation), first="  ", rest="    ")
    else:
        print_wrapped(f"{found.best.score:.6g} ({says})", first="best score: ", rest="  ")
    print()
    _print_figures(found)
    chosen = found.best or found.nearest
    if chosen is not None:
        print()
        print_wrapped(_encoding(chosen.encoding), first="best: " if found.best else "nearest: ", rest="  ")
    provenance = {str(p.provenance) for p in found.predictions.values()}
    print_wrapped(", ".join(sorted(provenance)), first="provenance: ")
    for note in dict.fromkeys(note for p in found.predictions.values() for note in p.notes):
        print_wrapped(note, first="note: ", rest="  ")


def _print_figures(found: Search) -> None:
    from torchedge.searching.evaluation import FIGURES

    chosen = found.best or found.nearest
    assert chosen is not None
    rows = []
    for name, limit in found.constraints.items():
        figure, value = FIGURES[name], chosen.figures[name]
        front = found.fronts.get(name, ())
        cheapest = number(front[0].figures[name]) if front else "-"
        title = f"{name.replace('_', ' ')} {figure.letter}"
        rows.append([title, figure.unit, number(value), number(limit), cheapest, str(len(front))])
    print_table(
        ["figure", "unit", "best" if found.best else "nearest", "limit", "front from", "points"], rows, left=2
    )


def _encoding(encoding: Any) -> str:  # noqa: ANN401 - a space's own
    if isinstance(encoding, dict):
        return ", ".join(f"{k} {v}" for k, v in encoding.items())
    return str(encoding)
