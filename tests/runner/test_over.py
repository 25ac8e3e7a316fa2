"""`torchedge run --over`: the native runner on a device without Python, over transports."""

import json

import numpy as np
import pytest
from profiling.campaigns.conftest import programs  # noqa: F401 - a fixture

import torchedge
from torchedge.cli import main
from torchedge.storage.tensors import read_tensors

pytest.importorskip("pyopencl")


@pytest.fixture
def over(native, programs, monkeypatch, tmp_path, capsys):  # noqa: F811
    """Run a command with the native runner on a fake phone; return its document, or the line of its error."""
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path / "cache"))
    for name, value in native.environment.items():
        monkeypatch.setenv(name, value)

    def call(bundle, *words, way="adb", status=0):
        runner = ("--over", way, "--runner", str(native.program), "--device", native.device)
        got = main(["run", str(bundle), *runner, *map(str, words), *(() if status else ("--json",))])
        out, err = capsys.readouterr()
        assert got == status, err
        return json.loads(out) if not status else err

    return call


@pytest.fixture
def saved(batch, tmp_path):
    files = [tmp_path / f"{k}.npy" for k in range(2)]
    for file, tensor in zip(files, batch, strict=True):
        np.save(file, tensor.numpy())
    return files


@pytest.mark.slow
def test_an_inference_has_the_executor_s_bits(over, inference, batch, saved, tmp_path):
    expected = torchedge.load_bundle(inference).run(batch[0].numpy())[0]
    for way in ("adb", "adb:ABC123", "ssh://board", "local"):
        out = tmp_path / "out.npy"
        document = over(inference, "--input", saved[0], "--out", out, "--steps", 3, way=way)
        assert np.load(out).tobytes() == expected.tobytes(), way
        assert document["figures"]["steps"] == 3 and document["over"] == way
        copied = {"adb": True, "adb:ABC123": False, "ssh://board": True, "local": True}[way]
        assert ("torchedge-run" in document["pushed"]) == copied == bool(document["pushed"])
        out.unlink()
    assert document["figures"]["peak_bytes"] > 0
    left = [path.name for path in (tmp_path / "home of the device" / "torchedge" / "runs").iterdir()]
    assert not left  # a run leaves nothing of its own


@pytest.mark.slow
def test_training_brings_back_its_losses_and_state(over, training, batch, saved, tmp_path):
    state = tmp_path / "state.safetensors"
    words = ("--input", saved[0], "--input", saved[1], "--steps", 3, "--set", "lr=0.125", "--save", state)
    document = over(training, *words)
    bundle = torchedge.load_bundle(training)
    bundle.runner.set("lr", 0.125)
    losses = [float(bundle.run(*(tensor.numpy() for tensor in batch))[0]) for _ in range(3)]
    assert np.float32(document["losses"]).tolist() == losses
    arrays, metadata = read_tensors(state, finite=False)
    kept = {t.name for t in bundle.program.tensors if t.role in ("parameter", "buffer", "state")}
    assert metadata["batches"] == "3" and set(arrays) == kept
    assert all(bundle.runner.read(name).tobytes() == array.tobytes() for name, array in arrays.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--memory-limit", "1KiB"), "the limit is 1024"),
        (("--set", "no=1"), "no"),
        (("--set", "lr"), "expected NAME=VALUE"),
        (("--plot", "a.png"), "--plot is given with --over"),
        (("--runner", "nowhere"), "nowhere: is no file; expected torchedge-run"),
        (("--over", "usb"), "--over is 'usb'; expected local"),
    ],
)
def test_refusals_are_one_line(over, training, words, why):
    line = over(training, "--random", *words, status=2)
    assert why in line and line.count("\n") == 1 and line.startswith("torchedge: error: ")


def test_the_runner_is_named(inference, capsys):
    assert main(["run", str(inference), "--random", "--over", "adb"]) == 2
    assert "is given without --runner" in capsys.readouterr().err
    assert main(["run", str(inference), "--random", "--runner", "x"]) == 2
    assert "is given without --over" in capsys.readouterr().err
