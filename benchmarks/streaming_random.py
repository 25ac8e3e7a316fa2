"""Hold the planner against exhaustive search on random tiny instances, or try it on ones of any size.

    python benchmarks/streaming_random.py                       # 1,000 tiny instances
    python benchmarks/streaming_random.py --count 5000 --first-seed 10000 --strategy lc-opg
    python benchmarks/streaming_random.py --any-size --count 2000

Every plan goes through the verifier. If an instance is tiny, its objective, its lower bound and the claim
that it has no plan are held against exhaustive search. Instances of any size have 1 to 100,000 layers and
weights of up to 10^9 chunks, with all options. Without --strategy the exit status is 1 where a plan is
refused, an OPTIMAL one is not the best, a bound is above the optimum, a FEASIBLE one is below it, or a plan
takes more than 12 s of the processor. A strategy for comparison may miss the optimum and break the limits:
it is only counted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter

import oracle_path  # noqa: F401 - for oracles
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import any_instance, random_instance

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
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


def main() -> None:
    """Draw, plan, verify, compare, count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="instances (default 1000)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--any-size", action="store_true", help="draw instances of all sizes, not tiny ones")
    parser.add_argument("--strategy", help="one of overlap_strategies in place of the solver")
    arguments = parser.parse_args()
    if arguments.strategy is None:
        from torchedge.streaming.solving import solve
    else:
        from overlap_strategies import STRATEGIES

        solve = STRATEGIES[arguments.strategy]
    counts: Counter[str] = Counter()
    seconds = slowest = 0.0
    slowest_seed = None
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.count):
        instance = any_instance(seed) if arguments.any_size else random_instance(seed)
        start = time.process_time()
        plan = solve(instance)
        took = time.process_time() - start
        seconds += took
        if took > slowest:
            slowest, slowest_seed = took, seed
        said = judge(instance, plan, took)
        counts.update(said)
        if arguments.strategy is None and set(said) & set(MISMATCHES):
            problems = "; ".join(verify_plan(instance, plan).problems)
            print(f"seed {seed}: {', '.join(said[1:])}; {took:.1f} s; {problems}", flush=True)
    for name in COUNTS:
        print(f"{name:<34}{counts[name]:>8,}")
    print(f"{'seconds of the processor':<34}{seconds:>8.1f}")
    print(f"{'slowest':<34}{slowest:>8.1f} (seed {slowest_seed})")
    sys.exit(arguments.strategy is None and any(counts[name] for name in MISMATCHES))


if __name__ == "__main__":
    main()
