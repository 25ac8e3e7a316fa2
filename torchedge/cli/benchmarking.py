"""`torchedge bench`: how good the library's own choices are on a device."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from torchedge.cli.console import Progress, answer, print_table, print_wrapped
from torchedge.cli.options import PATH, Choice, Command, Group, command, opencl_device, whole
from torchedge.errors import InputError

if TYPE_CHECKING:
    from torchedge.profiling.kernel_benchmark import BenchSummary


@click.group("bench", cls=Group)
def bench() -> None:
    """Measure how good the library's own choices are on a device."""


@bench.command(
    "kernels",
    cls=Command,
    examples=[
        "torchedge bench kernels --quick --out bench",
        "torchedge bench kernels --device 1 --out bench --seconds 420",
    ],
)
@click.option("--out", "-o", type=PATH, required=True, metavar="FOLDER", help="Folder of the results.")
@opencl_device
@click.option(
    "--profile", "profile_", help="Device whose coefficients the tuner takes. [default: the class's]"
)
@click.option(
    "--operators",
    help="Operators, or shapes of them (Conv2Ds1 56 3), separated by commas. [default: all nine]",
)
@click.option(
    "--candidates", type=whole(2), default=50, show_default=True, help="Candidates measured for a case."
)
@click.option(
    "--seconds", type=whole(1), help="Begin no case after so many seconds; start again to continue."
)
@click.option("--gflop", type=float, default=4.0, show_default=True, help="Skip shapes with more arithmetic.")
@click.option("--storage", type=Choice(["buffer", "image"]), help="Preferred storage. [default: the class's]")
@click.option("--quick", is_flag=True, help="Few shapes and candidates (three minutes on two cores).")
def _kernels(
    out: Path,
    device: str | None,
    profile_: str | None,
    operators: str | None,
    candidates: int,
    seconds: int | None,
    gflop: float,
    storage: str | None,
    quick: bool,
) -> None:
    """Judge the tuner over TMModel's nine operators.

    For each shape, candidates are compiled and timed; the tuner's choice is compared with the best of them,
    with the defaults, and with other ways to choose. An interrupted run continues: results lie in
    FOLDER/kernels.jsonl.
    """
    from torchedge.lowering.targets import target_for
    from torchedge.opencl import open_context
    from torchedge.profiling.kernel_benchmark import bench_kernels, summarize
    from torchedge.profiling.operator_cases import OPERATORS, all_cases
    from torchedge.textures.coefficients import coefficients_of, default_coefficients, errors_of

    names = tuple([name.strip() for name in operators.split(",")]) if operators else OPERATORS
    cases = all_cases(names, (min(gflop, 0.2) if quick else gflop) * 1e9)
    if not cases:
        raise InputError(f"--gflop is {gflop}; every shape has more arithmetic: give a larger number")
    if quick:
        cases = [case for name in OPERATORS for case in [c for c in cases if c.operator == name][1::5][:2]]
        candidates = min(candidates, 16)
    context = open_context(device)
    target = target_for(context.device)
    target = replace(target, storage=cast(Any, storage)) if storage else target
    if profile_ is None:
        coefficients = default_coefficients(target.name)
    else:
        from torchedge.devices import find_device

        known = find_device(profile_)
        coefficients = coefficients_of(known)
        target = replace(target, errors=errors_of(known))
    with Progress(len(cases), "measuring") as progress:

        def step(name: str) -> None:
            progress.doing(name)
            progress.step()

        limit = float(seconds) if seconds is not None else float("inf")
        rows = bench_kernels(
            cases, out, context, target, coefficients, among=candidates, seconds=limit, step=step
        )
    summary = summarize(rows)
    document = {"device": context.device.name, "of_cases": len(cases), **asdict(summary)}
    answer(document, partial(print_summary, context.device.name, summary, len(cases)))


def print_summary(device: str, summary: BenchSummary, wanted: int) -> None:
    """Print how each way to choose does over the measured cases, of `wanted` ones."""
    measured = sum(summary.cases.values())
    print_wrapped(
        f"{device}: {measured} of {wanted} cases, {summary.measured} candidates measured "
        f"(all of them in {summary.exhaustive} cases)"
    )
    head = ["choice", "regret %", "95th %", "within 5 % of best", "over default", "least"]
    rows: list[list[Any]] = [
        [
            way.way,
            f"{100 * way.regret:.1f}",
            f"{100 * way.regret_95:.1f}",
            f"{100 * way.accuracy:.1f} %",
            f"{way.speedup:.2f} x",
            f"{way.slowest:.2f} x",
        ]
        for way in summary.ways
    ]
    print_table(head, rows)
    print_wrapped(
        f"rank correlation {summary.correlation:.2f}; tuning {summary.tuning_s:.2f} s in all, "
        f"{summary.stride_1_s:.2f} s for the convolutions of stride 1"
    )
    if measured < wanted:
        print_wrapped("start the same command again to continue")


@command(
    "explain-kernel",
    examples=[
        "torchedge explain-kernel MatMul 512 512 512 --device nvidia-h200",
        "torchedge explain-kernel Conv2Ds1 64 3 --device adreno-640 --json",
    ],
)
@click.argument("operator")
@click.argument("sizes", nargs=-1, type=whole(1), required=True)
@click.option(
    "--device", "-d", default="adreno-640", show_default=True, help="Device whose coefficients count."
)
def explain_kernel(operator: str, sizes: tuple[int, ...], device: str) -> None:
    """Explain which schedule a kernel gets, and which term of its cost decides.

    OPERATOR is one of TMModel's nine: MatMul ROWS COLUMNS INNER, SoftMax or LayerNorm ROWS COLUMNS, the
    convolutions SIDE WINDOW. Printed are the default and the tuner's choice, with the predicted terms of
    their cost.
    """
    import numpy as np

    from torchedge.devices import find_device
    from torchedge.lowering.inference import target_of_device
    from torchedge.lowering.tuning import layout_options, score
    from torchedge.profiling.operator_cases import case_of, operator_kernel
    from torchedge.textures.coefficients import coefficients_of

    case, known = case_of(operator, sizes), find_device(device)
    target, coefficients = target_of_device(known), coefficients_of(known)
    kernel = operator_kernel(case, target)
    options = {
        node: layout_options(node, kernel.layouts[node], target)
        for node in kernel.group.reads
        if target.storage == "image"
    }
    scores = score(kernel.nest, kernel.layouts, target, coefficients, options)
    document: dict[str, Any] = {"case": case.name, "device": known.name, "candidates": int(scores.ms.size)}
    document["coefficients"] = str(coefficients.provenance)
    for name, place in (("default", 0), ("chosen", scores.best())):
        choice = scores.choice(place)
        terms = scores.terms(np.array([place]), target, coefficients)
        stored = [choice.layouts[node] for node in options]
        document[name] = {
            "ms": choice.ms,
            "schedule": asdict(choice.schedule),
            "operands": [
                layout.storage if layout.storage == "buffer" else layout.pattern for layout in stored
            ],
            "terms_ms": {
                name: float(ms[0]) for name, ms in sorted(terms.items(), key=lambda term: -term[1][0])
            },
        }
    answer(document, lambda: _print_choices(document))


def _print_choices(document: dict[str, Any]) -> None:
    print_wrapped(
        "{case} on {device}: {candidates} candidates, coefficients {coefficients}".format(**document)
    )
    for name in ("default", "chosen"):
        part = document[name]
        settings = ", ".join([f"{key} {value}" for key, value in part["schedule"].items()])
        lying = f"; operands: {', '.join(part['operands'])}" if part["operands"] else ""
        print_wrapped(f"{name}, {part['ms']:.4f} ms predicted: {settings}{lying}")
        print_table(["term", "ms"], [[term, f"{ms:.4f}"] for term, ms in part["terms_ms"].items() if ms])
