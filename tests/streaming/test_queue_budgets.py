"""Queues within a budget: no run of the queue exceeds it, and all weights arrive."""

from dataclasses import replace
from functools import partial

import pytest
from oracles.inference_graphs import make_graph

from torchedge.devices import find_device
from torchedge.errors import InputError
from torchedge.streaming.planning import LAMBDAS, SETTINGS, plan_graph, trade_off
from torchedge.streaming.queues import plan_queue_within
from torchedge.streaming.strategies import preload_everything
from torchedge.streaming.verification import verify_plan

pytest.importorskip("ortools")
pytest.importorskip("scipy")

CHUNK = 16 * 1024
PHONE = find_device("adreno-750")


def chain(name, layers, weight_bytes=500_000, output=200_000):
    """A row of layers, each with a weight of its own; the first weight has to be preloaded."""
    rows = [("op0", "linear", [], output, ["w0"])]
    rows += [(f"op{n}", "linear", [f"op{n - 1}"], output, [f"w{n}"]) for n in range(1, layers)]
    return replace(make_graph(*rows, weight_bytes=weight_bytes), name=name)


def solve(instance):
    from torchedge.streaming import solving

    return solving.solve(instance, effort=0.1)


def planned(graphs, limit):
    plan = partial(plan_graph, device=PHONE, chunk=CHUNK, fusion="none", memory_limit=limit, effort=0.1)
    return [plan(graph) for graph in graphs]


@pytest.mark.parametrize("limit", [2_850_000, 3_000_000, 3_300_000, 4_000_000, 10_000_000])
def test_no_run_exceeds_the_limit(limit):
    models = planned([chain("one", 8), chain("two", 5, 600_000), chain("three", 3)], limit)
    steps = []
    found = plan_queue_within(models, limit, solve, lambda: steps.append(1))
    assert 1 <= len(steps) <= 5
    for run in (*found.together, *found.apart):
        assert run.memory.peak.total <= limit
    assert [run.latency_ms for run in found.apart] == pytest.approx([m.timeline.latency_ms for m in models])
    for model, share in zip(models, found.plan.shares, strict=True):
        assert share.preloaded + share.carried + share.own == model.instance.total_chunks
    own = [layer for m in models for layer in m.budgeted.instance.layers]
    assert [layer for group in found.plan.groups for layer in group.instance.layers] == own


def test_room_is_used_to_start_the_next_model_sooner():
    models = planned([chain("one", 8), chain("two", 5)], 20_000_000)
    found = plan_queue_within(models, 20_000_000, solve)
    (group,) = found.plan.groups
    assert verify_plan(group.instance, group.plan).ok
    assert found.plan.shares[1].carried > 0 and found.plan.shares[1].preloaded == 0
    assert found.latency_ms < found.apart_ms


def test_models_that_do_not_go_together_run_apart():
    models = planned([chain("one", 4, 2_000_000), chain("two", 4, 2_000_000)], 8_500_000)

    least = max(m.budgeted.peak_bytes for m in models)

    def helpless(joint):
        return replace(preload_everything(joint), status="INFEASIBLE")

    found = plan_queue_within(models, least, helpless)
    assert [(g.first, g.last) for g in found.plan.groups] == [(1, 1), (2, 2)]
    assert found.latency_ms == pytest.approx(found.apart_ms)


def test_a_model_may_come_twice():
    (model,) = planned([chain("one", 5)], 5_000_000)
    found = plan_queue_within([model, model], 5_000_000, solve)
    assert [name for name, _, _ in found.lanes[0].spans] == ["one", "one"]


def test_queues_of_nothing():
    with pytest.raises(InputError, match="no models"):
        plan_queue_within([], 1, solve)


# sweeps -----------------------------------------------------------------------------------------------------


def test_a_sweep_trades_latency_for_memory():
    steps = []
    points = trade_off(
        chain("one", 8), PHONE, chunk=CHUNK, fusion="none", effort=0.1, progress=lambda: steps.append(1)
    )
    assert len(points) == len(steps) == SETTINGS
    assert {point.lam for point in points} == set(LAMBDAS)
    memory = [point.plan.timeline.memory.average.total for point in points]
    assert memory == sorted(memory)
    least = min(points, key=lambda point: point.plan.timeline.preloaded_bytes)
    assert least.lam == LAMBDAS[0] and least.m_peak == 500 * 2**20
    for point in points:
        assert point.plan.instance.lam == point.lam
        assert point.plan.plan.peak_chunks * CHUNK <= point.m_peak
    assert all(p.plan.graph == points[0].plan.graph for p in points)
    unlimited = trade_off(chain("one", 3), PHONE, chunk=CHUNK, m_peak=None, effort=0.1)
    assert sum(point.m_peak is None for point in unlimited) == len(LAMBDAS)
