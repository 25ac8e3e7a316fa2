"""The overlap problem in reversed time: one machine of varying speed, jobs that are served or preloaded.

Slot t is layer N - t. A weight is a job of T(w) chunks, released in the slot of the layer before its first
use. Preemption is free. A job costs `late` for every layer from its first use back to the slot in which its
last remaining chunk is served (its first load, z_w), or `preload_cost` if it is preloaded. Costs are whole
numbers: `Instance.prices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from torchedge.streaming.instances import Instance

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class WorkBudget:
    """The one limit of a solve: about microseconds of a core, counted, not measured, so that plans repeat."""

    left: float
    spent: float = 0.0

    def spend(self, amount: float) -> bool:
        """Count some work; False once all is spent."""
        self.left -= amount
        self.spent += amount
        return self.left > 0

    @contextmanager
    def share(self, part: float) -> Iterator[WorkBudget]:
        """Lend a part of the work that is left; what is not spent of it comes back."""
        work = WorkBudget(max(0.0, self.left) * part)
        yield work
        self.spend(work.spent)


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

    @property
    def size(self) -> int:
        """Jobs and slots."""
        return len(self.jobs) + self.end - self.start


def make_problem(instance: Instance) -> Problem:
    """Reverse an instance in time; a weight that cannot be streamed at all is a fixed preload."""
    count = len(instance.layers)
    preload_price, distance_price, _ = instance.prices
    capacity = np.array([layer.capacity_chunks for layer in reversed(instance.layers)], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(capacity[::-1])])  # chunks that layers 1..k can load
    most = np.inf if instance.m_peak_chunks is None else instance.m_peak_chunks
    jobs, cost, chunks = [], 0, 0
    for place, weight in enumerate(instance.weights):
        preload_cost = preload_price * weight.chunks
        if weight.chunks > min(before[weight.first_use - 1], most):
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


def segments(problem: Problem, limit: int | None = None, resident: Sequence[int] = ()) -> list[Subproblem]:
    """Split time where nothing waits even if all jobs are streamed.

    No schedule without idling carries work across such a point, whichever jobs are preloaded: the parts
    are independent. With a `limit` on chunks in flight they are, too, unless streaming all breaks it at the
    very point (`resident` chunks by slot): then there is no cut. A last part may be left with more work than
    capacity.
    """
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


def fewest_remaining(job: Job, remaining: int) -> float:
    """Serve the job with the fewest remaining chunks first (SRPT), over what its lateness costs.

    That is optimal where every job's lateness costs the same: rescaled by cumulated capacity it minimises the
    unfinished jobs at every instant.
    """
    return remaining / max(1, job.late)


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
    order: Order = fewest_remaining,
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
    jobs, count = tuple(jobs), problem.layers
    arriving = [0] * (count + 1)
    staying = [0] * (count + 2)
    for job in jobs:
        arriving[job.release] += job.chunks
        staying[job.last] += job.chunks
        staying[job.release] -= job.chunks
    resident, waiting, shared = [0] * count, 0, 0
    slot, newest = (
        min((job.last for job in jobs), default=count),
        max((job.release for job in jobs), default=0),
    )
    while slot < count and (waiting or slot <= newest):
        shared += staying[slot]
        waiting += arriving[slot]
        resident[slot] = waiting + shared
        waiting -= min(waiting, int(problem.capacity[slot]))
        slot += 1
    return resident


def whole_chunks(problem: Problem, jobs: Iterable[Job], packing: Packing) -> list[int]:
    """Chunks in flight by slot where a weight counts whole from its first load to its last use."""
    change = [0] * (problem.layers + 1)
    for job in jobs:
        change[job.last] += job.chunks
        change[packing.finish[job.weight] + 1] -= job.chunks
    return list(accumulate(change[:-1]))


def most_in_flight(problem: Problem, jobs: Sequence[Job], packing: Packing, *, whole: bool) -> int:
    """The most chunks in flight; whole: weights count whole."""
    counts = whole_chunks(problem, jobs, packing) if whole else residency(problem, jobs)
    return max(counts, default=0)


def admit(
    problem: Problem,
    part: Subproblem,
    preloaded: frozenset[int],
    work: WorkBudget,
    *,
    limit: int | None = None,
    whole: bool = False,
) -> frozenset[int]:
    """Preload more jobs until the others keep a limit on chunks in flight and are served within the part.

    Where a job exceeds the limit, the largest of it and of the waiting ones is preloaded; all jobs, where no
    work is left.
    """
    while work.spend(200 + 5 * len(part.jobs) + (part.end - part.start)):
        dropped = _overdue(problem, part, preloaded, limit, whole)
        if not dropped:
            return preloaded
        preloaded |= dropped
    return frozenset(job.weight for job in part.jobs)


def _overdue(
    problem: Problem, part: Subproblem, preloaded: frozenset[int], limit: int | None, whole: bool
) -> frozenset[int]:
    """Serve the streamed jobs once; return those that exceed the limit or would not finish."""
    jobs = sorted((job for job in part.jobs if job.weight not in preloaded), key=lambda job: job.last)
    releases = sorted(jobs, key=lambda job: job.release)
    dropped: set[int] = set()
    left: dict[int, int] = {}
    waiting: list[tuple[float, int, Job]] = []
    largest: list[tuple[int, int, Job]] = []
    in_flight = decided = released = 0
    slot = jobs[0].last if jobs else part.end
    while slot < part.end and (left or decided < len(jobs)):
        if not left and jobs[decided].last > slot:
            slot = jobs[decided].last
        while released < len(jobs) and releases[released].release <= slot:
            job = releases[released]
            released += 1
            if job.weight not in dropped:
                heappush(waiting, (fewest_remaining(job, job.chunks), job.weight, job))
        before, after = in_flight, in_flight
        room = int(problem.capacity[slot])
        while room and waiting:
            _, weight, job = waiting[0]
            if weight in dropped:
                heappop(waiting)
                continue
            taken = min(room, left[weight])
            room -= taken
            left[weight] -= taken
            if not whole:
                after -= taken
            if left[weight]:
                heapreplace(waiting, (fewest_remaining(job, left[weight]), weight, job))
            else:
                heappop(waiting)
                del left[weight]
                after -= job.chunks if whole else 0
        while decided < len(jobs) and jobs[decided].last == slot:
            job = jobs[decided]
            decided += 1
            heappush(largest, (-job.chunks, -job.weight, job))
            left[job.weight] = job.chunks
            before, after = before + job.chunks, after + job.chunks
            while limit is not None and before > limit and largest:
                _, _, job = heappop(largest)
                if job.weight in left:
                    dropped.add(job.weight)
                    amount = job.chunks if whole else left[job.weight]
                    before, after = before - amount, after - amount
                    del left[job.weight]
        in_flight = after
        slot += 1
    # What is still waiting at the end: the largest jobs that make up for all of it.
    late = sum(left.values())
    for job in sorted(jobs, key=lambda job: (-job.chunks, job.weight)):
        if late > 0 and job.weight in left:
            dropped.add(job.weight)
            late -= job.chunks
    return frozenset(dropped | {job.weight for job in jobs[decided:]})
