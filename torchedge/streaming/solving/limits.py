"""Limits on memory: what is in flight, and the smallest limit on memory with which there is a plan at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from torchedge.errors import MissingExtraError
from torchedge.streaming.solving.packing import Packing, residency
from torchedge.streaming.solving.problems import Job, Problem, Subproblem

__all__ = ["Smallest", "rooms", "smallest_memory", "staying_chunks", "whole_chunks"]

NODES = 2_000
"""Nodes after which the search for the smallest limit settles for what it has."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest limit on memory found, the jobs (weights) refused with it, whether none is smaller."""

    chunks: int
    refused: frozenset[int]
    proven: bool


def whole_chunks(problem: Problem, jobs: Sequence[Job], packing: Packing) -> list[int]:
    """Chunks in flight by slot where a weight counts whole from its first load to its last use."""
    change = [0] * (problem.layers + 1)
    for job in jobs:
        change[job.last] += job.chunks
        change[packing.finish[job.weight] + 1] -= job.chunks
    return [int(x) for x in np.cumsum(change)[:-1]]


def staying_chunks(problem: Problem, jobs: Iterable[Job]) -> list[int]:
    """Chunks in flight by slot of weights that are used again later, between those uses."""
    change = [0] * (problem.layers + 1)
    for job in jobs:
        if job.last < job.release - 1:
            change[job.last] += job.chunks
            change[job.release - 1] -= job.chunks
    return [int(x) for x in np.cumsum(change)[:-1]]


def rooms(problem: Problem, part: Subproblem, limit: int, staying: Sequence[int]) -> list[int]:
    """Most chunks that a part may have in flight by slot.

    staying: of all weights. Those of other parts are counted as if all of them were streamed.
    """
    room = [limit - chunks for chunks in staying]
    for job in part.jobs:
        for slot in range(job.last, job.release - 1):
            room[slot] += job.chunks
    return [max(0, chunks) for chunks in room]


def smallest_memory(problem: Problem) -> Smallest:
    """Find the smallest limit on preloaded chunks and chunks in flight together that allows a plan.

    A whole-number programme: which jobs to refuse; what waits in each slot is at least what waited before
    less the capacity, plus what is released (no packing has less in flight, see `packing.residency`).
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix
    except ImportError as error:
        raise MissingExtraError.of("scipy", extra="plan", purpose="planning a stream of weights") from error
    jobs, slots = problem.jobs, problem.layers
    count = len(jobs)
    total = sum(job.chunks for job in jobs) + problem.fixed_chunks
    preloaded = count + slots  # variables: streamed (count), waiting (slots), preloaded, the limit
    limit = preloaded + 1
    chunks = {k: float(job.chunks) for k, job in enumerate(jobs)}
    rows: list[tuple[dict[int, float], float]] = []  # sum <= side
    rows.append(({**{k: -v for k, v in chunks.items()}, preloaded: -1.0}, -float(total)))
    released: dict[int, dict[int, float]] = {}
    staying: dict[int, dict[int, float]] = {}
    for k, job in enumerate(jobs):
        released.setdefault(job.release, {})[k] = chunks[k]
        for slot in range(job.last, job.release):
            staying.setdefault(slot, {})[k] = chunks[k]
    for slot in range(slots):
        waits = {**released.get(slot, {}), count + slot: -1.0}
        rows.append((waits, 0.0))
        if slot:
            rows.append(({**waits, count + slot - 1: 1.0}, float(problem.capacity[slot - 1])))
        held = {**staying.get(slot, {}), count + slot: 1.0}
        if problem.in_flight is not None:
            rows.append((held, float(problem.in_flight)))
        rows.append(({**held, preloaded: 1.0, limit: -1.0}, 0.0))
    rows.append(({count + slots - 1: 1.0}, float(problem.capacity[slots - 1])))
    index = [(r, k) for r, (entries, _) in enumerate(rows) for k in entries]
    values = [v for entries, _ in rows for v in entries.values()]
    matrix = csr_matrix((values, np.array(index).T), shape=(len(rows), limit + 1))
    solved = milp(
        np.eye(1, limit + 1, limit)[0],
        constraints=LinearConstraint(matrix, -np.inf, np.array([side for _, side in rows])),
        integrality=np.concatenate([np.ones(count), np.zeros(slots + 2)]),
        bounds=Bounds(0, np.concatenate([np.ones(count), np.full(slots + 2, np.inf)])),
        options={"node_limit": NODES},
    )
    if solved.x is None:
        return Smallest(total, frozenset(job.weight for job in jobs), False)
    refused = frozenset(job.weight for k, job in enumerate(jobs) if solved.x[k] < 0.5)
    return Smallest(_needed(problem, jobs, refused), refused, bool(solved.status == 0))


def _needed(problem: Problem, jobs: Iterable[Job], refused: frozenset[int]) -> int:
    """Memory that refusing these jobs takes."""
    kept = [job for job in jobs if job.weight not in refused]
    preloaded = problem.fixed_chunks + sum(job.chunks for job in jobs if job.weight in refused)
    return preloaded + max(residency(problem, kept), default=0)
