"""`torchedge fit --base`: a profile from few points, and every way to ask for it wrongly."""

import json
import shutil

import pytest

from torchedge import find_device
from torchedge.cli import main

pytest.importorskip("sklearn")


def adapt(dataset, base, out, *words):
    return main(["fit", "all", str(dataset), "--base", str(base), "--out", str(out), *words])


@pytest.mark.slow
def test_a_transfer_says_what_it_was_made_of(small_dataset, fitted, tmp_path, capsys):
    out = tmp_path / "mine"
    assert adapt(small_dataset, fitted, out, "--points", "12") == 0
    text = capsys.readouterr().out
    assert "made-up adapted to measurements of jetson-tx2" in " ".join(text.split())
    assert "Φ (training latency)" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("next: ")) <= 80
    training = find_device(out).profile["training"]
    assert training["base"] == "made-up" and training["points"] == 12
    assert len(training["used"]) == 12 and all("@" in row for row in training["used"])
    assert training["base_sha256"] == find_device(fitted).fingerprint
    assert training["provenance"] == "public data"
    assert training["command"].startswith("torchedge fit training jetson-tx2 --base made-up --points 12")
    unused = training["accuracy"]["phi"]["unused points"]
    assert set(unused["networks"]) == {"one", "two"} and 0 <= unused["coverage"] <= 100


@pytest.mark.slow
def test_the_transfer_predicts_like_the_device(small_dataset, fitted, tmp_path, capsys):
    """The dataset's memory is 1500 + 1.2 reserved-like, far from the base's 1400 beside a free simulation."""
    out = tmp_path / "mine"
    assert adapt(small_dataset, fitted, out, "--points", "5000", "--json") == 0
    told = capsys.readouterr()
    assert "5000 points of mode train are asked for, 80 are there; all are used" in told.err
    document = json.loads(told.out)
    assert document["training"]["points"] == 80 and "accuracy" not in document["training"]
    assert main(["accuracy", str(small_dataset), "-d", str(out), "--protocol", "profile", "--json"]) == 0
    figures = {f["symbol"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    assert main(["accuracy", str(small_dataset), "-d", str(fitted), "--protocol", "profile", "--json"]) == 0
    before = {f["symbol"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    for symbol in ("Γ", "Φ"):
        assert figures[symbol]["error"]["median"] < before[symbol]["error"]["median"]
    assert figures["Φ"]["error"]["median"] < 10


@pytest.mark.slow
def test_the_same_words_give_the_same_bytes_and_another_seed_other_points(small_dataset, fitted, tmp_path):
    contents, chosen = [], []
    for name, seed in (("a", ()), ("b", ()), ("c", ("--seed", "1"))):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "mine"
        assert adapt(small_dataset, fitted, out, "--points", "6", *seed) == 0
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
        chosen.append(find_device(out).profile["training"]["used"])
    assert {"device.toml", "training-forests.safetensors", "training.safetensors"} <= contents[0].keys()
    assert contents[0] == contents[1] and chosen[0] != chosen[2]


def test_a_device_nobody_knows_is_described_from_what_its_probe_saw(small_dataset, fitted, tmp_path):
    folder = tmp_path / "campaign"
    shutil.copytree(small_dataset, folder)
    environment = {
        "row": "environment",
        "probe": "training_probe 1",
        "device": "cuda",
        "device_name": "Orin X",
        "memory_meter": "meminfo",
        "memory_total_mib": 7620.0,
        "torch": "2.5.0",
        "date": "2026-11-21",
        "command": "training_probe.py -",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    out = tmp_path / "orin"
    assert adapt(folder, fitted, out, "--device", "orin-x", "--points", "5") == 0
    device = find_device(out)
    assert (device.name, device.title, device.memory) == ("orin-x", "Orin X", "unified")
    assert device.value("memory_mib") == 7620
    assert device.profile["training"]["provenance"] == "public data"  # the base's, which is the weaker


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--base", "adreno-740"], "adreno-740 has no fitted models to adapt; choose another --base:"),
        (["--base", "no-such-device"], "no-such-device"),
        (["--base", "BASE", "--points", "2"], "2 is too small; expected a whole number from 3"),
        (["--points", "30"], "--points is given without --base; add --base DEVICE, or omit it"),
        (["--base", "BASE", "--device", "nowhere"], "nowhere"),
    ],
)
def test_wrong_words_are_told_and_leave_nothing(small_dataset, fitted, tmp_path, refused, words, says):
    out = tmp_path / "mine"
    words = [str(fitted) if word == "BASE" else word for word in words]
    assert says in refused("fit", "all", str(small_dataset), "--out", str(out), *words)
    assert not out.exists()


def test_a_folder_without_measurements_is_told(fitted, tmp_path, capsys):
    for folder in (tmp_path / "none", tmp_path):
        assert adapt(folder, fitted, tmp_path / "mine") == 2
        assert "measurements.csv" in capsys.readouterr().err.splitlines()[-1]
