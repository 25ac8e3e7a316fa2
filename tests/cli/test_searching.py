"""`torchedge search`: what it prints and writes, its exit status, going on after an interruption."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from torchedge.cli import BAD_INPUT, DOES_NOT_FIT, main

NETWORKS = """
from torch import nn

from torchedge import SearchSpace

def small():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

class Widths(SearchSpace):
    name = "widths"
    choices = {"width": (8, 16, 32)}
    input_size = (3, 32, 32)

    def build(self, encoding):
        return nn.Conv2d(3, encoding["width"], 3)

made = Widths()

def widest(encodings):
    return [e["width"] for e in encodings]

number = 3
"""
FAST = ("--device", "jetson-tx2", "--iterations", "3", "--population", "10")


@pytest.fixture
def nets(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(NETWORKS)
    return str(file)


@pytest.fixture
def run(capsys):
    def call(*words, status=0):
        capsys.readouterr()
        assert main(["search", *words]) == status, capsys.readouterr().err
        return capsys.readouterr()

    return call


def test_a_model_is_pruned(run, nets):
    out = run(f"{nets}:small", "--training-memory", "5000", "--input-size", "3x64x64", *FAST).out
    assert "nets:small on jetson-tx2: " in out and "share of the weights that stays, a stand-in" in out
    assert "best: 0 32, 2 64" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_nothing_fits(run, nets):
    words = (f"{nets}:small", "--training-memory", "100", "--inference-latency", "500", *FAST)
    out = " ".join(run(*words, status=DOES_NOT_FIT).out.split())
    assert "no candidate is within the limits" in out and "cannot be met at all" in out
    assert "inference_latency φ: met" in out and "nearest: 0 " in out


def test_a_space_and_a_score_of_ones_own(run, nets):
    for name in ("Widths", "made"):
        words = (f"{nets}:{name}", "--training-memory", "5000", "--score", f"{nets}:widest", "--json", *FAST)
        found = json.loads(run(*words).out)
        assert found["best"]["encoding"] == {"width": 32} and found["best"]["score"] == 32
        assert found["space"] == "widths" and found["counts"]["evaluated"] == 3


def test_sub_networks_of_ofa(run):
    words = ("ofa-resnet50", "--inference-latency", "60", "--image-sizes", "96,128", *FAST)
    found = json.loads(run(*words, "--json").out)
    assert found["best"]["figures"]["inference_latency"] <= 60
    assert found["best"]["encoding"]["image_size"] in (96, 128)


def test_what_is_written(run, nets, tmp_path):
    out = tmp_path / "out"
    words = (f"{nets}:small", "--training-memory", "5000", "--inference-latency", "50", *FAST)
    printed = run(*words, "--out", str(out), "--json").out
    document = json.loads(printed)
    assert json.loads((out / "result.json").read_text()) == document
    winner = json.loads((out / "winner.json").read_text())
    assert winner["best"] == document["best"] and set(winner["predictions"]) == {"train", "infer"}
    for name in ("training_memory", "inference_latency"):
        rows = list(csv.DictReader((out / f"front-{name}.csv").open()))
        assert len(rows) == len(document["fronts"][name])
        assert json.loads(rows[0]["encoding"]) == document["fronts"][name][0]["encoding"]
    refused = main(["search", *words, "--out", str(out)])
    assert refused == BAD_INPUT
    again = json.loads(run(*words, "--out", str(out), "--resume", "--json").out)
    assert {**again, "seconds": 0} == {**document, "seconds": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ofa-resnet50"], "no limit is given; expected one or more of --training-memory"),
        (["ofa-resnet50", "--training-memory", "9", "--resume"], "--resume is given without --out"),
        (["ofa-resnet50", "--training-memory", "9", "--score", "best"], "--score is 'best'"),
        (["ofa-resnet50", "--training-memory", "9", "--score", "weights"], "belongs to prunings"),
        (["ofa-resnet50", "--training-memory", "9", "--image-sizes", "20"], "from 64 to 4096"),
        (["ofa-resnet50", "--training-memory", "9", "--seed", "-1"], "seed is -1"),
        (["ofa-resnet50", "--training-memory", "9", "--mutation", "2"], "mutation is 2.0"),
        (["ofa-resnet50", "--training-memory", "9", "--device", "tx9"], "tx9"),
        (["ofa-resnet51", "--training-memory", "9"], "no model is called 'ofa-resnet51'"),
        (["NETS:small", "--training-memory", "9", "--image-sizes", "96"], "belongs to ofa-resnet50"),
        (
            ["NETS:small", "--training-memory", "9", "--score", "NETS:number"],
            "number is an int; expected a function",
        ),
        (["NETS:small", "--training-memory", "9", "--score", "NETS:absent"], "defines no 'absent'"),
        (["NETS:small", "--training-memory", "9", "--out", "NETS"], "is a file; expected a folder"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(words, message, nets, refused):
    assert message in refused("search", *(w.replace("NETS", nets) for w in words))


@pytest.mark.slow
def test_a_search_killed_at_random_moments_ends_the_same(tmp_path, checkout):
    words = [sys.executable, "-m", "torchedge", "search", "ofa-resnet50", "--training-memory", "3000"]
    words += ["--inference-latency", "35", "--device", "jetson-tx2", "--iterations", "6", "--out"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}

    def start(folder, *more):
        return subprocess.Popen([*words, str(folder), *more], env=environment, stderr=subprocess.DEVNULL)

    begun = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    taken = time.monotonic() - begun
    dice = random.Random(0)
    for _ in range(2):
        ended = start(tmp_path / "killed", "--resume")
        try:
            ended.wait(timeout=dice.uniform(0.2, 0.8) * taken)
        except subprocess.TimeoutExpired:
            ended.send_signal(signal.SIGKILL)
            ended.wait()
    assert start(tmp_path / "killed", "--resume").wait() == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")]
    assert {**results[0], "seconds": 0} == {**results[1], "seconds": 0}
    journals = [(tmp_path / name / "journal.jsonl").read_bytes() for name in ("whole", "killed")]
    assert journals[0] == journals[1]
