"""A mixed-integer programme of a small problem: the slot in which each streamed job ends.

A variable is a job and a slot by which its last chunk is served; a job without an end is preloaded. Jobs with
ends can be served if and only if, for all slots a <= b, those released from a on that end by b have no more
chunks than the slots from a to b serve (then earliest end first serves them). There are many such rows, and
few matter: those that a solution breaks are added, and the programme is solved again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchedge.errors import needed
from torchedge.storage.locks import PROCESS
from torchedge.streaming.solving.prices import Floats, Ints
from torchedge.streaming.solving.problems import Job, Problem, Subproblem, WorkBudget

MOST_VARIABLES, FEW_VARIABLES = 4_000, 300
CLOSE, NEAR_ENOUGH = 0.001, 0.004
"""Gaps at which programmes of few and of more variables are solved."""
NODES, SOLUTIONS = 100, 6
"""Nodes of branch and bound, and solutions with more rows, at most."""
ROOT, NODE = 70, 3
"""Work of the first node and of another one, by entry of the matrix that is not zero."""
NEAR = 1e-6
"""By how much a row may be exceeded, as a share of the largest weight."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Serve the job with the earliest end first: an `Order`. `slots` by weight."""

    slots: Mapping[int, int]

    def __call__(self, job: Job, remaining: int) -> float:
        """Return the end of a job."""
        return self.slots[job.weight]


def make_programme(
    problem: Problem,
    part: Subproblem,
    *,
    whole: bool,
    in_flight: int | None,
    memory: int | None = None,
    smallest: bool = False,
) -> Programme | None:
    """Return the programme of a part; None if it has too many variables.

    in_flight, memory: most chunks in flight, and of these and of the part's preloads together; whole: weights
    count whole. smallest: minimise the memory instead of the cost.
    """
    if len(part.jobs) > MOST_VARIABLES:
        return None
    capacity = problem.capacity[part.start : part.end]
    total = np.concatenate([[0], np.cumsum(capacity)])
    usable = np.flatnonzero(capacity)
    jobs, slots = [], []
    for k, job in enumerate(part.jobs):
        first = np.searchsorted(total, total[job.release - part.start] + job.chunks, "left") - 1
        own = part.start + usable[np.searchsorted(usable, first) :]
        if smallest and not whole:
            own = own[-1:]  # when a job ends counts neither in the cost nor in memory
        elif memory is None and not smallest:
            own = own[job.late * (job.use - problem.layers + own) < job.preload_cost]
        jobs.append(np.full(len(own), k))
        slots.append(own)
        if sum(map(len, slots)) > MOST_VARIABLES:
            return None
    if not sum(map(len, slots)):
        return None
    ends = np.concatenate(jobs), np.concatenate(slots)
    return Programme(problem, part, *ends, whole, in_flight, memory, smallest=smallest)


class Programme:
    """Variables by job and slot, and the rows that were added so far.

    Then come, in units of the largest weight, the chunks that each slot finds waiting (where a limit counts
    them), those preloaded, and the memory that is minimised.
    """

    def __init__(
        self,
        problem: Problem,
        part: Subproblem,
        job: Ints,
        slot: Ints,
        whole: bool,
        in_flight: int | None,
        memory: int | None,
        *,
        smallest: bool,
    ) -> None:
        self.part, self.job, self.slot, self.whole, self.smallest = part, job, slot, whole, smallest
        self.most_in_flight, self.most_memory = in_flight, 0 if smallest else memory
        self.release = np.array([j.release for j in part.jobs])[job]
        self.last = np.array([j.last for j in part.jobs])[job]
        sizes = np.array([j.chunks for j in part.jobs], dtype=float)
        self.largest = float(sizes.max())
        self.chunks = sizes[job] / self.largest
        self.origin: int = min(part.start, int(self.last.min()))
        capacity = problem.capacity[self.origin : part.end] / self.largest
        capacity[: part.start - self.origin] = 0.0  # none of these jobs is released yet
        self.total = np.concatenate([[0.0], np.cumsum(capacity)])
        waits = not whole and not (in_flight is None and self.most_memory is None)
        self.waiting = len(job) + np.arange(len(capacity) if waits else 0)
        self.preloaded = len(job) + len(self.waiting)
        self.base = 0.0 if smallest else float(sum(j.preload_cost for j in part.jobs))
        prices = [
            problem.cost(part.jobs[k], int(t)) - part.jobs[k].preload_cost
            for k, t in zip(job, slot, strict=True)
        ]
        self.cost = np.zeros(self.preloaded + 2)
        self.cost[-1] = self.largest * smallest
        if not smallest:
            self.cost[: len(job)] = prices
        self.unit = max(1.0, float(np.abs(self.cost).max()) / 1e6)  # costs to 10^6 keep the solver precise
        self.known: set[tuple[str, int, int]] = set()
        self.rows: list[tuple[Ints, Floats]] = []
        self.sides: list[float] = []
        for k in range(len(part.jobs)):
            own = np.flatnonzero(job == k)
            self._add(("once", k, 0), own, np.ones(len(own)), 1.0)
        every = np.append(np.arange(len(job)), self.preloaded)
        self._add(("preloads", 0, 0), every, -np.append(self.chunks, 1.0), -float(sizes.sum()) / self.largest)
        for at, column in enumerate(self.waiting, self.origin):
            arriving = np.flatnonzero(self.release == at)
            columns = np.concatenate([arriving, self.waiting[at - self.origin :][:2]])
            values = np.concatenate([self.chunks[arriving], [1.0, -1.0][: len(columns) - len(arriving)]])
            self._add(("waiting", at, 0), columns, values, float(capacity[at - self.origin]))
            present = np.flatnonzero((self.last <= at) & (at <= self.release))
            self._limit(at, present, np.array([column]))

    def solve(self, offer: Callable[[Ends], int | None], upper: int | None, work: WorkBudget) -> float:
        """Bound the least cost (or memory) from below, infinitely where nothing less than `upper` exists.

        offer: takes ends of the jobs to stream, the others to be preloaded, and returns the cost (or memory)
        that is reached with them; None: they exceed a limit.
        Raises MissingExtraError: scipy is not installed.
        """
        with needed("scipy", extra="plan", purpose="planning a stream of weights"):
            from scipy.optimize import Bounds, LinearConstraint, linprog, milp
        count = len(self.job)
        most = np.append(np.ones(count), np.full(len(self.cost) - count, np.inf))
        limits = np.column_stack([np.zeros(len(most)), most])
        while True:
            relaxed = linprog(self.cost / self.unit, A_ub=self._matrix(), b_ub=self.sides, bounds=limits)
            if relaxed.status == 2:
                return np.inf
            if relaxed.x is None:
                return 0.0
            gain = self.unit * float(relaxed.fun)
            bound = self.base + gain
            if not work.spend(self._effort) or not self._separate(relaxed.x):
                break
        for _ in range(SOLUTIONS):
            used = np.ones(len(most), dtype=bool)
            if upper is not None:  # a variable that costs more than can be gained is zero
                dearer = self.unit * relaxed.lower.marginals - (upper - 1 - self.base - gain + 1e-6 * upper)
                used[:count] = dearer[:count] <= 0
            if not used[:count].any():
                return np.inf
            matrix = self._matrix()[:, used]
            nodes = min(NODES, int((work.left / matrix.nnz - ROOT) / NODE))
            if nodes < 1:
                break
            gap = self.gap * max(1.0, bound) / max(1.0, abs(bound - self.base))
            with _without_output():
                solved = milp(
                    self.cost[used] / self.unit,
                    constraints=LinearConstraint(matrix, -np.inf, self.sides),
                    integrality=np.arange(len(most))[used] < count,
                    bounds=Bounds(0, most[used]),
                    options={"node_limit": nodes, "mip_rel_gap": gap},
                )
            work.spend(matrix.nnz * (ROOT + NODE * (solved.mip_node_count or 0)))
            if solved.status == 2:
                return np.inf
            if solved.mip_dual_bound is not None:
                bound = max(bound, self.base + self.unit * solved.mip_dual_bound)
            if solved.x is None:
                break
            values = np.zeros(len(most))
            values[used] = solved.x
            chosen = np.flatnonzero(values[:count] > 0.5)
            cost = offer(Ends({self.part.jobs[self.job[v]].weight: int(self.slot[v]) for v in chosen}))
            upper = cost if upper is None or (cost is not None and cost < upper) else upper
            if (upper is not None and upper - bound <= self.gap * upper) or not self._separate(values):
                break
        return bound

    def _matrix(self) -> Any:  # noqa: ANN401 - scipy has no types
        from scipy.sparse import csr_array

        columns, values = (np.concatenate(x) for x in zip(*self.rows, strict=True))
        starts = np.cumsum([0, *(len(row) for row, _ in self.rows)])
        return csr_array((values, columns, starts), shape=(len(self.rows), len(self.cost)))

    @property
    def _effort(self) -> float:
        """Work of solving the linear relaxation once, and of looking for the rows that it breaks."""
        entries = sum(len(row) for row, _ in self.rows)
        return 2_000 + 2 * entries + len(self.part.jobs) * (20 + (len(self.job) + len(self.total)) / 100)

    @property
    def gap(self) -> float:
        """The share of the cost at which solution and bound are near enough."""
        return CLOSE if len(self.job) <= FEW_VARIABLES else NEAR_ENOUGH

    def _separate(self, values: Floats) -> bool:
        """Add rows that a solution breaks, those broken most; return whether there are any."""
        before = len(self.rows)
        loads = self.chunks * values[: len(self.job)]
        ending = self.slot - self.origin
        for first in np.unique(self.release[loads > 0]):
            own, start = self.release >= first, first - self.origin
            load = np.bincount(ending[own], loads[own], len(self.total) - 1)
            excess = np.cumsum(load)[start:] - (self.total[start + 1 :] - self.total[start])
            for place in start + np.argsort(-excess, kind="stable")[:3]:
                if excess[place - start] > NEAR:
                    columns = np.flatnonzero(own & (ending <= place))
                    side = self.total[place + 1] - self.total[start]
                    self._add(("ends", int(first), int(place)), columns, self.chunks[columns], side)
        if self.whole:
            change = np.zeros(len(self.total))
            np.add.at(change, self.last - self.origin, loads)
            np.add.at(change, ending + 1, -loads)
            in_flight = np.cumsum(change)[:-1]
            limits = np.inf if self.most_in_flight is None else self.most_in_flight / self.largest, np.inf
            if self.most_memory is not None:
                limits = limits[0], self.most_memory / self.largest + values[-1] - values[self.preloaded]
            excess = in_flight - min(limits)
            for slot in self.origin + np.argsort(-excess, kind="stable")[:5]:
                if excess[slot - self.origin] > NEAR:
                    present = np.flatnonzero((self.last <= slot) & (slot <= self.slot))
                    self._limit(int(slot), present, self.waiting)
        return len(self.rows) > before

    def _limit(self, slot: int, present: Ints, more: Ints) -> None:
        """Limit what is in flight in a slot: jobs by variable, and other columns."""
        columns, values = np.append(present, more), np.append(self.chunks[present], np.ones(len(more)))
        if self.most_in_flight is not None:
            self._add(("in flight", slot, 0), columns, values, self.most_in_flight / self.largest)
        if self.most_memory is not None:
            columns = np.append(columns, [self.preloaded, self.preloaded + 1])
            values = np.append(values, [1.0, -1.0 if self.smallest else 0.0])
            self._add(("memory", slot, 0), columns, values, self.most_memory / self.largest)

    def _add(self, key: tuple[str, int, int], columns: Ints, values: Floats, side: float) -> None:
        if key not in self.known:
            self.known.add(key)
            self.rows.append((columns, values))
            self.sides.append(side)


@contextmanager
def _without_output() -> Iterator[None]:
    """Keep off the standard output a line that HiGHS prints, whatever its options, with some solutions.

    Output of other threads follows at the end.
    """
    with ExitStack() as stack:
        try:
            flush = ctypes.CDLL(None).fflush
            own = os.dup(1)
            file = stack.enter_context(tempfile.TemporaryFile())
        except (AttributeError, OSError, TypeError):  # no such library, no standard output, a full disk
            yield
            return
        stack.enter_context(PROCESS)
        sys.stdout.flush()
        flush(None)
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            flush(None)
            os.dup2(own, 1)
            os.close(own)
            file.seek(0)
            for line in file:
                if not line.startswith(b"HighsMipSolverData::"):
                    os.write(1, line)
