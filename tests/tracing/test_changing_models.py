"""The guard of Python state against eager PyTorch: where a result changes, so does the state."""

import pytest
import torch
from oracles.changing_models import CHANGES, ROWS, Model

from torchedge.tracing.python_state import Guard


def check(model, change):
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    guard = Guard({"model": model})
    number, result = guard.check(), model(x)
    assert guard.check() == number, "nothing has changed"
    change()
    found = model(x)
    differs = found.shape != result.shape or not torch.equal(found, result)
    assert not differs or guard.check() != number
    return differs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ROWS)
def test_a_change_of_each_kind_is_another_state(kind):
    model = Model([kind])
    assert check(model, model.holders[0].change)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_another_state(name):
    model = Model([])
    check(model, lambda: CHANGES[name](model))


def test_a_module_without_a_dict_of_modules_is_an_object():
    """PyTorch 2.11 leaves hooks behind that hold such a module, where an export fails."""
    model, emptied = Model([]), torch.nn.Linear(2, 2)
    vars(emptied).clear()
    hook = torch.nn.modules.module.register_module_buffer_registration_hook(lambda *_: emptied)
    try:
        assert not check(model, lambda: None)
    finally:
        hook.remove()
