"""Many sources to the rows that others name: sorted first, so that work does not grow as their product."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.nodes import compute
from oracles.rule_checks import check

from torchedge.lowering.assembly import lower
from torchedge.lowering.building import pointwise
from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules import all_rules, indexing, sorting
from torchedge.lowering.rules.sorting import in_order
from torchedge.lowering.targets import TARGETS
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

aten = torch.ops.aten
G = torch.Generator().manual_seed(5)
BASE = torch.randn(40, 30, generator=G).double()


def places(rows, *shape):
    return torch.randint(0, rows, shape, generator=G)


def normal(*shape):
    return torch.randn(shape, generator=G).double()


CASES = {
    "embedding": (aten.embedding_dense_backward.default, (normal(300, 6), places(50, 300), 50, 3, False)),
    "one token": (
        aten.embedding_dense_backward.default,
        (normal(130, 4), torch.full((130,), 7), 20, -1, False),
    ),
    "more rows than tokens": (
        aten.embedding_dense_backward.default,
        (normal(3, 33, 5), places(900, 3, 33), 900, -1, False),
    ),
    "scatter_add": (aten.scatter_add.default, (BASE, 0, places(40, 45, 25), normal(45, 28))),
    "scatter_add along the last": (aten.scatter_add.default, (BASE, 1, places(30, 35, 50), normal(40, 50))),
    "largest": (aten.scatter_reduce.two, (BASE, 0, places(40, 45, 25), normal(45, 28), "amax")),
    "mean of others": (
        aten.scatter_reduce.two,
        (BASE, 0, places(40, 45, 25), normal(45, 28), "mean"),
        {"include_self": False},
    ),
    "index_put": (aten.index_put.default, (BASE, [places(40, 333), places(30, 333)], normal(333), True)),
    "index_put, separable": (
        aten.index_put.default,
        (normal(2, 6, 5), [None, places(6, 9, 1), places(5, 8)], normal(2, 9, 8), True),
    ),
    "index_put, in place": (
        aten.index_put.default,
        (BASE, [torch.randperm(40, generator=G)], normal(40, 30)),
    ),
    "index_add": (aten.index_add.default, (BASE, 0, places(40, 99), normal(99, 30))),
}


@pytest.mark.parametrize("name", CASES)
def test_sorted_sources(name, monkeypatch):
    monkeypatch.setattr(indexing, "MOST_SEARCHED", 64)
    monkeypatch.setattr(sorting, "BLOCK", 32)
    target, args, *more = CASES[name]
    check(target, *args, **(more[0] if more else {}))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("embedding", "cpu"),
        pytest.param("one token", "gpu", marks=pytest.mark.slow),
        pytest.param("scatter_add", "cpu", marks=pytest.mark.slow),
        pytest.param("largest", "mobile", marks=pytest.mark.slow),
    ],
)
def test_sorted_sources_on_a_device(name, device, monkeypatch):
    pytest.importorskip("pyopencl")
    from oracles.device_checks import run_on_device

    monkeypatch.setattr(indexing, "MOST_SEARCHED", 64)
    target, args, *more = CASES[name]
    want = target(*args, **(more[0] if more else {})).numpy()
    (found,) = run_on_device(target, args, more[0] if more else {}, [torch.tensor(want)], device)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-5, 40), min_size=1, max_size=150), st.integers(-7, 45), st.sampled_from([1, 4, 64])
)
def test_order(keys, wanted, block):
    given_keys = np.array(keys, np.int32)
    count, block_before = len(keys), sorting.BLOCK
    stored = Stored((count,), "int32", "keys", 0)
    sorting.BLOCK = block
    try:
        order = in_order(lambda position: stored.at(position), count)
    finally:
        sorting.BLOCK = block_before
    known, data = {}, {"keys": given_keys}
    positions = pointwise((count,), "int32", lambda place: _position(order, place))
    np.testing.assert_array_equal(compute(positions, data, known), np.argsort(given_keys, kind="stable"))
    first = pointwise((1,), "int32", lambda _: order.first(_constant(wanted)))
    assert compute(first, data, known)[0] == np.searchsorted(np.sort(given_keys), wanted)


def _position(order, place):
    from torchedge.expressions.scalars import Position

    return Position(order.position(place), "int32")


def _constant(number):
    from torchedge.expressions.indices import constant

    return constant(number)


def test_work_does_not_grow_as_tokens_times_rows():
    def work(tokens, rows):
        model = torch.nn.Embedding(rows, 16)
        captured = capture_step(
            model, places(rows, tokens), loss=lambda y: (y * y).mean(), keep=frozenset(all_rules())
        )
        return sum(launch.flops for launch in lower(captured.step, "gpu").launches)

    small, large = work(1024, 2048), work(4096, 8192)
    assert large < 6 * small


def test_kernels_stay_small_where_every_tensor_has_as_many_elements():
    """As many tokens as rows: then the merges of the sort could be taken for work row by row, and inlined."""

    def texts(tokens):
        model = torch.nn.Embedding(2048, 16)
        captured = capture_step(
            model, places(2048, tokens), loss=lambda y: (y * y).mean(), keep=frozenset(all_rules())
        )
        return sum(len(kernel.source) for kernel in lower(captured.step, "gpu").kernels)

    assert texts(2048) < 1.5 * texts(2047)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_read_leaves_its_tensor(device, monkeypatch):
    """Sources near the end of the order look behind it: guards within guards, lane by lane."""
    pytest.importorskip("pyopencl")
    monkeypatch.setattr(indexing, "MOST_SEARCHED", 64)
    model, tokens = torch.nn.Embedding(40, 8), places(40, 96)
    captured = capture_step(model, tokens, loss=lambda y: (y * y).sum(), keep=frozenset(all_rules()))
    program = lower(captured.step, replace(TARGETS[device], checks=True))
    with Executor(program, checks=True) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        _, gradient = executor.run(tokens.numpy())
    want = torch.zeros(40, 8).index_add(0, tokens, 2 * model(tokens)).detach()
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)
