"""Graphs that are chains of thousands of operators: kernels stay small, nothing recurses over the length."""

import numpy as np
import pytest

from torchedge.graphs.steps import GraphBuilder, Ref
from torchedge.lowering.assembly import lower

FORM = ((4, 8), "float32")
LENGTH = 1500


def chain(*kinds, length=LENGTH):
    """Return a step of `length` operators, of these kinds in turn, each of the one before."""
    builder = GraphBuilder()
    x = value = builder.add("x", *FORM, "input")
    for place in range(length):
        kind, attributes = kinds[place % len(kinds)]
        value = builder.call(kind, {"input": Ref(value), **attributes}, [FORM])[0]
    return builder.finish([x], [value])


@pytest.mark.parametrize("target", ["cpu", "mobile"])
def test_a_chain_of_functions_becomes_many_small_kernels(target):
    program = lower(chain(("sin", {}), ("add", {"other": 0.5})), target)
    assert 1 < len(program.launches) < LENGTH / 10
    assert max(len(kernel.source) for kernel in program.kernels) < 20_000


def test_a_chain_of_padding_that_leaves_nothing_is_one_kernel():
    program = lower(chain(("constant_pad_nd", {"pad": (1, -1), "value": 0.0}), length=360), "cpu")
    assert len(program.launches) == 1


def test_a_chain_computes_what_numpy_does():
    pytest.importorskip("pyopencl")
    from torchedge.runtime.executors import Executor

    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    expected = x.astype(np.float64)
    for place in range(LENGTH):
        expected = np.cos(expected) if place % 2 == 0 else expected * 1.5
    step = chain(("cos", {}), ("mul", {"other": 1.5}))
    with Executor(lower(step)) as executor:
        (found,) = executor.run(x)
    np.testing.assert_allclose(found, expected, atol=1e-4)
