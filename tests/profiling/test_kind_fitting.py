"""Latency of kinds of steps: written, read and chosen."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.devices import Provenance, find_device
from torchedge.errors import ProfileError
from torchedge.prediction.analysis import analyse
from torchedge.prediction.intervals import assumed_errors
from torchedge.prediction.latency.model import LatencyModel
from torchedge.prediction.latency.roofline import (
    prior_mean,
)
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import MATRICES, load_models
from torchedge.profiling.kind_fitting import read_kind_rows
from torchedge.profiling.profile_folders import PartFit, write_profile

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A profile with a model of its own for steps of matrix products in float32."""
    device = find_device("nvidia-h200")
    model = LatencyModel(prior_mean(device, None), assumed_errors(0.3))
    kinds = PartFit({("train", (MATRICES, None)): model}, {"provenance": "measured"})
    return write_profile(tmp_path_factory.mktemp("kinds") / "mine", device, {}, kinds=kinds)


def test_other_precisions_follow_from_the_measured_one(written):
    full, half = (
        load_models(written, "train", precision).latency.matrices for precision in (None, "bfloat16")
    )
    assert full.amp is None and half.amp == "bfloat16"
    assert load_models(written, "infer").latency.matrices is None


def test_convolutions_in_channels_last_have_their_own_times(written, tmp_path):
    device = find_device("nvidia-h200")
    slow = LatencyModel(prior_mean(written, None) + np.log(2), assumed_errors(0.3))
    kinds = PartFit({("train", ("channels-last", None)): slow}, {"provenance": "measured"})
    profiled = write_profile(tmp_path / "last", device, {}, kinds=kinds)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    plain, other = (
        torchedge.predict(n, 64, input_size=(3, 64, 64), device=profiled).latency.value for n in (net, last)
    )
    expected = slow.predict(
        [analyse(torchedge.capture(net, input_size=(3, 64, 64))).work_under(device_settings(profiled, None))],
        np.zeros(1, dtype=np.intp),
        np.array([64.0]),
    )
    assert other == pytest.approx(float(expected.value[0])) and other != pytest.approx(plain, rel=0.01)
    table = torchedge.Predictor(profiled).predict_many([net, last], [64], input_size=(3, 64, 64))
    assert table.latency[:, 0] == pytest.approx([plain, other])
    captured = torchedge.capture(last, input_size=(3, 64, 64))
    assert torchedge.predict(captured, 64, device=profiled).latency.value == pytest.approx(other)
    without, same = (
        torchedge.predict(n, 64, input_size=(3, 64, 64), device="jetson-tx2") for n in (last, net)
    )
    assert any("channels_last was not measured" in note for note in without.notes)
    assert without.latency.value == pytest.approx(same.latency.value)


def test_provenance_is_that_of_the_campaign(written, tmp_path):
    half = LatencyModel(prior_mean(written, "bfloat16"), assumed_errors(0.3))
    kinds = {("train", ("convolutions", "bfloat16")): half}
    public = PartFit(kinds, {"provenance": "public data"})
    device = write_profile(tmp_path / "theirs", written, {}, kinds=public)
    assert load_models(device, "train", "bfloat16").latency_provenance is Provenance.PUBLIC_DATA
    assert load_models(written, "train").latency_provenance is Provenance.MEASURED


def test_a_damaged_file_is_refused(written, tmp_path):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in written.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "kinds.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ProfileError, match="kinds"):
        load_models(find_device(folder))


def test_a_campaign_of_plain_training_has_no_kinds(tmp_path):
    (tmp_path / "measurements.csv").write_text(
        "id,mode,batch_size,fits,memory_mib,allocated_mib,reserved_mib,latency_ms\nn,train,1,1,1,1,1,1\n"
    )
    (tmp_path / "networks.jsonl").write_text(
        '{"id": "n", "network": "n", "input_size": [3, 32, 32], "build":'
        ' {"library": "torchvision", "name": "resnet18"}}\n'
    )
    with pytest.raises(ProfileError, match="no kind of steps"):
        read_kind_rows(tmp_path, find_device("nvidia-h200"))
