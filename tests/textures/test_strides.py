"""Features of access patterns: closed forms of the paper's figures, and the definitions by loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.textures.layouts import PATTERNS
from torchedge.textures.strides import (
    cross_block_strides,
    distinct_lines,
    lines_of,
    quad_columns,
    reuse_distances,
)
from torchedge.textures.work import STRIDE_FEATURES


@pytest.mark.parametrize(
    ("pattern", "distance"), [("column", 0), ("row", 1), ("block-2", 2), ("block-4", 4), ("block-8", 8)]
)
def test_the_patterns_have_the_reuse_distances_of_figure_3(pattern, distance):
    steps = np.arange(64)
    x, y = np.broadcast_arrays(*PATTERNS[pattern].place(steps, 0 * steps))
    assert reuse_distances(lines_of(x, y, 2)) == distance


def by_feature(x, y):
    return dict(zip(STRIDE_FEATURES, cross_block_strides(x, y), strict=True))


def test_a_stride_counts_along_one_axis():
    steps = np.arange(64)
    histogram = by_feature(steps, steps)
    assert histogram["x 4x4"] == 1 / 64 and histogram["y 4x4"] == 15 / 64
    assert histogram["x 4x2"] == 1 / 64 and histogram["y 4x2"] == 31 / 64


def test_a_walk_down_four_rows_and_back_enters_each_line_once():
    steps = np.arange(256)
    x, y = PATTERNS["block-4"].place(steps, 0 * steps)
    histogram = by_feature(x, y)
    assert histogram["x 2x1"] + histogram["y 2x1"] == 1 / 2
    assert histogram["x 4x4"] + histogram["y 4x4"] == 1 / 16


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_reuse_distances_count_the_distinct_lines_since(lines):
    distances = []
    for place, line in enumerate(lines):
        if line in lines[:place]:
            last = max(k for k in range(place) if lines[k] == line)
            distances.append(len(set(lines[last:place])))
    expected = float(np.mean(distances)) if distances else 0.0
    assert reuse_distances(np.array(lines)) == pytest.approx(expected)
    assert distinct_lines(np.array(lines)) == len(set(lines))


def test_candidates_are_computed_side_by_side():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 64, (2, 5, 7, 16))
    together = cross_block_strides(x, y)
    assert together.shape == (5, 7, len(STRIDE_FEATURES))
    np.testing.assert_array_equal(together[3, 2], cross_block_strides(x[3, 2], y[3, 2]))
    lines = lines_of(x, y, 2)
    assert reuse_distances(lines)[1, 4] == reuse_distances(lines[1, 4])


def test_columns_that_four_neighbours_read():
    lanes = np.arange(32)
    assert quad_columns(lanes) == 4  # along a row
    assert quad_columns(lanes // 2) == 2  # block-2
    assert quad_columns(lanes // 4) == 1  # block-4, or down a column
    assert quad_columns(np.zeros((3, 1), int)).tolist() == [1, 1, 1]  # the same texel for all
    assert quad_columns(np.stack([lanes, lanes * 0])).tolist() == [4, 1]
