"""Hold the planner against the paper's model handed to CP-SAT as it stands.

    python benchmarks/streaming_direct.py                            # all models of the paper, 120 s each
    python benchmarks/streaming_direct.py resnet-50 plan-me.json --seconds 30 --no-m-peak

Models by name are laid out for the Adreno 750 in half precision; instance files are taken as they are. Each
solver runs in a process of its own, whose peak memory is told; every plan goes through the verifier. CP-SAT
gets `--seconds` of solving (told are those of building its model, too; and what the processor spent on both,
which on a machine that does other work is less than its cores would allow) and no hint. Its model has two
variables for each pair of a weight and a layer that may load it: where those are more than CP-SAT can hold,
it gets the widest window of layers before a first use that it can hold, and its bound then says nothing. It
runs four workers: on two cores it finds and proves more with them than with two. The exit status is 1 where
the planner's objective is above CP-SAT's. Building models takes what `benchmarks/streaming_models.py` takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from torchedge.streaming.instances import read_instance, write_instance
from torchedge.streaming.plans import OverlapPlan

Timed = tuple[OverlapPlan | None, float]
"""A plan and the seconds that solving took."""

PAPER = (
    *("gpt-neo-small", "gpt-neo-1.3b", "gpt-neo-2.7b", "resnet-50", "sam-2", "vit", "deepvit", "sd-unet"),
    *(
        "whisper-medium",
        "depth-anything-small",
        "depth-anything-large",
        "vit-8b",
        "llama-2-13b",
        "llama-2-70b",
    ),
)
TITLES = ("model", "layers", "weights", "pairs", "window", "planner", "bound", "s", "MiB")
TITLES_DIRECT = ("CP-SAT", "its bound", "s", "of the processor", "MiB", "planner is")


def write_model(name: str, path: Path) -> None:
    """Lower one of the paper's models and write its instance."""
    from torchedge.devices import find_device
    from torchedge.errors import TorchedgeError
    from torchedge.lowering.inference import lower_model
    from torchedge.streaming.capacities import make_instance

    device = find_device("adreno-750")
    try:
        program = lower_model(name, device, precision="float16")
    except TorchedgeError as error:
        sys.exit(str(error))
    write_instance(path, replace(make_instance(program, device), name=name))


def plan_exactly(path: Path, arguments: argparse.Namespace) -> Timed:
    """Plan with the solver of torchedge."""
    from torchedge.streaming.solving.planner import solve
    from torchedge.streaming.verification import check_plan

    instance = read_instance(path)
    start = time.perf_counter()
    plan = solve(instance)
    seconds = time.perf_counter() - start
    check_plan(instance, plan)
    return plan, seconds


def plan_directly(path: Path, arguments: argparse.Namespace) -> Timed:
    """Plan with the paper's model in CP-SAT, whole where it fits."""
    from paper_model import MAX_PAIRS, direct_cp_sat, whole_window, widest_reach

    from torchedge.streaming.verification import check_plan

    instance = read_instance(path)
    window = arguments.window
    if window is None:
        window = widest_reach(whole_window(instance), MAX_PAIRS)
    start = time.perf_counter()
    plan = direct_cp_sat(instance, seconds=arguments.seconds, window=window, workers=arguments.workers)
    seconds = time.perf_counter() - start
    if plan is not None:
        check_plan(instance, plan)
    return plan, seconds


def apart(
    work: Callable[[Path, argparse.Namespace], Timed], path: Path, arguments: argparse.Namespace
) -> tuple[OverlapPlan | None, float, float, float]:
    """Plan in a forked process; return the plan, its seconds, the processor's and the process' peak MiB."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, work, path, arguments))
    process.start()
    sender.close()
    try:
        found: tuple[OverlapPlan | None, float, float, float] = receiver.recv()
    except EOFError:
        sys.exit(f"{work.__name__} of {path.name} ended without a result")
    finally:
        process.join()
    return found


def _report(
    sender: Connection,
    work: Callable[[Path, argparse.Namespace], Timed],
    path: Path,
    arguments: argparse.Namespace,
) -> None:
    plan, seconds = work(path, arguments)
    used = resource.getrusage(resource.RUSAGE_SELF)
    sender.send((plan, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))


def verdict(ours: OverlapPlan, direct: OverlapPlan | None) -> str:
    """Say how the planner's objective stands to CP-SAT's."""
    if direct is None:
        return "the only one with a plan"
    if ours.objective is None or direct.objective is None:
        return "equal" if ours.status == direct.status else "WORSE" if ours.objective is None else "better"
    if ours.objective > direct.objective:
        return "WORSE"
    return (
        "equal" if ours.objective == direct.objective else f"{direct.objective / ours.objective:.2f} x better"
    )


def told(plan: OverlapPlan | None) -> tuple[str, str]:
    """Objective with status, and bound."""
    if plan is None:
        return "none found", "-"
    objective = "none" if plan.objective is None else f"{plan.objective:,.1f}"
    bound = "-" if plan.lower_bound is None else f"{plan.lower_bound:,.1f}"
    return f"{objective} {plan.status}", bound


def compare(name: str, path: Path, arguments: argparse.Namespace) -> str:
    """Plan one instance both ways and print its row; return the verdict."""
    from paper_model import MAX_PAIRS, count_pairs, whole_window, widest_reach

    whole = whole_window(read_instance(path))
    layers = len(whole.capacity) - 1
    reach = widest_reach(whole, MAX_PAIRS) if arguments.window is None else arguments.window
    ours, seconds, _, mib = apart(plan_exactly, path, arguments)
    direct, direct_seconds, processor, direct_mib = apart(plan_directly, path, arguments)
    assert ours is not None
    said = verdict(ours, direct)
    cells = (
        *(name, f"{layers:,}", f"{len(whole.weights):,}", f"{sum(count_pairs(whole, layers)):,}"),
        *("all" if reach >= layers else str(reach), *told(ours), f"{seconds:.2f}", f"{mib:,.0f}"),
        *(*told(direct), f"{direct_seconds:.0f}", f"{processor:.0f}", f"{direct_mib:,.0f}", said),
    )
    print(f"| {' | '.join(cells)} |", flush=True)
    return said


def main() -> None:
    """Print a row for each instance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("instances", nargs="*", default=PAPER, help="names of models, or instance files")
    parser.add_argument("--seconds", type=float, default=120, help="CP-SAT's time (default 120)")
    parser.add_argument("--workers", type=int, default=4, help="CP-SAT's workers (default 4)")
    parser.add_argument("--window", type=int, help="layers before a first use that may load (default: all)")
    parser.add_argument("--no-m-peak", action="store_true", help="without the limit of 500 MiB in flight")
    arguments = parser.parse_args()
    titles = (*TITLES, *TITLES_DIRECT)
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    said = []
    with tempfile.TemporaryDirectory() as folder:
        for given in arguments.instances:
            path = Path(given)
            if not path.is_file():
                path = Path(folder) / "instance.json"
                # A process of its own: what capturing takes is no part of what planning takes.
                laying = multiprocessing.get_context("fork").Process(target=write_model, args=(given, path))
                laying.start()
                laying.join()
                if laying.exitcode:
                    sys.exit(1)
            if arguments.no_m_peak:
                path, source = Path(folder) / "without.json", path
                write_instance(path, replace(read_instance(source), m_peak_chunks=None))
            said.append(compare(Path(given).name, path, arguments))
    sys.exit("WORSE" in said)


if __name__ == "__main__":
    main()
