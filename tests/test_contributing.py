"""CONTRIBUTING.md: the recipes for an operator, a target, a device and a feature, run as they are printed."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge import ops
from torchedge.lowering.rules import all_rules
from torchedge.tracing.steps import capture_step

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KIND = "special_spherical_bessel_j0"


def recipe(checkout, title, language="python"):
    """Return the blocks in a language under a heading."""
    text = (checkout / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [text for word, text in FENCE.findall(section) if word == language]


class WithNewOperator(nn.Module):
    def forward(self, x):
        return torch.special.spherical_bessel_j0(x)


@pytest.fixture
def entry(checkout, monkeypatch):
    """The recipe's entry, added to the operators for one test."""
    from torchedge.ops import elementwise

    block = recipe(checkout, "How to add an operator")[0]
    added = eval(block, dict(vars(elementwise)))
    monkeypatch.setattr(elementwise, "OPS", (*elementwise.OPS, added))
    ops.registry.cache_clear()
    yield added
    monkeypatch.undo()
    ops.registry.cache_clear()


def test_the_operator_is_unknown_without_the_recipe():
    graph = torchedge.capture(WithNewOperator(), input_size=(4,), mode="infer")
    assert graph.unsupported == (KIND,) and KIND not in all_rules()


def test_the_recipe_of_an_entry_makes_the_operator_known(entry):
    assert entry.kind == KIND and ops.spec_of(KIND) is entry
    graph = torchedge.capture(WithNewOperator(), input_size=(4,), mode="infer")
    assert graph.unsupported == ()
    assert (
        torchedge.predict(WithNewOperator(), 8, "jetson-tx2", input_size=(4,), mode="infer").unsupported == ()
    )


def test_the_recipe_of_a_rule_makes_kernels(checkout):
    pytest.importorskip("pyopencl")
    from torchedge.lowering.assembly import lower
    from torchedge.lowering.rules import elementwise, registry
    from torchedge.runtime import Executor

    x = torch.tensor([0.0, 0.5, -2.0, 3.0])
    exec(recipe(checkout, "How to add an operator")[1], dict(vars(elementwise)))
    try:
        captured = capture_step(WithNewOperator(), x, keep=frozenset(all_rules()))
        with Executor(lower(captured.step)) as executor:
            (result,) = executor.run(x.numpy())
    finally:
        del registry._RULES[KIND]
    np.testing.assert_allclose(result, torch.special.spherical_bessel_j0(x.double()), rtol=1e-6)


@pytest.mark.slow
def test_the_recipe_of_a_target_compiles_programs_with_the_right_results(checkout, monkeypatch):
    pytest.importorskip("pyopencl")
    from torchedge.lowering import targets
    from torchedge.lowering.assembly import lower
    from torchedge.runtime import Executor

    (block,) = recipe(checkout, "How to add a target")
    target = eval(block, dict(vars(targets)))
    monkeypatch.setitem(targets.TARGETS, target.name, target)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10), nn.Softmax(1)
    ).eval()
    x = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
        captured = capture_step(model, x)
        program = lower(captured.step, target=target.name)
        assert program.target == target.name
        with Executor(program) as executor:
            executor.load({name: tensor.numpy() for name, tensor in captured.tensors.items()})
            (result,) = executor.run(x.numpy())
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


def test_the_recipe_of_a_device_is_predicted_for(checkout, tmp_path, monkeypatch):
    (text,) = recipe(checkout, "How to add a device", "toml")
    folder = tmp_path / "profiles" / "my-board"
    folder.mkdir(parents=True)
    (folder / "device.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))
    assert torchedge.find_device("what its driver reports").name == "my-board"
    prediction = torchedge.predict(nn.Linear(4, 2), 8, "my-board", input_size=(4,), mode="infer")
    assert str(prediction.provenance) == "assumed" and prediction.device_memory_mib == 7620


def test_the_recipe_of_a_feature_is_computed(checkout, monkeypatch):
    from torchedge.prediction.feature_sets import registry

    for table in ("_FEATURES", "_SETS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    (block,) = recipe(checkout, "How to add a feature")
    exec(block, {})
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    vector = torchedge.features(model, 32, feature_set="mine", input_size=(3, 16, 16))
    parameters = sum(p.numel() for p in model.parameters())
    values = np.asarray(getattr(vector, "values", vector), dtype=float).ravel()
    assert values[-1] == parameters
