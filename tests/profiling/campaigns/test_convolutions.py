"""Convolutions like those of a plan's networks: how they are drawn, and that measuring them goes on."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from oracles import fake_convolution_probe
from oracles.fake_campaigns import Silent, plan_of, prepare, run_fake

from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.profiling.campaigns import convolutions
from torchedge.profiling.campaigns.convolutions import draw_shapes, measure_convolutions, shapes_of
from torchedge.profiling.campaigns.transports import LocalTransport


def job(*layers, size=(3, 32, 32)):
    nodes, previous = [{"name": "x", "op": "input"}], "x"
    for number, (kind, settings) in enumerate(layers):
        name = f"layer{number}"
        nodes.append(
            {"name": name, "op": "module", "type": kind, "kwargs": settings, "args": [{"node": previous}]}
        )
        previous = name
    nodes.append({"name": "y", "op": "output", "args": [{"node": previous}]})
    return {"id": "net-0", "network": "net", "input_size": list(size), "build": {"nodes": nodes}}


def conv(inputs, outputs, kernel=3, **rest):
    return "Conv2d", {"in_channels": inputs, "out_channels": outputs, "kernel_size": kernel, **rest}


JOB = job(
    conv(3, 16, stride=2, padding=1),
    conv(16, 16, groups=16),
    conv(16, 32, groups=4, padding="same"),
    conv(32, 64, [1, 3], padding=[0, 1]),
    ("ReLU", {}),
)


@pytest.fixture(scope="module")
def known():
    return shapes_of([JOB])


def test_convolutions_of_networks(known):
    plain = {"groups": 1, "kernel": [3, 3], "stride": [1, 1], "dilation": [1, 1], "batch": 0}
    assert known == [
        {**plain, "inputs": 3, "outputs": 16, "stride": [2, 2], "padding": [1, 1], "size": [32, 32]},
        {**plain, "inputs": 16, "outputs": 32, "groups": 4, "padding": [1, 1], "size": [14, 14]},
        {**plain, "inputs": 32, "outputs": 64, "kernel": [1, 3], "padding": [0, 1], "size": [14, 14]},
    ]


def test_drawn_ones_are_near_new_and_the_same_again(known):
    drawn = draw_shapes(known, 2000, 7, 3.2e9)
    assert len(drawn) == 2000 == len({json.dumps(shape) for shape in drawn})
    assert drawn == draw_shapes(known, 2000, 7, 3.2e9) != draw_shapes(known, 2000, 8, 3.2e9)
    assert drawn[:100] == draw_shapes(known, 100, 7, 3.2e9)
    assert not [shape for shape in drawn if {**shape, "batch": 0} in known]
    origins = {json.dumps([s["kernel"], s["stride"], s["padding"], s["groups"]]): s for s in known}
    for shape in drawn:
        origin = origins[json.dumps([shape[n] for n in ("kernel", "stride", "padding", "groups")])]
        assert shape["batch"] >= 1
        assert shape["inputs"] % shape["groups"] == shape["outputs"] % shape["groups"] == 0
        assert shape["groups"] == 1 or shape["inputs"] > shape["groups"]
        assert 0.6 * origin["size"][0] <= shape["size"][0] <= 1.6 * origin["size"][0]
        for name in ("inputs", "outputs"):
            if origin[name] <= 4:
                assert shape[name] == origin[name]
            else:  # nearest multiples of 32 are 16 away
                assert 0.6 * origin[name] - 17 < shape[name] < 1.5 * origin[name] + 17
    aligned = sum(shape["outputs"] % 8 == 0 for shape in drawn) / len(drawn)
    assert 0.3 < aligned < 0.7


def test_tensors_stay_below_a_limit(known):
    for shape in draw_shapes(known, 200, 0, 1e6):
        assert 4 * shape["batch"] * shape["inputs"] * shape["size"][0] ** 2 < 1e6
    assert draw_shapes(known, 200, 0, 10.0) == []


# measuring --------------------------------------------------------------------------------------------------

SHAPES = draw_shapes(
    [{"inputs": 64, "outputs": 64, "groups": 1, "kernel": [3, 3], "stride": [1, 1], "padding": [1, 1],
      "dilation": [1, 1], "size": [28, 28], "batch": 0}], 30, 0, 1e9,
)  # fmt: skip
CUDA = {"device": "cuda", "memory_total_mib": 8000}


@pytest.fixture
def hooks(tmp_path, checkout):
    probe = tmp_path / "convolution_probe.py"
    shutil.copyfile(fake_convolution_probe.__file__, probe)
    return [checkout / "hooks" / "leash.py", probe]


@pytest.fixture
def folder(tmp_path):
    """A campaign's folder with shapes drawn already."""
    root = tmp_path / "campaign"
    root.mkdir()
    (root / "shapes.jsonl").write_text("".join(json.dumps(shape) + "\n" for shape in SHAPES))
    return root


def measure(folder, hooks, count=30):
    listener = Silent()
    transport = LocalTransport(sys.executable, folder / "device")
    measure_convolutions(folder, count, 0, CUDA, transport, hooks, listener)
    return listener


def rows(folder):
    return [json.loads(line) for line in (folder / "convolutions.jsonl").read_text().splitlines()]


def shape_of(row):
    return {name: row[name] for name in SHAPES[0]}


def test_every_convolution_gets_a_row_once(folder, hooks):
    listener = measure(folder, hooks)
    assert [shape_of(row) for row in rows(folder)] == SHAPES
    assert listener.begun == [("measuring", 30, 0)] and listener.steps == 30
    before = (folder / "convolutions.jsonl").read_bytes()
    assert measure(folder, hooks).begun == []
    assert (folder / "convolutions.jsonl").read_bytes() == before


def test_goes_on_behind_a_torn_line(folder, hooks):
    measure(folder, hooks, count=12)
    path = folder / "convolutions.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert measure(folder, hooks).begun == [("measuring", 30, 11)]
    assert [shape_of(row) for row in rows(folder)] == SHAPES


def test_what_takes_the_probe_down_is_not_tried_again(folder, hooks, monkeypatch):
    monkeypatch.setenv("FAKE_DIES_AT", "10")
    measure(folder, hooks)
    found = rows(folder)
    assert [shape_of(row) for row in found] == SHAPES
    reasons = [number for number, row in enumerate(found) if "reason" in row]
    assert reasons == [10, 21] and "ended here with status" in found[10]["reason"]


def test_a_probe_that_says_nothing_ends_it(folder, hooks, monkeypatch):
    hooks[1].write_text("import sys; sys.exit('convolution_probe: this PyTorch sees no GPU')")
    with pytest.raises(DeviceError, match="the probe ended with status 1: convolution_probe: this PyTorch"):
        measure(folder, hooks)
    assert len(rows(folder)) == 1


def test_damaged_shapes_are_named(folder, hooks):
    (folder / "shapes.jsonl").write_text("{}\n" * 30)
    with pytest.raises(ProfileError, match=r"shapes\.jsonl: is damaged.*delete it and run again"):
        measure(folder, hooks)


@pytest.mark.slow
def test_shapes_are_drawn_from_the_plans_networks(tmp_path, hooks):
    (tmp_path / "jobs.jsonl").write_text(json.dumps(JOB) + "\n" + '{"skipped": "a", "reason": "b"}\n')
    measure(tmp_path, hooks, count=40)
    assert [shape_of(row) for row in rows(tmp_path)] == draw_shapes(shapes_of([JOB]), 40, 0, 1000 * 2**20)


@pytest.mark.slow
def test_networks_without_convolutions_are_refused(tmp_path, hooks):
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job(("ReLU", {}))) + "\n")
    with pytest.raises(InputError, match="have no convolutions"):
        measure(tmp_path, hooks)


def test_part_of_a_campaign_on_cuda_only(tmp_path, hooks, monkeypatch):
    from torchedge.profiling.campaigns import running

    plan, asked = plan_of(networks=1, levels=(0,)), []
    prepare(tmp_path / "a", plan)
    monkeypatch.setattr(convolutions, "measure_convolutions", lambda *given: asked.append(given))
    listener = Silent()
    run_fake(tmp_path / "a", plan, listener, convolutions=5000)
    assert not asked and "on CUDA only" in listener.notes[-1]
    journal = Path(tmp_path / "a" / "rows.jsonl")
    on_cpu = [json.loads(line) for line in journal.read_text().splitlines()]
    on_cuda = [{**row, "device": "cuda"} if row["row"] == "environment" else row for row in on_cpu]
    journal.write_text("".join(json.dumps(row) + "\n" for row in on_cuda))
    run_fake(tmp_path / "a", plan, convolutions=5000)
    folder, count, seed, environment, *_ = asked[0]
    assert (folder, count, seed) == (tmp_path / "a", 5000, 0) and environment["device"] == "cuda"
    assert [file.name for file in asked[0][5]] == [running.LEASH, convolutions.PROBE]
    run_fake(tmp_path / "a", plan)
    assert len(asked) == 1
