"""Tables of networks by name: read, skipped with a reason, scored on groups left out, fitted."""

import csv
import math

import numpy as np
import pytest
from public_data import METHODS, LeftOut, fit, methods_for, score_left_out
from public_tables import find_public_table, read_public_samples

from torchedge.devices import find_device
from torchedge.errors import InputError
from torchedge.tracing.vision import prepare_torchvision

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")


def needs_timm():
    prepare_torchvision()
    pytest.importorskip("timm")


def architecture(number):
    a, b, c, d = (OPERATIONS[number // 5**k % 5] for k in range(4))
    return f"|{a}~0|+|{b}~0|{c}~1|+|{d}~0|nor_conv_3x3~1|skip_connect~2|"


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    """Networks whose time is one millisecond and a half a convolution."""
    texts = [architecture(7 * number % 625) for number in range(60)]
    rows = [
        {"arch": text, "device": device, "latency_ms": 1 + text.count("conv") / 2}
        for text in texts
        for device in ("adreno-640", "elsewhere")
    ]
    return write(tmp_path_factory.mktemp("data") / "nasbench201-edge", "latency.csv", rows)


@pytest.mark.slow
def test_edge_rows_are_read_for_one_device(edge):
    assert find_public_table(edge) == "latency.csv"
    public = read_public_samples(edge, find_device("adreno-640"))
    assert public.samples.mode == "infer" and len(public.samples.batch) == 60
    assert not public.samples.work[0].training and set(public.samples.batch) == {1.0}
    assert len(public.samples.networks) < 60  # some of these cells compute the same
    with pytest.raises(InputError, match="it has adreno-640, elsewhere"):
        read_public_samples(edge, find_device("adreno-740"))


@pytest.mark.slow
def test_every_method_is_scored_on_groups_it_has_not_seen(edge):
    pytest.importorskip("sklearn")
    public = read_public_samples(edge, find_device("adreno-640"))
    assert methods_for(public) == METHODS
    scores = score_left_out(public, METHODS, strict=False)
    assert set(scores) == set(METHODS)
    assert all(np.isfinite(score.predicted).all() and score.groups == 10 for score in scores.values())
    assert len({score.mean for score in scores.values()}) == len(METHODS)


@pytest.mark.slow
def test_fit_writes_an_inference_profile(edge, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    out = tmp_path / "mine"
    fit(edge, find_device("adreno-640"), out, force=False, accuracy=False)
    table = find_device(out).profile["inference"]
    assert table["rows"] == 60 and table["provenance"] == "public data" and "memory_rows" not in table
    command = "benchmarks/accuracy/public_data.py fit nasbench201-edge --device adreno-640 --out mine"
    assert table["command"] == command
    from torchedge.prediction.profiles import load_models

    models = load_models(find_device(out), "infer")
    assert str(models.latency_provenance) == "public data" and str(models.memory_provenance) == "assumed"


@pytest.mark.slow
def test_timm_steps_name_what_they_skip(tmp_path):
    needs_timm()
    rows = [
        {"model": name, "layout": layout, "amp": 1, "batch_size": 8, "image_size": 64, "step_ms": 10,
         "param_count_m": million}
        for name, million in (
            ("resnet18", 11.69), ("resnet26", 3.0), ("nobody_knows", 1.0), ("tv_resnet34", 21.8)
        )
        for layout in ("nchw", "nhwc")
    ]  # fmt: skip
    folder = write(tmp_path / "rtx3090-train", "steps.csv", rows)
    public = read_public_samples(folder, find_device("rtx-3090"))
    assert public.samples.label.tolist() == ["resnet18", "tv_resnet34"] and public.samples.networks == [
        "resnet"
    ]
    assert public.skipped == {
        "resnet26": "another network under that name today",
        "nobody_knows": "unknown to this timm",
    }
    assert public.samples.settings.amp == "float16" and public.samples.work[0].training
    with pytest.raises(InputError, match="layout 'other'"):
        read_public_samples(folder, find_device("rtx-3090"), column="other")


def test_memory_rows_are_simulated_and_saturated_ones_left_out(tmp_path):
    needs_timm()
    rows = [
        {"model": "resnet18", "batch_size": batch, "max_gpu_memory_mib": 5000 + 10 * batch,
         "saturated": int(batch == 128), "faketensor_peak_mib": 3000}
        for batch in (8, 16, 128)
    ]  # fmt: skip
    public = read_public_samples(write(tmp_path / "server", "memory.csv", rows), find_device("nvidia-a100"))
    assert public.samples.batch.tolist() == [8, 16] and public.baseline.tolist() == [3000, 3000]
    peaks = public.samples.peaks
    assert (peaks.reserved >= peaks.allocated).all() and peaks.allocated[1] > peaks.allocated[0]
    # Adam: weights, gradients and two states of 11.69 million parameters at the least.
    assert peaks.allocated[0] > 4 * 4 * 11.69e6 / 2**20
    assert methods_for(public) == ("forest on our features", "without forest", "nothing fitted")


def test_scores_in_closed_form():
    score = LeftOut(np.array([1.1, 1.8, 4.0]), np.array([1.0, 2.0, 4.0]), 3)
    assert math.isclose(score.mean, 20 / 3) and math.isclose(score.median, 10) and math.isclose(score.rank, 1)
    assert math.isclose(LeftOut(np.array([3.0, 2, 1]), np.array([1.0, 2, 3]), 3).rank, -1)
