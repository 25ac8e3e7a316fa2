"""Schedules: every byte of a weight is copied once and in time, no two live tensors share memory."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.small_programs import sgd
from oracles.streaming_programs import STORAGES, instance_of, random_plan, weighted_chain

from torchedge.errors import PlanError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.arenas import planned
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor
from torchedge.streaming.plans import STRATEGIES, always_next, preload_everything
from torchedge.streaming.schedules import (
    LEAST_STAGING_BYTES,
    Transfer,
    least_memory,
    make_schedule,
    weight_uses,
)
from torchedge.textures.layouts import PATTERNS, Layout

STAGING = 2**16


@st.composite
def programs(draw):
    """Launches that read earlier results and weights of every storage, some weights in several launches."""
    count = draw(st.integers(1, 8))
    weights = draw(st.integers(0, 8))
    tensors = [
        StoredTensor(f"t{i}", (40, 4 * i + 4), "float32", "intermediate", Layout((0, 1)))
        for i in range(count)
    ]
    for k in range(weights):
        shape = (draw(st.integers(1, 300)), draw(st.integers(1, 30)))
        storage = draw(st.sampled_from(sorted(STORAGES)))
        dtype = draw(st.sampled_from(["float32", "float16"]))
        role = draw(st.sampled_from(["parameter", "buffer", "constant"]))
        tensors.append(StoredTensor(f"w{k}", shape, dtype, role, STORAGES[storage](shape[1])))
    kernels, launches = [], []
    for i in range(count):
        read = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        read |= (
            {count + k for k in draw(st.sets(st.integers(0, weights - 1), max_size=4))} if weights else set()
        )
        kernels.append(Kernel(f"k{i}", "-", ("write", *["read"] * len(read))))
        launches.append(Launch(i, (i, *sorted(read)), (1,)))
    made = Program("random", tuple(tensors), tuple(kernels), tuple(launches), (), (count - 1,), Arena(0))
    return planned(made, 512)


@given(programs(), st.integers(0, 9), st.sampled_from([1000, 4096, 10_000]))
def test_every_schedule_covers_its_weights_and_keeps_them_apart(made, seed, chunk_bytes):
    instance = instance_of(made, chunk_bytes)
    plan = random_plan(instance, seed)
    schedule = make_schedule(made, instance, plan, STAGING)
    check_arena(schedule.program, 512, schedule.streamed)
    assert schedule.program.digest == made.digest
    uses = weight_uses(made)
    copied = defaultdict(list)
    for position, transfers in enumerate(schedule.transfers):
        assert [uses[t.tensor][0] for t in transfers] == sorted(uses[t.tensor][0] for t in transfers)
        for transfer in transfers:
            assert position < uses[transfer.tensor][0] and transfer.nbytes > 0
            copied[transfer.tensor].append((transfer.start, transfer.stop))
    weights = {i for i, t in enumerate(made.tensors) if t.role not in ("intermediate", "output")}
    assert set(schedule.preload) == weights - set(copied) and set(schedule.streamed) == set(copied)
    for index, ranges in copied.items():
        stored = made.tensors[index]
        ends = [0, *[stop for _, stop in sorted(ranges)]]
        assert [start for start, _ in sorted(ranges)] == ends[:-1]
        assert ends[-1] == stored.layout.pack(np.zeros(stored.shape, stored.dtype)).nbytes
        row = _row_bytes(stored)
        assert all(start % row == 0 and (stop % row == 0 or stop == ends[-1]) for start, stop in ranges)


def _row_bytes(stored):
    if stored.layout.storage == "buffer":
        return 4096
    return stored.layout.extent(stored.shape)[0] * 4 * ITEM_SIZES[stored.dtype]


@given(programs(), st.integers(0, 9))
def test_memory_is_what_the_program_allocates_and_no_less_than_its_bound(made, seed):
    instance = instance_of(made)
    plan = random_plan(instance, seed)
    schedule = make_schedule(made, instance, plan, STAGING)
    memory, bound = schedule.memory, least_memory(made, instance, plan, STAGING)
    resident = sum(tensor.nbytes for tensor in schedule.program.residents)
    assert memory.ports_bytes + memory.preloaded_bytes == resident
    assert memory.total_bytes == resident + memory.arena_bytes + STAGING
    assert bound == replace(memory, arena_bytes=schedule.program.arena.live_bytes)
    assert bound.total_bytes <= memory.total_bytes


@given(programs(), st.integers(0, 9))
def test_the_check_finds_a_weight_that_lies_over_another_tensor(made, seed):
    instance = instance_of(made)
    schedule = make_schedule(made, instance, random_plan(instance, seed), STAGING)
    arena, uses = schedule.program.arena, weight_uses(made)
    for weight, first in schedule.streamed.items():
        for other, start in schedule.streamed.items():
            together = start <= uses[weight][1] and first <= uses[other][1]
            if weight != other and together and weight in arena.offset and other in arena.offset:
                moved = replace(arena, offset={**arena.offset, weight: arena.offset[other]})
                broken = replace(schedule.program, arena=replace(moved, nbytes=2**20))
                with pytest.raises(PlanError, match="still needed"):
                    check_arena(broken, 1, schedule.streamed)


def test_a_weight_takes_memory_before_the_launch_beside_which_it_is_loaded_reads_its_own():
    made = weighted_chain([4096, 4096, 4096])
    schedule = make_schedule(made, instance_of(made), always_next(instance_of(made)), STAGING)
    assert schedule.preload == (made.tensors.index(next(t for t in made.tensors if t.name == "w0")),)
    names = {t.name: i for i, t in enumerate(made.tensors)}
    assert schedule.transfers == ((Transfer(names["w1"], 0, 16384),), (Transfer(names["w2"], 0, 16384),), ())
    # w2 arrives while launch 1 reads w1: both have memory then.
    assert schedule.memory.arena_bytes >= 2 * 16384
    with pytest.raises(PlanError, match="before it is loaded"):
        check_arena(schedule.program, 512, {names["w1"]: 2, names["w2"]: 1})


def test_baselines_become_schedules():
    made = weighted_chain([5000, 70, 3000, 70])
    instance = instance_of(made)
    schedules = {
        name: make_schedule(made, instance, plan(instance), STAGING) for name, plan in STRATEGIES.items()
    }
    assert not schedules["preload-all"].streamed
    assert schedules["preload-all"].memory.preloaded_bytes == sum(w.nbytes for w in instance.weights)
    assert len(schedules["always-next"].streamed) == len(schedules["same-type"].streamed) == 3


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("chunks", [1, 3, 7, 500])
def test_chunks_are_whole_rows_of_texels(pattern, chunks):
    layout, shape = Layout((0, 2, 3, 1), "image", 2, pattern, 2), (3, 7, 5, 6)
    width, height = layout.extent(shape)
    packed = layout.pack(np.zeros(shape, np.float16))
    assert layout.packed_bytes(shape, "float16") == packed.nbytes
    ranges = [layout.chunk_bytes(shape, "float16", c, c + 1, chunks) for c in range(chunks)]
    assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges]][:-1]
    assert ranges[-1][1] == packed.nbytes
    rows = {(stop - start) // (width * 8) for start, stop in ranges}
    assert all((stop - start) % (width * 8) == 0 for start, stop in ranges)
    assert max(rows) - min(rows) <= 1 and height == packed.shape[0]


def test_a_plan_of_another_program_is_refused():
    made, other = weighted_chain([500, 70]), weighted_chain([500, 70, 30])
    instance = instance_of(made)
    plan = preload_everything(instance)
    with pytest.raises(PlanError, match=r"2 layers, 3 launches; plan this program itself"):
        make_schedule(other, instance, plan, STAGING)
    larger = weighted_chain([500, 71])
    with pytest.raises(PlanError, match=r"weight 'w1' has 280 bytes .* the program has 284 bytes"):
        make_schedule(larger, instance, plan, STAGING)
    renamed = replace(made, tensors=tuple([replace(t, name=t.name.replace("w", "v")) for t in made.tensors]))
    with pytest.raises(PlanError, match="has no weight 'w0'"):
        make_schedule(renamed, instance, plan, STAGING)


def test_a_plan_that_breaks_its_rules_is_refused():
    made = weighted_chain([500, 5000])
    instance = instance_of(made)
    plan = always_next(instance)
    with pytest.raises(PlanError, match=r"cannot run: \(C0\) 'w1'"):
        make_schedule(made, instance, replace(plan, loads=(replace(plan.loads[0], chunks=4),)), STAGING)


@pytest.mark.parametrize("staging_bytes", [0, LEAST_STAGING_BYTES - 4096, LEAST_STAGING_BYTES + 1])
def test_the_pool_has_whole_pages(staging_bytes):
    made = weighted_chain([500])
    instance = instance_of(made)
    with pytest.raises(PlanError, match="multiple of 4096"):
        make_schedule(made, instance, preload_everything(instance), staging_bytes)


def test_a_weight_that_is_written_is_not_streamed():
    made = sgd()
    made = replace(made, launches=(made.launches[2], *made.launches[:2]))
    instance = instance_of(made)
    make_schedule(made, instance, preload_everything(instance), STAGING)
    with pytest.raises(PlanError, match="'w' is written or returned by small and cannot be streamed"):
        make_schedule(made, instance, always_next(instance), STAGING)
