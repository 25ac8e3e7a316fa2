"""A plan's networks built, pruned and written as job lines, in a child process.

    python -m torchedge.profiling.campaigns.expansion FOLDER

FOLDER/jobs.jsonl gets one line an item of FOLDER/plan.toml, in the plan's order: a job, or {"skipped": id,
"reason": ...}. Existing lines stay, so that a killed expansion continues where it was.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchedge.errors import ProfileError, TorchedgeError
from torchedge.profiling.campaigns.children import report_errors
from torchedge.profiling.campaigns.plans import CampaignPlan, PlanItem, parse_plan
from torchedge.storage.documents import read_bytes
from torchedge.storage.journals import Journal, read_rows

JOBS, PLAN = "jobs.jsonl", "plan.toml"


def read_jobs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of jobs.jsonl without a torn last line."""
    for job in read_rows(folder / JOBS):
        if "skipped" not in job and not {"id", "build"} <= job.keys():
            raise ProfileError(f"{folder / JOBS}: is damaged (no id or build); delete it and run again")
        yield job


def expand(folder: Path, start: Callable[[str], Any] = lambda _: None) -> None:
    """Bring a campaign's job lines up to its plan; `start` receives each item's id before it is built.

    Raises InputError for a network that is unknown or whose library is missing, and ProfileError where the
    folder cannot be written. A network that cannot be pruned or written down is skipped with its reason.
    """
    plan = parse_plan(PLAN, read_bytes(folder / PLAN).decode())
    _check_names(plan)
    with Journal(folder / JOBS, wait=True) as jobs:  # an expansion whose controller was killed ends soon
        known = sum(1 for _ in jobs.rows())
        for item in list(plan.items())[known:]:
            start(item.id)
            jobs.append(make_job(item, plan))


def make_job(item: PlanItem, plan: CampaignPlan) -> dict[str, Any]:
    """Return the job line of an item, without points, or the reason for none.

    Level 0 is written as nodes where the format holds the network, else named with its library.
    """
    from torchedge.profiling.campaigns.networks import build_network, recipe_of
    from torchedge.profiling.campaigns.pruning import prune, untrained_norms
    from torchedge.profiling.campaigns.serialising import serialise

    recipe: Mapping[str, Any] = recipe_of(item.network.name, item.network.kwargs)
    reached = 0.0
    try:
        model = build_network(recipe)
        if item.level:
            seed = zlib.crc32(f"{plan.seed} {item.id}".encode())
            norms = untrained_norms(model, plan.seed) if item.strategy == "l1" else None
            pruned = prune(
                model, item.input_size, item.level, strategy=item.strategy, scope=plan.scope,  # type: ignore[arg-type]
                round_to=plan.round_to, seed=seed, norms=norms,
            )  # fmt: skip
            model, reached = pruned.model, pruned.reached
        try:
            recipe = {"nodes": serialise(model, item.id, input_size=item.input_size)}
        except TorchedgeError:
            if item.level:
                raise
    except Exception as error:  # one network that a library cannot build does not end a campaign
        name = "" if isinstance(error, TorchedgeError) else f"{type(error).__name__}: "
        return {"skipped": item.id, "reason": name + " ".join(str(error).split())[:500]}
    return {
        "id": item.id,
        "network": item.network.label,
        "pruning_level": item.level,
        "pruning_reached": round(reached, 3),
        "strategy": item.strategy,
        "input_size": list(item.input_size),
        "optimizer": plan.optimizer,
        "build": recipe,
    }


def _check_names(plan: CampaignPlan) -> None:
    """Raise InputError for a plan with unknown networks, before anything is measured."""
    from torchedge.profiling.campaigns.networks import check_recipe, recipe_of

    for network in plan.networks:
        check_recipe(recipe_of(network.name, network.kwargs))


def main() -> int:
    """Expand the folder named on the command line; each line printed is an id, or an error as JSON."""
    folder = Path(sys.argv[1])
    return report_errors(
        lambda: expand(folder, lambda item: print(json.dumps({"item": item}), flush=True)), str(folder)
    )


if __name__ == "__main__":
    sys.exit(main())
