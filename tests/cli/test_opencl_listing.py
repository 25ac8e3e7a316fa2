"""`torchedge devices --opencl`, with and without pyopencl."""

import json
import sys
from dataclasses import fields, replace

import pytest
from oracles.opencl_devices import GPU, PHONE

from torchedge.cli import main
from torchedge.cli.listing import print_opencl_device, print_opencl_devices
from torchedge.opencl import ClDevice


def test_the_devices_of_this_machine(run):
    pytest.importorskip("pyopencl")
    out = run("devices", "--opencl")
    assert "device" in out.splitlines()[0] and "0" in out and "*" in out
    assert max(map(len, out.splitlines())) <= 80
    documents = json.loads(run("devices", "--opencl", "--json"))
    assert set(documents[0]) == {field.name for field in fields(ClDevice)} | {"fault", "remark", "default"}
    assert [document["default"] for document in documents].count(True) == 1
    assert run("devices", "--opencl", "0").startswith("0: ")
    assert json.loads(run("devices", "--opencl", "0", "--json")) == documents[0]


def test_an_unknown_device_is_one_line(refused):
    pytest.importorskip("pyopencl")
    assert "fits no device; expected one of 0: " in refused("devices", "--opencl", "no such thing")


def test_an_unknown_default_device_does_not_hide_the_list(run, capsys, monkeypatch):
    pytest.importorskip("pyopencl")
    monkeypatch.setenv("TORCHEDGE_OPENCL_DEVICE", "no such thing")
    assert main(["devices", "--opencl"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].startswith("0 ") and "fits no device" in err


def test_without_pyopencl_the_command_says_how_to_get_it(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    assert "pip install 'torchedge[opencl]'" in refused("devices", "--opencl")


def test_tables_fit_a_terminal(capsys):
    faults = {GPU.index: "", PHONE.index: "its driver ends the process " + "for a long reason " * 9}
    print_opencl_devices([GPU, PHONE, replace(GPU, index=12, name="long " * 20)], GPU, faults)
    for device in (GPU, PHONE):
        print_opencl_device(device, faults[device.index])
    print_opencl_devices([GPU], GPU, {}, {GPU.index: "its loops end after 65535 rounds, without an error"})
    out = capsys.readouterr().out
    assert "doubtful" in out and "0: its loops end after 65535 rounds" in out
    assert "1: its driver ends the process" in out and "install a newer driver" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "rows in multiples of 64 texels" in out and "buffers, images, arithmetic" in out
