"""Drawn networks: the same ones everywhere, and they train; a plan measures each in two precisions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from torchedge.devices import find_device
from torchedge.prediction.profiles import CONVOLUTIONS, MATRICES, load_models
from torchedge.profiling.campaigns.drawn import (
    CLASSES,
    DRAWN,
    FAMILIES,
    drawn_batch,
    drawn_network,
    drawn_side,
)
from torchedge.profiling.campaigns.expansion import make_job
from torchedge.profiling.campaigns.plans import parse_plan, read_plan
from torchedge.profiling.datasets import read_dataset
from torchedge.profiling.kind_fitting import fit_kinds, read_kind_rows
from torchedge.profiling.profile_folders import write_profile
from torchedge.profiling.samples import prepare
from torchedge.profiling.topologies import build_topology
from torchedge.tracing.capturing import capture


def test_each_number_is_one_network_of_its_family():
    count = len(FAMILIES)
    for number in range(count):
        assert drawn_network(number) == drawn_network(number) != drawn_network(number + count)
    linear = [sum(node.get("type") == "Linear" for node in drawn_network(n)) for n in range(count)]
    assert [n > 1 for n in linear] == [name in ("transformer", "perceptron") for name in FAMILIES]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", range(2 * len(FAMILIES)))
def test_drawn_networks_train(number):
    torch.manual_seed(number)
    model, side = build_topology(drawn_network(number), "drawn"), drawn_side(number)
    scores = model(torch.randn(2, 3, side, side))
    assert scores.shape[0] == 2 and (scores.dim() == 3 or scores.shape[1] == CLASSES)
    scores.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert drawn_batch(number) >= 1
    assert not capture(model, input_size=(3, side, side)).unsupported


def test_a_plan_measures_them_in_float32_and_under_autocast():
    plan = parse_plan("p", "drawn = 3")
    items = plan.items()
    assert [item.id for item in items[:3]] == ["drawn-0", "drawn-0-bfloat16", "drawn-1"]
    jobs = [make_job(item, plan) for item in items]
    assert jobs[0]["build"] == jobs[1]["build"] == {"nodes": drawn_network(0)}  # they share a process
    assert [job.get("amp") for job in jobs[:2]] == [None, "bfloat16"]
    assert items[4].network.name == f"{DRAWN}2" and items[4].input_size == (3, *[drawn_side(2)] * 2)
    larger = read_plan("minute").joined(read_plan("processor"))
    assert larger.drawn == read_plan("processor").drawn
    assert set(larger.points(())) >= set(read_plan("minute").points(()))


BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def dataset_of(folder: Path, numbers: range) -> Path:
    """Write a campaign of drawn networks of which each point under autocast takes what float32's takes."""
    plan, lines = parse_plan("p", f"drawn = {numbers.stop}"), []
    jobs = [make_job(item, plan) for item in plan.items() if int(item.id.split("-")[1]) in numbers]
    for job in jobs:
        for mode in ("train", "infer"):
            lines += [f"{job['id']},{mode},{batch},1,300,,,1" for batch in BATCHES]
    head = "id,mode,batch_size,fits,memory_mib,allocated_mib,reserved_mib,latency_ms"
    (folder / "measurements.csv").write_text("\n".join([head, *lines]) + "\n")
    (folder / "networks.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return folder


@pytest.mark.slow
def test_steps_under_autocast_are_fitted_in_both_modes_and_float32_keeps_its_own(tmp_path, monkeypatch):
    device, folder = find_device("raspberry-pi-5"), dataset_of(tmp_path, range(1, 5))
    samples = prepare(read_dataset(folder), device, mode="infer")
    assert set(samples.label.tolist()) == {f"drawn-{n}" for n in range(1, 5)}
    assert not any(work.tiled for work in samples.work)

    measured = read_kind_rows(folder, device, float32=False)
    assert set(measured.rows) == {
        (mode, (products, "bfloat16")) for mode in ("train", "infer") for products in (CONVOLUTIONS, MATRICES)
    }
    factor = {"train": 3.0, "infer": 5.0}
    known = {}
    for (mode, kind), rows in measured.rows.items():
        unfitted = load_models(device, mode, "bfloat16").latency
        times = unfitted.predict(rows.work, np.arange(len(rows.phi)), rows.batch).value
        rows.phi[:] = known[mode, kind] = factor[mode] * times
    fitted = write_profile(tmp_path / "out", device, {}, kinds=fit_kinds(measured, tmp_path / "out"))
    for (mode, kind), rows in measured.rows.items():
        model = load_models(fitted, mode, "bfloat16").latency
        model = model.matrices if kind[0] == MATRICES and model.matrices is not None else model
        predicted = model.predict(rows.work, np.arange(len(rows.phi)), rows.batch).value
        assert np.abs(np.log(predicted / known[mode, kind])).mean() < 0.25
    plain, before = load_models(fitted, "train").latency, load_models(device, "train").latency
    assert plain.matrices is not None
    for model in (plain, plain.matrices):
        assert (model.coefficients == before.coefficients).all()
