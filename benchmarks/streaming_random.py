"""Hold the planner against exhaustive search on random tiny instances, or try it on ones of any size.

    python benchmarks/streaming_random.py                       # 1,000 tiny instances
    python benchmarks/streaming_random.py --count 5000 --first-seed 10000
    python benchmarks/streaming_random.py --any-size --count 2000
    python benchmarks/streaming_random.py --tight --count 50

Every plan goes through the verifier. If an instance is tiny, its objective, its lower bound and the claim
that it has no plan are held against exhaustive search. Instances of any size have 1 to 100,000 layers and
weights of up to 10^9 chunks, with all options. Tight ones have little room in flight: 7 to 36 layers and 43
to 56 weights of up to 100 chunks, with either residency, and 2 layers with 300 weights of 10^6 to 10^9
chunks; so many of each of the three kinds are drawn. The exit status is 1 where a plan is refused, an OPTIMAL
one is not the best, a bound is above the optimum, a FEASIBLE one is below it, or a plan takes more than 12 s
of the processor.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import get_args

from harness import options_of
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import Tight, any_instance, random_instance, tight_instance

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.solving.planner import solve
from torchedge.streaming.verification import verify_plan

NEAR = 1e-9
MISMATCHES = ("refused by the verifier", "OPTIMAL but not the best", "better than the best", "bound too high",
              "INFEASIBLE, but there is a plan", "above 12 s")  # fmt: skip
GAPS = {"within 0.1 %": 0.001, "within 1 %": 0.01, "within 10 %": 0.1}
COUNTS = ("plans", "OPTIMAL", "FEASIBLE", "INFEASIBLE", *GAPS, "INFEASIBLE, unproven", "tried exhaustively",
          "equal to exhaustive search", *MISMATCHES)  # fmt: skip
TINY = 20_000
"""Choices of an instance that are all tried."""
MOST_SECONDS = 12


def judge(instance: Instance, plan: OverlapPlan, seconds: float) -> list[str]:
    """What is to be counted of a plan."""
    said: list[str] = ["plans", plan.status]
    if plan.gap is not None:
        said += [name for name, most in GAPS.items() if plan.gap <= most]
    if plan.solver.get("smallest_is_proven") is False:
        said.append("INFEASIBLE, unproven")
    if not verify_plan(instance, plan).ok:
        said.append("refused by the verifier")
    if seconds > MOST_SECONDS:
        said.append("above 12 s")
    if math.prod(w.first_use for w in instance.weights) > TINY:
        return said
    best = best_plan(instance)
    said.append("tried exhaustively")
    if plan.objective is None or best.objective is None:
        if plan.status == best.status:
            said.append("equal to exhaustive search")
        elif best.objective is not None:
            said.append("INFEASIBLE, but there is a plan")
        return said
    if abs(plan.objective - best.objective) <= NEAR:
        said.append("equal to exhaustive search")
    elif plan.status == "OPTIMAL":
        said.append("OPTIMAL but not the best")
    if plan.objective < best.objective - NEAR:
        said.append("better than the best")
    if plan.lower_bound is not None and plan.lower_bound > best.objective + NEAR:
        said.append("bound too high")
    return said


def run(draw: Callable[[int], Instance], seeds: range) -> bool:
    """Plan instances and print what is counted of the plans, and each mismatch; True: none."""
    counts: Counter[str] = Counter()
    times: list[tuple[float, int]] = []
    gaps: list[tuple[float, int]] = []
    for seed in seeds:
        instance = draw(seed)
        start = time.process_time()
        plan = solve(instance)
        took = time.process_time() - start
        times.append((took, seed))
        if plan.gap is not None:
            gaps.append((plan.gap, seed))
        said = judge(instance, plan, took)
        counts.update(said)
        if set(said) & set(MISMATCHES):
            problems = "; ".join(verify_plan(instance, plan).problems)
            print(f"seed {seed}: {', '.join(said[1:])}; {took:.1f} s; {problems}", flush=True)
    for name in COUNTS:
        print(f"{name:<34}{counts[name]:>8,}")
    print(f"{'seconds of the processor':<34}{sum(took for took, _ in times):>8.1f}")
    print("{:<34}{:>8.1f} (seed {})".format("slowest", *max(times)))
    if gaps:
        print("{:<34}{:>8.2%} (seed {})".format("widest gap", *max(gaps)))
    return not any(counts[name] for name in MISMATCHES)


def main() -> None:
    """Draw, plan, verify, compare, count."""
    parser = options_of(__doc__, count=1000, first_seed=0)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--any-size", action="store_true", help="draw instances of all sizes, not tiny ones")
    kind.add_argument("--tight", action="store_true", help="draw instances with little room in flight")
    arguments = parser.parse_args()
    draws: dict[str, Callable[[int], Instance]] = {
        "": any_instance if arguments.any_size else random_instance
    }
    if arguments.tight:
        draws = {f"tight, {kind}": partial(tight_instance, kind=kind) for kind in get_args(Tight)}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.count)
    matches = True
    for title, draw in draws.items():
        print(title, end="\n" if title else "", flush=True)
        matches &= run(draw, seeds)
    sys.exit(not matches)


if __name__ == "__main__":
    main()
