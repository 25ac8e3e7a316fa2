"""Schedules fit the devices they are for, whatever the extents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.lowering.targets import LARGE, MIDDLE, SMALL, TARGETS, Extents, default_schedule

CPU, GPU, MOBILE = TARGETS["cpu"], TARGETS["gpu"], TARGETS["mobile"]
EXTENTS = st.builds(
    Extents,
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
        (Extents(1, 4096, 4096, 4096), LARGE),
        (Extents(1, 100_352, 64, 576), MIDDLE),
        (Extents(1, 1024, 1024, 1024), replace(SMALL, slices=1)),
        (Extents(1, 576, 64, 100_352), replace(SMALL, slices=57)),
    ],
)
def test_gpus_take_the_largest_block_that_fills_them(extents, block):
    assert default_schedule(extents, GPU) == block


def test_columns_decide_the_vectors_of_a_cpu():
    def tile(rows, cols):
        found = default_schedule(Extents(1, rows, cols, 512), CPU)
        return found.tile_rows, found.vectors, found.vector

    assert tile(512, 512) == (8, 2, 16)
    assert tile(512, 48) == (8, 3, 16)
    assert tile(512, 16) == (16, 1, 16)
    assert tile(512, 3) == (16, 1, 4)
    assert tile(49, 512) == (10, 2, 16)


def test_a_cpu_with_few_rows_splits_the_inner_loop():
    found = default_schedule(Extents(1, 16, 512, 4608), CPU)
    assert (found.block_cols, found.slices) == (512, 6)
