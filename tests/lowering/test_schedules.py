"""Schedules fit the devices they are for, whatever the extents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.lowering.schedules import (
    LARGE,
    MIDDLE,
    SMALL,
    ContractionExtents,
    PointwiseExtents,
    RowsExtents,
    default_schedule,
    is_legal,
)
from torchedge.lowering.targets import TARGETS

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
def test_panels_hold_whole_tiles_and_fit_a_cache(extents):
    found = default_schedule(extents, CPU)
    assert found.kind == "panel"
    assert found.block_rows % found.tile_rows == found.block_cols % found.tile_cols == 0
    held = found.depth * (found.block_rows + found.block_cols) + found.block_rows * found.block_cols
    assert held * extents.itemsize <= 2 << 20
    assert 1 <= found.slices <= CPU.work_items


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


@given(EXTENTS)
def test_tiles_of_a_phone_are_small(extents):
    found = default_schedule(extents, MOBILE)
    assert found.kind == "register"
    assert found.tile_rows * found.vectors <= 8


@pytest.mark.parametrize(
    ("extents", "block"),
    [
        (ContractionExtents(1, 4096, 4096, 4096), LARGE),
        (ContractionExtents(1, 100_352, 64, 576), MIDDLE),
        (ContractionExtents(1, 1024, 1024, 1024), replace(SMALL, slices=1)),
        (ContractionExtents(1, 576, 64, 100_352), replace(SMALL, slices=57)),
    ],
)
def test_gpus_take_the_largest_block_that_fills_them(extents, block):
    assert default_schedule(extents, GPU) == block


def test_columns_decide_the_vectors_of_a_cpu():
    def tile(rows, cols):
        found = default_schedule(ContractionExtents(1, rows, cols, 512), CPU)
        return found.tile_rows, found.vectors, found.vector

    assert tile(512, 512) == (8, 2, 16)
    assert tile(512, 48) == (8, 3, 16)
    assert tile(512, 16) == (16, 1, 16)
    assert tile(512, 3) == (16, 1, 4)
    assert tile(49, 512) == (10, 2, 16)


def test_a_cpu_with_few_rows_splits_the_inner_loop():
    found = default_schedule(ContractionExtents(1, 16, 512, 4608), CPU)
    assert (found.block_cols, found.slices) == (512, 6)


@given(EXTENTS, st.sampled_from(["cpu", "gpu", "mobile"]))
def test_defaults_are_legal(extents, name):
    if extents.itemsize == 4:
        assert is_legal(default_schedule(extents, TARGETS[name]), extents, TARGETS[name])


SIZES = st.lists(st.integers(2, 300), max_size=3).map(tuple)


@given(SIZES, SIZES, st.booleans(), st.booleans(), st.sampled_from(["cpu", "gpu", "mobile"]))
def test_defaults_of_rows_and_elements_are_legal(rows, inner, along, searches, name):
    extents = RowsExtents(rows, inner, bool(inner) and (along or not rows), searches)
    for case in (extents, PointwiseExtents(rows)):
        assert is_legal(default_schedule(case, TARGETS[name]), case, TARGETS[name])
