"""Constants, ranges and random numbers, against PyTorch and the generator's paper."""

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import render

from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules.registry import Result, apply_rule

aten = torch.ops.aten
X = torch.randn(2, 3, dtype=torch.float64)


def test_undefined_content_is_zero():
    result = Result(((2, 2),), ("float32",))
    (node,) = apply_rule("empty", result, {"size": [2, 2]})
    assert not compute(node, {}).any()


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
