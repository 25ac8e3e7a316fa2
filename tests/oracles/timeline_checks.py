"""A check of simulated runs that shares nothing with the simulator: each law from its definition."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchedge.streaming.plans import OverlapPlan
from torchedge.streaming.rates import Rates
from torchedge.streaming.simulation import MemoryCurve, RunTimeline

CLOSE = 1e-9


def held_at(curve: MemoryCurve, time: float, name: str = "total") -> int:
    """Bytes held at a time."""
    place = int(np.searchsorted(curve.times_ms, time, side="right")) - 1
    return int(getattr(curve, name)[place])


def check_timeline(
    found: RunTimeline,
    plan: OverlapPlan,
    rates: Rates,
    activation_bytes: Sequence[int] | None,
    *,
    keep_preloaded: bool,
) -> None:
    """Assert every law of a run; times to a relative 1e-9."""
    loads = _loads(found, plan)
    slack = CLOSE * max(found.latency_ms, 1)
    _check_disk(found, loads, rates, slack)
    _check_preloads(found, loads, rates, slack)
    _check_layers(found, loads, rates, slack)
    _check_memory(found, loads, activation_bytes, keep_preloaded)
    total = sum(w.nbytes for w in found.instance.weights)
    alone = sum(layer.latency_ms for layer in found.instance.layers)
    assert found.latency_ms >= max(total / (rates.disk_read.value * 1e6), alone) - slack
    assert abs(found.execution_ms - alone - found.stalls.disk - found.stalls.transform) <= slack


def _loads(found: RunTimeline, plan: OverlapPlan) -> list[dict[str, float]]:
    """The run's loads in order of their reads; they are those of the plan."""
    names = [w.name for w in found.instance.weights]
    runs = found.loads
    loads = [
        {
            "weight": int(runs.weights[k]),
            "layer": int(runs.layers[k]),
            "nbytes": int(runs.nbytes[k]),
            "read": float(runs.read_starts_ms[k]),
            "arrives": float(runs.read_ends_ms[k]),
            "starts": float(runs.starts_ms[k]),
            "ends": float(runs.ends_ms[k]),
        }
        for k in range(len(runs.nbytes))
    ]
    planned: dict[tuple[str, float], int] = defaultdict(int)
    moved: dict[tuple[str, float], int] = defaultdict(int)
    weights = {w.name: w for w in found.instance.weights}
    for name in plan.preload:
        planned[name, 0] += weights[name].nbytes
    for x in plan.loads:
        end = (x.first_chunk + x.chunks) * found.instance.chunk_bytes
        begin = x.first_chunk * found.instance.chunk_bytes
        planned[x.weight, x.layer] += min(end, weights[x.weight].nbytes) - begin
    for run in loads:
        moved[names[int(run["weight"])], run["layer"]] += int(run["nbytes"])
    assert planned == moved
    return loads


def _check_disk(found: RunTimeline, loads: list[dict[str, float]], rates: Rates, slack: float) -> None:
    """One read at a time, in order of need, each as soon as disk and staging limit let it."""
    uses = [w.first_use for w in found.instance.weights]
    order = [(x["layer"], uses[x["weight"]]) for x in loads]
    assert order == sorted(order)
    alone: dict[float, float] = defaultdict(float)
    for x in loads:
        alone[x["layer"]] += x["nbytes"]
        most = max(rates.request_bytes, found.instance.chunk_bytes)
        assert x["layer"] == 0 or x["nbytes"] <= most
    free = 0.0
    for k, x in enumerate(loads):
        assert x["read"] >= free
        assert abs(x["arrives"] - x["read"] - x["nbytes"] / (rates.disk_read.value * 1e6)) <= slack
        limit = _limit(rates, x["nbytes"] if x["layer"] == 0 else alone[x["layer"]])
        assert _staged(loads[:k], x["read"]) + x["nbytes"] <= limit
        if x["read"] > free:  # it waited: just before it there was no room
            before = np.nextafter(x["read"], 0)
            assert _staged(loads[:k], before) + x["nbytes"] > limit
        free = x["arrives"]


def _limit(rates: Rates, alone: float) -> float:
    return float("inf") if rates.staging_bytes is None else max(rates.staging_bytes, alone)


def _staged(loads: list[dict[str, float]], time: float) -> float:
    return sum(x["nbytes"] for x in loads if x["read"] <= time < x["ends"])


def _check_preloads(found: RunTimeline, loads: list[dict[str, float]], rates: Rates, slack: float) -> None:
    free = 0.0
    for x in (x for x in loads if x["layer"] == 0):
        takes = rates.launch_overhead.value / 1e3 + x["nbytes"] / (rates.weight_transform.value * 1e6)
        assert x["starts"] == max(free, x["arrives"])
        assert abs(x["ends"] - x["starts"] - takes) <= slack
        free = x["ends"]
    assert found.initialisation_ms == free


def _check_layers(found: RunTimeline, loads: list[dict[str, float]], rates: Rates, slack: float) -> None:
    """Each layer starts as soon as it may, takes what the law says, and moves its loads while it runs."""
    previous = found.initialisation_ms
    for number, layer in enumerate(found.instance.layers, 1):
        own = [x for x in loads if x["layer"] == number]
        start, end = found.layers.starts_ms[number - 1], found.layers.ends_ms[number - 1]
        assert start == max([previous, *(x["arrives"] for x in own)])
        nbytes = sum(x["nbytes"] for x in own)
        assert nbytes == found.layers.load_bytes[number - 1]
        assert abs(end - start - rates.loaded_ms(layer, nbytes, found.instance.chunk_bytes)) <= slack
        assert all(start <= x["starts"] <= x["ends"] <= end for x in own)
        assert all(a["ends"] == b["starts"] for a, b in pairwise(own))
        previous = end
    assert found.latency_ms == previous


def _check_memory(
    found: RunTimeline,
    loads: list[dict[str, float]],
    activation_bytes: Sequence[int] | None,
    keep_preloaded: bool,
) -> None:
    """What is held just at, and between, all moments of the curve follows from who is there."""
    curve, ends = found.memory, found.layers.ends_ms
    starts = [found.initialisation_ms, *ends[:-1]]
    assert curve.times_ms[0] == 0 and curve.times_ms[-1] == found.latency_ms
    assert np.all(np.diff(curve.times_ms) > 0)
    for place, time in enumerate(curve.times_ms):
        unified = texture = 0
        for x in loads:
            unified += x["nbytes"] * (x["read"] <= time < x["ends"])
            stays = keep_preloaded and x["layer"] == 0
            gone = float("inf") if stays else ends[found.instance.weights[x["weight"]].last_use - 1]
            texture += x["nbytes"] * (x["starts"] <= time < gone)
        alive = activation_bytes or [0] * len(ends)
        active = sum(a for a, s, e in zip(alive, starts, ends, strict=True) if s <= time < e)
        assert (curve.unified[place], curve.texture[place], curve.activations[place]) == (
            unified,
            texture,
            active,
        )
    kept = sum(x["nbytes"] for x in loads if x["layer"] == 0) if keep_preloaded else 0
    assert curve.total[-1] == kept
    assert curve.total.min() >= 0
    for name in ("unified", "texture", "activations", "total"):
        assert 0 <= getattr(curve.average, name) <= getattr(curve.peak, name) * (1 + CLOSE)
