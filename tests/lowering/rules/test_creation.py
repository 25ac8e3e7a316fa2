"""Constants, ranges and random numbers, against PyTorch and the generator's paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import check, render

from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules.registry import Result, apply_rule

aten = torch.ops.aten
X = torch.randn(2, 3, dtype=torch.float64)


def test_constants():
    check(aten.full.default, [2, 3], 1.5)
    check(aten.full.default, [2, 3], True, dtype=torch.bool)
    check(aten.full.default, [], 7)
    check(aten.full_like.default, X, 2)
    check(aten.new_full.default, X, [4], 3)
    check(aten.fill.Scalar, X, 3)
    check(aten.fill.Tensor, X, torch.tensor(4.0))
    check(aten.scalar_tensor.default, 2.5)
    check(aten.zeros.default, [3])
    check(aten.ones_like.default, X)
    check(aten.new_zeros.default, X, [2], dtype=torch.int64)
    check(aten.new_ones.default, X, [2])
    for size in ((4, 4), (2, 5)):
        check(aten.eye.m, *size)


def test_undefined_content_is_zero():
    result = Result(((2, 2),), ("float32",))
    (node,) = apply_rule("empty", result, {"size": [2, 2]})
    assert not compute(node, {}).any()


@pytest.mark.parametrize("bounds", [(0, 5, 1), (2, 11, 3), (7, -3, -2)])
def test_ranges(bounds):
    check(aten.arange.start_step, *bounds)
    check(aten.arange.start_step, *[float(b) * 0.3 for b in bounds], rtol=1e-6)


def test_ranges_by_their_end():
    check(aten.arange.default, 6)
    check(aten.arange.start, 2, 6)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_equal_distances(steps):
    check(aten.linspace.default, -1.0, 2.0, steps, rtol=1e-6)
    check(aten.linspace.default, 0, 10, steps, dtype=torch.int64)


def uniform(shape, seed, counter, offset):
    state = [Stored((), "int64", name, place) for place, name in enumerate(("seed", "counter"))]
    arguments = {"seed": state[0], "counter": state[1], "shape": shape, "offset": offset}
    (node,) = apply_rule("random_uniform", Result((shape,), ("float32",)), arguments)
    render([node])
    return compute(node, {"seed": np.asarray(seed), "counter": np.asarray(counter)})


def test_random_numbers_are_uniform_and_differ_by_seed_step_and_operator():
    drawn = uniform((64, 64), 1, 0, 0)
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.02 and abs(drawn.var() - 1 / 12) < 0.01
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert (uniform((64, 64), *other) == drawn).mean() < 0.01
    assert (uniform((64, 64), 1, 0, 0) == drawn).all()


def test_random_numbers_are_philox():
    """Salmon et al.'s known answer: counter and key all zero give 0x6627e8d5 first."""
    assert uniform((), 0, 0, 0) == (0x6627E8D5 >> 8) * 2.0**-24


@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(3, 5, 16), (7,), ()], ids=str)
def test_random_numbers_are_the_same_on_a_device(shape, device_class):
    pytest.importorskip("pyopencl")
    from torchedge.graphs.steps import GraphBuilder, Ref
    from torchedge.lowering.assembly import lower
    from torchedge.runtime import Executor

    builder = GraphBuilder()
    seed, counter = [builder.add(name, (), "int64", "input") for name in ("seed", "counter")]
    attrs = {"seed": Ref(seed), "counter": Ref(counter), "shape": shape, "offset": 3}
    made = builder.call("random_uniform", attrs, [(shape, "float32")])
    executor = Executor(lower(builder.finish([seed, counter], made), device_class))
    for numbers in ((5, 0), (2**31 - 1, 2**33 + 7)):
        (found,) = executor.run(*[np.asarray(n, np.int64) for n in numbers])
        assert (found == uniform(shape, *numbers, 3).astype(np.float32)).all()
