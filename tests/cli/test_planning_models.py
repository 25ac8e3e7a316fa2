"""`torchedge plan MODEL`: one model, a queue, a sweep; what they print and write, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from torchedge.cli import DOES_NOT_FIT, main

pytest.importorskip("scipy")

NETS = """
from torch import nn

def chain(width, depth):
    return nn.Sequential(*(x for _ in range(depth) for x in (nn.Linear(width, width), nn.ReLU())))

def small():
    return chain(512, 6)

def other():
    return chain(512, 4)

def wide():
    return chain(2048, 2)

def raises():
    print("out of the model")
    raise RuntimeError("out of ideas")
"""

DEVICE = """
name = "bare"
title = "A device of which little is known"
kind = "gpu"
vendor = "nobody"
memory = "unified"

[figures.bandwidth_gb_s]
value = 10.0
unit = "GB/s"
provenance = "assumed"
source = "a test"
"""

SMALL = ("plan", "model", "nets.py:small", "--input-size", "512", "-d", "adreno-750", "--chunk", "64KiB")
TWO = ("plan", "queue", "nets.py:small", "nets.py:other", *SMALL[3:])
SWEEP = ("plan", "sweep", *SMALL[2:])


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """A folder with models and a device."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    Path("bare").mkdir()
    Path("bare/device.toml").write_text(DEVICE)
    return tmp_path


# one model --------------------------------------------------------------------------------------------------


def test_one_model(run):
    out = run(*SMALL, "--memory-limit", "6MiB")
    for words in (
        "nets:small on adreno-750: 6 launches, 6 weights of 6.0 MiB",
        "this plan     preloading everything",
        "memory allocated",
        "proven optimal (lambda 0.9, M_peak 500.0 MiB)",
        "memory limit   6.0 MiB, of which",
        "loaded while layers run",
        "predicted      assumed figures.",
    ):
        assert words in out, out
    assert max(map(len, out.splitlines())) <= 80
    assert not list(Path().glob("*.json"))


def test_progress_goes_to_stderr(capsys):
    assert main(["-v", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "lowering and planning nets.py:small" in err and "done after" in err
    assert "lowering" not in out


def test_what_is_written_is_accepted(run):
    out = run(*SMALL, "--memory-limit", "3.5MiB", "-o", "plan.json", "--write-instance", "problem.json.gz")
    assert "written to plan.json\n" in out and "instance written to problem.json.gz" in out
    out = run("plan", "verify", "plan.json", "problem.json.gz")
    assert "the plan keeps all rules" in out
    again = run("plan", "instance", "problem.json.gz", "--json")
    assert json.loads(again)["objective"] == json.loads(Path("plan.json").read_text())["objective"]


def test_the_layers(run):
    out = run(*SMALL, "--layers")
    assert re.search(r"^layer name +class +capacity loads start ms takes ms$", out, re.MULTILINE)
    assert re.search(r"^1 +\S*rows_\w+ +reusable +\d+ +\d+ +\d+\.\d +\d\.\d\d$", out, re.MULTILINE)
    assert re.search(r"^ {6}(\d+\.\w+ \(\d+\), )*\d+\.weight \(\d+\)", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
    rows = json.loads(run(*SMALL, "--layers", "--json"))["layers"]
    assert [row["number"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_numbers_without_unit_are_mib(run):
    whole, unit = (json.loads(run(*SMALL, "--memory-limit", limit, "--json")) for limit in ("6", "6MiB"))
    assert whole == unit and whole["memory_limit_bytes"] == 6 * 2**20


def test_json(run):
    document = json.loads(run(*SMALL, "--json", "--memory-limit", "6MiB", "--out", "plan.json"))
    assert document["model"] == "nets:small" and document["status"] == "OPTIMAL"
    assert document["allocated"]["total_bytes"] <= document["memory_limit_bytes"] == 6 * 2**20
    assert document["program"] == json.loads(Path("plan.json").read_text())["program"]
    assert document["weights"] == 6 and "layers" not in document and Path("plan.json").exists()


def test_no_plan_within_the_limit(run):
    out = run(*SMALL, "--memory-limit", "1MiB", "--out", "plan.json", status=DOES_NOT_FIT)
    works = re.search(r"memory limit that works is (\S+):", " ".join(out.split()))[1]
    assert "does not run within 1.0 MiB" in out and not Path("plan.json").exists()
    assert "memory limit   " in run(*SMALL, "--memory-limit", works)
    document = json.loads(run(*SMALL, "--memory-limit", "1MiB", "--json", status=DOES_NOT_FIT))
    assert document["status"] == "INFEASIBLE" and document["works_bytes"] > 2**20
    assert works in document["reason"]


def test_options_of_planning(run):
    single = json.loads(run(*SMALL, "--precision", "float32", "--json"))
    assert single["weight_bytes"] > 6 * 10**6
    free = run(*SMALL, "--m-peak", "none", "--lambda", "0.5", "--effort", "0.1")
    assert "lambda 0.5, M_peak none" in free


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["same-type", "always-next", "preload-all"])
def test_strategies(run, strategy):
    wide = ("plan", "model", "nets.py:wide", "--input-size", "2048", "-d", "adreno-750", "--chunk", "64KiB")
    out = run(*wide, "--strategy", strategy)
    assert ("breaks rules of the overlap problem" in " ".join(out.split())) == (strategy != "preload-all")
    if strategy == "preload-all":
        out = run(*wide, "--strategy", strategy, "--memory-limit", "10MiB", status=DOES_NOT_FIT)
        assert "as preload-all plans it takes" in " ".join(out.split())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("picture", [None, "memory", "gantt", "comparison"])
def test_pictures(run, picture):
    pytest.importorskip("matplotlib")
    words = () if picture is None else ("--picture", picture)
    assert "drawn to run.svg" in run(*SMALL, "--plot", "run.svg", *words)
    assert "<svg" in Path("run.svg").read_text()


# several models, several settings ---------------------------------------------------------------------------


def test_a_queue(run):
    out = run(*TWO, "--memory-limit", "6MiB")
    for words in (
        "nets:small, nets:other on adreno-750, one after the other within 6.0 MiB",
        "1. nets:small",
        "2. nets:other",
        "planned together  one at a time",
        "latency, ms",
        "by models before",
    ):
        assert words in out, out
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(run(*TWO, "--memory-limit", "6MiB", "--json"))
    assert document["together"]["latency_ms"] < document["one_at_a_time"]["latency_ms"]
    assert document["together"]["allocated_bytes"] <= 6 * 2**20
    assert document["models"][1]["bytes_loaded_by_models_before"] > 0
    assert [m["model"] for m in document["models"]] == ["nets:small", "nets:other"]


@pytest.mark.slow
def test_a_queue_of_which_one_does_not_fit(run):
    out = run(*TWO, "--memory-limit", "1MiB", status=DOES_NOT_FIT)
    assert "nets:small does not run within 1.0 MiB" in out


def test_a_sweep(run):
    out = run(*SWEEP)
    assert "nets:small on adreno-750: latency (ms) against memory (MiB)" in out
    assert out.count("\nlambda ") == 7 and "\npreloading everything " in out
    assert max(map(len, out.splitlines())) <= 80
    points = json.loads(run(*SWEEP, "--json", "--m-peak", "none"))
    assert len(points) == 7 and {0.9, 0.03} <= {point["lambda"] for point in points}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [(*TWO, "--memory-limit", "6MiB"), SWEEP])
def test_pictures_of_several(run, words):
    pytest.importorskip("matplotlib")
    assert "drawn to all.png" in run(*words, "--plot", "all.png")
    assert Path("all.png").read_bytes().startswith(b"\x89PNG")


# what cannot be meant ---------------------------------------------------------------------------------------


WRONG = {
    "no model": (("plan", "model"), "MODEL"),
    "unknown model": (("plan", "model", "gpt-neo-1.4b", "-d", "adreno-750"), "did you mean gpt-neo-1.3b"),
    "unknown device": ((*SMALL[:5], "-d", "adreno-75"), "adreno-750"),
    "a device without storage": ((*SMALL[:5], "-d", "./bare"), "add [figures.disk_read_gb_s]"),
    "a model that raises": (("plan", "model", "nets.py:raises", "-d", "adreno-750"), "out of ideas"),
    "another input size": ((*SMALL, "--input-size", "7"), "--input-size 7 is the shape of one sample"),
    "a picture of nothing": ((*SMALL, "--picture", "gantt"), "add --plot FILE"),
    "one file for two": ((*SMALL, "-o", "x.json", "--write-instance", "./x.json"), "name one file twice"),
    "two without limit": (TWO, "--memory-limit"),
    "two into a file": ((*TWO, "--memory-limit", "3MiB", "-o", "x.json"), "-o"),
    "a sweep of two": ((*SWEEP, "nets.py:other"), "nets.py:other"),
    "a sweep in a limit": ((*SWEEP, "--memory-limit", "1GiB"), "--memory-limit"),
    "a sweep of one lambda": ((*SWEEP, "--lambda", "0.5"), "--lambda"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_in_one_line(case, refused):
    words, says = WRONG[case]
    before = sorted(Path().rglob("*.*"))
    assert says in refused(*words)
    assert [path for path in sorted(Path().rglob("*.*")) if "__pycache__" not in str(path)] == before
