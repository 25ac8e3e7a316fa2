"""The overlap problem in reversed time: one machine of varying speed, jobs that are served or preloaded.

Slot t is layer N - t. A weight is a job of T(w) chunks, released in the slot of the layer before its first
use. Preemption is free. A job costs `late` for every layer from its first use back to the slot in which its
last remaining chunk is served (its first load, z_w), or `preload_cost` if it is preloaded. Costs are whole
numbers: `Instance.prices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from torchedge.streaming.instances import Instance

__all__ = [
    "ORDERS",
    "Ints",
    "Job",
    "Packing",
    "Problem",
    "Subproblem",
    "make_problem",
    "pack",
    "residency",
    "segments",
]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Job:
    """A weight that may be streamed: `release` and `last` are slots, the other figures as in the module."""

    weight: int
    chunks: int
    release: int
    use: int
    last: int
    preload_cost: int
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
    """Reverse an instance in time; a weight that cannot be streamed at all is a fixed preload."""
    count = len(instance.layers)
    preload_price, distance_price, _ = instance.prices
    capacity = np.array([layer.capacity_chunks for layer in reversed(instance.layers)], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(capacity[::-1])])  # chunks that layers 1..k can load
    limits = [x for x in (instance.m_peak_chunks, instance.memory_chunks) if x is not None]
    jobs, cost, chunks = [], 0, 0
    for place, weight in enumerate(instance.weights):
        preload_cost = preload_price * weight.chunks
        if before[weight.first_use - 1] < weight.chunks or any(weight.chunks > x for x in limits):
            cost += preload_cost
            chunks += weight.chunks
            continue
        late = distance_price * (weight.chunks if instance.distance == "chunks" else 1)
        release = count - weight.first_use + 1
        jobs.append(
            Job(place, weight.chunks, release, weight.first_use, count - weight.last_use, preload_cost, late)
        )
    jobs.sort(key=lambda job: (job.release, job.chunks, job.weight))
    return Problem(count, capacity, tuple(jobs), instance.m_peak_chunks, instance.memory_chunks, cost, chunks)


def segments(problem: Problem, limit: int | None = None) -> list[Subproblem]:
    """Split time where nothing waits even if all jobs are streamed.

    No schedule without idling carries work across such a point, whichever jobs are preloaded: the parts
    are independent. With a `limit` on chunks in flight they are, too, unless streaming all breaks it at the
    very point: then there is no cut. A last part may be left with more work than capacity.
    """
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


Order = Callable[[Job, int], float]


def _fewest_remaining(job: Job, remaining: int) -> float:
    return remaining


def _weighted(job: Job, remaining: int) -> float:
    return remaining / max(1, job.late)


def _consumption(job: Job, remaining: int) -> float:
    return job.release


def _smallest(job: Job, remaining: int) -> float:
    return job.chunks


ORDERS: dict[str, Order] = {
    "fewest remaining": _fewest_remaining,
    "weighted": _weighted,
    "consumption": _consumption,
    "smallest": _smallest,
}
"""Which waiting job a slot serves first. Fewest remaining chunks first (SRPT) is optimal where every job's
lateness costs the same: rescaled by cumulated capacity it minimises the unfinished jobs at every instant."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The slot in which each job's last chunk is served, and who loads what: `(slot, job, chunks)`."""

    cost: int
    finish: dict[int, int]
    served: list[tuple[int, int, int]]
    unfinished: tuple[int, ...]


def pack(
    problem: Problem,
    jobs: Iterable[Job],
    order: Order = _fewest_remaining,
    *,
    end: int | None = None,
    record: bool = False,
) -> Packing:
    """Serve jobs without idling; `served` and `finish` name jobs by the index of their weight.

    record: also list what each slot loads.
    """
    queue = sorted(jobs, key=lambda job: job.release)
    capacity = problem.capacity
    end = problem.layers if end is None else end
    waiting: list[tuple[float, int, int, Job]] = []
    finish: dict[int, int] = {}
    served: list[tuple[int, int, int]] = []
    cost = place = 0
    count = len(queue)
    slot = queue[0].release if queue else end
    while slot < end and (waiting or place < count):
        if not waiting and queue[place].release > slot:
            slot = queue[place].release
            continue
        while place < count and queue[place].release == slot:
            job = queue[place]
            heappush(waiting, (order(job, job.chunks), job.weight, job.chunks, job))
            place += 1
        room = int(capacity[slot])
        while room and waiting:
            _, weight, remaining, job = waiting[0]
            taken = min(room, remaining)
            room -= taken
            if record:
                served.append((slot, weight, taken))
            if taken == remaining:
                heappop(waiting)
                finish[weight] = slot
                cost += problem.cost(job, slot)
            else:
                left = remaining - taken
                heapreplace(waiting, (order(job, left), weight, left, job))
        slot += 1
    left_over = tuple(sorted([entry[1] for entry in waiting] + [job.weight for job in queue[place:]]))
    return Packing(cost, finish, served, left_over)


def residency(problem: Problem, jobs: Iterable[Job]) -> list[int]:
    """Chunks in flight in each slot (layer), of any packing without idling: they do not depend on its order.

    A slot counts the chunks loaded in it or in later slots (earlier layers) of jobs whose last use is not
    yet past.
    """
    count = problem.layers
    arriving = [0] * (count + 1)
    staying = [0] * (count + 2)
    for job in jobs:
        arriving[job.release] += job.chunks
        staying[job.last] += job.chunks
        staying[job.release] -= job.chunks
    resident, waiting, shared = [], 0, 0
    for slot in range(count):
        shared += staying[slot]
        waiting += arriving[slot]
        resident.append(waiting + shared)
        waiting -= min(waiting, int(problem.capacity[slot]))
    return resident
