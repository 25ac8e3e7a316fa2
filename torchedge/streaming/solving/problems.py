"""The overlap problem in reversed time: one machine of varying speed, jobs that may be refused.

Slot t is layer N - t. A weight is a job of T(w) chunks, released in the slot of the layer before its first
use; preemption is free; its cost is `late` for every layer from its first use back to the slot in which its
last remaining chunk is served (its first load, z_w), or `refusal` where it is preloaded. Costs are whole
numbers: `Instance.prices`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchedge.streaming.instances import Instance

__all__ = ["Ints", "Job", "Problem", "Subproblem", "make_problem", "segments"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Job:
    """A weight that may be streamed: `release` and `last` are slots, the other figures as in the module."""

    weight: int
    chunks: int
    release: int
    use: int
    last: int
    refusal: int
    late: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Jobs by release, the capacity of each slot, limits, cost and chunks of what must be preloaded.

    `in_flight`: most chunks in flight (C2); `memory`: most chunks preloaded and in flight together.
    """

    layers: int
    capacity: Ints
    jobs: tuple[Job, ...]
    in_flight: int | None
    memory: int | None
    fixed_cost: int = 0
    fixed_chunks: int = 0

    def layer(self, slot: int) -> int:
        """The layer that is a slot."""
        return self.layers - slot

    def cost(self, job: Job, slot: int) -> int:
        """Cost of a job whose first load is in `slot`."""
        return job.late * (job.use - self.layer(slot))


@dataclass(frozen=True, slots=True)
class Subproblem:
    """Jobs that share the slots `start` to `end` (not included) with no other job."""

    start: int
    end: int
    jobs: tuple[Job, ...]


def make_problem(instance: Instance) -> Problem:
    """Turn an instance round; weights that no capacity comes before are preloaded for good."""
    count = len(instance.layers)
    preload_price, distance_price, _ = instance.prices
    capacity = np.array([layer.capacity_chunks for layer in reversed(instance.layers)], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(capacity[::-1])])  # chunks that layers 1..k can load
    limits = [x for x in (instance.m_peak_chunks, instance.memory_chunks) if x is not None]
    jobs, cost, chunks = [], 0, 0
    for place, weight in enumerate(instance.weights):
        refusal = preload_price * weight.chunks
        if before[weight.first_use - 1] < weight.chunks or any(weight.chunks > x for x in limits):
            cost += refusal
            chunks += weight.chunks
            continue
        late = distance_price * (weight.chunks if instance.distance == "chunks" else 1)
        release = count - weight.first_use + 1
        jobs.append(
            Job(place, weight.chunks, release, weight.first_use, count - weight.last_use, refusal, late)
        )
    jobs.sort(key=lambda job: (job.release, job.chunks, job.weight))
    return Problem(count, capacity, tuple(jobs), instance.m_peak_chunks, instance.memory_chunks, cost, chunks)


def segments(problem: Problem, limit: int | None = None) -> list[Subproblem]:
    """Split time where nothing waits even if all jobs are streamed.

    No schedule without idling carries work across such a point, whichever jobs it refuses, so that the parts
    are independent. With a `limit` on chunks in flight they are, too, unless streaming all breaks it at the
    very point: then there is no cut. A last part may be left with more work than capacity.
    """
    from torchedge.streaming.solving.packing import residency

    resident = residency(problem, problem.jobs) if limit is not None else []
    parts: list[Subproblem] = []
    waiting = place = slot = start = 0
    members: list[Job] = []
    jobs = problem.jobs
    while place < len(jobs) or waiting:
        if not waiting and not members:
            slot = start = jobs[place].release
        while place < len(jobs) and jobs[place].release == slot:
            waiting += jobs[place].chunks
            members.append(jobs[place])
            place += 1
        if slot >= problem.layers:
            break
        waiting -= min(waiting, int(problem.capacity[slot]))
        slot += 1
        tied = (
            limit is not None
            and place < len(jobs)
            and jobs[place].release == slot
            and resident[slot - 1] > limit
        )
        if not waiting and not tied:
            parts.append(Subproblem(start, slot, tuple(members)))
            members = []
    if members:
        parts.append(Subproblem(start, problem.layers, tuple(members)))
    return parts
