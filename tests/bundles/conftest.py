"""Bundles of a small network, exported once; tests that damage one take a copy."""

import json
import shutil

import pytest
import torch
from oracles.sealing import seal
from torch import nn

import torchedge
from torchedge.bundles.manifests import digest_of


class Small(nn.Sequential):
    """A convolution, batch norm and a classifier."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
        )


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    return Small()


@pytest.fixture(scope="session")
def batch():
    """Images and class numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.tensor([3, 7])


@pytest.fixture(scope="session")
def inference(model, batch, tmp_path_factory):
    """The folder of a bundle for inference on this machine's processor."""
    out = tmp_path_factory.mktemp("bundles") / "inference"
    torchedge.export(model, batch[0], out=out, device="local-cpu", onnx=False)
    return out


@pytest.fixture(scope="session")
def training(model, batch, tmp_path_factory):
    """The folder of a bundle that trains with momentum, for an Adreno."""
    out = tmp_path_factory.mktemp("bundles") / "training"
    torchedge.export(model, batch[0], out=out, device="adreno", mode="train", targets=batch[1], onnx=False)
    return out


@pytest.fixture
def copied(tmp_path, inference):
    """A copy to damage."""
    return shutil.copytree(inference, tmp_path / "bundle")


@pytest.fixture
def manifest():
    """Change the manifest of a folder by a function of its document, and its own hash with it."""

    def change(folder, function):
        path = folder / "manifest.json"
        document = json.loads(path.read_text())
        function(document)
        path.write_text(json.dumps({**document, "sha256": digest_of(document)}))

    return change


@pytest.fixture
def reseal():
    """Give a changed file the hash that the manifest asks for: what is left is what is in it."""

    def call(folder, name):
        path = folder / "manifest.json"
        document = json.loads(path.read_text())
        document["files"][name] = {}
        path.write_text(json.dumps(document))
        seal(folder, kernels=False)

    return call
