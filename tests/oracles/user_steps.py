"""Training steps as users write them: what a watch predicts, and what the same code holds on meta tensors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from oracles.eager_memory import LiveStorages, _calibrated
from torch import nn
from torch.nn import functional

import torchedge
from torchedge.prediction.memory.step_tapes import write_tape

WIDTH, NOISE = 256, 8


@dataclass(frozen=True)
class Loop:
    """Modules and inputs that are on the device, and one pass of a loop over them."""

    modules: Sequence[nn.Module]
    inputs: Sequence[torch.Tensor]
    step: Callable[[], Any]


def layers(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLUs between them."""
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return Adam over modules, with the implementation of GPUs."""
    return torch.optim.Adam([p for module in modules for p in module.parameters()], foreach=True)


def score(scores: torch.Tensor, answer: float) -> torch.Tensor:
    """Return how far a critic's scores are from an answer."""
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, answer))


STEPS: dict[str, Callable[[int], Loop]] = {}
"""Steps by name: each makes its loop from a batch size."""


def step_of(*widths: int, sgd: bool = False) -> Callable[[Callable[..., None]], Callable[[int], Loop]]:
    """Register a step of one network, of its optimizer and a batch."""

    def register(step: Callable[..., None]) -> Callable[[int], Loop]:
        def make(batch: int) -> Loop:
            net, x = layers(*widths), torch.randn(batch, WIDTH)
            optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=True) if sgd else adam(net)
            return Loop((net,), (x,), lambda: step(net, optimizer, x))

        return STEPS.setdefault(step.__name__, make)

    return register


def step_of_gan(step: Callable[..., None]) -> Callable[[int], Loop]:
    """Register a step of a generator, its critic, their optimizers and real pictures."""

    def make(batch: int) -> Loop:
        generator, critic = layers(NOISE, WIDTH, WIDTH), layers(WIDTH, WIDTH, 1)
        generating, judging, real = adam(generator), adam(critic), torch.randn(batch, WIDTH)
        return Loop((generator, critic), (real,), lambda: step(generator, critic, generating, judging, real))

    return STEPS.setdefault(step.__name__, make)


def made(make: Callable[[int], Loop]) -> Callable[[int], Loop]:
    """Register what makes a loop of several modules."""
    return STEPS.setdefault(make.__name__, make)


def noise(real: torch.Tensor) -> torch.Tensor:
    """Return as much noise for a generator as there are pictures."""
    return torch.randn(len(real), NOISE)


@step_of_gan
def gan_with_one_picture(generator, critic, generating, judging, real):
    """One generated batch serves both updates: its graph outlives the critic's."""
    judging.zero_grad()
    fake = generator(noise(real))
    (score(critic(real), 1) + score(critic(fake.detach()), 0)).backward()
    judging.step()
    generating.zero_grad()
    score(critic(fake), 1).backward()
    generating.step()


@step_of_gan
def gan_without_gradients(generator, critic, generating, judging, real):
    """The critic's pictures are generated without gradients, and its losses differentiated one by one."""
    with torch.no_grad():
        fake = generator(noise(real))
    judging.zero_grad()
    score(critic(real), 1).backward()
    score(critic(fake), 0).backward()
    judging.step()
    generating.zero_grad()
    fake = generator(noise(real))
    score(critic(fake), 1).backward()
    generating.step()


@step_of_gan
def critic_steps_twice(generator, critic, generating, judging, real):
    """Two updates of the critic to one of the generator."""
    for _ in range(2):
        judging.zero_grad()
        fake = generator(noise(real)).detach()
        (score(critic(real), 1) + score(critic(fake), 0)).backward()
        judging.step()
    generating.zero_grad()
    score(critic(generator(noise(real))), 1).backward()
    generating.step()


@made
def two_optimizers(batch: int) -> Loop:
    """One loss, an optimizer for each part."""
    body, head = layers(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    first, second = adam(body), torch.optim.SGD(head.parameters(), 0.1, foreach=True)
    x = torch.randn(batch, WIDTH)

    def step() -> None:
        first.zero_grad()
        second.zero_grad()
        head(body(x)).square().mean().backward()
        first.step()
        second.step()

    return Loop((body, head), (x,), step)


@made
def two_backwards(batch: int) -> Loop:
    """Two losses over one graph, which the first backward pass retains."""
    body, head, other = layers(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer, x = adam(body, head, other), torch.randn(batch, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        hidden = body(x)
        loss = head(hidden).square().mean()
        second = other(hidden).square().mean()
        loss.backward(retain_graph=True)
        second.backward()
        optimizer.step()

    return Loop((body, head, other), (x,), step)


@step_of(WIDTH, WIDTH, WIDTH, WIDTH)
def gradients_become_zeros(net, optimizer, x):
    """`zero_grad(set_to_none=False)`."""
    optimizer.zero_grad(set_to_none=False)
    net(x).square().mean().backward()
    optimizer.step()


@step_of(WIDTH, 4 * WIDTH, WIDTH, sgd=True)
def gradients_end_late(net, optimizer, x):
    """The old gradients end behind the forward pass."""
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@made
def teacher(batch: int) -> Loop:
    """Distillation: a wide teacher without gradients."""
    net, wide = layers(WIDTH, 128, WIDTH), layers(WIDTH, 2 * WIDTH, 2 * WIDTH, WIDTH)
    optimizer, x = adam(net), torch.randn(batch, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            expected = wide(x)
        functional.mse_loss(net(x), expected).backward()
        optimizer.step()

    return Loop((net, wide), (x,), step)


@made
def average(batch: int) -> Loop:
    """A moving average of the weights, updated behind the step."""
    net, x = layers(WIDTH, WIDTH, WIDTH, WIDTH), torch.randn(batch, WIDTH)
    mean = torch.optim.swa_utils.AveragedModel(net)
    optimizer = adam(net)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        len([*mean.parameters()])

    return Loop((net, mean), (x,), step)


@made
def copied_target(batch: int) -> Loop:
    """A target network, which is a copy of the one that learns."""
    net, x = layers(WIDTH, WIDTH, WIDTH, WIDTH), torch.randn(batch, WIDTH)
    target, optimizer = copy.deepcopy(net), adam(net)

    def step() -> None:
        with torch.no_grad():
            expected = target(x)
        optimizer.zero_grad()
        functional.mse_loss(net(x), expected).backward()
        optimizer.step()

    return Loop((net, target), (x,), step)


@step_of(WIDTH, *[WIDTH] * 16, sgd=True)
def clips(net, optimizer, x):
    """Gradients are clipped by their norm, after `zero_grad` behind the forward pass."""
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    optimizer.step()


@step_of(WIDTH, WIDTH, WIDTH, WIDTH, sgd=True)
def measures_gradients(net, optimizer, x):
    """The norm of all gradients in one tensor, and each one's own."""
    optimizer.zero_grad()
    net(x).square().mean().backward()
    torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    torch.stack([p.grad.data.norm() for p in net.parameters()]).norm()
    optimizer.step()


@step_of(WIDTH, WIDTH, WIDTH, WIDTH)
def clips_what_accumulates(net, optimizer, x):
    """Two micro-batches, and clipping behind the second."""
    for _ in range(2):
        (net(x).square().mean() / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Scaler:
    """What `torch.amp.GradScaler` computes, on meta tensors, whose gradients it refuses."""

    def __init__(self) -> None:
        self.factor, self.growth = torch.full((), 65536.0), torch.full((), 0, dtype=torch.int32)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss times the factor."""
        return loss * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients in place, and look for infinities."""
        self.inverse, self.infinite = self.factor.reciprocal(), torch.full((), 0.0)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(self.inverse)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update."""
        optimizer.step()

    def update(self) -> None:
        """Drop what one step needs."""
        del self.inverse, self.infinite


@made
def scales(batch: int) -> Loop:
    """Gradients of a scaled loss, unscaled and clipped."""
    net, x = layers(WIDTH, WIDTH, WIDTH, WIDTH), torch.randn(batch, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=True)
    scaler: Any = Scaler() if x.is_meta else torch.amp.GradScaler("cpu")

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Loop((net,), (x,), step)


@made
def tried_before(batch: int) -> Loop:
    """A first call of the body tells how wide the head has to be."""
    body, x = layers(WIDTH, WIDTH, WIDTH), torch.randn(batch, WIDTH)
    nets: list[nn.Module] = []

    def step() -> None:
        if not nets:
            nets.append(nn.Sequential(body, nn.Linear(body(x[:1]).shape[1], WIDTH)))
            nets.append(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
        optimizer = torch.optim.SGD([p for n in nets for p in n.parameters()], 0.1, foreach=True)
        loss = nets[1](nets[0](x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Loop((body,), (x,), step)


def counted_peak(make: Callable[[int], Loop], batch: int) -> int:
    """Return the most bytes of the second pass of a loop on meta tensors."""
    with torch.device("meta"):
        loop = make(batch)
    mode = LiveStorages()
    mode.owned = _calibrated("meta")
    for module in loop.modules:
        for tensor in (*module.parameters(), *module.buffers()):
            mode.follow(tensor.data, "weights")
    for tensor in loop.inputs:
        mode.follow(tensor, "input")
    gc.collect()
    gc.disable()
    try:
        with torch.device("meta"), mode:
            loop.step()
            mode.reset_peak()
            loop.step()
    finally:
        gc.enable()
    return mode.peak


def watched(make: Callable[[int], Loop], batch: int, device: str = "nvidia-h200") -> Any:
    """Return the watch over one pass of a loop."""
    loop = make(batch)
    with torchedge.watch(device) as watch:
        loop.step()
    return watch


def predicted_peak(watch: Any, batch: int) -> int:
    """Return the most bytes of a watched step, without workspaces of CUDA's libraries."""
    settings = replace(watch.settings, backend="cpu", attention="math")
    return int(write_tape(watch.graph, settings).peak_bytes(np.array([batch]))[0])
