"""One training step of each network, on the device in use, held against PyTorch in float64."""

import copy

import pytest
import torch

pytest.importorskip("pyopencl")

from drivers.networks import BENCHMARKS, EVERY, ON_PHONES, OTHERS, drawn

import torchedge

BOUND = 1e-4
"""Norm of a gradient's error over the gradient's norm, or over this share of all gradients' norm."""
VANISHING = 1e-3


def exact_gradients(case):
    model = copy.deepcopy(case.model).double()
    inputs = [t.double() if t.is_floating_point() else t for t in case.inputs]
    targets = case.targets.double() if case.targets.is_floating_point() else case.targets
    loss = case.loss(model(*inputs), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_step(case, **settings):
    """Hold loss and gradients of a Trainer's first step against float64's.

    Momentum's buffer is the gradient after the first step.
    """
    expected, exact = exact_gradients(case)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    with torchedge.Trainer(
        case.model, case.inputs, case.targets, loss=case.loss, optimizer=optimizer, **settings
    ) as trainer:
        loss = trainer.step(case.inputs, case.targets)
    assert loss == pytest.approx(expected, rel=BOUND)
    whole = float(torch.stack([g.norm() for g in exact.values()]).norm())
    names = dict(case.model.named_parameters())
    off = {}
    for name, gradient in exact.items():
        mine = optimizer.state[names[name]]["momentum_buffer"].double()
        off[name] = float((mine - gradient).norm()) / max(float(gradient.norm()), VANISHING * whole)
    wrong = {name: error for name, error in off.items() if not error <= BOUND}
    assert not wrong, f"{len(wrong)} of {len(off)} gradients are wrong: {wrong}"


QUICK = ("cnn", "gru", "ranking")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*OTHERS, *BENCHMARKS)
        if EVERY or name in QUICK or name not in ON_PHONES
    ],
)
def test_a_training_step_is_that_of_float64(name):
    check_step(drawn(name))
