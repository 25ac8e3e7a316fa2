"""Schedules fit the devices they are for, whatever the extents."""

from dataclasses import replace
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from torchedge.lowering.candidates import candidates_of
from torchedge.lowering.schedules import (
    ContractionExtents,
    ContractionSchedule,
    RowsExtents,
    default_schedule,
    is_legal,
)
from torchedge.lowering.targets import TARGETS, Limits, bounded

CPU, GPU, MOBILE = TARGETS["cpu"], TARGETS["gpu"], TARGETS["mobile"]
EXTENTS = st.builds(
    ContractionExtents,
    st.sampled_from([1, 12, 64]),
    st.integers(1, 200_000),
    st.integers(1, 5_000),
    st.integers(1, 500_000),
    st.sampled_from([4, 8]),
    st.sampled_from([0, 16, 64, 96]),
)


@given(EXTENTS)
def test_blocks_of_a_gpu_are_whole_warps_and_fit_local_memory(extents):
    found = default_schedule(extents, GPU)
    assert found.kind == "local"
    assert found.threads % 32 == 0
    assert (
        found.block_rows * found.depth % found.threads == found.block_cols * found.depth % found.threads == 0
    )
    assert 2 * found.depth * (found.block_rows + found.block_cols + 8) * extents.itemsize <= 48 << 10
    assert found.slices == 1 or extents.inner // found.slices >= 192


SIZES = st.lists(st.integers(2, 300), max_size=3).map(tuple)


LIMITS = st.builds(
    lambda name, local, group, sizes, serial: bounded(
        replace(TARGETS[name], serial=serial),
        Limits("", local_bytes=local, work_group=group, work_item_sizes=sizes),
    ),
    st.sampled_from(["cpu", "gpu", "mobile"]),
    st.sampled_from([1 << 10, 4 << 10, 16 << 10, 32 << 10, 60_000, 256 << 10, 512 << 10]),
    st.sampled_from([1, 16, 32, 100, 128, 384, 1024, 8192]),
    st.sampled_from([(1024, 1024, 64), (8192, 8192, 8192), (384, 16, 1), (1, 1, 1)]),
    st.booleans(),
)


def within(schedule, extents, target):
    """Whether a schedule stays within a target's limits, by the meaning of its fields alone."""
    if isinstance(schedule, ContractionSchedule):
        rows, cols, depth = schedule.block_rows, schedule.block_cols, schedule.depth
        if schedule.kind == "panel":
            return (depth * (rows + cols) + rows * cols) * extents.itemsize <= target.local_bytes
        if schedule.kind == "local":
            nbytes = 2 * depth * (rows + cols) * extents.itemsize
            return schedule.threads <= target.largest_group and nbytes <= target.local_bytes
        group = schedule.group
    else:
        group = schedule.group
        if target.serial and getattr(schedule, "members", 1) == 1:
            return True
    sizes = all(size <= most for size, most in zip(group, target.group_sizes, strict=False))
    shared = 0
    if getattr(schedule, "members", 1) > 1:
        shared = prod(group) * extents.sum_bytes * (1 if schedule.along else schedule.vector)
    return sizes and prod(group) <= target.largest_group and shared <= target.local_bytes


@given(EXTENTS, LIMITS)
def test_defaults_of_contractions_fit_any_device(extents, target):
    schedule = default_schedule(extents, target)
    assert is_legal(schedule, extents, target) and within(schedule, extents, target)
    for candidates in candidates_of(extents, target):
        for number in range(0, len(candidates), 7):
            assert within(candidates.pick(number), extents, target)


@given(SIZES, SIZES, st.booleans(), st.sampled_from([4, 8, 64, 400]), LIMITS)
def test_defaults_of_rows_and_elements_fit_any_device(rows, inner, along, sum_bytes, target):
    extents = RowsExtents(rows, inner, bool(inner) and (along or not rows), sum_bytes=sum_bytes)
    for case in (extents, RowsExtents(rows, (), False, sum_bytes=0)):
        schedule = default_schedule(case, target)
        assert is_legal(schedule, case, target) and within(schedule, case, target)


def test_smaller_local_memory_takes_smaller_panels_and_the_usual_one_stays():
    extents = ContractionExtents(1, 4096, 4096, 4096)
    usual = default_schedule(extents, CPU)
    assert default_schedule(extents, bounded(CPU, Limits("", local_bytes=8 << 20))) == usual
    small = default_schedule(extents, bounded(CPU, Limits("", local_bytes=32 << 10)))
    assert small.kind == "panel" and small.block_rows < usual.block_rows
    assert default_schedule(extents, bounded(CPU, Limits("", local_bytes=1 << 10))).kind == "register"
