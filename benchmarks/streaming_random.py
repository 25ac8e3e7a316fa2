"""Hold the planner against exhaustive search on random tiny instances.

    python benchmarks/streaming_random.py                       # 1,000 instances
    python benchmarks/streaming_random.py --count 5000 --first-seed 10000 --strategy lc-opg

Every plan goes through the verifier, and its objective and lower bound are held against the optimum that
trying every choice finds. Without --strategy the exit status is 1 where a plan is refused, an OPTIMAL one is
not the best, a bound is above the optimum, or a FEASIBLE one is below it. A strategy for comparison may miss
the optimum and break the limits: it is only counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import oracle_path  # noqa: F401 - for oracles
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import random_instance

from torchedge.streaming.instances import Instance
from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.verification import verify_plan

NEAR = 1e-9
MISMATCHES = ("refused by the verifier", "OPTIMAL but not the best", "better than the best", "bound too high",
              "INFEASIBLE, but there is a plan")  # fmt: skip
COUNTS = ("plans", "equal to exhaustive search", "OPTIMAL", "FEASIBLE", "INFEASIBLE", *MISMATCHES)


def judge(instance: Instance, plan: OverlapPlan) -> list[str]:
    """What is to be counted of a plan."""
    best = best_plan(instance)
    said: list[str] = ["plans", plan.status]
    if not verify_plan(instance, plan).ok:
        said.append("refused by the verifier")
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
    parser.add_argument("--strategy", help="one of overlap_strategies in place of the solver")
    arguments = parser.parse_args()
    if arguments.strategy is None:
        from torchedge.streaming.solving import solve
    else:
        from overlap_strategies import STRATEGIES

        solve = STRATEGIES[arguments.strategy]
    counts: Counter[str] = Counter()
    seconds = 0.0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.count):
        instance = random_instance(seed)
        start = time.perf_counter()
        plan = solve(instance)
        seconds += time.perf_counter() - start
        said = judge(instance, plan)
        counts.update(said)
        if arguments.strategy is None and set(said) & set(MISMATCHES):
            print(f"seed {seed}: {', '.join(said[1:])}; {'; '.join(verify_plan(instance, plan).problems)}")
    for name in COUNTS:
        print(f"{name:<34}{counts[name]:>8,}")
    print(f"{'planned in':<34}{seconds:>8.1f} s")
    sys.exit(arguments.strategy is None and any(counts[name] for name in MISMATCHES))


if __name__ == "__main__":
    main()
