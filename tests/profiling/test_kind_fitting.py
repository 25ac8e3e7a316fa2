"""Latency of kinds of steps: written, read and chosen."""

import copy
import csv
import json
from itertools import pairwise

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
from torchedge.prediction.latency.roofline import COEFFICIENT_NAMES, PHASES, prior_mean
from torchedge.prediction.predictor import device_settings
from torchedge.prediction.profiles import MATRICES, load_models
from torchedge.profiling.kind_fitting import fit_kinds, read_kind_rows
from torchedge.profiling.profile_folders import PartFit, write_profile
from torchedge.profiling.topologies import build_topology

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
    products = [COEFFICIENT_NAMES.index(f"rate_{phase}") for phase in PHASES]
    inferred = load_models(written, "infer").latency.matrices  # its products are those of training
    assert inferred.coefficients[products] == pytest.approx(full.coefficients[products])


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


def layers_of(width, depth):
    """A job: linear layers on images of 3 x 8 x 8."""
    sizes = [192, *[width] * depth, 10]
    nodes = [{"name": "x", "op": "input"}, module("flat", "Flatten", "x")]
    for place, (inner, outer) in enumerate(pairwise(sizes)):
        nodes.append(module(f"l{place}", "Linear", nodes[-1]["name"], in_features=inner, out_features=outer))
    return [*nodes, {"name": "", "op": "output", "args": [{"node": nodes[-1]["name"]}]}]


def module(name, kind, reads, **settings):
    return {"name": name, "op": "module", "type": kind, "kwargs": settings, "args": [{"node": reads}]}


def campaign(folder, named):
    """A folder of steps as long as the H200's profile says, half of them on a host 1.8 times as slow."""
    folder.mkdir()
    jobs, rows = [], []
    for width in (64, 96, 128, 192):
        for depth in (8, 20, 40):
            for slow in (1.0, 1.8):
                name = f"mlp-{width}-{depth}-{slow}"
                job = {"id": name, "network": f"mlp-{width}", "input_size": [3, 8, 8], "optimizer": "sgd"}
                job["build"] = {"nodes": layers_of(width, depth)}
                jobs.append(job | ({"host": "slow"} if named and slow > 1 else {}))
                device = find_device("nvidia-h200")
                device = device.on_host(slow * device.measured_operator_us)
                model = torchedge.predict(
                    build_topology(job["build"]["nodes"], name), 2, device, input_size=(3, 8, 8)
                )
                row = {
                    "id": name,
                    "mode": "train",
                    "batch_size": 2,
                    "fits": 1,
                    "memory_mib": 900,
                    "allocated_mib": 9,
                }
                rows.append(row | {"reserved_mib": 20, "latency_ms": model.latency.value, "launch_us": 5.473})
    (folder / "networks.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    with (folder / "measurements.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.mark.slow
def test_the_slowness_of_a_host_that_jobs_name_is_fitted(tmp_path):
    device, errors = find_device("nvidia-h200"), {}
    for named in (False, True):
        measured = read_kind_rows(campaign(tmp_path / str(named), named), device)
        fit = fit_kinds(measured, tmp_path / "out")
        errors[named] = fit.described["accuracy"]["matrices float32"]["mean"]
    assert errors[True] < 0.25 * errors[False]
    assert fit.described["operator_us"] == pytest.approx(5.473 / 1.8, rel=0.03)  # of the other host
