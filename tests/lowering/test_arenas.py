"""Arenas: correct by an independent check, close to the bound, the best one where that can be known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.arena_plans import least_bytes, training_lifetimes
from oracles.small_programs import chain, image_copy, pointwise, program, tensor

from torchedge.errors import InputError, PlanError
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.arenas import (
    allocations,
    image_bytes,
    in_place_pairs,
    lifetimes_of,
    plan_arena,
    planned,
    total_bytes,
)
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor
from torchedge.textures.layouts import Layout


@st.composite
def programs(draw):
    """Launches that read and write intermediates at random, some in place, some of them images."""
    count = draw(st.integers(1, 14))
    tensors = []
    for i in range(count):
        shape = (draw(st.integers(1, 40)), draw(st.integers(1, 40)))
        image = draw(st.booleans())
        layout = Layout((0, 1), "image", 1) if image else Layout((0, 1))
        tensors.append(
            StoredTensor(
                f"t{i}", shape, draw(st.sampled_from(["float32", "float16"])), "intermediate", layout
            )
        )
    kernels, launches = [], []
    for i in range(count):
        earlier = draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
        access = ("write", *["read"] * len(earlier))
        pairs = draw(st.lists(st.sampled_from(range(1, len(access))), max_size=2)) if earlier else []
        kernels.append(Kernel(f"k{i}", "", access, in_place=tuple((p, 0) for p in pairs)))
        launches.append(Launch(i, (i, *earlier), (1,)))
    outputs = tuple(sorted(draw(st.sets(st.integers(0, count - 1), max_size=2))))
    return Program("random", tuple(tensors), tuple(kernels), tuple(launches), (), outputs, Arena(0))


@given(programs(), st.sampled_from([1, 16, 128]))
def test_every_plan_passes_the_independent_check(made, alignment):
    found = planned(made, alignment)
    check_arena(found, alignment)
    assert planned(made, alignment).arena == found.arena
    assert total_bytes(found.arena) >= found.arena.live_bytes
    moved = _moved(found)
    if moved is not None:
        with pytest.raises(PlanError):
            check_arena(moved, alignment)


@given(programs(), st.sampled_from([1, 16, 128]), st.integers(1, 20_000))
def test_no_allocation_exceeds_its_limit_or_the_largest_tensor(made, alignment, most):
    found = planned(replace(made, arena=Arena(0, allocation_bytes=most)), alignment)
    check_arena(found, alignment)
    assert found.arena.allocation_bytes == most
    largest = max(tensor.nbytes for tensor in made.tensors) + alignment
    assert max(allocations(found.arena)) <= max(most, largest)
    assert total_bytes(found.arena) >= found.arena.live_bytes
    bounds = set(np.cumsum(found.arena.pieces)[:-1].tolist())
    for index in found.arena.offset:
        number, begin = found.arena.place(index)
        assert begin + made.tensors[index].nbytes <= found.arena.buffers[number]
        if found.arena.offset[index] in bounds and begin + made.tensors[index].nbytes > alignment:
            across = {**found.arena.offset, index: found.arena.offset[index] - alignment}
            with pytest.raises(PlanError):
                check_arena(replace(found, arena=replace(found.arena, offset=across)), alignment)


@given(programs(), st.data())
def test_the_check_agrees_with_comparing_all_pairs(made, data):
    """Each tensor where it likes: the check accepts a plan if and only if no pair is in conflict."""
    found = planned(made, 1)
    offset = {i: data.draw(st.integers(0, 400)) for i in found.arena.offset}
    shuffled = replace(found, arena=replace(found.arena, offset=offset, nbytes=10_000))
    lives = lifetimes_of(made)
    pairs = {frozenset(pair) for pair in in_place_pairs(made, lives)}

    def conflict(i, j):
        (a, b), (c, d) = lives[i], lives[j]
        apart = (
            offset[i] + made.tensors[i].nbytes <= offset[j] or offset[j] + made.tensors[j].nbytes <= offset[i]
        )
        return not (b <= c or d <= a or apart or (frozenset((i, j)) in pairs and offset[i] == offset[j]))

    if any(conflict(i, j) for i in offset for j in offset if i < j):
        with pytest.raises(PlanError):
            check_arena(shuffled, 1)
    else:
        check_arena(shuffled, 1)


def _moved(made):
    """Return the program with a tensor moved onto another that is alive in a launch that writes neither."""
    lives = lifetimes_of(made)
    buffers = [i for i in lives if i in made.arena.offset]
    for i in buffers:
        for j in buffers:
            if i != j and lives[i][0] < lives[j][0] < lives[i][1] - 1:
                return replace(
                    made, arena=replace(made.arena, offset={**made.arena.offset, j: made.arena.offset[i]})
                )
    return None


small = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=6
).map(
    lambda rows: ({i: r[0] for i, r in enumerate(rows)}, {i: (r[1], r[1] + r[2]) for i, r in enumerate(rows)})
)


@given(small)
def test_few_buffers_get_the_best_arena(case):
    assert plan_arena(*case).nbytes == least_bytes(*case)


@pytest.mark.parametrize("layers", [10, 60, 200])
@pytest.mark.parametrize("seed", range(3))
def test_training_steps_come_within_five_percent_of_the_bound(layers, seed):
    arena = plan_arena(*training_lifetimes(layers, seed), 128)
    assert arena.nbytes <= 1.05 * arena.live_bytes + 128 * layers


def test_sizes_are_rounded_to_the_alignment_but_not_the_last_one():
    arena = plan_arena({7: 100, 8: 10}, {7: (0, 2), 8: (1, 2)}, 64)
    assert arena.offset == {7: 0, 8: 128} and arena.nbytes == 138 and arena.live_bytes == 110


def test_reading_what_nobody_wrote_is_refused():
    with pytest.raises(InputError, match=r"launch 0, kernel k, reads t before any launch writes it"):
        program(
            [tensor("t", (4,)), tensor("z", (4,), "output")],
            [pointwise("k", "", ["read", "write"])],
            [("k", ["t", "z"], [4])],
        )


def pairs_of(made):
    lives = lifetimes_of(made)
    return in_place_pairs(made, lives)


def joined(sizes, launches, declared):
    names = ["a", "b", "c"]
    tensors = [tensor("x", (8,), "input"), *[tensor(n, (s,)) for n, s in zip(names, sizes, strict=True)]]
    tensors.append(tensor("z", (8,), "output"))
    kernels = [
        pointwise("make", "b[i] = a[i];", ["read", "write"]),
        pointwise("join", "c[i] = a[i] + b[i];", ["read", "read", "write"], in_place=declared),
    ]
    return program(tensors, kernels, [(k, t, [8]) for k, t in launches])


def test_an_output_takes_the_place_of_an_input_that_dies():
    steps = [("make", "xa"), ("make", "xb"), ("join", "abc"), ("make", "cz")]
    steps = [(k, list(t)) for k, t in steps]
    assert pairs_of(joined((8, 8, 8), steps, ((0, 2), (1, 2)))) == [(1, 3), (2, 3)]
    made = joined((8, 8, 8), steps, ((1, 2),))
    assert pairs_of(made) == [(2, 3)]
    assert made.arena.offset[2] == made.arena.offset[3] and made.arena.live_bytes == 64
    # Another size, a later reader, an argument that is not declared: no.
    assert pairs_of(joined((8, 8, 9), steps, ((0, 2), (1, 2)))) == []
    later = [*steps[:-1], ("join", ["a", "b", "c"]), ("make", ["c", "z"])]
    assert pairs_of(joined((8, 8, 8), later, ((0, 2), (1, 2)))) == []
    twice = [("make", ["x", "a"]), ("join", ["a", "a", "c"]), ("make", ["c", "z"])]
    assert pairs_of(joined((8, 8, 8), twice, ((0, 2),))) == []
    assert pairs_of(joined((8, 8, 8), twice, ((0, 2), (1, 2)))) == [(1, 3)]


def test_images_of_one_size_and_dtype_share_slots():
    layout = Layout((0, 1), "image", 1)
    made = image_copy((6, 9), layout, count=5)
    assert made.arena.slots == ((3, 6, "float32"),) * 2 and made.arena.nbytes == 0
    assert total_bytes(made.arena) == made.arena.live_bytes == 2 * image_bytes((3, 6, "float32"))
    images = {0: (8, 8, "float32"), 1: (8, 8, "float16"), 2: (4, 9, "float32"), 3: (2, 2, "float16")}
    lives = {0: (0, 1), 1: (0, 1), 2: (1, 2), 3: (1, 2)}
    arena = plan_arena({}, lives, images=images)
    assert sorted(arena.slots) == [(8, 8, "float16"), (8, 9, "float32")]


def test_the_check_names_the_fault():
    made = chain(length=3)
    first = min(made.arena.offset)

    def broken(**changes):
        return replace(made, arena=replace(made.arena, **changes))

    offset = made.arena.offset
    for changes, message in (
        ({"offset": {**offset, first: 64}}, "multiple of 128"),
        ({"offset": {**offset, first: 1 << 20}}, "within"),
        ({"offset": {**offset, first: -128}}, "multiple of 128"),
        ({"offset": {**offset, 0: 0}}, "tensor 0 is no intermediate"),
        ({"offset": {**offset, 99: 0}}, "tensor 99 is no intermediate"),
        ({"offset": {i: o for i, o in offset.items() if i != first}}, "t0 has no place"),
        ({"slot": {first: 0}}, "t0 has no place, or two"),
        ({"offset": dict.fromkeys(offset, 0)}, "writes t1 over t0"),
    ):
        with pytest.raises(PlanError, match=message):
            check_arena(broken(**changes), 128)
    pictures = image_copy((6, 9), Layout((0, 1), "image", 1))
    for slots in (((2, 6, "float32"),) * 2, ((3, 6, "float16"),) * 2, ()):
        with pytest.raises(PlanError, match="slot"):
            check_arena(replace(pictures, arena=replace(pictures.arena, slots=slots)), 128)
