"""`torchedge accuracy`: what it prints and draws, and every way to ask for it wrongly."""

import functools
import json
import shutil

import pytest

from torchedge.cli import main
from torchedge.profiling.campaigns.recording import describe_device


def test_a_picture_of_everything(small_dataset, fitted, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "all.svg"
    assert main(["accuracy", str(small_dataset), "-d", str(fitted), "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"<?xml")
    assert f"written to {out}" in " ".join(capsys.readouterr().out.split())


def test_tables_and_json_without_a_file(small_dataset, fitted, capsys):
    assert main(["accuracy", str(small_dataset), "-d", str(fitted)]) == 0
    out = capsys.readouterr().out
    assert "Γ, MiB" in out and "Φ, ms" in out and max(map(len, out.splitlines())) <= 80
    assert main(["accuracy", str(small_dataset), "-d", str(fitted), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "made-up"
    assert document["fitted_to_these_rows"] is False
    assert [f["symbol"] for f in document["figures"]] == ["Γ", "Φ"]
    assert document["figures"][0]["rows"] == 80 and len(document["figures"][0]["worst"]) == 15


@pytest.mark.slow
def test_rows_that_a_profile_was_fitted_to_are_left_out_or_marked(small_dataset, tmp_path, capsys):
    pytest.importorskip("sklearn")
    own = tmp_path / "own"
    assert main(["fit", "all", str(small_dataset), "--out", str(own), "--no-accuracy"]) == 0
    words = ["accuracy", str(small_dataset), "-d", str(own), "--json"]
    capsys.readouterr()
    assert main(words) == 0
    unseen = json.loads(capsys.readouterr().out)
    assert "networks not trained on" in unseen["method"] and unseen["fitted_to_these_rows"] is False
    assert main([*words, "--protocol", "profile"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["fitted_to_these_rows"] is True and "fitted to these very" in seen["method"]
    assert seen["figures"][0]["error"]["median"] < unseen["figures"][0]["error"]["median"]


@pytest.mark.slow
def test_rows_that_a_profile_was_adapted_to_are_not_compared(small_dataset, fitted, tmp_path, capsys):
    pytest.importorskip("sklearn")
    own = tmp_path / "own"
    words = ["fit", "all", str(small_dataset), "--base", str(fitted), "--points", "20", "--out", str(own)]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["accuracy", str(small_dataset), "-d", str(own), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fitted_to_these_rows"] is False and document["figures"][0]["rows"] == 60
    assert "70 of 90 rows that the profile was not adapted to" in document["notes"][0]


def test_a_profile_that_ships_its_measurements_is_compared_with_them(small_dataset, fitted, tmp_path, capsys):
    folder = tmp_path / "shipped"
    shutil.copytree(fitted, folder)
    shutil.copytree(small_dataset, folder / "campaign")
    assert main(["accuracy", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["dataset"] == "made-up/campaign" and document["figures"][0]["rows"] == 80


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing-here"], "neither a folder of measurements nor a device"),
        (["EMPTY"], "holds neither measurements.csv nor device.toml"),
        (["adreno-640"], "ships no measurements to compare with"),
        (["adreno-640", "--device", "jetson-tx2"], "is a device already"),
        (["DATA", "--out", "EMPTY/report.html"], "expected a file that ends in .png, .svg, .pdf"),
        (["DATA", "--out", "EMPTY/none/report.png"], "expected it in a folder that exists"),
        (["DATA", "--device", "unheard-of"], "unheard-of"),
        (["CAMPAIGN", "--device", "./missing"], "missing: holds no device.toml"),
        (["CAMPAIGN", "--device", "other-board"], "device 'other-board' is unknown"),
        (["DATA", "--protocol", "guess"], "'guess' is not one of"),
    ],
)
def test_wrong_words_are_told(small_dataset, tmp_path, refused, words, says):
    empty = tmp_path / "empty"
    empty.mkdir()
    campaign = tmp_path / "campaign"  # of a board that only its own device.toml describes
    shutil.copytree(small_dataset, campaign)
    (campaign / "environment.json").write_text('{"device": "cpu", "device_name": "Board"}')
    describe_device(campaign, "my-board", {"device": "cpu", "device_name": "Board"})
    places = {"EMPTY": empty, "DATA": small_dataset, "CAMPAIGN": campaign}
    given = [functools.reduce(lambda w, name: w.replace(name, str(places[name])), places, w) for w in words]
    assert says in refused("accuracy", *given)
    assert list(empty.iterdir()) == []
