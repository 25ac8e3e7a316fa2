"""The helpers that users import into their own tests, and the example that shows them."""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracles import perf4sight_features
from torch import nn

from torchedge.errors import InputError
from torchedge.testing import ConvLayer, assert_features, conv_layers, reference_features

SIZE = (3, 8, 8)


def test_the_example_runs(checkout):
    found = runpy.run_path(str(checkout / "examples" / "test_features_example.py"))
    tests = [item for name, item in found.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_suite_configures_itself_without_pytests_cache(checkout, monkeypatch):
    """As with `-p no:cacheprovider`, where pytest's configuration has no `cache`."""
    configure = runpy.run_path(str(checkout / "tests" / "conftest.py"))["pytest_configure"]
    for name in ("POCL_EXTRA_BUILD_FLAGS", "POCL_CACHE_DIR", "TORCHEDGE_CACHE"):
        monkeypatch.setenv(name, "")
    ends = []
    configure(SimpleNamespace(option=SimpleNamespace(markexpr="not slow"), add_cleanup=ends.append))
    folders = [Path(os.environ[name]) for name in ("POCL_CACHE_DIR", "TORCHEDGE_CACHE")]
    assert all(folder.is_dir() for folder in folders)
    for end in ends:
        end()
    assert not any(folder.exists() for folder in folders)


def test_what_differs_is_listed():
    model = nn.Conv2d(3, 4, 3)
    assert_features(model, 2, {"mem_w": 108}, input_size=SIZE)
    with pytest.raises(AssertionError) as caught:
        assert_features(model, 2, {"mem_w": 107, "mem_w_grad": 216, "mem_ofm": 1}, input_size=SIZE)
    assert str(caught.value).splitlines() == [
        "2 of 3 features differ at batch size 2:",
        "  mem_w: expected 107, computed 108.0",
        "  mem_ofm: expected 1, computed 576.0",
    ]


def test_long_lists_are_cut():
    expected = dict.fromkeys(reference_features([], 1), -1.0)
    with pytest.raises(AssertionError, match="and 36 more"):
        assert_features(nn.Conv2d(3, 4, 3), 2, expected, input_size=SIZE)


def test_a_tolerance_is_relative():
    model = nn.Conv2d(3, 4, 3)
    assert_features(model, 2, {"mem_w": 107}, input_size=SIZE, rtol=0.01)
    with pytest.raises(AssertionError):
        assert_features(model, 2, {"mem_w": 100}, input_size=SIZE, rtol=0.01)
    with pytest.raises(AssertionError):
        assert_features(model, 2, {"mem_w": float("nan")}, input_size=SIZE, rtol=0.01)


def test_mistakes_are_no_failed_assertions():
    model = nn.Conv2d(3, 4, 3)
    with pytest.raises(InputError, match="no feature 'mem'"):
        assert_features(model, 2, {"mem": 1}, input_size=SIZE)
    with pytest.raises(InputError, match="one batch size"):
        assert_features(model, [1, 2], {"mem_w": 108}, input_size=SIZE)


def test_layers_are_read_in_order_of_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 3, (1, 3), padding=(0, 1))
            self.last = nn.Conv2d(6, 2, 2, stride=2, groups=2)

        def forward(self, x):
            return self.last(torch.cat([self.first(x), self.first(x)], 1))

    first = ConvLayer(3, 3, (1, 3), (8, 8), (8, 8))
    last = ConvLayer(2, 6, (2, 2), (8, 8), (4, 4), groups=2)
    assert conv_layers(Twice(), SIZE) == [first, first, last]


def test_the_model_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    conv_layers(model, SIZE)
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tied_weights_stay_tied_in_the_copy():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    model[1].weight = model[0].weight
    assert len(conv_layers(model, SIZE)) == 2


def test_a_batch_that_is_folded_away_is_named():
    class Folds(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(6, 1, 1)

        def forward(self, x):
            return self.conv(x.reshape(1, -1, 8, 8))

    with pytest.raises(InputError, match=r"reads \(1, 6, 8, 8\)"):
        conv_layers(Folds(), SIZE)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_features_of_layers_agree_with_the_oracle(mode):
    layers = [
        ConvLayer(64, 3, (7, 7), (224, 224), (112, 112)),
        ConvLayer(32, 32, (3, 1), (17, 9), (9, 9), groups=32, copies=3),
    ]
    for batch in (1, 7, 2**40):
        found = reference_features(layers, batch, mode=mode)
        expected = perf4sight_features.reference_features(layers, batch, mode=mode)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name] == (value if isinstance(value, int) else pytest.approx(value, rel=1e-12)), name
