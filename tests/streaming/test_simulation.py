"""The simulator: runs worked out by hand, laws that hold for any plan, an independent check of each run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.random_instances import instances
from oracles.timeline_checks import check_timeline

from torchedge.devices import Figure, Provenance
from torchedge.errors import InputError, PlanError
from torchedge.streaming.instances import Instance, Layer, Weight
from torchedge.streaming.plans import ChunkLoad, OverlapPlan, preload_everything
from torchedge.streaming.rates import Rates
from torchedge.streaming.simulation import (
    MemoryCurve,
    MemoryUse,
    Stalls,
    in_turn,
    simulate_plan,
    timeline_document,
)

MEGABYTE = 10**6


def figure(value: float, unit: str = "GB/s") -> Figure:
    return Figure(value, unit, Provenance.MEASURED, "a test")


RATES = Rates(figure(1), figure(2), figure(0, "us"), staging_bytes=10**12, request_bytes=10**9)
"""A chunk of a megabyte takes 1 ms from the disk, 0.5 ms to copy."""


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
    run = simulate_plan(model([4.0], [(2, 1, 1)]), plan(("w0",)), RATES)
    # 2 ms of disk, 1 ms of copying, then the layer.
    assert run.initialisation_ms == 3
    assert (run.execution_ms, run.latency_ms) == (4, 7)
    assert run.stalls == Stalls(0, 0)
    assert steps(run.memory, "staging") == {0: 2, 2: 2, 3: 0, 7: 0}
    assert steps(run.memory, "weights") == {0: 0, 2: 2, 3: 2, 7: 2}
    assert run.memory.peak == MemoryUse(2 * MEGABYTE, 2 * MEGABYTE, 0, 4 * MEGABYTE)
    assert run.memory.average.total == pytest.approx((2 * 2 + 1 * 4 + 4 * 2) / 7 * MEGABYTE)
    assert run.preloaded_bytes == 2 * MEGABYTE and run.allocated_bytes == 4 * MEGABYTE
    assert (run.strategy, run.provenance) == ("by hand", Provenance.MEASURED)


def test_a_copy_beside_the_first_layer():
    # w0 (1 MB) is read until 1 and copied until 1.5, while layer 1 does not get on; it ends at 4.5.
    run = simulate_plan(model([4.0, 3.0], [(1, 2, 2)]), plan(loads=(ChunkLoad("w0", 1, 1, 0),)), RATES)
    assert run.layers.starts_ms.tolist() == [0, 4.5]
    assert run.layers.ends_ms.tolist() == [4.5, 7.5]
    assert run.stalls == Stalls(waiting=0, slowed=0.5)
    assert run.initialisation_ms == 0
    assert steps(run.memory, "staging") == {0: 1, 1: 1, 1.5: 0, 7.5: 0}
    assert steps(run.memory, "weights") == {0: 0, 1: 1, 1.5: 1, 7.5: 0}


def test_a_layer_hides_half_of_a_copy_if_its_capacity_is_twice_the_thresholds():
    # 300 % of 4 ms at 2 MB/ms are 24 MB; the capacity is 48.
    instance = model([4.0, 3.0], [(2, 2, 2)])
    layers = tuple(replace(layer, capacity_chunks=48) for layer in instance.layers)
    run = simulate_plan(replace(instance, layers=layers), plan(loads=(ChunkLoad("w0", 1, 2, 0),)), RATES)
    assert run.layers.ends_ms.tolist() == [4.5, 7.5]


def test_a_layer_waits_for_its_weights():
    # 10 MB are read until 10; layer 2 ends at 9, its copy runs from 10 to 15; layer 3 waits for it.
    run = simulate_plan(
        model([4.0, 5.0, 1.0, 1.0], [(10, 3, 3)]), plan(loads=(ChunkLoad("w0", 2, 10, 0),)), RATES
    )
    assert run.layers.waits_ms.tolist() == [0, 0, 6, 0]
    assert run.stalls == Stalls(6, 0)
    assert run.latency_ms == 15 + 1 + 1
    assert steps(run.memory) == {0: 10, 10: 20, 15: 10, 16: 0, 17: 0}


def test_launches_follow_one_another_no_faster_than_the_host():
    rates = replace(RATES, host_launch=figure(3000, "us"))
    run = simulate_plan(model([1.0, 9.0, 1.0, 1.0], []), plan(), rates)
    assert run.layers.starts_ms.tolist() == [3, 6, 15, 16]  # handed over after 3, 6, 9 and 12 ms
    assert run.layers.waits_ms.tolist() == [3, 2, 0, 0]
    assert run.latency_ms == 17


def test_transfers_take_the_host_that_launches():
    rates = replace(RATES, host_launch=figure(1000, "us"), host_transfer=figure(2000, "us"))
    # Layer 1 is handed over at 1 and runs to 5.5; w0 is read until 1 and copied from 3 to 3.5; the host has
    # handed over its copy at 3, waits for w1 until 11, and hands over layers 2 and 3 at 12 and 13.
    loads = (ChunkLoad("w0", 1, 1, 0), ChunkLoad("w1", 1, 10, 0))
    run = simulate_plan(model([4.0, 1.0, 0.5], [(1, 2, 2), (10, 2, 2)]), plan(loads=loads), rates)
    assert run.loads.read_ends_ms.tolist() == [1, 11]
    assert run.loads.starts_ms.tolist() == [3, 13] and run.loads.ends_ms.tolist() == [3.5, 18]
    assert run.layers.starts_ms.tolist() == [1, 18, 19]
    assumed = replace(rates.host_transfer, provenance=Provenance.ASSUMED)
    assert replace(rates, host_transfer=assumed).provenance is Provenance.ASSUMED


def test_reading_ahead_stops_at_the_staging_pool():
    # Five weights of 2 MB, loaded beside layers 1 to 5; 6 MB may wait. w3 is read when w0 is copied, at 3.
    instance = model([10.0] * 6, [(2, n, n) for n in range(2, 7)])
    loads = tuple(ChunkLoad(f"w{n}", n + 1, 2, 0) for n in range(5))
    free = simulate_plan(instance, plan(loads=loads), RATES)
    assert free.loads.read_starts_ms.tolist() == [0, 2, 4, 6, 8]
    tight = simulate_plan(instance, plan(loads=loads), replace(RATES, staging_bytes=6 * MEGABYTE))
    assert tight.loads.read_starts_ms.tolist() == [0, 2, 4, 6, 12]  # copies end at 3, 12, 23
    assert tight.memory.peak.staging == 6 * MEGABYTE
    assert tight.latency_ms == free.latency_ms == 5 * 11 + 10


def test_large_loads_are_read_and_copied_in_requests():
    # 8 MB beside layer 1 in requests of 3 MB, a third of the pool; 4 MB beside layer 2.
    instance = model([8.0] * 3, [(8, 2, 2), (4, 3, 3)])
    loads = (ChunkLoad("w0", 1, 8, 0), ChunkLoad("w1", 2, 4, 0))
    small = replace(RATES, staging_bytes=9 * MEGABYTE + 5)
    run = simulate_plan(instance, plan(loads=loads), small)
    assert run.loads.nbytes.tolist() == [3 * MEGABYTE, 3 * MEGABYTE, 2 * MEGABYTE, 3 * MEGABYTE, MEGABYTE]
    assert run.loads.read_starts_ms.tolist() == [0, 3, 6, 8, 11]
    assert run.loads.ends_ms.tolist() == [4.5, 7.5, 9, 13.5, 14]


@pytest.mark.slow
def test_enormous_models_are_read_in_larger_requests():
    instance = Instance(1, (Layer("a", 0, 1.0, "elemental"),) * 2, (Weight("w", 2**31, 2**31, 2, 2),))
    run = simulate_plan(instance, plan(loads=(ChunkLoad("w", 1, 2**31, 0),)), replace(RATES, request_bytes=1))
    assert len(run.loads.nbytes) == 2**17
    assert run.loads.nbytes.sum() == 2**31


def test_activations_come_on_top():
    instance = model([4.0, 4.0], [(1, 1, 1)])
    run = simulate_plan(instance, plan(("w0",)), RATES, [3 * MEGABYTE, 5 * MEGABYTE])
    assert steps(run.memory, "activations") == {0: 0, 1: 0, 1.5: 3, 5.5: 5, 9.5: 0}
    assert run.memory.peak == MemoryUse(MEGABYTE, MEGABYTE, 5 * MEGABYTE, 6 * MEGABYTE)
    known = simulate_plan(instance, plan(("w0",)), RATES, [3, 5], allocated_bytes=7 * MEGABYTE)
    assert known.allocated_bytes == 7 * MEGABYTE
    with pytest.raises(InputError, match="expected 2, one a layer"):
        simulate_plan(instance, plan(("w0",)), RATES, [1])


def test_the_last_chunk_may_be_short():
    instance = Instance(
        MEGABYTE, (Layer("a", 9, 4.0, "elemental"),) * 2, (Weight("w0", 2 * MEGABYTE - 5, 2, 2, 2),)
    )
    found = simulate_plan(instance, plan(loads=(ChunkLoad("w0", 1, 1, 1), ChunkLoad("w0", 1, 1, 0))), RATES)
    assert found.loads.nbytes.tolist() == [MEGABYTE, MEGABYTE - 5]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (OverlapPlan("INFEASIBLE", None, None, (), (), 0, {"reason": "none"}), "INFEASIBLE"),
        (plan(), "w0"),
        (plan(("other",)), "other"),
        (plan(("w0", "w0")), "w0"),
        (plan(loads=(ChunkLoad("w0", 1, 1, 0),)), "never loaded"),
        (plan(loads=(ChunkLoad("w0", 1, 2, 0), ChunkLoad("w0", 1, 1, 1))), "w0"),
        (plan(loads=(ChunkLoad("w0", 1, 3, 0),)), "chunks 0 to 1"),
        (plan(loads=(ChunkLoad("w0", 2, 2, 0),)), "first use by 2"),
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
        st.sampled_from([0, 250]).map(lambda us: figure(us, "us")),
        st.sampled_from([1, 1024, 5000, 10**9]),
        st.sampled_from([1, 2048, 10**9]),
    )


@given(planned(), rates(), st.randoms(use_true_random=False))
def test_any_run_keeps_the_laws(case, rates, random):
    instance, plan = case
    alive = [random.randrange(5000) for _ in instance.layers]
    check_timeline(simulate_plan(instance, plan, rates, alive), plan, rates, alive)


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
    roomy = simulate_plan(instance, plan, replace(rates, staging_bytes=10**12)).latency_ms
    fast = simulate_plan(instance, plan, replace(rates, disk_read=figure(1.0))).latency_ms
    assert roomy <= latency * (1 + 1e-9)
    assert fast <= latency * (1 + 1e-9)


def test_the_text_and_the_document_of_a_run():
    run = simulate_plan(model([4.0], [(2, 1, 1)]), plan(("w0",)), RATES)
    assert str(run).startswith("instance, by hand: 7.0 ms, of these 3.0 initialisation")
    assert str(run).endswith("(simulated from measured figures)")
    document = timeline_document(run)
    assert document["latency_ms"] == 7 and document["simulated"]
    assert document["stall_ms"] == {"waiting": 0, "slowed": 0}
    assert document["peak_in_use"]["total_bytes"] == document["allocated_bytes"] == 4 * MEGABYTE


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True).map(sorted),
    st.tuples(*[st.floats(0, 25) for _ in range(2)]).map(sorted),
)
def test_a_curve_cut_in_two_and_joined_is_the_same_function(times, cuts):
    times = np.array([time - times[0] for time in times], np.float64)
    sizes = np.arange(1, 1 + len(times), dtype=np.int64)
    curve = MemoryCurve(times, 3 * sizes, sizes**2, 0 * sizes)

    def at(curve, time):
        return int(curve.total[np.searchsorted(curve.times_ms, time, "right") - 1])

    first, end = cuts
    part = curve.between(first, end)
    assert (part.times_ms[0], part.times_ms[-1]) == (0, pytest.approx(end - first))
    assert np.all(np.diff(part.times_ms) > 0)
    joined = in_turn([curve.between(0, first), part])
    assert joined.times_ms[-1] == pytest.approx(end)
    for time in np.linspace(0, end, 7, endpoint=False):
        if min(abs(time - times)) > 1e-9 and abs(time - first) > 1e-9:
            assert at(joined, time) == at(curve, time)
            assert time < first or at(part, time - first) == at(curve, time)
