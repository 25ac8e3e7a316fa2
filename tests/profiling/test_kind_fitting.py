"""Latency of kinds of steps: fitted to rows of known times, written, read and chosen."""

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
from torchedge.prediction.latency.model import SHARE_NAMES, LatencyModel
from torchedge.prediction.latency.roofline import (
    COEFFICIENT_NAMES,
    named,
    pack,
    prior_mean,
    step_time,
    work_times,
)
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import MATRICES, load_models
from torchedge.profiling import kind_fitting
from torchedge.profiling.kind_fitting import MeasuredKinds, fit_kinds, read_kind_rows
from torchedge.profiling.profile_folders import PartFit, write_profile
from torchedge.profiling.samples import DataSource

pytest.importorskip("sklearn")
TRUE_SHIFT = {"matrix_fwd": -0.8, "matrix_bwd_x": 0.5, "matrix_bwd_w": 0.5}


def workloads():
    """Eight networks of matrix products, each trained whole and with its first layers frozen."""
    out = []
    for width in (128, 256, 512, 768):
        for depth in (4, 8):
            layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
            for frozen in (0, depth // 2, depth - 1):
                for place, layer in enumerate(layers):
                    layer.requires_grad_(place >= frozen)
                graph = torchedge.capture(layers, torch.zeros(1, 512, width))
                out.append((f"{width}-{depth}", f"frozen {frozen > 0}", analyse(graph).work))
    return out


@pytest.fixture(scope="module")
def truth():
    device = find_device("nvidia-h200")
    prior = kind_fitting._prior(device, "train", (MATRICES, None))
    shift = [TRUE_SHIFT.get(name, 0.0) for name in COEFFICIENT_NAMES]
    return device, prior + np.array(shift)


@pytest.fixture(scope="module")
def rows(truth):
    _, coefficients = truth
    table = [(*w, batch, host) for w in workloads() for batch, host in ((4, 1.0), (64, 1.6), (512, 1.0))]
    family, setting, work, batch, host = (list(column) for column in zip(*table, strict=True))
    batches, hosts = np.array(batch, dtype=float), np.array(host)
    p = named(coefficients)
    times = work_times(pack(work, np.arange(len(work)), batches, calls=True), p)
    phi = step_time(times.busy, times.launch * hosts, p)
    thread = times.launch * hosts + np.exp(p["step"])
    about, names = (np.array(family), np.array(setting)), np.where(hosts > 1, "another host", "")
    return kind_fitting._Rows(*about, work, batches, phi, np.ones(len(work)), names, thread, True)


@pytest.fixture(scope="module")
def written(truth, rows, tmp_path_factory):
    device, _ = truth
    out = tmp_path_factory.mktemp("kinds") / "mine"
    steps = []
    measured = MeasuredKinds(
        DataSource("mine", "0" * 64, Provenance.MEASURED), device, {("train", (MATRICES, None)): rows}
    )
    part = fit_kinds(measured, out, lambda: steps.append(1))
    assert len(steps) == measured.fits
    return write_profile(out, device, {}, kinds=part)


def test_the_profile_predicts_steps_of_matrices_by_their_kind(written, truth):
    device, coefficients = truth
    graph = torchedge.capture(
        nn.Sequential(*[nn.Linear(640, 640) for _ in range(6)]), torch.zeros(1, 512, 640)
    )
    work = analyse(graph).work
    p = named(coefficients)
    rows = pack([work], np.zeros(1, dtype=np.intp), np.array([256.0]), calls=True)
    times = work_times(rows, p)
    expected = float(step_time(times.busy, times.launch, p)[0])
    predictions = torchedge.Predictor(written).predict_many(
        [graph, torchedge.capture(nn.Conv2d(3, 8, 3), input_size=(3, 32, 32))], 256
    )
    assert predictions.latency[0, 0] == pytest.approx(expected, rel=0.05)
    alone = torchedge.predict(graph, 256, device=written)
    assert alone.latency.value == pytest.approx(predictions.latency[0, 0])
    assert not set(alone.out_of_range) & set(SHARE_NAMES)
    plain = torchedge.predict(nn.Conv2d(3, 8, 3), 256, input_size=(3, 32, 32), device=device)
    assert predictions.latency[1, 0] == pytest.approx(plain.latency.value)


def test_other_precisions_follow_from_the_measured_one(written):
    full, half = (
        load_models(written, "train", precision).latency.matrices for precision in (None, "bfloat16")
    )
    assert full.amp is None and half.amp == "bfloat16"
    assert load_models(written, "infer").latency.matrices is None


def test_convolutions_in_channels_last_have_their_own_times(written, truth, tmp_path):
    device, _ = truth
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
