"""`Trainer` where Python state changes between its steps: it captures again, as eager PyTorch would run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchedge
from torchedge.runtime.host_marks import HostMarks

pytest.importorskip("pyopencl")

SCALE = 1.0
SETTINGS = {"shift": 0.5}


@dataclass
class Config:
    slope: float = 0.5


class Inner(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.layer, self.config, self.list = nn.Linear(4, 4), Config(), [1.0, {"bias": 0.25}]
        self.activation = partial(F.leaky_relu, negative_slope=0.1)

    def forward(self, x):
        x = self.activation(self.layer(x) * self.config.slope) * self.factor * SCALE
        return x + self.list[1]["bias"] + SETTINGS["shift"]


def model_with(power):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.tau = Inner(), 1.0

        def forward(self, x):
            y = self.inner(x)
            return y * power[0] * self.tau if self.training else y

    return Outer()


def transposed(self, x):
    return x @ self.weight + self.bias


CALL = nn.Module.__call__


CHANGES = {
    "attribute": lambda m, p, patch: setattr(m, "tau", 0.1),
    "dataclass": lambda m, p, patch: setattr(m.inner.config, "slope", 0.25),
    "nested containers": lambda m, p, patch: m.inner.list[1].update(bias=-1.0),
    "class attribute": lambda m, p, patch: patch.setattr(Inner, "factor", 3.0),
    "global": lambda m, p, patch: patch.setitem(globals(), "SCALE", 0.5),
    "entry of a global": lambda m, p, patch: patch.setitem(SETTINGS, "shift", 1.5),
    "closure": lambda m, p, patch: p.__setitem__(0, 2.0),
    "partial": lambda m, p, patch: setattr(m.inner, "activation", partial(F.leaky_relu, negative_slope=0.7)),
    "hook": lambda m, p, patch: m.inner.layer.register_forward_hook(
        lambda module, inputs, output: output * 2
    ),
    "mode": lambda m, p, patch: m.eval(),
    "own forward": lambda m, p, patch: setattr(
        m.inner.layer, "forward", MethodType(transposed, m.inner.layer)
    ),
    "class's forward": lambda m, p, patch: patch.setattr(Inner, "forward", lambda self, x: self.layer(x)),
    "hook of every module": lambda m, p, patch: patch.setitem(
        nn.modules.module._global_forward_pre_hooks, 0, lambda module, args: (args[0] * 1.5,)
    ),
    "result hook of every module": lambda m, p, patch: patch.setitem(
        nn.modules.module._global_forward_hooks, 0, lambda module, args, output: output * 1.5
    ),
    "call of every module": lambda m, p, patch: patch.setattr(
        nn.Module, "__call__", lambda self, *args: CALL(self, *args) * 2
    ),
}


def losses(step, model, power, change):
    found = [step(), step()]
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[change](model, power, patch)
        return [*found, step(), step()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_changes_between_steps_counts_as_in_eager(change):
    torch.manual_seed(0)
    powers = [1.5], [1.5]
    models = [model_with(power) for power in powers]
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def eager():
        loss = F.mse_loss(models[0](x), y)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        return loss.item()

    wanted = losses(eager, models[0], powers[0], change)
    with torchedge.Trainer(models[1], x, y, loss=F.mse_loss, optimizer=optimizers[1]) as trainer:
        found = losses(lambda: trainer.step(x, y), models[1], powers[1], change)
    assert found == pytest.approx(wanted, rel=1e-4)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


REPLACED = {
    "layer": lambda m: setattr(m.inner, "layer", nn.Linear(4, 4)),
    "weight": lambda m: setattr(m.inner.layer, "weight", nn.Parameter(torch.ones(4, 4))),
    "state dict": lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}, assign=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", REPLACED)
def test_weights_that_are_replaced_are_named_until_they_are_loaded(change):
    torch.manual_seed(0)
    model = model_with([1.5])
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchedge.Trainer(model, x, y, loss=F.mse_loss, optimizer=optimizer) as trainer:
        trainer.predict(x)
        REPLACED[change](model)
        with pytest.raises(torchedge.InputError, match=r"inner\.layer\.weight is another tensor"):
            trainer.predict(x)
        trainer.load()
        torch.testing.assert_close(trainer.predict(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def buffer_of(optimizer):
    return next(iter(optimizer.state.values()))["momentum_buffer"]


WRITTEN = {
    "in place": (lambda m, o: m.inner.layer.weight.detach().mul_(2), r"inner\.layer\.weight"),
    "through .data": (lambda m, o: m.inner.layer.bias.data[1:].fill_(0.5), r"inner\.layer\.bias"),
    "other data": (lambda m, o: setattr(m.inner.layer.weight, "data", torch.ones(4, 4)), "weight"),
    "state dict": (lambda m, o: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}), "weight"),
    "optimizer's state": (lambda m, o: buffer_of(o).zero_(), "the optimizer's momentum_buffer"),
    "other optimizer's state": (lambda m, o: o.state.clear(), "the optimizer's state"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("write", WRITTEN)
def test_what_code_writes_to_weights_is_refused_until_it_is_loaded(write):
    torch.manual_seed(0)
    model, (change, name) = model_with([1.5]), WRITTEN[write]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torchedge.Trainer(model, x, y, loss=F.mse_loss, optimizer=optimizer) as trainer:
        trainer.step(x, y)
        trainer.sync()
        trainer.step(x, y)
        trainer.sync()
        change(model, optimizer)
        for refused in (trainer.step, trainer.evaluate):
            with pytest.raises(torchedge.InputError, match=f"{name}.* was written to in main memory"):
                refused(x, y)
        trainer.load()
        assert trainer.step(x, y) == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-4)


def test_marks_cover_large_weights_in_turn():
    weight = torch.zeros(1_000, 100)
    marks = HostMarks({"weight": weight})
    assert not any(marks.changed() for _ in range(8))
    weight.data[-1, -1] = 1.0
    assert "weight" in [marks.changed() for _ in range(4)]


HOOKED = {
    "gradient": lambda m, o: m.inner.layer.weight.register_hook(lambda gradient: gradient * 2),
    "accumulated gradient": lambda m, o: m.inner.layer.weight.register_post_accumulate_grad_hook(print),
    "optimizer": lambda m, o: o.register_step_post_hook(lambda *_: None),
    "every optimizer": lambda m, o: register_optimizer_step_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("hook", HOOKED)
def test_hooks_that_no_step_runs_are_refused_between_steps(hook):
    model, x, y = model_with([1.5]), torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the optimizer's step
    with torchedge.Trainer(model, x, y, loss=F.mse_loss, optimizer=optimizer) as trainer:
        trainer.step(x, y)
        handle = HOOKED[hook](model, optimizer)
        with pytest.raises(torchedge.InputError, match="has a hook, which a captured step does not run"):
            trainer.step(x, y)
        handle.remove()
        trainer.step(x, y)
        optimizer.step = lambda: None
        with pytest.raises(torchedge.InputError, match="the optimizer has a hook"):
            trainer.step(x, y)


def test_a_buffer_that_is_read_after_a_write_to_a_part_of_it():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.ones(4))

        def forward(self, x):
            self.count[1:] = self.count[:-1].clone()
            self.count[0] += 1
            return self.layer(x) * self.count

    torch.manual_seed(0)
    model, x, y = Counting(), torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torchedge.Trainer(model, x, y, loss=F.mse_loss, optimizer=optimizer) as trainer:
        found = [trainer.step(x, y) for _ in range(3)]
    model.count.fill_(1)
    assert found == pytest.approx([F.mse_loss(model(x), y).item() for _ in range(3)], rel=1e-5)
