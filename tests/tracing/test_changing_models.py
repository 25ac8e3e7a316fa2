"""The guard of Python state against eager PyTorch: where a result changes, so does the state."""

from __future__ import annotations

import pytest
import torch
from oracles.changing_models import CHANGES, HOLDERS, Model, drawn

from torchedge.tracing.python_state import Guard


def check(model, changes):
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    guard = Guard({"model": model})
    number, result = guard.check(), model(x)
    for name, change in changes:
        assert guard.check() == number, "nothing has changed"
        change()
        found = model(x)
        differs = found.shape != result.shape or not torch.equal(found, result)
        assert not differs or guard.check() != number, name
        number, result = guard.check(), found


@pytest.mark.parametrize("kind", HOLDERS, ids=lambda kind: kind.__name__)
def test_a_change_of_each_kind_is_another_state(kind):
    model = Model([kind])
    x = torch.randn(2, 4)
    before = model(x)
    holder = model.holders[0]
    check(model, [(kind.__name__, holder.change)])
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_another_state(name):
    model = Model([])
    check(model, [(name, lambda: CHANGES[name](model))])


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_models_from_seeds(first):
    for seed in range(first, first + 10):
        check(*drawn(seed))
