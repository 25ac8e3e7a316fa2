"""The stand-alone probe on a CPU: its rows, their order, and what networks that misbehave leave of it."""

import ast
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from oracles.children import python

from torchedge.profiling.campaigns.plans import OPTIMIZERS

HOOKS = Path(__file__).resolve().parents[2] / "hooks"
STAND_IN = Path(__file__).resolve().parents[1] / "oracles" / "misbehaving_probe.py"
NODES = [
    {"name": "x", "op": "input"},
    {"name": "a.conv", "op": "module", "type": "Conv2d", "kwargs": {"in_channels": 3, "out_channels": 4,
     "kernel_size": 3}, "args": [{"node": "x"}]},
    {"name": "norm", "op": "module", "type": "LocalResponseNorm", "kwargs": {"size": 2},
     "args": [{"node": "a.conv"}]},
    {"name": "drop", "op": "module", "type": "StochasticDepth", "kwargs": {"p": 0.2, "mode": "row"},
     "args": [{"node": "norm"}]},
    {"name": "mean", "op": "method", "target": "mean", "args": [{"node": "drop"}, [2, 3]]},
    {"name": "y", "op": "output", "args": [{"node": "mean"}]},
]  # fmt: skip
FIGURES = ("memory_mib", "latency_ms", "latency_p10_ms", "latency_p90_ms", "steps")


def job(name, build, points, size=(4,), **rest):
    return {"id": name, "build": build, "input_size": list(size), "points": points, **rest}


JOBS = [
    job("net", {"nodes": NODES}, [["train", 2], ["infer", 4], ["train", 1], ["infer", 1]], (3, 8, 8)),
    job(
        "broken", {"nodes": [{"name": "a", "op": "module", "type": "Nothing"}]}, [["infer", 1], ["train", 1]]
    ),
    job("large", {"test": "large"}, [["infer", 1], ["infer", 2], ["infer", 3], ["train", 1]]),
    job("killed", {"test": "killed"}, [["infer", 1], ["infer", 2], ["infer", 3], ["train", 1]]),
    job("gone", {"test": "gone"}, [["infer", 2], ["train", 1]]),
    job("hungry", {"test": "hungry"}, [["infer", 1], ["infer", 2], ["train", 1]]),
    job("odd", {"test": ""}, [["train", 1]], optimizer="magic"),
    job("plain", {"test": ""}, [["train", 1]], optimizer="none"),
]


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    """The probe's rows of all jobs; without the slow tests, of the first two alone."""
    ours = [item for item in request.session.items if item.path == request.path]
    jobs = JOBS if any(item.get_closest_marker("slow") for item in ours) else JOBS[:2]
    folder = tmp_path_factory.mktemp("probe")
    (folder / "jobs.jsonl").write_text("".join(json.dumps(j) + "\n" for j in jobs) + "\n")
    out = folder / "rows.jsonl"
    words = [STAND_IN, HOOKS / "training_probe.py", folder / "jobs.jsonl", "--out", out, "--device", "cpu"]
    assert python(*words).stdout == ""
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def points(rows):
    """By job, its rows of points."""
    found = defaultdict(list)
    for row in rows:
        if row["row"] == "point":
            found[row["job"]].append(row)
    return found


@pytest.fixture(scope="module")
def probe():
    spec = importlib.util.spec_from_file_location("training_probe", HOOKS / "training_probe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_environment_comes_first_and_says_what_was_measured_with(rows):
    first = rows[0]
    assert [row["row"] for row in rows].count("environment") == 1
    assert (first["row"], first["device"], first["memory_meter"]) == ("environment", "cpu", "rss")
    assert first["probe"].startswith("training_probe ") and first["torch"] and first["python"]
    assert first["device_name"] and first["threads"] >= 1 and len(first["machine"]) == 16
    assert first["command"] == "training_probe.py jobs.jsonl --out rows.jsonl --device cpu"


@pytest.mark.slow
def test_every_point_has_one_row_behind_its_start(rows, points):
    for wanted in JOBS:
        have = sorted((row["mode"], row["batch_size"]) for row in points[wanted["id"]])
        assert have == sorted(map(tuple, wanted["points"])), wanted["id"]
    under_way = None
    for row in rows[1:]:
        point = (row["job"], row["mode"], row["batch_size"])
        assert row["row"] == "start" or point == under_way
        under_way = point


@pytest.mark.slow
def test_inference_before_training_and_batch_sizes_ascending(points):
    order = [(row["mode"], row["batch_size"]) for row in points["net"]]
    assert order == [("infer", 1), ("infer", 4), ("train", 1), ("train", 2)]


def test_figures_of_a_point(points):
    for row in points["net"]:
        assert row["fits"] == 1 and row["reason"] == ""
        assert all(row[name] > 0 for name in FIGURES)
        assert row["latency_p10_ms"] <= row["latency_ms"] <= row["latency_p90_ms"]
        assert row["allocated_mib"] is row["reserved_mib"] is row["throttled"] is None
        layers = {path: (fore, back) for path, fore, back in row["layers"]}
        assert list(layers) == ["layers.a_conv", "layers.norm", "layers.drop"]
        assert all(fore > 0 for fore, _ in layers.values())
        assert (layers["layers.a_conv"][1] is not None) == (row["mode"] == "train")


def test_a_network_that_cannot_be_built_says_why(points):
    for row in points["broken"]:
        assert row["fits"] is None and "'Nothing' is not known" in row["reason"]
        assert all(row[name] is None for name in (*FIGURES, "layers"))


@pytest.mark.slow
def test_an_unknown_optimizer_is_named(points):
    assert "magic" in points["odd"][0]["reason"] and points["plain"][0]["fits"] == 1


@pytest.mark.slow
def test_out_of_memory_is_a_result_and_larger_batches_are_not_tried(points):
    said = [(row["mode"], row["fits"], row["reason"]) for row in points["large"]]
    assert said == [
        ("infer", 0, "out of memory"),
        ("infer", 0, "out of memory"),
        ("infer", 0, "out of memory at two smaller batch sizes"),
        ("train", 0, "out of memory"),
    ]


@pytest.mark.slow
def test_a_killed_process_costs_one_point(points):
    assert [row["fits"] for row in points["killed"]] == [1, 0, 1, 1]
    assert points["killed"][1]["reason"] == "killed by signal 9 (out of memory)"
    assert [(row["fits"], row["reason"]) for row in points["gone"]] == [(None, "the process failed"), (1, "")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_of_a_point_does_not_hold_the_last_points(points):
    before, large, after = (row["memory_mib"] for row in points["hungry"])
    assert large - before > 400
    assert large - after > 200


def test_a_line_that_is_no_job_is_named(probe, tmp_path):
    file = tmp_path / "jobs.jsonl"
    file.write_text(json.dumps(JOBS[0]) + "\n\n" + '{"id": "a"}\n')
    jobs = probe.jobs_of(str(file))
    assert next(jobs)["id"] == "net"
    with pytest.raises(SystemExit, match="line 3 is not a job"):
        next(jobs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_simulation_is_known(probe, name):
    import torch

    optimizer = probe.make_optimizer(name, [torch.nn.Parameter(torch.zeros(1))])
    assert (optimizer is None) == (name == "none")


@pytest.mark.parametrize("file", sorted(HOOKS.glob("*.py")), ids=lambda p: p.name)
def test_syntax_is_that_of_python_3_6(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    allowed = sys.stdlib_module_names | {"torch", "pynvml", "numpy", "pyopencl"}
    assert {name.split(".")[0] for name in imported} <= allowed
