"""An export that replaces a bundle, and loses power at any moment: the old bundle is left, or the new one."""

import pytest
import torch
from oracles.power_loss import Disk
from torch import nn

import torchedge
from torchedge.storage import replacing


def export(folder, number):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, number)
    torchedge.export(
        model, torch.zeros(1, 3), out=folder / "bundle", device="local-cpu", onnx=False, force=True
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("exchanges", [True, False])
def test_bundles_are_the_old_or_the_new(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(replacing, "_exchange", lambda one, two: False)
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    export(disk.root, 1)
    with disk.recording():
        export(disk.root, 2)
        disk.acknowledged = 2
    numbers = set()
    for folder, acknowledged in disk.crashes(tmp_path / "left"):
        weights = torchedge.load_bundle(folder / "bundle").weights()
        number = next(float(array.max()) for array in weights.values() if array.shape == (2, 3))
        assert number == 2 if acknowledged else number in (1, 2)
        numbers.add(number)
    assert numbers == {1, 2}
