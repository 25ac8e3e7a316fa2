"""A check of simulated runs that shares nothing with the simulator: each law from its definition."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import THRESHOLDS, Rates
from torchedge.streaming.simulation import RunTimeline

CLOSE = 1e-9


def check_timeline(
    run: RunTimeline, plan: OverlapPlan, rates: Rates, activation_bytes: Sequence[int] | None
) -> None:
    """Assert every law of a run; times to a relative 1e-9."""
    loads = _loads(run, plan)
    slack = CLOSE * max(run.latency_ms, 1)
    _check_disk(run, loads, rates, slack)
    _check_copies(run, loads, rates, slack)
    _check_layers(run, loads, rates, slack)
    _check_memory(run, loads, activation_bytes)
    total = sum(w.nbytes for w in run.instance.weights)
    alone = sum(layer.latency_ms for layer in run.instance.layers)
    needed = {w.name for w in run.instance.weights}
    assert needed == {run.instance.weights[int(x["weight"])].name for x in loads}
    assert run.latency_ms >= max(total / (rates.disk_read.value * 1e6), alone) - slack
    assert abs(run.execution_ms - alone - run.stalls.waiting - run.stalls.slowed) <= slack
    assert run.allocated_bytes == run.memory.peak.total


def _loads(run: RunTimeline, plan: OverlapPlan) -> list[dict[str, float]]:
    """The run's loads in order of their reads; they are those of the plan."""
    names = [w.name for w in run.instance.weights]
    fields = ("weights", "layers", "nbytes", "read_starts_ms", "read_ends_ms", "starts_ms", "ends_ms")
    short = ("weight", "layer", "nbytes", "read", "arrives", "starts", "ends")
    columns = [getattr(run.loads, name).tolist() for name in fields]
    loads = [dict(zip(short, row, strict=True)) for row in zip(*columns, strict=True)]
    wanted: dict[tuple[str, float], int] = defaultdict(int)
    moved: dict[tuple[str, float], int] = defaultdict(int)
    weights = {w.name: w for w in run.instance.weights}
    for name in plan.preload:
        wanted[name, 0] += weights[name].nbytes
    for x in plan.loads:
        end = (x.first_chunk + x.chunks) * run.instance.chunk_bytes
        begin = x.first_chunk * run.instance.chunk_bytes
        wanted[x.weight, x.layer] += min(end, weights[x.weight].nbytes) - begin
    for load in loads:
        moved[names[int(load["weight"])], load["layer"]] += int(load["nbytes"])
    assert wanted == moved
    return loads


def _check_disk(run: RunTimeline, loads: list[dict[str, float]], rates: Rates, slack: float) -> None:
    """One read at a time, in order of need, each as soon as disk and staging pool let it."""
    uses = [w.first_use for w in run.instance.weights]
    order = [(x["layer"], uses[int(x["weight"])]) for x in loads]
    assert order == sorted(order)
    free = 0.0
    for k, x in enumerate(loads):
        most = min(rates.request_bytes, rates.staging_bytes // 3)
        assert x["nbytes"] <= max(most, run.instance.chunk_bytes)
        free = free if x["layer"] == 0 else max(free, run.initialisation_ms)
        assert x["read"] >= free
        assert abs(x["arrives"] - x["read"] - x["nbytes"] / (rates.disk_read.value * 1e6)) <= slack
        limit = max(rates.staging_bytes, x["nbytes"])
        assert _staged(loads[:k], x["read"]) + x["nbytes"] <= limit
        if x["read"] > free:  # it waited: just before it there was no room
            before = np.nextafter(x["read"], 0)
            assert _staged(loads[:k], before) + x["nbytes"] > limit
        free = x["arrives"]


def _staged(loads: list[dict[str, float]], time: float) -> float:
    return sum(x["nbytes"] for x in loads if x["read"] <= time < x["ends"])


def _check_copies(run: RunTimeline, loads: list[dict[str, float]], rates: Rates, slack: float) -> None:
    """One copy at a time, in order, as soon as it is read and its layer begins."""
    free = 0.0
    for x in loads:
        begins = 0.0 if x["layer"] == 0 else run.layers.starts_ms[int(x["layer"]) - 1]
        assert x["starts"] == max(free, x["arrives"], begins)
        takes = rates.copy_overhead.value / 1e3 + x["nbytes"] / (rates.copy.value * 1e6)
        assert abs(x["ends"] - x["starts"] - takes) <= slack
        free = x["ends"]
    assert run.initialisation_ms == max([0.0, *(x["ends"] for x in loads if x["layer"] == 0)])


def _check_layers(run: RunTimeline, loads: list[dict[str, float]], rates: Rates, slack: float) -> None:
    """Each layer starts as soon as it may; its progress adds up to its latency."""
    previous = run.initialisation_ms
    for number, layer in enumerate(run.instance.layers, 1):
        own = [x["ends"] for x in loads if run.instance.weights[int(x["weight"])].first_use == number]
        start, end = run.layers.starts_ms[number - 1], run.layers.ends_ms[number - 1]
        assert start == max([previous, *own])
        copying = sum(max(0.0, min(end, x["ends"]) - max(start, x["starts"])) for x in loads)
        most = THRESHOLDS[layer.load_class] * layer.latency_ms * rates.copy.value * 1e6
        capacity = layer.capacity_chunks * run.instance.chunk_bytes
        share = most / max(most, capacity) if most else 1.0
        assert abs(end - start - share * copying - layer.latency_ms) <= 10 * slack
        previous = end
    assert run.latency_ms == previous


def _check_memory(
    run: RunTimeline, loads: list[dict[str, float]], activation_bytes: Sequence[int] | None
) -> None:
    """The bytes in use at all moments of the curve follow from the loads alive then."""
    curve, ends = run.memory, run.layers.ends_ms
    starts = [run.initialisation_ms, *ends[:-1]]
    assert curve.times_ms[0] == 0 and curve.times_ms[-1] == run.latency_ms
    assert np.all(np.diff(curve.times_ms) > 0)
    spans = []
    for k, weight in enumerate(run.instance.weights):
        first = min((x["layer"], x["starts"]) for x in loads if x["weight"] == k)
        if first[0] == 0:
            spans.append((first[1], float("inf"), weight.nbytes))
        else:
            spans.append((first[1], ends[weight.last_use - 1], weight.nbytes))
    for place, time in enumerate(curve.times_ms):
        staging = sum(x["nbytes"] * (x["read"] <= time < x["ends"]) for x in loads)
        weights = sum(nbytes for come, go, nbytes in spans if come <= time < go)
        alive = activation_bytes or [0] * len(ends)
        active = sum(a for a, s, e in zip(alive, starts, ends, strict=True) if s <= time < e)
        held = (curve.staging[place], curve.weights[place], curve.activations[place])
        assert held == (staging, weights, active)
    for name in ("staging", "weights", "activations", "total"):
        assert 0 <= getattr(curve.average, name) <= getattr(curve.peak, name) * (1 + CLOSE)
