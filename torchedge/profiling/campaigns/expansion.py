"""A plan's networks built, pruned and written as job lines, in a child process.

    python -m torchedge.profiling.campaigns.expansion FOLDER

FOLDER/jobs.jsonl gets one line an item of FOLDER/plan.toml, in the plan's order: a job, or {"skipped": id,
"reason": ...}. Existing lines stay, so that a killed expansion continues where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchedge.errors import InputError, ProfileError, TorchedgeError
from torchedge.profiling.campaigns.plans import CampaignPlan, PlanItem, parse_plan
from torchedge.storage.documents import read_text
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
    from torchedge.profiling.topologies import check_recipe, recipe_of

    plan = parse_plan(PLAN, read_text(folder / PLAN, "TOML"))
    for network in plan.networks:  # before anything is measured
        check_recipe(recipe_of(network.name, network.kwargs))
    with Journal(folder / JOBS, wait=True) as jobs:  # an expansion whose controller was killed ends soon
        known = sum(1 for _ in jobs.rows())
        for item in plan.items()[known:]:
            start(item.id)
            jobs.append(make_job(item, plan))


def make_job(item: PlanItem, plan: CampaignPlan) -> dict[str, Any]:
    """Return the job line of an item, without points, or the reason for none.

    Level 0 is written as nodes where the format holds the network, else named with its library.
    """
    from torchedge.profiling.campaigns.pruning import prune, untrained_norms
    from torchedge.profiling.topologies import build_network, recipe_of, serialise

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
        if "nodes" not in recipe:
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
        **({} if item.amp is None else {"amp": item.amp, "setting": item.amp}),
        "build": recipe,
    }


# work in child processes ------------------------------------------------------------------------------------
#
# Its memory is freed at its end, and the parent needs no torch. The child prints one JSON object a line: its
# progress, or {"error": message, "input": whether the user's input is at fault}.


class Listener(Protocol):
    """Receives the progress of a campaign; a progress bar, for one."""

    def begin(self, label: str, total: int, done: int) -> None:
        """Networks are written as job lines, or points or convolutions are measured."""

    def doing(self, what: str) -> None:
        """Name the current network or point."""

    def step(self) -> None:
        """One more network or point is done."""

    def note(self, text: str) -> None:
        """Show a line to the user."""


def run_child(module: str, arguments: Sequence[str], listen: Callable[[dict[str, Any]], object]) -> None:
    """Run `python -m module arguments`; call `listen` with each object that it prints.

    Raises the child's error as InputError or ProfileError, and ProfileError where the child is killed.
    """
    words = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stdout:
                row = json.loads(line)
                if "error" in row:
                    raise (InputError if row["input"] else ProfileError)(row["error"])
                listen(row)
            errors = process.stderr.read().strip().splitlines()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ProfileError(
            f"preparing the campaign ended with status {process.returncode} "
            f"({errors[-1][:200] if errors else 'killed'}); run the same command again"
        )


def report_errors(work: Callable[[], object], folder: str) -> int:
    """Do a child's work; print an error as JSON. Returns the exit status 0."""
    try:
        work()
    except (TorchedgeError, OSError) as error:
        message = f"{folder}: {error.strerror}; check the disk" if isinstance(error, OSError) else str(error)
        print(json.dumps({"error": message, "input": isinstance(error, InputError)}), flush=True)
    return 0


def main() -> int:
    """Expand the folder named on the command line; each line printed is an id, or an error as JSON."""
    folder = Path(sys.argv[1])
    return report_errors(
        lambda: expand(folder, lambda item: print(json.dumps({"item": item}), flush=True)), str(folder)
    )


if __name__ == "__main__":
    sys.exit(main())
