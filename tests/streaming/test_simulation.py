"""The simulator: runs worked out by hand, laws that hold for any plan, an independent check of each run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.random_instances import instances, random_instance
from oracles.timeline_checks import check_timeline, held_at

from torchedge.devices import Figure, Provenance
from torchedge.errors import InputError, PlanError
from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan
from torchedge.streaming.rates import Rates
from torchedge.streaming.simulation import MemoryUse, Stalls, join_curves, simulate_plan, timeline_document
from torchedge.streaming.strategies import always_next, preload_everything, same_type

MEGABYTE = 10**6


def figure(value: float, unit: str = "GB/s") -> Figure:
    return Figure(value, unit, Provenance.MEASURED, "a test")


RATES = Rates(figure(1), figure(2), figure(0.5), figure(1000, "us"), staging_bytes=None, request_bytes=10**9)
"""A chunk of a megabyte takes 1 ms from the disk, 0.5 ms in a kernel, 2 ms (+ 1 ms) in a transform."""


def model(latencies: list[float], weights: list[tuple[int, int, int]], load_class="elemental") -> Instance:
    """Layers of ample capacity by threshold; weights of chunks, first and last use."""
    return Instance(
        MEGABYTE,
        tuple(Layer(f"l{n}", 0, ms, load_class) for n, ms in enumerate(latencies, 1)),
        tuple(Weight(f"w{n}", c * MEGABYTE, c, first, last) for n, (c, first, last) in enumerate(weights)),
    )


def plan(preload: tuple[str, ...] = (), loads: tuple[ChunkLoad, ...] = ()) -> OverlapPlan:
    return OverlapPlan("FEASIBLE", 0.0, None, preload, loads, 0, {"strategy": "by hand"})


def steps(curve, name="total"):
    """A curve as {time in ms: megabytes}."""
    return dict(zip(curve.times_ms.tolist(), (getattr(curve, name) / MEGABYTE).tolist(), strict=True))


def test_one_layer_and_its_preloaded_weight():
    found = simulate_plan(model([4.0], [(2, 1, 1)]), plan(("w0",)), RATES)
    # 2 ms of disk, then 1 ms of launch and 4 ms of transform, then the layer.
    assert found.initialisation_ms == 7
    assert (found.execution_ms, found.latency_ms) == (4, 11)
    assert found.stalls == Stalls(0, 0)
    assert steps(found.memory, "unified") == {0: 2, 2: 2, 7: 0, 11: 0}
    assert steps(found.memory, "texture") == {0: 0, 2: 2, 7: 2, 11: 2}
    assert found.memory.peak == MemoryUse(2 * MEGABYTE, 2 * MEGABYTE, 0, 4 * MEGABYTE)
    assert found.memory.average.total == pytest.approx((2 * 2 + 4 * 5 + 2 * 4) / 11 * MEGABYTE)
    assert found.preloaded_bytes == 2 * MEGABYTE
    assert (found.strategy, found.provenance) == ("by hand", Provenance.ASSUMED)


def test_preloaded_weights_are_pipelined():
    # Reads end at 1, 2, 4; transforms take 3, 3, 5 from 1 on: 4, 7, 12.
    found = simulate_plan(model([4.0], [(1, 1, 1), (1, 1, 1), (2, 1, 1)]), plan(("w2", "w1", "w0")), RATES)
    assert found.loads.read_ends_ms.tolist() == [1, 2, 4]
    assert found.loads.ends_ms.tolist() == [4, 7, 12]
    assert found.initialisation_ms == 12


def test_a_load_beside_the_first_layer():
    # w0 (1 MB) is read until 1; layer 1 of 4 ms starts then and takes 0.5 ms longer; layer 2 follows at once.
    found = simulate_plan(model([4.0, 3.0], [(1, 2, 2)]), plan(loads=(ChunkLoad("w0", 1, 1, 0),)), RATES)
    assert found.layers.starts_ms.tolist() == [1, 5.5]
    assert found.layers.ends_ms.tolist() == [5.5, 8.5]
    assert found.stalls == Stalls(disk=1, transform=0.5)
    assert found.initialisation_ms == 0
    assert steps(found.memory, "unified") == {0: 1, 1: 1, 5.5: 0, 8.5: 0}
    assert steps(found.memory, "texture") == {0: 0, 1: 1, 5.5: 1, 8.5: 0}


def test_a_stall_on_the_disk():
    # Layer 2 loads 10 MB, read until 10; layer 1 ends at 4. The last layer that uses it is layer 3 of 4.
    found = simulate_plan(
        model([4.0, 5.0, 1.0, 1.0], [(10, 3, 3)]), plan(loads=(ChunkLoad("w0", 2, 10, 0),)), RATES
    )
    assert found.layers.waits_ms.tolist() == [0, 6, 0, 0]
    assert found.layers.slowed_ms.tolist() == [0, 5, 0, 0]
    assert found.stalls == Stalls(6, 5)
    assert found.latency_ms == 4 + 6 + 10 + 1 + 1
    assert steps(found.memory) == {0: 10, 10: 20, 20: 10, 21: 0, 22: 0}


def test_loads_of_a_layer_share_its_run():
    found = simulate_plan(
        model([4.0, 3.0], [(1, 2, 2), (3, 2, 2)]),
        plan(loads=(ChunkLoad("w1", 1, 3, 0), ChunkLoad("w0", 1, 1, 0))),
        RATES,
    )
    assert found.layers.starts_ms[0] == 4
    assert found.loads.starts_ms.tolist() == [4, 5.5]
    assert found.loads.ends_ms.tolist() == [5.5, 10]
    assert steps(found.memory, "unified") == {0: 1, 1: 4, 4: 4, 5.5: 3, 10: 0, 13: 0}


def test_reading_ahead_stops_at_the_staging_limit():
    # Three weights of 2 MB, loaded by layers 1, 2 and 3; 4 MB may wait. w2's read starts when w0 has moved.
    instance = model([10.0] * 4, [(2, 2, 2), (2, 3, 3), (2, 4, 4)])
    loads = tuple(ChunkLoad(f"w{n}", n + 1, 2, 0) for n in range(3))
    free = simulate_plan(instance, plan(loads=loads), RATES)
    assert free.loads.read_starts_ms.tolist() == [0, 2, 4]
    held = simulate_plan(instance, plan(loads=loads), replace(RATES, staging_bytes=4 * MEGABYTE))
    assert held.loads.read_starts_ms.tolist() == [0, 2, 13]  # layer 1 runs from 2 to 13
    assert held.memory.peak.unified == 4 * MEGABYTE
    assert held.latency_ms == free.latency_ms == 2 + 3 * 11 + 10


def test_without_staging_a_layer_reads_what_it_loads_and_nothing_ahead():
    instance = model([10.0] * 3, [(2, 2, 2), (2, 3, 3)])
    loads = (ChunkLoad("w0", 1, 2, 0), ChunkLoad("w1", 2, 1, 1), ChunkLoad("w1", 2, 1, 0))
    found = simulate_plan(instance, plan(loads=loads), replace(RATES, staging_bytes=0))
    assert found.loads.read_starts_ms.tolist() == [0, 13, 14]
    assert found.layers.waits_ms.tolist() == [2, 2, 0]


def test_large_loads_are_read_and_moved_in_requests():
    # 8 MB beside layer 1 in requests of 3 MB, 4 MB beside layer 2: 3 MB are free when the first has moved.
    instance = model([8.0] * 3, [(8, 2, 2), (4, 3, 3)])
    loads = (ChunkLoad("w0", 1, 8, 0), ChunkLoad("w1", 2, 4, 0))
    found = simulate_plan(
        instance, plan(loads=loads), replace(RATES, staging_bytes=0, request_bytes=3 * MEGABYTE + 5)
    )
    assert found.loads.nbytes.tolist() == [3 * MEGABYTE, 3 * MEGABYTE, 2 * MEGABYTE, 3 * MEGABYTE, MEGABYTE]
    # Layer 1 runs from 8 to 20 and has moved 3, 6 and 8 MB by 12.5, 17 and 20.
    assert found.loads.ends_ms[:3].tolist() == [12.5, 17, 20]
    assert found.loads.read_starts_ms.tolist() == [0, 3, 6, 20, 23]
    roomy = replace(RATES, staging_bytes=8 * MEGABYTE, request_bytes=3 * MEGABYTE)
    assert simulate_plan(instance, plan(loads=loads), roomy).loads.read_starts_ms.tolist() == [
        0,
        3,
        6,
        12.5,
        17,
    ]


def test_enormous_models_are_read_in_larger_requests():
    instance = Instance(1, (Layer("a", 0, 1.0, "elemental"),) * 2, (Weight("w", 2**31, 2**31, 2, 2),))
    found = simulate_plan(
        instance, plan(loads=(ChunkLoad("w", 1, 2**31, 0),)), replace(RATES, request_bytes=1)
    )
    assert len(found.loads.nbytes) == 2**17
    assert found.loads.nbytes.sum() == 2**31


def test_the_staging_limit_holds_preloaded_weights_back_too():
    instance = model([4.0], [(1, 1, 1), (1, 1, 1)])
    found = simulate_plan(instance, plan(("w0", "w1")), replace(RATES, staging_bytes=MEGABYTE))
    assert found.loads.read_starts_ms.tolist() == [0, 4]
    assert found.initialisation_ms == 8
    assert found.memory.peak.unified == MEGABYTE


def test_preloaded_weights_stay_or_leave_after_their_last_use():
    instance = model([4.0, 4.0], [(1, 1, 1)])
    stays = simulate_plan(instance, plan(("w0",)), RATES)
    leaves = simulate_plan(instance, plan(("w0",)), RATES, keep_preloaded=False)
    assert steps(stays.memory)[12] == 1
    assert steps(leaves.memory) == {0: 1, 1: 2, 4: 1, 8: 0, 12: 0}


def test_activations_come_on_top():
    instance = model([4.0, 4.0], [(1, 1, 1)])
    found = simulate_plan(instance, plan(("w0",)), RATES, [3 * MEGABYTE, 5 * MEGABYTE])
    assert steps(found.memory, "activations") == {0: 0, 1: 0, 4: 3, 8: 5, 12: 0}
    assert found.memory.peak == MemoryUse(MEGABYTE, MEGABYTE, 5 * MEGABYTE, 6 * MEGABYTE)
    with pytest.raises(InputError, match="expected 2, one a layer"):
        simulate_plan(instance, plan(("w0",)), RATES, [1])


def test_the_last_chunk_may_be_short():
    instance = Instance(
        MEGABYTE, (Layer("a", 9, 4.0, "elemental"),) * 2, (Weight("w0", 2 * MEGABYTE - 5, 2, 2, 2),)
    )
    found = simulate_plan(instance, plan(loads=(ChunkLoad("w0", 1, 1, 1), ChunkLoad("w0", 1, 1, 0))), RATES)
    assert found.loads.nbytes.tolist() == [MEGABYTE, MEGABYTE - 5]


def test_a_model_without_weights():
    found = simulate_plan(model([4.0, 3.0], []), plan(), RATES)
    assert (found.initialisation_ms, found.latency_ms) == (0, 7)
    assert found.memory.peak.total == found.memory.average.total == 0


def test_a_run_of_no_time_averages_what_it_holds():
    found = simulate_plan(model([0.0], []), plan(), RATES, [7])
    assert found.latency_ms == 0
    assert found.memory.average.total == 0  # activations come and go at once


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (OverlapPlan("INFEASIBLE", None, None, (), (), 0, {"reason": "none"}), "INFEASIBLE"),
        (plan(), "w0"),
        (plan(("other",)), "other"),
        (plan(("w0", "w0")), "w0"),
        (plan(loads=(ChunkLoad("w0", 1, 1, 0),)), "chunks 0 to 1"),
        (plan(loads=(ChunkLoad("w0", 1, 2, 0), ChunkLoad("w0", 1, 1, 1))), "w0"),
        (plan(loads=(ChunkLoad("w0", 1, 3, 0),)), "chunks 0 to 1"),
        (plan(loads=(ChunkLoad("w0", 2, 2, 0),)), "use by layer 2"),
        (plan(loads=(ChunkLoad("w0", 0, 2, 0),)), "layer 0"),
        (plan(loads=(ChunkLoad("w0", 1, 0, 0), ChunkLoad("w0", 1, 2, 0))), "w0"),
        (plan(loads=(ChunkLoad("w0", 1, -1, 0),)), "w0"),
        (plan(("w0",), (ChunkLoad("w0", 1, 2, 0),)), "w0"),
    ],
)
def test_plans_that_cannot_run_are_refused(bad, word):
    with pytest.raises(PlanError, match=word):
        simulate_plan(model([1.0, 1.0], [(2, 2, 2)]), bad, RATES)


def test_weights_beyond_counting_are_refused():
    huge = Weight("a", 2**53, 1, 1, 1)
    instance = Instance(
        2**53, (Layer("a", 0, 1.0, "reusable"),), tuple(replace(huge, name=f"w{n}") for n in range(200))
    )
    with pytest.raises(InputError, match="2\\^60"):
        simulate_plan(instance, preload_everything(instance), RATES)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Instance, OverlapPlan]:
    """An instance and any complete plan: each weight preloaded, or split over layers before its use."""
    instance = draw(instances(limits=False))
    preload, loads = [], []
    for w in instance.weights:
        if w.first_use == 1 or draw(st.booleans()):
            preload.append(w.name)
            continue
        first = 0
        while first < w.chunks:
            chunks = draw(st.integers(1, w.chunks - first))
            loads.append(ChunkLoad(w.name, draw(st.integers(1, w.first_use - 1)), chunks, first))
            first += chunks
    return instance, plan(tuple(preload), tuple(draw(st.permutations(loads))))


def rates() -> st.SearchStrategy[Rates]:
    gb_s = st.sampled_from([1e-3, 5e-3, 0.1]).map(figure)
    return st.builds(
        Rates,
        gb_s,
        gb_s,
        gb_s,
        st.sampled_from([0, 250]).map(lambda us: figure(us, "us")),
        st.sampled_from([0, 1024, 5000, None]),
        st.sampled_from([1, 2048, 10**9]),
    )


@given(planned(), rates(), st.booleans(), st.randoms(use_true_random=False))
def test_any_run_keeps_the_laws(case, rates, keep, random):
    instance, plan = case
    alive = [random.randrange(5000) for _ in instance.layers]
    found = simulate_plan(instance, plan, rates, alive, keep_preloaded=keep)
    check_timeline(found, plan, rates, alive, keep_preloaded=keep)


@given(planned(), rates(), st.randoms(use_true_random=False))
def test_the_order_of_entries_in_a_plan_does_not_matter(case, rates, random):
    instance, plan = case
    shuffled = replace(
        plan,
        preload=tuple(random.sample(plan.preload, len(plan.preload))),
        loads=tuple(random.sample(plan.loads, len(plan.loads))),
    )
    one, other = (simulate_plan(instance, p, rates) for p in (plan, shuffled))
    assert timeline_document(one) == timeline_document(other)
    assert one.memory.times_ms.tolist() == other.memory.times_ms.tolist()


@given(planned(), rates())
def test_more_room_and_a_faster_disk_never_hurt(case, rates):
    instance, plan = case
    latency = simulate_plan(instance, plan, rates).latency_ms
    roomy = simulate_plan(instance, plan, replace(rates, staging_bytes=None)).latency_ms
    fast = simulate_plan(instance, plan, replace(rates, disk_read=figure(1.0))).latency_ms
    assert roomy <= latency * (1 + 1e-9)
    assert fast <= latency * (1 + 1e-9)


@pytest.mark.parametrize("strategy", [preload_everything, always_next, same_type])
@pytest.mark.parametrize("seed", range(8))
def test_strategies_run_whatever_they_exceed(strategy, seed):
    instance = random_instance(seed, "medium")
    chosen = strategy(instance)
    found = simulate_plan(instance, chosen, RATES)
    check_timeline(found, chosen, RATES, None, keep_preloaded=True)
    assert found.strategy == chosen.solver["strategy"]


def test_many_layers_and_loads():
    count, each = 5000, 20
    weights = tuple(Weight(f"w{n}", each, each, n, n) for n in range(2, count))
    instance = Instance(1, tuple(Layer(f"l{n}", each, 0.1, "elemental") for n in range(count)), weights)
    loads = tuple(ChunkLoad(w.name, w.first_use - 1, 1, k) for w in weights for k in range(each))
    found = simulate_plan(instance, plan(loads=loads), RATES)
    assert len(found.loads.nbytes) == 99_960
    assert found.memory.total[-1] == 0


def test_what_a_run_says_of_itself():
    found = simulate_plan(model([4.0], [(2, 1, 1)]), plan(("w0",)), RATES)
    assert str(found).startswith("instance, by hand: 11.0 ms, of these 7.0 initialisation")
    document = timeline_document(found)
    assert document["latency_ms"] == 11
    assert document["stall_ms"] == {"disk": 0, "transform": 0}
    assert document["peak"]["total_bytes"] == 4 * MEGABYTE


def test_curves_one_after_the_other():
    one = simulate_plan(model([4.0], [(1, 1, 1)]), plan(("w0",)), RATES, keep_preloaded=False).memory
    both = join_curves([one, one])
    assert np.all(np.diff(both.times_ms) > 0)
    assert steps(both) == {0: 1, 1: 2, 4: 1, 8: 1, 9: 2, 12: 1, 16: 0}
    assert both.average.total == one.average.total
    assert held_at(both, 9.5) == 2 * MEGABYTE
