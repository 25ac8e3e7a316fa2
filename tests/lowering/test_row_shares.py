"""How work-items share rows: limits, no empty slice, whole cache lines, and the device filled."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.node_runs import program_of, run_nodes
from oracles.rule_checks import apply

from torchedge.expressions.indices import Fetched, of
from torchedge.lowering.building import RowBuilder, pointwise
from torchedge.lowering.nodes import Stored
from torchedge.lowering.row_shares import LINE, line_shares, shares_of, slices_of
from torchedge.lowering.schedules import RowsExtents, RowsSchedule, default_schedule, is_legal
from torchedge.lowering.targets import TARGETS

ATEN = torch.ops.aten
sizes = st.integers(1, 700)


@st.composite
def loops(draw):
    """Rounds of loops, the number of those over rows, and the order of memory."""
    items = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    rows = draw(st.integers(0, len(items) - 1))
    return items, rows, tuple(draw(st.permutations(range(len(items)))))


@given(loops(), st.sampled_from([1, 2, 8, 64, 128]), st.integers(1, 128))
def test_shares_keep_their_limits(nest, members, across):
    items, rows, memory = nest
    share = shares_of(items, rows, memory, members, across)
    assert prod(share[rows:]) <= members
    assert all(1 <= s <= n for s, n in zip(share, items, strict=True))
    assert all(s & (s - 1) == 0 for s in share[rows:])
    assert prod(share[:rows]) <= across


@given(loops(), st.integers(1, 5000))
def test_no_slice_is_empty(nest, slices):
    items, rows, memory = nest
    share = shares_of(items, rows, memory, 8, 8)
    for n, s, cut in zip(items, share, slices_of(items, rows, share, slices), strict=True):
        rounds = -(-n // s)
        length = -(-rounds // cut)
        assert (cut - 1) * length < rounds <= cut * length


@given(loops())
def test_neighbours_read_whole_lines(nest):
    items, rows, memory = nest
    share = line_shares(items, rows, memory)
    if memory[0] < rows and items[memory[0]] >= LINE:
        assert prod(share) == share[memory[0]] >= LINE
    elif memory[0] >= rows and items[memory[0]] >= LINE:
        assert prod(share) == share[memory[0]] == LINE


@given(st.lists(sizes, max_size=3), st.lists(sizes, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_defaults_are_legal(rows, inner, along, slices):
    extents = RowsExtents(tuple(rows), tuple(inner), along or not rows, False, (), slices, 12)
    for target in TARGETS.values():
        schedule = default_schedule(extents, target)
        assert is_legal(schedule, extents, target)
        assert prod(schedule.shares(extents)) in (1, prod(schedule.group))
        assert (prod(schedule.cuts(extents)) > 1) == (schedule.slices > 1)


@pytest.mark.parametrize("channels", [32, 256])
def test_few_long_rows_fill_a_gpu(channels):
    """Group norm, channels last: neighbours read neighbouring groups; slices or large groups fill the GPU."""
    groups, gpu = channels // 4, TARGETS["gpu"]
    extents = RowsExtents((16, groups), (12_544, 4), True, False, (3, 1, 2, 0), True, 12)
    schedule = default_schedule(extents, gpu)
    share = schedule.shares(extents)
    assert share[1] == 8 and share[2] >= gpu.row_group // 8
    items = 16 * groups * schedule.members * schedule.slices
    assert gpu.work_items // 2 <= items <= 2 * gpu.work_items


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(1, 37), min_size=2, max_size=3),
    st.data(),
    st.sampled_from([(2, 2), (4, 8), (16, 32), (64, 64)]),
    st.integers(1, 9),
)
def test_every_schedule_sums_every_element_once(shape, data, sizes, slices):
    pytest.importorskip("pyopencl")
    dims = data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))
    x = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(prod(shape))).double()
    want = x.sum(tuple(dims))
    nodes, stored = apply(ATEN.sum.dim_IntList, (x, list(dims)), {}, [want])
    members, group = sizes
    along = data.draw(st.booleans())
    schedule = RowsSchedule(1, along, members, (group,), slices=slices)
    (total,) = run_nodes(nodes, stored, "gpu", schedule, inputs=[nodes[0].rows.operands[0]])
    np.testing.assert_array_equal(total, want.numpy())


def test_lanes_follow_what_is_read_most():
    """Rows of a table that is larger than all that is read of it, found by neighbouring tokens."""
    table, tokens = Stored((5000, 40), "float32", "table", 0), Stored((64,), "int64", "tokens", 1)
    rows = pointwise((64, 40), "float32", lambda t, c: table.at(of(Fetched(tokens.at(t), 0, 4999)), c))
    builder = RowBuilder((64, 40), (1,), "sum")
    total = builder.reduce("sum", lambda t, c: rows.at(t, c))
    node = builder.row(lambda *_: total)
    (kernel,) = program_of([node], "gpu", inputs=[table, tokens]).kernels
    assert "float4" in kernel.source and "vload4" not in kernel.source.split("{", 1)[1]
