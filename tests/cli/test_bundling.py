"""`torchedge export` and `torchedge run`: bundles made and run in a shell."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

import torchedge
from torchedge.cli import main
from torchedge.storage.tensors import read_tensors, write_tensors

pytest.importorskip("pyopencl")

FACTORY = """
import torch
from torch import nn

print("a factory may print: it does not spoil the output")

def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5))

def heads():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
        def forward(self, x):
            return x * self.scale, x + 1
    return Heads()
"""
SIZE = ("--input-size", "3x8x8", "--device", "local-cpu", "--no-onnx")


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    file = tmp_path_factory.mktemp("nets") / "nets.py"
    file.write_text(FACTORY)
    return file


@pytest.fixture(scope="module")
def exported(nets, tmp_path_factory):
    """Folders by name: an inference, a training step, a model of two outputs."""
    folder = tmp_path_factory.mktemp("bundles")
    for name, words in (
        ("infer", (f"{nets}:small", *SIZE, "-b", "2")),
        (
            "train",
            (f"{nets}:small", *SIZE, "-b", "2", "--mode", "train", "--optimizer", "adam", "--lr", "0.01"),
        ),
        ("heads", (f"{nets}:heads", "--input-size", "3", "--device", "local-cpu", "--no-onnx")),
    ):
        assert main(["export", *words, "--out", str(folder / name)]) == 0
    return folder


def save(path, array):
    np.save(path, array)
    return str(path)


def test_verify_says_what_it_compared(run, exported, tmp_path):
    out = " ".join(run("verify", str(exported / "train")).split())
    assert re.search(r"\d+ kernels, \d+ launches, \d+ tensors are those that this version lowers", out)
    document = json.loads(run("verify", str(exported / "infer"), "--json"))
    assert document["verified"] and document["programs"] == 1 and document["kernels"] > 1
    damaged = shutil.copytree(exported / "infer", tmp_path / "damaged")
    with (damaged / "program.json").open("a") as file:
        file.write(" ")
    assert main(["verify", str(damaged)]) == 2


def test_export_tells_what_it_wrote(run, nets, tmp_path):
    out = run("export", f"{nets}:small", *SIZE, "--out", str(tmp_path / "b"), "--device", "adreno")
    assert "nets:small: inference" in out and "adreno-740 (mobile)" in out and str(tmp_path / "b") in out
    document = json.loads(
        run("export", f"{nets}:small", *SIZE, "--out", str(tmp_path / "b"), "--force", "--json")
    )
    assert document["mode"] == "infer" and document["device"]["name"] == "local-cpu"
    assert document["launches"] > 0 and document["files"]["program.json"]["bytes"] > 0


def test_export_writes_onnx_and_reads_weights(run, nets, tmp_path):
    pytest.importorskip("onnxscript")
    torch.manual_seed(7)
    arrays = {
        name: torch.randn(shape).numpy()
        for name, shape in (("0.weight", (4, 3, 3, 3)), ("0.bias", 4), ("3.weight", (5, 256)), ("3.bias", 5))
    }
    write_tensors(tmp_path / "w.safetensors", arrays)
    words = ("export", f"{nets}:small", *SIZE[:4], "--out", str(tmp_path / "b"))
    document = json.loads(run(*words, "--weights", str(tmp_path / "w.safetensors"), "--json"))
    assert "model.onnx" in document["files"] and document["onnx"]["checked_by"].startswith("onnx ")
    weights = torchedge.load_bundle(tmp_path / "b").weights()
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights[name], array)


def test_the_seed_decides_on_random_weights(run, nets, tmp_path):
    weights = []
    for place, seed in enumerate(("3", "3", "4")):
        out = tmp_path / str(place)
        run("export", f"{nets}:small", *SIZE, "--out", str(out), "--seed", seed)
        weights.append(torchedge.load_bundle(out).weights()["3.weight"])
    assert (weights[0] == weights[1]).all() and not (weights[0] == weights[2]).all()


def test_a_bundle_is_shown_and_run(run, exported, tmp_path):
    out = run("run", str(exported / "infer"))
    assert "run it with --input input=FILE, or --random" in out
    assert json.loads(run("run", str(exported / "infer"), "--json"))["mode"] == "infer"
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8))
    words = ("run", str(exported / "infer"), "--input", save(tmp_path / "x.npy", x))
    assert "highest at" in run(*words)
    result = json.loads(run(*words, "--out", str(tmp_path / "y.npy"), "--json"))
    y = np.load(tmp_path / "y.npy")
    (expected,) = torchedge.load_bundle(exported / "infer").run(x)
    np.testing.assert_array_equal(y, expected)
    assert result["outputs"][0]["shape"] == [2, 5] and result["steps"] == 1
    assert result["outputs"][0]["argmax"] == expected.argmax(axis=1).tolist()


def test_several_outputs_are_written_together(run, exported, tmp_path):
    x = np.ones((1, 3), np.float32)
    words = ("run", str(exported / "heads"), "--input", "x=" + save(tmp_path / "x.npy", x))
    run(*words, "--out", str(tmp_path / "y.npz"))
    with np.load(tmp_path / "y.npz") as file:
        assert sorted(file) == ["output_0", "output_1"]
        np.testing.assert_array_equal(file["output_1"], x + 1)


def test_training_goes_down_and_is_saved(run, exported, tmp_path):
    words = ("run", str(exported / "train"), "--random", "--steps", "20")
    result = json.loads(run(*words, "--save", str(tmp_path / "w.safetensors"), "--time", "--json"))
    assert len(result["losses"]) == 20 and result["losses"][-1] < result["losses"][0] / 2
    assert result["step_ms"] > 0 and {"kernel", "kind", "launches", "ms"} <= result["kernels"][0].keys()
    saved, _ = read_tensors(tmp_path / "w.safetensors")
    before = torchedge.load_bundle(exported / "train").weights()
    assert saved.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert not np.array_equal(saved["3.weight"], before["3.weight"])
    still = json.loads(run(*words, "--set", "lr=0", "--json"))
    assert len(set(still["losses"])) == 1
    out = run(*words, "--time")
    assert "20 steps" in out and "last " in out and "median step" in out
    assert max(map(len, out.splitlines())) <= 80


WRONG_RUNS = [
    (("--input", "{x}", "--input", "{x}"), "is one too many; expected input float32"),
    (("--input", "y={x}"), r"the bundle has no input 'y'; expected input float32\["),
    (("--input", "{none}"), "cannot be read"),
    (("--input", "{text}"), "is no .npy file of numbers"),
    (("--input", "{objects}"), "is no .npy file of numbers; make it with numpy.save$"),
    (("--input", "{huge}"), "expected at most"),
    (("--input", "{flat}"), r"input input has shape \[384\], expected \[2, 3, 8, 8\]"),
    (("--input", "{whole}"), "input input has dtype int64, expected float32"),
    (("--input", "{x}", "--random"), "--random is given beside --input"),
    (("--random", "--out", "{dir}/y.txt"), "expected a file that ends in .npy or .npz"),
    (("--random", "--save", "{dir}/y.pt"), "expected a file that ends in .safetensors"),
    (("--random", "--set", "lr"), "expected NAME=VALUE with a number"),
    (("--random", "--set", "lr=1"), "'lr' is no hyperparameter"),
    (("--out", "{dir}/y.npy"), "--out is given without inputs, .*add --input FILE or --random"),
    (("--steps", "9"), "--steps is given without inputs"),
    (("--random", "--time-limit", "5"), "--time-limit is given without --isolated"),
    (("--random", "--steps", "0"), "0 is too small; expected a whole number from 1"),
    (("--random", "--device", "no such device"), "no such device"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_RUNS)
def test_wrong_runs_are_told(refused, exported, tmp_path, words, message):
    names = {
        "x": save(tmp_path / "x.npy", np.zeros((2, 3, 8, 8), np.float32)),
        "flat": save(tmp_path / "flat.npy", np.zeros(384, np.float32)),
        "whole": save(tmp_path / "whole.npy", np.zeros((2, 3, 8, 8), np.int64)),
        "huge": save(tmp_path / "huge.npy", np.zeros(10**6)),
        "none": str(tmp_path / "none.npy"),
        "text": str(tmp_path / "text.npy"),
        "objects": str(tmp_path / "objects.npy"),
        "dir": str(tmp_path),
    }
    (tmp_path / "text.npy").write_text("no array")
    with (tmp_path / "objects.npy").open("wb") as file:
        header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
        np.lib.format.write_array_header_1_0(file, header)
    assert re.search(message, refused("run", str(exported / "infer"), *[w.format(**names) for w in words]))


@pytest.mark.parametrize(
    "words", [("--batch-size", "8"), ("--mode", "train"), ("--amp", "bf16"), ("--max-batch-size",)]
)
def test_a_bundle_is_predicted_as_it_was_exported(refused, exported, words):
    line = refused("predict", str(exported / "infer"), *words)
    assert f"{words[0]} is given with a bundle, whose step is as it was exported" in line


def test_a_rate_that_is_no_number(refused, exported):
    words = ("run", str(exported / "train"), "--random", "--set")
    for rate in ("nan", "inf", "-1"):
        assert "expected a number from 0 to 3.4e+38" in refused(*words, f"lr={rate}")


WRONG_EXPORTS = [
    ((), "Missing option '--out'"),
    (("--out", "{out}", "--lr", "1"), "--lr is given without --mode train"),
    (("--out", "{out}", "--loss", "mse"), "--loss is given without --mode train"),
    (("--out", "{out}", "--mode", "train", "--lr", "-1"), "--lr is -1.0; expected a number from 0 to"),
    (("--out", "{out}", "--mode", "train", "--lr", "nan"), "--lr is nan"),
    (("--out", "{out}", "--mode", "train", "--lr", "1e300"), r"expected a number from 0 to 3\.4e\+38"),
    (("--out", "{out}", "--precision", "float36"), r"did you mean float32\? Run `torchedge export --help`"),
    (("--out", "{out}/a/b"), "there is no folder"),
    (("--out", "{out}", "--device", "nokia"), "is unknown"),
    (("--out", "{out}", "--weights", "{out}.pt"), "cannot be read"),
    (("--out", "{out}", "--input-size", "9"), "."),
]


@pytest.mark.parametrize(("words", "message"), WRONG_EXPORTS)
def test_wrong_exports_are_told(refused, nets, tmp_path, words, message):
    given = [word.format(out=tmp_path / "b") for word in words]
    assert re.search(message, refused("export", f"{nets}:small", "--no-onnx", *given))
    assert not list(tmp_path.iterdir())


def test_weights_that_do_not_fit_are_told(refused, nets, tmp_path):
    write_tensors(tmp_path / "w.safetensors", {"0.weight": np.zeros(3, np.float32)})
    words = ("export", f"{nets}:small", *SIZE, "--out", str(tmp_path / "b"))
    assert "does not fit nets:small" in refused(*words, "--weights", str(tmp_path / "w.safetensors"))


def test_models_without_weights_are_not_exported(refused, tmp_path):
    assert "weights of such a file are not read" in refused(
        "export", "net.onnx", "--out", str(tmp_path / "b")
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_losses_by_name(run, nets, tmp_path, loss):
    words = ("export", f"{nets}:small", *SIZE, "--mode", "train", "--loss", loss, "--optimizer", "sgd")
    document = json.loads(run(*words, "--out", str(tmp_path / "b"), "--json"))
    wanted = {"mse": [1, 5], "cross-entropy": [1]}[loss]
    assert document["inputs"][1]["shape"] == wanted and document["hyperparameters"]["lr"] == pytest.approx(
        0.01
    )
