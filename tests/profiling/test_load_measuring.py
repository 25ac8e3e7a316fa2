"""Loads measured on tiny kernels: rows that `read_loads` reads, journals that go on, the command."""

import json

import pytest
from torch import nn

from torchedge.cli import main
from torchedge.errors import InputError, ProfileError
from torchedge.opencl import open_context
from torchedge.profiling import load_fitting, load_measuring
from torchedge.profiling.load_fitting import read_loads
from torchedge.profiling.load_measuring import (
    LoadBench,
    LoadedOperator,
    cases,
    count_rows,
    disk_row,
    measure_loads,
)
from torchedge.storage.journals import Journal

pytest.importorskip("pyopencl")


@pytest.fixture
def few(monkeypatch):
    """Four sizes of one kernel of each class, small copies, a small file."""
    tiny = []
    for size in (1, 2, 3, 4):
        shape = (8, 1024 * size)
        tiny += [
            LoadedOperator("gelu", shape, nn.GELU, (shape,)),
            LoadedOperator("softmax", shape, lambda: nn.Softmax(-1), (shape,)),
            LoadedOperator(
                "linear", (64, 64 * size, 64), lambda size=size: nn.Linear(64 * size, 64), ((64, 64 * size),)
            ),
        ]
    monkeypatch.setattr(load_measuring, "cases", lambda quick: tiny)
    monkeypatch.setattr(load_measuring, "_COPIES", (1 << 16,))
    monkeypatch.setattr(load_measuring, "_POOL_BYTES", 1 << 22)
    monkeypatch.setattr(load_measuring, "_DISK_BYTES", 1 << 22)
    monkeypatch.setattr(load_measuring, "_WARM_S", 0.0)
    monkeypatch.setattr(load_fitting, "DISTURBED", float("inf"))  # a busy machine is no failure
    return tiny


@pytest.mark.slow
def test_rows_are_read_and_a_second_start_measures_what_is_missing(few, tmp_path, capsys):
    out = tmp_path / "loads.jsonl"
    names = []
    assert measure_loads(out, quick=True, step=names.append) == 17
    assert names[0] == "gelu 8 1024" and names[-5:] == [
        "copy by copy 65536", "copy by kernel 65536", "disk", "launch", "host",
    ]  # fmt: skip
    lines = out.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["row"] == "environment" and len(rows) == 18
    for case, row in zip(few, rows[1:13], strict=True):
        assert (row["kernel"], row["size"]) == (case.kernel, list(case.size))
        ratios = [extra / row["input_bytes"] for extra, _, _ in row["loads"]]
        assert ratios[0] == 0 and ratios == sorted(ratios) and 1.5 < ratios[-1] <= 4
        assert all(0 < least <= ms for _, ms, least in row["loads"])
        assert set(row["ways"]) == {"bytes", "alone", "copy", "kernel", "slot"}
    classes = {"gelu": "elemental", "softmax": "hierarchical", "linear": "reusable"}
    assert all(row["class"] == classes[row["kernel"]] for row in rows[1:13])
    assert rows[1]["input_bytes"] == 4 * 8 * 1024 and rows[3]["flops"] >= 2 * 64**3
    out.write_text("\n".join(lines[:6]) + "\n" + lines[6][:40])  # killed while it wrote
    assert measure_loads(out, quick=True) == 12
    again = out.read_text().splitlines()
    assert again[:6] == lines[:6] and len(again) == 18
    table = read_loads(out)
    assert len(table.cases) <= 12 and table.points == sum(len(row["loads"]) for row in rows[1:13])
    assert table.copy_gb_s > 0 and table.disk_gb_s > 0 and table.launch_us > 0
    assert min(table.host_us) > 0
    assert set(table.ways) == {"copy", "kernel", "slot"}
    assert main(["profile", "--streaming", "--quick", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["new_rows"] == 0 and document["way"] in table.ways
    assert document["disk_gb_s"] == table.disk_gb_s
    with pytest.raises(InputError, match="was measured with quick True, now False; choose another --out"):
        measure_loads(out)


def test_rows_of_something_else_are_no_journal(few, tmp_path):
    out = tmp_path / "loads.jsonl"
    out.write_text('{"id": "resnet18"}\n')
    with pytest.raises(ProfileError, match=r"loads\.jsonl line 1: is no row of `torchedge profile"):
        measure_loads(out)
    out.unlink()
    with Journal(out) as journal:
        journal.append({"row": "environment", "probe": "load_probe 1", "device": "another"})
    with pytest.raises(InputError, match="was measured with probe load_probe 1, now torchedge streaming 1"):
        measure_loads(out)


def test_options_of_streaming_stand_with_it(tmp_path, capsys):
    assert main(["profile", "--out", str(tmp_path / "x")]) == 2
    assert "--out is given without --streaming" in capsys.readouterr().err
    assert main(["profile", "--streaming"]) == 2
    assert "--streaming needs --out FILE" in capsys.readouterr().err
    assert main(["profile", "--streaming", "--out", str(tmp_path / "x"), "--device", "none such"]) != 0
    assert "OpenCL device 'none such' fits no device" in capsys.readouterr().err


def test_the_cases_have_all_kernels_in_ascending_sizes():
    for quick in (False, True):
        chosen = cases(quick=quick)
        keys = [(case.kernel, case.size) for case in chosen]
        assert len(set(keys)) == len(keys) and len(keys) < count_rows(quick=quick)
        assert {case.kernel for case in chosen} == {
            "gelu", "add", "relu", "softmax", "layer_norm", "linear", "conv",
        }  # fmt: skip
        for kernel in ("gelu", "linear", "conv", "softmax"):
            works = [work(case) for case in chosen if case.kernel == kernel]
            assert works == sorted(works)


def work(case):
    first = 1
    for number in case.size:
        first *= number
    return first * case.size[0] if case.kernel == "conv" else first


def test_the_disk_is_read_whole(tmp_path):
    row = disk_row(tmp_path, 1 << 22)
    assert row["bytes"] == 1 << 22 and row["ms"] > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProfileError, match="reading a temporary file of 4 MiB failed"):
        disk_row(tmp_path / "none", 1 << 22)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_all_device_classes_are_measured(target):
    """On PoCL, the kernels of each class fill buffers or textures."""
    from torchedge.lowering.targets import TARGETS

    bench = LoadBench(open_context(), TARGETS[target], 1 << 20)
    case = LoadedOperator("linear", (16, 512, 16), lambda: nn.Linear(512, 16), ((16, 512),))
    row = load_measuring.measure_case(bench, case, quick=True)
    assert row["class"] == "reusable" and len(row["loads"]) >= 3
    assert bench.texture == ("image2d" if target == "mobile" else "buffer")
