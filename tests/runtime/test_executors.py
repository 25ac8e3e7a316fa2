"""The executor on PoCL, with programs written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.small_programs import chain, image_copy, pointwise, program, sgd, tensor, vector_add

from torchedge.errors import InputError, KernelBuildError, KernelCheckError, OpenCLError, PlanError
from torchedge.lowering.programs import Kernel
from torchedge.runtime import Executor
from torchedge.textures.layouts import Layout, channels_last
from torchedge.textures.patterns import PATTERNS

pytest.importorskip("pyopencl")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_vector_addition():
    x, y = normal(1000), normal(1000, seed=1)
    with Executor(vector_add()) as executor:
        (z,) = executor.run(x, y)
        np.testing.assert_array_equal(z, x + y)
        assert executor.arena_bytes == 0
        assert executor.resident_bytes == 3 * 4000


@pytest.mark.parametrize("checks", [False, True])
def test_a_chain_reuses_two_places(checks):
    made = chain(length=6)
    with Executor(made, checks=checks) as executor:
        np.testing.assert_array_equal(executor.run(np.zeros(1000, np.float32))[0], np.full(1000, 7))
        assert executor.arena_bytes == made.arena.nbytes == 4096 + 4000
        assert made.arena.live_bytes == 8000


def test_a_chain_in_place_takes_one():
    made = chain(length=6, in_place=True)
    with Executor(made, checks=True) as executor:
        np.testing.assert_array_equal(executor.run(np.zeros(1000, np.float32))[0], np.full(1000, 7))
        assert executor.arena_bytes == made.arena.live_bytes == 4000


def test_parameters_and_states_stay_from_step_to_step():
    with Executor(sgd()) as executor:
        executor.load({"w": np.arange(10, dtype=np.float32)})
        executor.set("lr", 0.5)
        assert executor.step(np.ones(10, np.float32))[0] == 45
        assert executor.step(np.ones(10, np.float32), read=False) == []
        np.testing.assert_array_equal(executor.read("w"), np.arange(10) - 1)
        assert executor.read("steps") == 7 and executor.read("steps").dtype == np.int64
        executor.set("lr", 0)
        executor.run(np.ones(10, np.float32))
        np.testing.assert_array_equal(executor.read("w"), np.arange(10) - 1)
