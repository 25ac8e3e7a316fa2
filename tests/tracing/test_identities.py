"""Texts of what decides about a capture: one for equal models, others for changes, none where unknown."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchedge.tracing.identities import identity_of

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


def hooked():
    model = Scaled()
    model.first.register_forward_hook(lambda *_: None)
    return model


def with_tensor():
    model = Scaled()
    model.table = torch.ones(3)
    return model


def with_method():
    model = Scaled()
    model.generator = torch.Generator()
    return model


UNSEEN = {
    hooked: "hooks of Linear",
    with_tensor: "Tensor",
    with_method: "Generator",
    FromEnvironment: "module os",
    WithImport: "an import of random in forward",
    FromFile: "['open'] in forward",
}


@pytest.mark.parametrize("model", UNSEEN)
def test_what_may_decide_unseen_has_no_text_and_is_logged(model, caplog):
    caplog.set_level("DEBUG", "torchedge")
    assert identity_of(model()) is None
    assert caplog.messages == [f"what decides about a capture has no text: {UNSEEN[model]}"]


def test_a_library_class_with_another_forward_has_no_text(monkeypatch):
    assert identity_of(nn.ReLU()) is not None
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    assert identity_of(nn.ReLU()) is None
    monkeypatch.undo()
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: x)
    assert identity_of(F.relu) is not None  # the user's own function, by its code


@pytest.mark.slow
def test_other_processes_have_the_same_text():
    code = (
        "import hashlib, torch; from torchedge.tracing.identities import identity_of; "
        "from torchedge.tracing.vision import import_torchvision; "
        "model = import_torchvision().models.mobilenet_v2(); "
        "text = identity_of(model, {'a', 'b', 'c'}, torch.nn.functional.l1_loss); "
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
