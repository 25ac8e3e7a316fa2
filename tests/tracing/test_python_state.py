"""Texts of what decides about a capture: one for equal models, others for changes, none where unknown."""

import contextlib
import decimal
import enum
import functools
import gc
import logging
import math
import os
import sys
import threading
import types

import pytest
import torch
from oracles.children import python
from torch import nn
from torch.nn import functional as F

from torchedge.tracing.python_state import PythonState, identity_of
from torchedge.tracing.vision import prepare_torchvision

SCALE = 2.0
SETTINGS = {"slope": 0.1}


class Scaled(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(width, 3)
        self.slope = 0.5

    def forward(self, x):
        return twice(self.second(F.leaky_relu(self.first(x), self.slope) * SCALE))


def twice(x):
    return x * SETTINGS["slope"] * 2


class FromEnvironment(nn.Module):
    def forward(self, x):
        return x * float(os.environ.get("FACTOR", "1"))


class WithImport(nn.Module):
    def forward(self, x):
        import random

        return x * random.random()


class FromFile(nn.Module):
    def forward(self, x):
        return x * len(open(__file__).read())


@pytest.mark.slow
def test_code_that_generates_text_decides_nothing_about_a_forward_pass():
    prepare_torchvision()
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    assert PythonState({"model": adapted}, tracing=True).clocks == []  # batches of prompts read the time


def test_equal_models_have_one_text():
    text = identity_of(Scaled(), F.mse_loss, {"size": (2, 3)})
    assert text is not None and text == identity_of(Scaled(), F.mse_loss, {"size": (2, 3)})


def changed(model, change):
    change(model)
    return model


CHANGES = {
    "attribute": lambda m: setattr(m, "slope", 0.25),
    "mode": lambda m: m.second.eval(),
    "frozen": lambda m: m.first.bias.requires_grad_(False),
    "shape": lambda m: setattr(m, "second", nn.Linear(4, 5)),
    "dtype": lambda m: m.first.double(),
    "other layer": lambda m: setattr(m, "second", nn.Sequential(nn.Linear(4, 3))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_model_change_the_text(change):
    text = identity_of(changed(Scaled(), CHANGES[change]))
    assert text is not None and text != identity_of(Scaled())


def test_tied_weights_are_told_from_equal_ones():
    tied, apart = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert identity_of(tied) != identity_of(apart)


@pytest.mark.parametrize(("home", "name", "value"), [("module", "SCALE", 3.0), ("settings", "slope", 0.3)])
def test_what_the_code_names_counts(monkeypatch, home, name, value):
    before = identity_of(Scaled())
    if home == "module":
        monkeypatch.setattr(sys.modules[__name__], name, value)
    else:
        monkeypatch.setitem(SETTINGS, name, value)
    assert identity_of(Scaled()) != before is not None


def test_functions_count_by_code_defaults_and_closures():
    def loss(weight, default):
        return lambda y, target, scale=default: F.mse_loss(y, target) * weight * scale

    texts = [identity_of(loss(*values)) for values in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))]
    texts += [identity_of(f) for f in (F.mse_loss, F.l1_loss, functools.partial(F.mse_loss, reduction="sum"))]
    texts += [identity_of(lambda y, t: (y - t).sum()), identity_of(lambda y, t: (y - t).mean())]
    assert None not in texts and len(set(texts)) == len(texts)


def test_torchs_defaults_count():
    before = identity_of(Scaled())
    with torch.autocast("cpu"), torch.no_grad():
        assert identity_of(Scaled()) != before


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(3)

    def forward(self, x):
        return x * self.table


UNSEEN = {
    WithTable: "Tensor",
    FromEnvironment: "module os",
    WithImport: "an import of random in forward",
    FromFile: "['open'] in forward",
}


@pytest.mark.parametrize("model", UNSEEN)
def test_what_may_decide_unseen_has_no_text_and_is_logged(model, caplog):
    caplog.set_level("DEBUG", "torchedge")
    assert identity_of(model()) is None
    assert caplog.messages == [f"what decides about a capture has no text: {UNSEEN[model]}"]


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu, self.unread = nn.ReLU(), 1

    def forward(self, x):
        return self.relu(x) * math.pi * getattr(torch, "extra", 1)


OUTSIDE = {
    "a layer's forward": lambda m: m.setattr(nn.ReLU, "forward", lambda self, x: x),
    "a function that a layer calls": lambda m: m.setattr(F, "relu", lambda x, inplace=False: x),
    "the call of modules": lambda m: m.setattr(nn.Module, "__call__", lambda self, x: x),
    "a value of math": lambda m: m.setattr(math, "pi", 3),
    "a value put on torch": lambda m: m.setattr(torch, "extra", 2, raising=False),
    "a global hook": lambda m: m.setitem(nn.modules.module._global_forward_hooks, 0, lambda *_: None),
}


@pytest.mark.parametrize("change", OUTSIDE)
def test_what_is_patched_outside_of_a_model_changes_state_and_text(monkeypatch, change):
    model = Rectified()
    state = PythonState({"model": model})
    assert state.text is not None and state.same()
    OUTSIDE[change](monkeypatch)
    assert not state.same()
    assert PythonState({"model": model}).signature != state.signature
    monkeypatch.undo()
    assert state.same()
    model.unread = 2
    assert state.same()


@contextlib.contextmanager
def setting(home, name, value):
    if not hasattr(home, name):
        pytest.skip("this PyTorch lacks the setting")
    before = getattr(home, name)
    try:
        setattr(home, name, value)
    except RuntimeError as error:  # PyTorch's own test utilities, which other tests import, freeze flags
        pytest.skip(str(error))
    yield
    setattr(home, name, before)


@pytest.mark.parametrize(
    "flags",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        torch.no_grad,
        lambda: setting(torch.backends, "fp32_precision", "ieee"),
        lambda: setting(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: setting(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_flags_of_pytorch_change_state_and_text(flags):
    state = PythonState({"model": Scaled()})
    with flags():
        assert not state.same()
        assert PythonState({"model": Scaled()}).text != state.text
    assert state.same()


def test_a_variable_of_the_environment_is_watched(monkeypatch):
    monkeypatch.setenv("FACTOR", "2")
    state = PythonState({"model": FromEnvironment()})
    assert state.same()
    monkeypatch.setenv("FACTOR", "3")
    assert not state.same()
    assert [str(change) for change in state.changes()] == ["os.environ ([b'2'], then [b'3'])"]


def test_changes_are_named_and_restored():
    model = Scaled()
    model.first.register_forward_hook(lambda *_: None)
    state = PythonState({"model": model})
    model.slope = 0.75
    model.first._forward_hooks.clear()
    assert sorted(map(str, state.changes())) == [
        "model.first._forward_hooks (a list, then [])",
        "model.slope (0.5, then 0.75)",
    ]
    state.restore()
    assert state.same() and model.slope == 0.5 and len(model.first._forward_hooks) == 1


@pytest.mark.slow
def test_other_processes_have_the_same_text():
    code = (
        "import hashlib, torch; from torchedge.tracing.python_state import identity_of; "
        "from torchedge.tracing.vision import import_torchvision; "
        "model = import_torchvision().models.mobilenet_v2(); "
        "text = identity_of(model, {'a', 'b', 'c'}, torch.nn.functional.l1_loss); "
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    first, second = (python("-c", code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2"))
    assert first == second


def test_a_variable_that_code_fills_later_is_a_change():
    def made():
        def read():
            return value

        def fill(number):
            nonlocal value
            value = number

        if not made:
            value = 0
        return read, fill

    read, fill = made()
    state = PythonState({"read": read})
    assert state.same()
    fill(3)
    assert not state.same()
    (change,) = state.changes()
    assert "value of" in str(change) and str(change).endswith("(absent, then 3)")
    state.restore()
    assert state.same()
    with pytest.raises(NameError):
        read()


class OfLine(nn.Module):
    """Reads a member of a C structure: read-only, and another object each time."""

    def __init__(self):
        super().__init__()
        self.code = twice.__code__.replace(co_firstlineno=1000)

    def forward(self, x):
        return x * self.code.co_firstlineno


def test_read_only_members_of_c_structures_are_state_and_are_left_as_they_are():
    model = OfLine()
    state = PythonState({"model": model})
    state.restore()
    assert state.same() and not state.changes()
    assert state.text is not None and state.text == PythonState({"model": OfLine()}).text
    model.code = model.code.replace(co_firstlineno=2000)
    assert PythonState({"model": model}).text != state.text


class OfAnyName(nn.Module):
    """Reads a function's attribute by a computed name, and one that a module may have."""

    def __init__(self, module):
        super().__init__()
        self.module, self.part = module, functools.partial(torch.add, torch.ones(1))

    def forward(self, x):
        return getattr(self, "".join(["pa", "rt"]))(x) * getattr(self.module, "scale", 1.0)


def test_a_name_that_a_module_gets_later_is_a_change():
    module = types.ModuleType("settings")
    model = OfAnyName(module)
    state = PythonState({"model": model})
    assert state.same()
    module.torchedge_unread = 1
    module.scale = 3.0
    state = PythonState({"model": model})
    del module.scale
    assert not state.same() and "scale" in str(state.changes()[0])
    state = PythonState({"model": model})
    module.scale = 2.0
    del module.torchedge_unread  # as many names as before
    assert not state.same() and "scale" in [c.path.rpartition(".")[2] for c in state.changes()]
    state.restore()
    assert not hasattr(module, "scale") and state.same()


class Weighted(enum.Enum):
    ONE = 1


Weighted.ONE.weight = 1.0
BY_NAME = 1.0


def by_globals():
    return globals()["BY_NAME"]


def set_by_name(value):
    global BY_NAME
    BY_NAME = value


ASKED = {
    "decimals": (
        lambda: decimal.getcontext().prec,
        lambda n: setattr(decimal.getcontext(), "prec", n),
        28,
        5,
    ),
    "the folder": (lambda: os.getcwd(), os.chdir, os.getcwd(), os.sep),
    "a logger's level": (
        lambda: logging.getLogger("asked").isEnabledFor(10),
        lambda level: logging.getLogger("asked").setLevel(level),
        0,
        10,
    ),
    "recursion": (lambda: sys.getrecursionlimit(), sys.setrecursionlimit, sys.getrecursionlimit(), 1234),
    "collection": (lambda: gc.isenabled(), lambda on: gc.enable() if on else gc.disable(), True, False),
    "words of the program": (
        lambda: len(sys.argv),
        lambda words: sys.argv.__setitem__(slice(None), words),
        [*sys.argv],
        ["a", "b", "c", "d"],
    ),
    "a thread's name": (
        lambda: threading.current_thread().name,
        lambda name: setattr(threading.current_thread(), "name", name),
        threading.current_thread().name,
        "another",
    ),
    "a member's attribute": (
        lambda: Weighted.ONE.weight,
        lambda weight: setattr(Weighted.ONE, "weight", weight),
        1.0,
        2.0,
    ),
    "a global by its name": (by_globals, set_by_name, 1.0, 2.0),
}


@pytest.mark.parametrize("case", ASKED)
def test_state_of_the_process_that_libraries_return_is_compared(case):
    ask, change, before, now = ASKED[case]
    state = PythonState({"ask": ask})
    answer = ask()
    assert state.same() and not state.changes()
    try:
        change(now)
        assert ask() != answer
        assert not state.same() and state.changes()
        assert PythonState({"ask": ask}).signature != state.signature
    finally:
        change(before)
    assert state.same()
