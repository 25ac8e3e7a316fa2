"""Forward passes that change the Python state that they read: refused by name, or without influence."""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import dataclass
from functools import cache as memoized
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.step_interpreter import Interpreter
from torch import nn

from torchedge.errors import CaptureError
from torchedge.tracing.steps import capture_step

CALLS, CACHE = [0], {}
TOTAL = 0


@dataclass
class Counter:
    number: int = 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.seen, self.table = nn.Linear(4, 4), 0, [], {}
        self.counter, self.first, self.state, self.width = Counter(), True, None, 0
        self.random, self.generator = random.Random(3), np.random.default_rng(0)
        self.numbers, self.plain = itertools.count(), torch.zeros(1)


def of_closure():
    calls = 0

    def forward(self, x):
        nonlocal calls
        calls += 1
        return self.layer(x) * calls

    return forward


def attribute(self, x):
    self.calls += 1
    return self.layer(x) * self.calls


def list_(self, x):
    self.seen.append(1)
    return self.layer(x) * len(self.seen)


def dict_(self, x):
    self.table["calls"] = self.table.get("calls", 0) + 1
    return self.layer(x) * self.table["calls"]


def dataclass_(self, x):
    self.counter.number += 1
    return self.layer(x) * self.counter.number


def entry_of_a_global(self, x):
    CALLS[0] += 1
    return self.layer(x) * CALLS[0]


def global_(self, x):
    global TOTAL
    TOTAL += 1
    return self.layer(x) * TOTAL


def first_call(self, x):
    if self.first:
        self.first = False
        return self.layer(x) * 2
    return self.layer(x)


def hidden_state(self, x):
    self.state = x if self.state is None else x + self.state * 0.5
    return self.layer(self.state)


def plain_tensor(self, x):
    self.plain = self.plain + 1
    return self.layer(x) * self.plain


def plain_tensor_in_place(self, x):
    self.plain += 1
    return self.layer(x) * self.plain


def environment(self, x):
    os.environ["TORCHEDGE_TEST_CALLS"] = str(int(os.environ.get("TORCHEDGE_TEST_CALLS", "0")) + 1)
    return self.layer(x) * int(os.environ["TORCHEDGE_TEST_CALLS"])


def imported_random(self, x):
    import random as numbers

    return self.layer(x) * numbers.random()


REFUSED = {
    "attribute": (attribute, "model.calls (1, then 2)"),
    "list": (list_, "model.seen ([1], then [1, 1])"),
    "dict": (dict_, "model.table"),
    "dataclass": (dataclass_, "model.counter.number"),
    "closure": (of_closure(), "calls of of_closure"),
    "entry of a global": (entry_of_a_global, "CALLS ([1], then [2])"),
    "global": (global_, "TOTAL (1, then 2)"),
    "iterator": (lambda self, x: self.layer(x) * next(self.numbers), "model.numbers, an iterator"),
    "first call": (first_call, "model.first (True, then False)"),
    "hidden state": (hidden_state, "model.state"),
    "plain tensor": (plain_tensor, "model.plain"),
    "plain tensor in place": (plain_tensor_in_place, "neither a parameter nor a buffer"),
    "clock": (lambda self, x: self.layer(x) * time.perf_counter(), "from time"),
    "environment": (environment, "os.environ ([b'1'], then [b'2'])"),
    "system number": (
        lambda self, x: self.layer(x) * int.from_bytes(os.urandom(8), "big"),
        "from os.urandom",
    ),
    "unseeded numpy": (
        lambda self, x: self.layer(x) * np.random.default_rng().random(),
        "from numpy.random.default_rng",
    ),
    "file": (
        lambda self, x: self.layer(x) * len(Path(__file__).read_text()),
        f"reads the file '{Path(__file__).name}' at",
    ),
    "array file": (
        lambda self, x: self.layer(x) * float(np.fromfile(__file__, np.uint8, 1)[0]),
        f"reads the file '{Path(__file__).name}' at",
    ),
    "random number": (lambda self, x: self.layer(x) * random.random(), "from random"),
    "random branch": (
        lambda self, x: self.layer(x) if random.random() < 0.01 else x * self.layer.weight.sum(),
        "from random",
    ),
    "imported random": (imported_random, "from random"),
    "numpy number": (lambda self, x: self.layer(x) * np.random.rand(), "from numpy.random"),
    "own random": (lambda self, x: self.layer(x) * self.random.random(), "model.random"),
    "own numpy": (lambda self, x: self.layer(x) * self.generator.random(), "model.generator"),
    "torch number": (lambda self, x: self.layer(x) * torch.rand(1).item(), "decides by values"),
    "gradient": (
        lambda self, x: self.layer(x) if self.layer.weight.grad is None else x,
        "reads .grad at test_changing_state.py",
    ),
}


def with_forward(forward):
    return type("Model", (Layer,), {"forward": forward})()


def captured(forward, model=None):
    x = torch.randn(4, 4)
    model = with_forward(forward) if model is None else model
    return model, x, capture_step(model, x, loss=lambda output: output.square().sum())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("forward", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_step_would_freeze_is_refused_and_stays_as_it_was(forward, words):
    model = with_forward(forward)
    numbers = random.getstate(), model.random.getstate(), model.generator.bit_generator.state
    with pytest.raises(CaptureError, match=r"forward|decides|writes") as refusal:
        captured(forward, model)
    assert words in str(refusal.value)
    assert (CALLS, TOTAL, model.calls, model.seen, model.table) == ([0], 0, 0, [], {})
    assert (model.counter.number, model.first, model.state) == (0, True, None)
    assert numbers == (random.getstate(), model.random.getstate(), model.generator.bit_generator.state)


def statistics(self, x):
    self.calls += 1
    self.seen_last = x.shape
    return self.layer(x)


@memoized
def read_once():
    return len(Path(__file__).read_text())


def cache(self, x):
    if self.state is None or self.width < x.shape[0]:
        self.state, self.width = torch.arange(4.0), x.shape[0]
    return self.layer(x) * self.state


def global_cache(self, x):
    if "table" not in CACHE:
        CACHE["table"] = torch.arange(4.0)
    return self.layer(x) * CACHE["table"]


def last_output(self, x):
    self.state = self.layer(x)
    return self.state * 2


def timed(self, x):
    self.width = time.perf_counter()
    return self.layer(x)


ACCEPTED = {
    "statistics": statistics,
    "file read once": lambda self, x: self.layer(x) * read_once(),
    "cache": cache,
    "global cache": global_cache,
    "last output": last_output,
    "certain draw": lambda self, x: self.layer(x) if random.random() < 1.0 else x,
    "timed": timed,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("forward", ACCEPTED.values(), ids=ACCEPTED)
def test_changes_without_influence_are_accepted(forward):
    model, x, step = captured(forward)
    loss, *_ = Interpreter(step.tensors).run(step.step, x)
    assert not CACHE and model.state is None and model.width == 0
    torch.testing.assert_close(loss, model(x).square().sum())
    torch.testing.assert_close(loss, model(x).square().sum())
    CACHE.clear()


def test_a_loss_with_state_is_refused_and_keeps_its_hooks():
    class Loss(nn.Module):
        calls = 0

        def forward(self, output):
            self.calls = self.calls + 1
            return output.sum() * self.calls

    loss = Loss()
    with pytest.raises(CaptureError, match=r"loss\.calls"):
        capture_step(nn.Linear(2, 2), torch.randn(2, 2), loss=loss)
    assert loss.calls == 0 and not loss._forward_hooks and not loss._forward_pre_hooks


def counting(x, owner):
    owner.calls += 1
    return x * owner.calls


def with_hook(register):
    model = with_forward(lambda self, x: self.layer(x))
    register(model)
    return model


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return counting(gradient, Counting)


def counted_output(model):
    model.layer.register_forward_hook(lambda module, args, output: counting(output, model))


def counted_gradient(model):
    model.layer.register_full_backward_pre_hook(lambda module, gradients: (counting(gradients[0], model),))


def counted_function(model):
    model.layer.register_forward_hook(lambda module, args, output: Counting.apply(output))


@pytest.mark.parametrize("register", [counted_output, counted_gradient, counted_function])
def test_counters_of_hooks_and_of_the_backward_pass_are_refused(register):
    model = with_hook(register)
    with pytest.raises(CaptureError, match=r"calls \((0, then 1|1, then 2)\)"):
        captured(None, model)
    assert model.calls == Counting.calls == 0
    assert len(model.layer._forward_hooks) + len(model.layer._backward_pre_hooks) == 1


def keep_gradient(model, module, before, after):
    model.gradient = after


def test_what_hooks_keep_without_influence_is_accepted():
    model = with_hook(lambda m: m.layer.register_forward_hook(lambda _, args, output: m.seen.append(output)))
    model.layer.register_full_backward_hook(partial(keep_gradient, model))
    _, x, step = captured(None, model)
    loss, *_ = Interpreter(step.tensors).run(step.step, x)
    torch.testing.assert_close(loss, model(x).square().sum())


def test_another_default_dtype_is_captured():
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    torch.set_default_dtype(torch.float64)  # which exchanges torch.Storage
    try:
        step = capture_step(model, x, loss=lambda output: (output * torch.ones(4)).sum())
    finally:
        torch.set_default_dtype(torch.float32)
    loss, *_ = Interpreter(step.tensors).run(step.step, x)
    torch.testing.assert_close(loss, model(x).double().sum())
