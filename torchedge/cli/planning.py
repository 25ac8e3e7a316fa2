"""`torchedge plan`: which layer loads which weights of a model that is larger than the memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchedge.cli.arguments import MODEL_HELP, add_json, shape
from torchedge.errors import InputError

NAME = "plan"
SUMMARY = "plan which layer loads which chunk of which weight"
DESCRIPTION = f"""\
Plan an inference whose weights are larger than the memory (FlashMem): which are
loaded before the first layer runs, and which layer loads which chunks of the
others while it computes. The plan is verified and simulated on the device.

{MODEL_HELP}
The models that FlashMem was evaluated on have names, too, such as gpt-neo-1.3b.

The memory limit covers all that the run holds: weights, activations, what is
read ahead. Several MODELs run one after the other within it. With --sweep one
MODEL is planned at several lambdas and M_peaks. SIZE is a number with its unit:
256KiB, 500MiB, 1.5GiB.

With --instance the overlap problem is read from a file, and with --verify
nothing is planned: PLAN is held against its rules. docs/streaming.md describes
both kinds of JSON file.

The exit status is 3 where there is no plan within the memory limit (one that
works is named), and where PLAN breaks a rule. Needs torchedge[plan]."""

_LEAST_EFFORT, _MOST_EFFORT = 0.01, 1000.0

_GOES_WITH = {
    "device": "MODEL",
    "memory_limit": "MODEL",
    "m_peak": "MODEL",
    "lam": "MODEL",
    "chunk": "MODEL",
    "precision": "MODEL",
    "fusion": "MODEL",
    "input_size": "MODEL",
    "effort": "MODEL",
    "sweep": "MODEL",
    "plot": "MODEL",
    "picture": "MODEL",
    "layers": "MODEL",
    "write_instance": "MODEL",
    "verify": "--instance",
}
"""Options that belong to one of the two forms alone."""

_NOT_WITH = {
    "several MODELs": ("out", "write_instance", "layers", "picture", "strategy", "sweep"),
    "--sweep": ("out", "write_instance", "layers", "picture", "strategy", "memory_limit", "lam"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; None stands for what was not given, so that it can be refused."""
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--device", "-d", help="name, alias or profile folder; see `torchedge devices`")
    parser.add_argument("--memory-limit", metavar="SIZE", help="all that the run may hold")
    parser.add_argument(
        "--m-peak", metavar="SIZE", help="most that is in flight beside what is preloaded, or none (500MiB)"
    )
    parser.add_argument(
        "--lambda", dest="lam", type=_share, metavar="X",
        help="price of preloading, 0 to 1: the higher, the less memory (0.9)",
    )  # fmt: skip
    parser.add_argument("--chunk", metavar="SIZE", help="the unit of loading (256KiB)")
    parser.add_argument(
        "--precision", choices=("float16", "float32", "model"), metavar="NAME",
        help="of weights and activations: float16 (default), float32 or model, as the model has them",
    )  # fmt: skip
    parser.add_argument(
        "--fusion", choices=("adaptive", "all", "none"), metavar="NAME",
        help="of operators into kernels: adaptive (default), all or none",
    )  # fmt: skip
    parser.add_argument(
        "--input-size", type=shape, metavar="CxHxW",
        help="shape of one sample, such as 3x224x224 (default: the model's own)",
    )  # fmt: skip
    parser.add_argument("--effort", type=_effort, metavar="X", help="how hard the solver tries (1)")
    parser.add_argument(
        "--strategy", metavar="NAME",
        help="a strategy to compare with: always-next, same-type or preload-all",
    )  # fmt: skip
    parser.add_argument("--sweep", action="store_true", default=None, help="latency against memory")
    parser.add_argument(
        "--layers", action="store_true", default=None, help="also print what each layer loads"
    )
    parser.add_argument(
        "--out", "-o", type=Path, metavar="PLAN", help="where the plan goes (.json, .json.gz)"
    )
    parser.add_argument(
        "--write-instance", type=Path, metavar="FILE", help="where the overlap problem that it solves goes"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw to a .png, .svg or .pdf file")
    parser.add_argument(
        "--picture", choices=("memory", "gantt", "comparison"), metavar="NAME",
        help="what to draw: memory (default), gantt or comparison",
    )  # fmt: skip
    parser.add_argument("--instance", type=Path, metavar="FILE", help="overlap instance to plan")
    parser.add_argument("--verify", type=Path, metavar="PLAN", help="only verify the plan in a file")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, write and print; return 0, or 3 where there is no plan or one breaks a rule."""
    _check(arguments)
    if arguments.instance is not None:
        from torchedge.cli.planning_instances import run_instance

        return run_instance(arguments)
    from torchedge.cli import planning_models

    if arguments.sweep:
        return planning_models.run_sweep(arguments)
    if len(arguments.models) > 1:
        return planning_models.run_queue(arguments)
    return planning_models.run_model(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not belong together."""
    models, instance = arguments.models, arguments.instance
    if not models and instance is None:
        raise InputError("nothing to plan is given; expected a MODEL, or --instance FILE")
    if models and instance is not None:
        raise InputError(f"--instance and the MODEL {models[0]} are given; expected one of the two")
    form = "--instance" if instance is not None else "MODEL"
    for name, wanted in _GOES_WITH.items():
        if getattr(arguments, name) is not None and wanted != form:
            raise InputError(f"{_option(name)} goes with {wanted}, not with {form}; leave it out")
    if arguments.sweep and len(models) > 1:
        raise InputError(f"--sweep goes with one MODEL, and {len(models)} are given; leave the others out")
    special = "--sweep" if arguments.sweep else "several MODELs" if len(models) > 1 else None
    for name in _NOT_WITH.get(special or "", ()):
        if getattr(arguments, name) is not None:
            raise InputError(f"{_option(name)} does not go with {special}; leave it out")
    if special == "several MODELs" and arguments.memory_limit is None:
        raise InputError("several MODELs share a memory limit; give it, such as --memory-limit 500MiB")
    if arguments.picture is not None and arguments.plot is None:
        raise InputError("--picture says what to draw; expected --plot FILE, too")


def _option(name: str) -> str:
    return "--lambda" if name == "lam" else f"--{name.replace('_', '-')}"


def _share(text: str) -> float:
    return _number(text, 0.0, 1.0)


def _effort(text: str) -> float:
    return _number(text, _LEAST_EFFORT, _MOST_EFFORT)


def _number(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {low:g} to {high:g}")
    return value
