"""A mixed-integer programme of what to stream, for limits that a flow does not know in full."""

from __future__ import annotations

import numpy as np

from torchedge.errors import MissingExtraError
from torchedge.streaming.solving.prices import NEVER, Floats, Ints
from torchedge.streaming.solving.problems import Problem, Subproblem, Work

__all__ = ["MOST_JOBS", "choose"]

MOST_JOBS = 120
"""Jobs and slots of a part up to which the programme is solved."""
NODES = 100
"""Nodes of branch and bound at most."""


def choose(
    problem: Problem,
    part: Subproblem,
    limit: int,
    streaming: Floats,
    preloading: Floats,
    prices: Floats,
    work: Work,
    *,
    whole: bool,
    most_preloaded: int | None,
) -> tuple[float, Ints]:
    """Bound the cost of a part from below; return the jobs (positions) that the programme preloads, too.

    In a slot wait the chunks of the slot before, less those served, plus those released. Beside them, a
    streamed job is in flight from its last use to its release; whole, until its last chunk could be served if
    no other job were. streaming, preloading: costs by job. prices: of chunks served, by slot of the part.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise MissingExtraError.of("scipy", extra="plan", purpose="planning a stream of weights") from error
    jobs, first = part.jobs, min(job.last for job in part.jobs)
    slots = np.arange(first, part.end)
    chunks = np.array([job.chunks for job in jobs], dtype=float)
    release = np.array([job.release for job in jobs])
    last = np.array([job.last for job in jobs])
    released = (release[None, :] == slots[:, None]) * chunks
    staying = ((last[None, :] <= slots[:, None]) & (slots[:, None] < release[None, :])) * chunks
    capacity = np.where(slots >= part.start, problem.capacity[slots], 0).astype(float)
    count = len(slots)
    waiting = np.hstack([np.tri(count) @ released, -np.tri(count, k=-1)])  # of jobs streamed, chunks served
    serving = np.hstack([np.zeros((count, len(jobs))), np.eye(count)])
    in_flight = waiting + np.hstack([staying, np.zeros((count, count))])
    rows = [
        (serving - waiting, np.zeros(count)),
        (waiting[-1:] - serving[-1:], np.zeros(1)),  # nothing waits after the last slot
        (in_flight, np.full(count, float(limit))),
    ]
    if whole:
        total = np.concatenate([[0], np.cumsum(problem.capacity)])
        ends = np.searchsorted(total, total[release] + chunks, "left") - 1
        present = ((last[None, :] <= slots[:, None]) & (slots[:, None] <= ends[None, :])) * chunks
        rows.append((np.hstack([present, np.zeros((count, count))]), np.full(count, float(limit))))
    if most_preloaded is not None:
        row = np.concatenate([-chunks, np.zeros(count)])[None, :]
        rows.append((row, np.array([most_preloaded - chunks.sum()])))
    scale = max(1.0, float(chunks.max()))
    costs = np.where(streaming < NEVER, streaming - preloading, 0.0)
    income = np.concatenate([np.zeros(part.start - first), prices])
    result = milp(
        np.concatenate([costs, -income]),
        constraints=[LinearConstraint(matrix / scale, -np.inf, side / scale) for matrix, side in rows],
        integrality=np.concatenate([np.ones(len(jobs)), np.zeros(count)]),
        bounds=Bounds(0, np.concatenate([(streaming < NEVER).astype(float), capacity])),
        options={"node_limit": NODES, "mip_rel_gap": 1e-4},
    )
    work.spend((300 + 10 * (result.mip_node_count or 0)) * part.size)
    everything = float(preloading.sum())
    if result.status == 2:  # infeasible
        return np.inf, np.arange(0)
    bound = 0.0 if result.mip_dual_bound is None else everything + float(result.mip_dual_bound)
    chosen = np.arange(len(jobs)) if result.x is None else np.flatnonzero(result.x[: len(jobs)] < 0.5)
    return bound, chosen
