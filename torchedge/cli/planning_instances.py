"""`torchedge plan --instance`: an overlap plan of an instance in a file, or the verification of one."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.console import Progress, number, print_json, print_table, print_wrapped, warn
from torchedge.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchedge.streaming.instances import Instance
    from torchedge.streaming.plans import OverlapPlan
    from torchedge.streaming.verification import Verification

__all__ = ["Planned", "find_strategy", "plan_instance", "read_planned", "report", "run_instance", "summary"]

_SHOWN = 20
"""How many problems of a plan are printed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, what the verifier found, and what took how long (None: the plan was read)."""

    instance: Instance
    plan: OverlapPlan
    found: Verification
    seconds: float | None


def run_instance(arguments: argparse.Namespace) -> int:
    """Plan (or verify), write and print; return 0, or 3 where there is no plan or it breaks a rule."""
    _check(arguments)
    instance = _read(arguments)
    if arguments.verify is not None:
        planned = read_planned(instance, arguments.verify)
    else:
        planned = plan_instance(instance, arguments.strategy)
    if arguments.out is not None:
        from torchedge.streaming.plans import write_plan

        write_plan(arguments.out, planned.plan)
    return report(planned, arguments)


def plan_instance(instance: Instance, strategy: str | None) -> Planned:
    """Plan an instance and verify the plan.

    Strategies for comparison may break the limits, which is warned of.

    Raises:
        PlanError: the plan is none.
        InputError: no strategy is called so.
    """
    from torchedge.streaming.verification import check_plan, verify_plan

    make = _solver(strategy)
    with Progress(1, f"planning {instance.name}") as progress:
        start = time.perf_counter()
        plan = make(instance)
        seconds = time.perf_counter() - start
        progress.step()
    if strategy is None or not verify_plan(instance, plan, limits=False).ok:
        return Planned(instance, plan, check_plan(instance, plan), seconds)
    found = verify_plan(instance, plan)
    if not found.ok:
        warn(f"{strategy} keeps no limits: {found.problems[0]}")
    return Planned(instance, plan, found, seconds)


def read_planned(instance: Instance, path: Path) -> Planned:
    """Read a plan and verify it."""
    from torchedge.streaming.plans import read_plan
    from torchedge.streaming.verification import verify_plan

    plan = read_plan(path)
    return Planned(instance, plan, verify_plan(instance, plan), None)


def report(planned: Planned, arguments: argparse.Namespace) -> int:
    """Print what was planned or verified; return the exit status."""
    from torchedge.cli.console import DOES_NOT_FIT

    if arguments.json:
        print_json(summary(planned))
    else:
        _print(planned)
        if arguments.out is not None:
            print_wrapped(f"written to {arguments.out}")
    refused = planned.seconds is None and not planned.found.ok
    return DOES_NOT_FIT if refused or planned.plan.status == "INFEASIBLE" else 0


# what is asked for ------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be meant before anything takes time."""
    from torchedge.cli.console import check_target

    out: Path | None = arguments.out
    if arguments.verify is not None and (out is not None or arguments.strategy is not None):
        raise InputError("--verify plans nothing; leave out --out and --strategy")
    if out is None:
        return
    check_target("--out", out)
    if out.exists() and arguments.instance.exists() and out.samefile(arguments.instance):
        raise InputError(f"--out {out} is the instance itself; choose another name")


def _read(arguments: argparse.Namespace) -> Instance:
    from torchedge.streaming.instances import read_instance

    return read_instance(arguments.instance)


def _solver(name: str | None) -> Callable[[Instance], OverlapPlan]:
    if name is not None:
        return find_strategy(name)
    from torchedge.streaming.solving import solve

    return solve


def find_strategy(name: str) -> Callable[[Instance], OverlapPlan]:
    """Return a strategy to compare with by its name; raises InputError where there is none."""
    from torchedge.streaming.strategies import STRATEGIES

    if name not in STRATEGIES:
        raise InputError(f"--strategy is {name!r}; expected one of {', '.join(STRATEGIES)}, or none")
    return STRATEGIES[name]


# what came out ----------------------------------------------------------------------------------------------


def summary(planned: Planned) -> dict[str, Any]:
    """Return what is printed as plain data; MiB count whole chunks."""
    instance, plan, found = planned.instance, planned.plan, planned.found
    streamed = len({load.weight for load in plan.loads})
    total = instance.total_chunks
    document: dict[str, Any] = {
        "instance": instance.name,
        "status": plan.status,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "weights": len(instance.weights),
        "streamed_weights": streamed,
        "seconds": planned.seconds,
        "accepted": found.ok,
        "problems": list(found.problems),
    }
    if plan.status == "INFEASIBLE":
        smallest = plan.solver.get("smallest_memory_chunks")
        document |= {"reason": plan.solver.get("reason"), "smallest_memory_chunks": smallest}
        return document
    for name, chunks in (
        ("total", total),
        ("preloaded", found.preloaded_chunks),
        ("peak", found.peak_chunks),
    ):
        document |= {f"{name}_chunks": chunks, f"{name}_mib": _mib(instance, chunks)}
    return document


def _mib(instance: Instance, chunks: int) -> float:
    from torchedge.streaming.instances import MEBIBYTE

    return chunks * instance.chunk_bytes / MEBIBYTE


def _print(planned: Planned) -> None:
    instance, plan, found = planned.instance, planned.plan, planned.found
    print_wrapped(
        f"{instance.name}: {len(instance.layers):,} layers, {len(instance.weights):,} weights, lambda "
        f"{instance.lam:g}, {_limits(instance)}"
    )
    if plan.status == "INFEASIBLE":
        print_wrapped(f"there is no plan: {plan.solver.get('reason')}")
        smallest = plan.solver.get("smallest_memory_chunks")
        if isinstance(smallest, int):
            size = f"{smallest:,} chunks ({number(_mib(instance, smallest))} MiB)"
            print_wrapped(f"the smallest memory limit that works is {size}")
    else:
        _print_tables(planned)
    for problem in found.problems[:_SHOWN]:
        print_wrapped(problem, first="problem: ", rest="  ")
    if len(found.problems) > _SHOWN:
        print(f"problem: and {len(found.problems) - _SHOWN} more")
    print_wrapped("the verifier accepts it" if found.ok else "the verifier refuses it")


def _print_tables(planned: Planned) -> None:
    plan, told = planned.plan, summary(planned)
    rows = [
        ["status", plan.status],
        ["objective", _exact(plan.objective)],
        ["lower bound", _exact(plan.lower_bound)],
        ["gap", "-" if plan.gap is None else f"{100 * plan.gap:.3g} %"],
        ["streamed weights", f"{told['streamed_weights']:,} of {told['weights']:,}"],
        ["seconds", "-" if planned.seconds is None else f"{planned.seconds:.2f}"],
    ]
    print_table(["", "plan"], rows)
    print()
    sizes = [
        [text, f"{told[f'{name}_chunks']:,}", number(told[f"{name}_mib"])]
        for text, name in (
            ("all weights", "total"),
            ("preloaded", "preloaded"),
            ("in flight at most", "peak"),
        )
    ]
    print_table(["", "chunks", "MiB"], sizes)


def _exact(value: float | None) -> str:
    return "-" if value is None else f"{value:,.12g}"


def _limits(instance: Instance) -> str:
    limits = (("M_peak", instance.m_peak_chunks), ("memory", instance.memory_chunks))
    told = [f"{name} {number(_mib(instance, chunks))} MiB" for name, chunks in limits if chunks is not None]
    return " and ".join(told) or "no limits"
