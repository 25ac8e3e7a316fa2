"""Workspaces of convolutions fitted to measured ones: a known rule is found, damaged tables are refused."""

import gzip
import json

import numpy as np
import pytest

from torchedge.errors import ProfileError
from torchedge.prediction.memory.workspaces import PHASES, tensor_bytes
from torchedge.profiling import workspace_fitting
from torchedge.profiling.workspace_fitting import fit_workspaces, read_workspaces

MIB = 2**20


def convolution(random, **given):
    """A convolution's line as the probe writes it, workspaces by a rule: all tensors where channels fit 4."""
    side, kernel = int(random.integers(16, 96)), int(random.choice([1, 3, 5]))
    stride = int(random.integers(1, 3))
    row = {
        "inputs": int(random.integers(16, 200)),
        "outputs": int(random.integers(16, 200)),
        "groups": 1,
        "kernel": [kernel] * 2,
        "stride": [stride] * 2,
        "padding": [kernel // 2] * 2,
        "dilation": [1, 1],
        "size": [side, side],
        "batch": int(random.integers(16, 64)),
        **given,
    }
    after = (side + 2 * (kernel // 2) - kernel) // stride + 1
    x = row["batch"] * row["inputs"] * side * side
    y = row["batch"] * row["outputs"] * after * after
    w = row["outputs"] * row["inputs"] * kernel * kernel
    fits = row["inputs"] % 4 == 0 and row["outputs"] % 4 == 0
    taken = 4 * (x + y + w) / MIB if fits else 0.0
    row.update({f"{phase}_workspace_mib": 0.0 for phase in PHASES})
    return {**row, "forward_workspace_mib": taken, **given}


def lines(count, seed, **given):
    random = np.random.default_rng(seed)
    return [convolution(random, **given) for _ in range(count)]


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return [
        read_workspaces(write(folder / f"{seed}.jsonl", lines(count, seed)))[""]
        for seed, count in ((1, 3000), (2, 500))
    ]


def test_a_rule_is_found_and_holds_for_other_shapes(tables):
    pytest.importorskip("sklearn")
    learnt, unseen = tables
    model = fit_workspaces({"": learnt})
    for table in (learnt, unseen):
        assert model.bytes_of("forward", table.geometry) == pytest.approx(table.measured["forward"], rel=1e-5)
    assert not model.bytes_of("backward_x", unseen.geometry).any()


def test_geometry_is_worked_out_from_the_shapes(tmp_path):
    row = lines(1, 0, inputs=6, outputs=8, groups=2, kernel=[3, 5], stride=[2, 1], padding=[1, 2],
                size=[9, 7], batch=3)  # fmt: skip
    found = read_workspaces(write(tmp_path / "c.jsonl", row * 200))[""]
    assert found.geometry[0].tolist() == [3, 6, 8, 2, 15, 2, 3, 63, 35]
    x, y, w = 3 * 6 * 63, 3 * 8 * 35, 8 * 3 * 15
    assert tensor_bytes(found.geometry)[0] == 4 * (x + y + w)


def test_failed_and_depthwise_convolutions_and_rests_of_blocks_are_left_out(tmp_path):
    good = lines(200, 4, forward_workspace_mib=1.04, backward_w_workspace_mib=1.06)
    depthwise = lines(5, 5, inputs=32, outputs=64, groups=32)
    found = read_workspaces(write(tmp_path / "c.jsonl", [*good, *depthwise, {"reason": "out of memory"}]))[""]
    assert len(found.geometry) == 200
    assert not found.measured["forward"].any() and (found.measured["backward_w"] > MIB).all()


def test_kinds_are_told_apart_and_fitted_apart(tmp_path):
    pytest.importorskip("sklearn")
    line = {"size": [1, 400], "kernel": [1, 3], "stride": [1, 2], "padding": [0, 1]}
    last = {"dtype": "bfloat16", "channels_last": True}
    rows = [
        *lines(200, 6),
        *lines(200, 7, dtype="float16", forward_workspace_mib=7.0),
        *lines(200, 8, **last, inputs=32, outputs=32, groups=32, forward_workspace_mib=9.0),
        *lines(200, 9, **line, forward_workspace_mib=5.0),
        *lines(199, 10, **line, **last),  # too few, left out
    ]
    tables = read_workspaces(write(tmp_path / "c.jsonl", rows))
    assert list(tables) == ["", "half-", "half-last-", "line-"]
    model = fit_workspaces(tables)
    assert sorted(model.forests) == sorted(kind + phase for kind in tables for phase in PHASES)
    for kind, mib in (("half-", 7), ("half-last-", 9), ("line-", 5)):
        taken = model.bytes_of(kind + "forward", tables[kind].geometry)
        assert np.median(taken) == pytest.approx(mib * MIB, rel=0.02)


WRONG = {
    "not JSON": "{",
    "a list": "[]",
    "another table": '{"id": "resnet18", "mode": "train"}',
    "no workspace": json.dumps({k: v for k, v in lines(1, 0)[0].items() if "workspace" not in k}),
    "no groups": json.dumps(lines(1, 0, groups=0)[0]),
    "no step": json.dumps(lines(1, 0, stride=[0, 1])[0]),
    "three sides": json.dumps(lines(1, 0, size=[8, 8, 8])[0]),
    "text": json.dumps(lines(1, 0, batch="many")[0]),
    "without end": json.dumps(lines(1, 0)[0]).replace('"batch": ', '"batch": 1e999, "b": '),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_named(line, tmp_path):
    file = write(tmp_path / "convolutions.jsonl", lines(2, 0))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(
        ProfileError, match=r"convolutions\.jsonl line 3: .*(a measured convolution|JSON|64 bits)"
    ):
        read_workspaces(file)


def test_too_few_and_too_many_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ProfileError, match="199 convolutions that are not depthwise, expected at least 200"):
        read_workspaces(write(tmp_path / "few.jsonl", lines(199, 0)))
    monkeypatch.setattr(workspace_fitting, "_MOST_BYTES", 1 << 16)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(bytes(1 << 20)))
    with pytest.raises(ProfileError, match="unpacks to more than 65536 bytes"):
        read_workspaces(bomb)
