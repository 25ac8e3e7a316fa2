"""Training programs that compute activations again: fewer bytes, the same bits, PyTorch's gradients."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torchedge.lowering import recomputing
from torchedge.lowering.arenas import live_bytes, total_bytes
from torchedge.lowering.assembly import ALIGNMENT, lower
from torchedge.lowering.recomputing import Checkpoints
from torchedge.lowering.rules import all_rules
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

WIDTH = 16


class Block(nn.Module):
    """A layer with a residual, dropout and, of images, running statistics."""

    def __init__(self, images):
        super().__init__()
        inner = (
            [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)]
            if images
            else [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        )
        self.inner = nn.Sequential(*inner, nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x):
        return x + self.inner(x)


def network(images):
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(images) for _ in range(5)])
    return blocks, torch.randn(2, WIDTH, 12, 12) if images else torch.randn(32, WIDTH)


def captured_step(images):
    model, x = network(images)
    options = {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "seed": 3}
    return x, capture_step(
        model, (x,), loss=lambda y: y.square().mean(), keep=frozenset(all_rules()), **options
    )


def states_after(program, captured, x, steps=3):
    """The losses of some steps, and all that stays on the device after them."""
    with Executor(program) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        losses = [float(executor.run(x.numpy())[0]) for _ in range(steps)]
        names = [t.name for t in program.tensors if t.role in ("parameter", "buffer", "state")]
        return losses, {name: executor.read(name).copy() for name in names}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("images", [True, False])
def test_every_choice_has_the_bits_of_the_program_that_keeps_everything(images):
    x, captured = captured_step(images)
    program = lower(captured.step)
    checkpoints = Checkpoints(program)
    losses, states = states_after(program, captured, x)
    assert any("running_mean" in name for name in states) == images
    assert len(set(losses)) == len(losses)
    for number in (0, len(checkpoints) // 2, len(checkpoints) - 1):
        choice = checkpoints.choice(number, ALIGNMENT)
        assert choice.again or not number
        again, states_again = states_after(choice.program, captured, x)
        assert again == losses
        assert all(np.array_equal(value, states_again[name]) for name, value in states.items())
    assert total_bytes(choice.program.arena) < 0.7 * total_bytes(program.arena)


def test_gradients_are_pytorchs():
    model, x = network(images=False)
    for dropout in [module for module in model.modules() if isinstance(module, nn.Dropout)]:
        dropout.p = 0.0
    captured = capture_step(model, (x,), loss=lambda y: y.square().mean(), keep=frozenset(all_rules()))
    checkpoints = Checkpoints(lower(captured.step))
    program = checkpoints.choice(len(checkpoints) - 1, ALIGNMENT).program
    with Executor(program) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        _, *gradients = executor.run(x.numpy())
    exact = model.double()
    exact(x.double()).square().mean().backward()
    for parameter, gradient in zip(exact.parameters(), gradients, strict=True):
        np.testing.assert_allclose(gradient, parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("images", [True, False])
def test_choices_hold_less_the_more_they_repeat(images):
    program = lower(captured_step(images)[1].step)
    checkpoints = Checkpoints(program)
    choices = [checkpoints.choice(number, ALIGNMENT) for number in range(len(checkpoints))]
    alive = [checkpoints.live_bytes(number) for number in range(len(checkpoints))]
    assert alive == [live_bytes(choice.program) for choice in choices]
    assert alive[-1] < 1.1 * min(alive) and alive[-1] < 0.7 * checkpoints.live_bytes(-1)
    work = [choice.operations for choice in choices]
    assert work == sorted(work) and work[0] < 0.02 and 0.1 < work[-1] < 0.5
    whole = sum(launch.flops for launch in program.launches)
    for choice in choices:
        flops = sum(launch.flops for launch in choice.program.launches)
        assert flops == pytest.approx((1 + choice.operations) * whole)


def test_what_writes_to_weights_and_outputs_runs_once():
    program = lower(captured_step(images=True)[1].step)
    checkpoints = Checkpoints(program)
    own = {t for t, tensor in enumerate(program.tensors) if tensor.role != "intermediate"}

    def writes(program):
        return [
            index
            for launch in program.launches
            for index, access in zip(launch.tensors, program.kernels[launch.kernel].access, strict=True)
            if access != "read" and index in own
        ]

    last = checkpoints.choice(len(checkpoints) - 1, ALIGNMENT).program
    assert sorted(writes(last)) == sorted(writes(program))


def test_an_inference_has_no_choice():
    model, x = network(images=False)
    captured = capture_step(model, (x,), keep=frozenset(all_rules()), gradients=False)
    assert len(Checkpoints(lower(captured.step))) == 0


def test_the_cut_of_a_flow_is_the_smallest():
    edges = {
        "source": {("in", 1): math.inf},
        ("in", 1): {("out", 1): 5},
        ("out", 1): {("in", 2): math.inf, ("in", 3): math.inf},
        ("in", 2): {("out", 2): 2},
        ("in", 3): {("out", 3): 2},
        ("out", 2): {"sink": math.inf},
        ("out", 3): {"sink": math.inf},
    }
    reached = recomputing._reached_by_flow(edges)
    assert {n for n in (1, 2, 3) if ("in", n) in reached and ("out", n) not in reached} == {2, 3}  # 4 below 5
    edges["in", 1]["out", 1] = 3
    assert ("out", 1) not in recomputing._reached_by_flow(edges)
