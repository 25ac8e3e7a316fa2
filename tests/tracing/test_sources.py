"""Models by name, factory and file."""

import sys

import pytest
import torch
from torch import nn
from tracing.networks import SmallNet, image

from torchedge.errors import CaptureError, InputError, MissingExtraError
from torchedge.tracing.capturing import capture
from torchedge.tracing.input_size import infer_input
from torchedge.tracing.sources import load_model


def on_meta(model):
    return {p.device.type for p in model.parameters()} == {"meta"}


def test_torchvision_names():
    pytest.importorskip("torchvision")
    model, label = load_model("resnet18")
    assert label == "resnet18"
    assert type(model).__module__ == "torchvision.models.resnet"
    assert on_meta(model)


def test_timm_names():
    pytest.importorskip("timm")
    model, label = load_model("timm:resnet18")
    assert label == "resnet18"
    assert type(model).__module__ == "timm.models.resnet"
    assert load_model("edgenext_xx_small")[1] == "edgenext_xx_small"


def test_loading_draws_no_random_numbers():
    pytest.importorskip("torchvision")
    before = torch.get_rng_state()
    load_model("squeezenet1_1")
    assert torch.equal(before, torch.get_rng_state())


FACTORY = """
import torch
from neighbour import WIDTH

def small(width=WIDTH):
    return torch.nn.Linear(width, width)

def needy(width):
    return torch.nn.Linear(width, width)

def wrong():
    return 3

def failing():
    raise RuntimeError("no luck\\nsecond line")

def cpu_only():
    return torch.nn.Linear(int(torch.ones(1).item()), 1)

ready = torch.nn.ReLU()
number = 3
"""


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 6\n")
    (tmp_path / "model.py").write_text(FACTORY)
    return tmp_path / "model.py"


def test_factories(factory):
    model, label = load_model(f"{factory}:small")
    assert label == "model:small"
    assert model.in_features == 6
    assert on_meta(model)
    assert isinstance(load_model(f"{factory}:ready")[0], nn.ReLU)
    assert not on_meta(load_model(f"{factory}:cpu_only")[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (":smal", r"did you mean small\?"),
        (":needy", r"needs arguments \(width\)"),
        (":wrong", "returns an int"),
        (":failing", "RuntimeError: no luck; correct"),
        (":number", "is an int"),
        ("", "names no factory"),
    ],
)
def test_unusable_factories(factory, name, words):
    with pytest.raises(InputError, match=words) as caught:
        load_model(f"{factory}{name}")
    assert "\n" not in str(caught.value)


def test_a_broken_python_file(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    with pytest.raises(InputError, match="SyntaxError"):
        load_model(f"{path}:f")
    with pytest.raises(InputError, match="no such file"):
        load_model(f"{tmp_path}/nothing.py:f")


def test_files(tmp_path):
    program = torch.export.export(SmallNet(), (image(3, 8, 8),), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    model, label = load_model(str(tmp_path / "model.pt2"))
    assert label == "model.pt2"
    assert capture(model).fixed_batch == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no model is named"),
        ("resnt50", r"did you mean resnet50"),
        ("timm:resnt50", r"no model is called 'resnt50'"),
        ("nothing.onnx", "no such file"),
        ("nothing.pt2", "no such file"),
        ("weights.pth", r"weights.pth: there is no such file"),
        ("model.pt", r"model.pt: there is no such file"),
    ],
)
def test_unknown_models(text, words):
    pytest.importorskip("timm")
    with pytest.raises(InputError, match=words):
        load_model(text)


@pytest.mark.parametrize("name", ["weights.pth", "model.pt", "weights.safetensors"])
def test_files_of_weights_are_no_models(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"holds weights, not a model \(a pickled one is not read\); exp"):
        load_model(str(tmp_path / name))


def test_detectors_are_refused_with_their_backbone_named():
    models = pytest.importorskip("torchvision.models")
    with pytest.raises(CaptureError, match="backbone"):
        capture("fasterrcnn_mobilenet_v3_large_fpn")
    detector = models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    with pytest.raises(CaptureError, match="backbone"):
        capture(detector)
    assert len(capture(detector.backbone, input_size=(3, 320, 320)).outputs) == 6


@pytest.mark.parametrize(
    ("model", "size", "dtype"),
    [
        (nn.Conv1d(4, 2, 3), (4, 1024), torch.float32),
        (nn.Conv2d(5, 2, 3).half(), (5, 224, 224), torch.float16),
        (nn.Conv3d(1, 2, 3), (1, 16, 112, 112), torch.float32),
        (nn.Sequential(nn.ReLU(), nn.Linear(7, 2)), (7,), torch.float32),
        (nn.Embedding(10, 4), (128,), torch.int64),
        (nn.GRU(6, 2), (128, 6), torch.float32),
    ],
)
def test_inputs_are_inferred_from_the_first_layer(model, size, dtype):
    spec = infer_input(model)
    assert (spec.size, spec.dtype) == (size, dtype)
    assert spec.note is not None
    graph = capture(model, mode="infer")
    assert graph.values[graph.inputs[0]].at(2) == (2, *size)
    assert spec.note in graph.notes


def test_no_input_can_be_inferred_without_a_layer():
    with pytest.raises(InputError, match="input_size"):
        capture(nn.ReLU())


def test_a_missing_timm_is_installed_by_its_own_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"timm.*run: pip install timm$"):
        load_model("timm:resnet10t")
