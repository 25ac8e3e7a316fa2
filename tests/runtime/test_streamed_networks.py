"""Networks streamed on PoCL: bit for bit what they give with all weights loaded."""

import functools

import numpy as np
import pytest
import torch
from oracles.step_networks import SmallCNN, SmallGPT, SmallViT
from oracles.streaming_programs import instance_of, random_plan
from oracles.targets import target_here

from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import ArraysSource
from torchedge.streaming.plans import STRATEGIES
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule

pytest.importorskip("pyopencl")

PLANS = {**STRATEGIES, "random": lambda instance: random_plan(instance, 1)}


def build(name):
    """Return (model, inputs)."""
    torch.manual_seed(0)
    if name == "gpt":
        return SmallGPT(words=211, width=32, depth=3), (torch.randint(0, 211, (2, 8)),)
    if name == "vit":
        return SmallViT(width=48, depth=2), (torch.randn(1, 3, 16, 16),)
    return SmallCNN(width=32), (torch.randn(1, 3, 8, 8),)


@functools.cache
def lowered(name, target):
    """Return (program, logical arrays of its weights, inputs, outputs with all weights loaded)."""
    model, inputs = build(name)
    captured = capture_inference_step(model.eval(), inputs)
    program = lower_inference(captured, target_here(target)).program
    names = {t.name for t in program.tensors}
    data = {n: t.detach().numpy() for n, t in captured.tensors.items() if n in names}
    arrays = [x.numpy() for x in inputs]
    with Executor(program) as executor:
        executor.load(data)
        outputs = executor.run(*arrays)
    with torch.no_grad():
        expected = model(*inputs)
    expected = expected["logits"] if isinstance(expected, dict) else expected
    np.testing.assert_allclose(outputs[0], expected.numpy(), rtol=1e-3, atol=1e-4)
    return program, data, arrays, outputs


@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("cnn", "cpu"), ("cnn", "mobile"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt", "cpu"), ("gpt", "gpu"), ("vit", "mobile"),
            )
        ],
    ],
)  # fmt: skip
def test_streaming_gives_the_same_bits(name, target, plan):
    program, data, arrays, outputs = lowered(name, target)
    instance = instance_of(program, 4096)
    schedule = make_schedule(program, instance, PLANS[plan](instance), LEAST_STAGING_BYTES)
    packed = {t.name: t.layout.pack(data[t.name]) for t in program.tensors if t.name in data}
    with Executor(schedule, source=ArraysSource(packed), profile=True, checks=plan == "random") as executor:
        for _ in range(2):
            for streamed, preloaded in zip(executor.run(*arrays), outputs, strict=True):
                np.testing.assert_array_equal(streamed, preloaded)
        measured = executor.measured()
    assert measured.allocated_bytes == schedule.memory.total_bytes
    if target == "mobile":
        assert measured.allocated["images"] > 0
    if plan == "always-next":
        storages = {program.tensors[index].layout.storage for index in schedule.streamed}
        assert ("image" in storages) == (target == "mobile")


@pytest.mark.slow
def test_streaming_takes_less_memory_than_preloading():
    program, *_ = lowered("gpt", "cpu")
    instance = instance_of(program, 4096)
    totals = {
        name: make_schedule(program, instance, PLANS[name](instance), LEAST_STAGING_BYTES).memory
        for name in ("preload-all", "always-next")
    }
    weights = totals["preload-all"].preloaded_bytes
    assert totals["always-next"].preloaded_bytes + totals["always-next"].arena_bytes < weights / 2
