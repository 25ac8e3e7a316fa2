"""Kernels over rows and element by element compute the same by every legal schedule."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.node_runs import run_nodes
from oracles.rule_checks import apply

from torchedge.expressions.dialect import Site
from torchedge.expressions.indices import Axis, of
from torchedge.expressions.rendering import writes_texels
from torchedge.lowering.building import elementwise
from torchedge.lowering.candidates import candidates_of
from torchedge.lowering.fusion import form_groups
from torchedge.lowering.kernels.nests import nest_of
from torchedge.lowering.nodes import Stored, nodes_below
from torchedge.lowering.placement import place_tensors
from torchedge.lowering.schedules import ContractionSchedule, RowsExtents, RowsSchedule, is_legal
from torchedge.lowering.targets import TARGETS
from torchedge.lowering.translation import Translation
from torchedge.textures.layouts import Layout

pytest.importorskip("pyopencl")
ATEN = torch.ops.aten
GPU = TARGETS["gpu"]


@pytest.mark.parametrize(
    "schedule",
    [
        RowsSchedule(1, False, 1, (8, 3)),
        RowsSchedule(4, False, 1, (4, 1)),
        RowsSchedule(2, False, 1, (2, 3), further=7),
        RowsSchedule(4, False, 1, (16, 8), further=1),
    ],
)
def test_elements(schedule):
    x, shift = Stored((4, 6, 32), "float32", "x", 0), Stored((32,), "float32", "shift", 1)
    data = {n.name: np.random.default_rng(n.index).normal(size=n.shape).astype("f") for n in (x, shift)}
    assert is_legal(schedule, RowsExtents((24, 32), (), False, sum_bytes=0), GPU)
    node = elementwise(lambda a, b: (a + b) * 2, x, shift, dtype="float32")
    (found,) = run_nodes([node], data, "gpu", schedule, inputs=[x, shift])
    np.testing.assert_allclose(found, (data["x"] + data["shift"]) * 2, rtol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        RowsSchedule(1, True, 1, (4,)),
        RowsSchedule(4, True, 1, (16,), unroll=2),
        RowsSchedule(8, True, 8, (8,)),
        RowsSchedule(1, False, 4, (4,)),
        RowsSchedule(4, False, 1, (3,)),
    ],
)
def test_rows(schedule):
    x = torch.randn(12, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = torch.softmax(x, 1)
    assert is_legal(schedule, RowsExtents((12,), (70,), True), GPU)
    nodes, data = apply(ATEN._softmax.default, (x, 1, False), {}, [want])
    (found,) = run_nodes(nodes, data, "gpu", schedule)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5)


@pytest.mark.parametrize("storage", ["buffer", "image"])
@pytest.mark.parametrize(("group", "unroll"), [((4, 32), 1), ((64, 1), 2), ((1, 8), 4)])
def test_tiles(group, unroll, storage):
    a, b = (torch.randn(n, dtype=torch.float64).numpy() for n in ((20, 64), (64, 24)))
    schedule = ContractionSchedule("register", 2, 4, 4, 2, 1, 4, 2, group=group, unroll=unroll)
    target = replace(TARGETS["mobile"], storage=storage, image_width=64)
    nodes, data = apply(ATEN.mm.default, (torch.tensor(a), torch.tensor(b)), {}, [torch.tensor(a @ b)])
    (found,) = run_nodes(nodes, data, target, schedule)
    np.testing.assert_allclose(found, a @ b, rtol=1e-4, atol=1e-5)


def test_predicates_hold_for_arrays_of_candidates():
    vectors = np.array([1, 2, 4, 8])
    schedules = RowsSchedule(vectors, False, 1, (np.array([64, 64, 2048, 64]),), further=1)
    elements = RowsExtents((5, 8), (), False, sum_bytes=0)
    assert is_legal(schedules, elements, GPU).tolist() == [True, True, False, False]
    assert not is_legal(schedules, replace(elements, sum_bytes=4), GPU).any()
    along = RowsSchedule(vectors, np.array([True, False, True, False]), 1, (64,))
    assert is_legal(along, RowsExtents((6,), (4,), True), GPU).tolist() == [True, True, True, False]
    searching = is_legal(along, RowsExtents((6,), (4,), True, searches=True), GPU)
    assert searching.tolist() == [True, True, False, False]


def test_texels_are_written_whole():
    rows, channels = Axis("r", 6), Axis("c", 8)
    layout = Layout((0, 1), "image", split=1)
    site, element = Site("t0", (6, 8), "float32", layout), (of(rows), of(channels))
    assert writes_texels(site, element, channels, 4)
    assert not writes_texels(site, element, channels, 8)
    assert not writes_texels(site, element, rows, 2)
    assert not writes_texels(site, element, None, 1)
    assert writes_texels(Site("t0", (6, 1), "float32", layout), (of(rows), of(Axis("n", 1))), None, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("operator", ["mm", "convolution", "softmax", "activation"])
def test_every_kind_of_candidate_computes_the_same(operator, name):
    x, w = (torch.randn(n, dtype=torch.float64) for n in ((2, 8, 12, 12), (16, 8, 3, 3)))
    a, b = torch.randn(36, 64, dtype=torch.float64), torch.randn(64, 40, dtype=torch.float64)
    convolution = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    cases = {
        "mm": (ATEN.mm.default, (a, b)),
        "convolution": (ATEN.convolution.default, convolution),
        "softmax": (ATEN._softmax.default, (a, 1, False)),
        "activation": (ATEN.tanh.default, (a,)),
    }
    target, arguments = cases[operator]
    want = target(*arguments)
    nodes, data = apply(target, arguments, {}, [want])
    below = nodes_below(nodes)
    stored = {n.index: n for n in below if isinstance(n, Stored)}
    (group,) = form_groups(Translation(tuple(nodes), (), stored), TARGETS[name]).groups
    nest = nest_of(group, place_tensors([group], list(stored.values()), []))
    schedules = [c.pick(k) for c in candidates_of(nest.extents, TARGETS[name]) for k in range(len(c))]
    for number in np.random.default_rng(0).permutation(len(schedules))[:4]:
        (found,) = run_nodes(nodes, data, name, schedules[number])
        np.testing.assert_allclose(found, want.numpy(), rtol=1e-4, atol=1e-5, err_msg=str(schedules[number]))
