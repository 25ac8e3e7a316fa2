"""`torchedge fit` on a small made-up dataset, and the profile it leaves."""

import json

import pytest

from torchedge.cli import main

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def made(small_dataset, tmp_path_factory):
    """A profile fitted once, for the tests that read it."""
    out = tmp_path_factory.mktemp("fitted") / "mine"
    assert main(["fit", "all", str(small_dataset), "--out", str(out), "--no-accuracy"]) == 0
    return out


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
def test_fit_writes_a_profile_that_predicts(made, capsys, tmp_path):
    from torchedge import find_device
    from torchedge.storage import file_sha256

    written = {"device.toml", "training.safetensors", "training-forests.safetensors"}
    kept = {"inference.safetensors", "inference-forests.safetensors"}  # what the board's own profile has
    assert set(content(made)) == written | kept
    training = find_device(made).profile["training"]
    for name, digest in training["files"].items():
        assert file_sha256(made / name, max_bytes=2**23) == digest
    assert training["provenance"] == "public data"
    assert training["command"] == "torchedge fit training jetson-tx2 --device jetson-tx2 --out mine"
    assert training["rows"] == 90 and training["memory_rows"] == 80
    assert set(training["versions"]) == {"torchedge", "python", "torch", "scikit-learn", "numpy"}
    net = tmp_path / "net.py"
    net.write_text("from torch import nn\ndef make():\n    return nn.Conv2d(3, 8, 3)\n")
    capsys.readouterr()
    assert (
        main(["predict", f"{net}:make", "-b", "8", "--input-size", "3x64x64", "-d", str(made), "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["provenance"] == "public data" and document["device"] == "jetson-tx2"


@pytest.mark.slow
def test_the_same_data_gives_the_same_bytes(made, small_dataset, tmp_path):
    again = tmp_path / "mine"
    assert main(["fit", "all", str(small_dataset), "--out", str(again), "--no-accuracy"]) == 0
    first, second = content(made), content(again)
    for text in (first, second):
        lines = text["device.toml"].decode().splitlines()
        text["device.toml"] = [line for line in lines if not line.startswith("date = ")]
    assert first == second
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.slow
def test_force_replaces_the_profile_and_keeps_what_else_is_there(
    made, small_dataset, tmp_path, monkeypatch, capsys
):
    fitted_before(made, monkeypatch)
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    (out / "device.toml").write_text("old")
    words = ["fit", "all", str(small_dataset), "--out", str(out), "--no-accuracy"]
    assert main(words) == 2 and "--force" in capsys.readouterr().err
    assert (out / "device.toml").read_text() == "old"
    assert main([*words, "--force"]) == 0
    assert content(out)["training.safetensors"] == content(made)["training.safetensors"]
    assert (out / "notes.md").read_text() == "mine"


@pytest.mark.slow
def test_the_accuracy_table_goes_into_the_profile(made, small_dataset, tmp_path, monkeypatch, capsys):
    from torchedge.profiling.accuracy import Score
    from torchedge.profiling.profile_folders import Accuracy

    scores = {("gamma", "own"): Score({"one": 1.234, "two": 2.0}, {"one": 90.0, "two": 80.0})}
    found = Accuracy(scores, ("phi, basis: not scored (too few rows)",))
    fitted_before(made, monkeypatch)
    monkeypatch.setattr("torchedge.profiling.profile_folders.score_all", lambda *_: found)
    out = tmp_path / "mine"
    assert main(["fit", "all", str(small_dataset), "--out", str(out), "--json"]) == 0
    text, err = capsys.readouterr()
    table = json.loads(text)["training"]["accuracy"]
    assert table == {
        "gamma": {"own": {"mean": 1.62, "coverage": 85.0, "networks": {"one": 1.23, "two": 2.0}}}
    }
    assert "torchedge: warning: phi, basis" in err
    assert main(["devices", str(out)]) == 0
    assert "mean absolute error of gamma: own 1.6 %" in capsys.readouterr().out


def fitted_before(made, monkeypatch, error=0.05):
    """Stand in for the fit, which takes its time; `error` is what cross-validation says, in log."""
    import numpy as np

    from torchedge import find_device
    from torchedge.prediction.profiles import read_models
    from torchedge.profiling.samples import HeldOut

    models = read_models(find_device(made), "train")
    held_out = HeldOut(0, np.array([error, -error]), np.ones(2), np.ones(2), np.array(["one", "two"]))

    def fit(model):
        def stub(samples, rows, judge):
            judge(held_out)
            return model

        return stub

    for name, model in (("fit_memory", models.memory), ("fit_latency", models.latency)):
        monkeypatch.setattr(f"torchedge.profiling.device_fits.{name}", fit(model))


@pytest.mark.slow
def test_a_fit_that_fails_leaves_nothing(made, small_dataset, tmp_path, monkeypatch, capsys):
    from torchedge.errors import ProfileError

    def fails(*_):
        raise ProfileError("the disk is full")

    fitted_before(made, monkeypatch)
    monkeypatch.setattr("torchedge.profiling.profile_folders.write_models", fails)
    out = tmp_path / "mine"
    assert main(["fit", "all", str(small_dataset), "--out", str(out), "--no-accuracy"]) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == []


def test_one_mode_of_a_dataset(made, small_dataset, tmp_path, monkeypatch, capsys):
    """The dataset holds training alone; the device's other mode stays."""
    fitted_before(made, monkeypatch)
    out = tmp_path / "mine"
    assert main(["fit", "training", str(small_dataset), "--out", str(out), "--no-accuracy", "--json"]) == 0
    assert "training" in json.loads(capsys.readouterr().out) and "inference.safetensors" in content(out)
    assert main(["fit", "inference", str(small_dataset), "--out", str(tmp_path / "none")]) == 2
    assert "holds no measurements of inference" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_file_is_not_a_dataset(small_dataset, tmp_path, refused):
    words = ("fit", "all", str(small_dataset / "measurements.csv"), "--out", str(tmp_path / "mine"))
    assert "`torchedge fit loads`" in refused(*words)


def test_an_unusable_figure_is_written_only_when_forced(made, small_dataset, tmp_path, monkeypatch, capsys):
    fitted_before(made, monkeypatch, error=0.6)
    out = tmp_path / "mine"
    words = ["fit", "all", str(small_dataset), "--out", str(out), "--no-accuracy"]
    assert main(words) == 2 and not out.exists()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "errs by 64 %" in err and "--force writes it" in err
    assert "measure more networks" in err or "add networks like" in err
    assert main([*words, "--force"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Γ (unusable), Φ (unusable)" in text and "unusable: errs by over 40 %" in text


def test_what_cannot_be_fitted_is_named_and_the_rest_is_fitted(made, small_dataset, tmp_path, monkeypatch):
    import torchedge
    from torchedge.errors import ProfileError

    fitted_before(made, monkeypatch)

    def too_few(*_, **__):
        raise ProfileError("4 rows measured memory in mode train; expected at least 6")

    monkeypatch.setattr("torchedge.profiling.device_fits.fit_memory", too_few)
    result = torchedge.fit(small_dataset, out=tmp_path / "mine", accuracy=False)
    assert [(f.symbol, f.verdict, f.written) for f in result.figures] == [("Φ", "good", True)]
    assert result.missing == (
        "training memory is not fitted: 4 rows measured memory in mode train; expected at least 6",
    )
    assert result.verdict == "good" and result.advice
    table = result.device.profile["training"]
    assert table["memory_rows"] == 0 and table["latency_rows"] == 80


def test_without_out_the_profile_is_found_by_its_name(made, small_dataset, monkeypatch, home, capsys):
    fitted_before(made, monkeypatch)
    words = ["fit", "all", str(small_dataset), "--no-accuracy"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert (home / "home" / "profiles" / "jetson-tx2" / "device.toml").is_file()
    assert "next: torchedge predict resnet50 --batch-size 8 --device jetson-tx2\n" in out
    assert main(words) == 2 and "--force" in capsys.readouterr().err
