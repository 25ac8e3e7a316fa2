"""Packing: the loads of a given set of streamed weights, without idling, by an order of service."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from torchedge.streaming.solving.problems import Job, Problem

__all__ = ["ORDERS", "Packing", "pack", "residency"]

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
    """Serve jobs without idling, each told by the index of its weight. `record` keeps who loads what."""
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
    held = [0] * (count + 2)
    for job in jobs:
        arriving[job.release] += job.chunks
        held[job.last] += job.chunks
        held[job.release] -= job.chunks
    resident, waiting, shared = [], 0, 0
    for slot in range(count):
        shared += held[slot]
        waiting += arriving[slot]
        resident.append(waiting + shared)
        waiting -= min(waiting, int(problem.capacity[slot]))
    return resident
