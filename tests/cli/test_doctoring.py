"""`torchedge doctor`: verdicts, commands and exit statuses on faked machines."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from torchedge import cli
from torchedge.profiling import doctoring


@pytest.fixture
def fast(monkeypatch):
    """The fresh process that imports torchvision is left out."""
    state = SimpleNamespace(loads=True)
    monkeypatch.setattr(doctoring, "_loads_operators", lambda: state.loads)
    return state


def findings(capsys):
    status = cli.main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["works"] == (status == 0)
    assert document["works"] == all(f["verdict"] != "broken" for f in document["findings"])
    return status, {f["subject"]: f for f in document["findings"]}


def test_each_gap_has_a_command(fast, capsys):
    status, found = findings(capsys)
    assert {"Python", "PyTorch", "GPU", "profiles", "cache folder", "profile folder"} <= found.keys()
    assert status in (0, 4)
    assert found["PyTorch"]["detail"].startswith(torch.__version__)
    for finding in found.values():
        assert finding["verdict"] in ("works", "missing", "broken")
        if finding["verdict"] == "broken":
            assert finding["command"]


def test_mismatched_wheels_are_named(fast, capsys):
    if doctoring._version("torchvision") is None:
        pytest.skip("torchvision is not installed")
    fast.loads = False
    status, found = findings(capsys)
    assert status == 4
    assert found["torchvision"]["verdict"] == "broken"
    assert "pip install" in found["torchvision"]["command"]


def test_a_gpu_without_cuda_in_pytorch_is_named(fast, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctoring, "_nvml_names", lambda: ["NVIDIA L4"])
    status, found = findings(capsys)
    assert status == 4
    assert "NVIDIA L4" in found["GPU"]["detail"] and "torch" in found["GPU"]["command"]


def test_a_missing_package_is_no_error(fast, capsys, monkeypatch):
    real = doctoring.importlib.util.find_spec
    monkeypatch.setattr(
        doctoring.importlib.util,
        "find_spec",
        lambda name: None if name in ("onnx", "pyopencl") else real(name),
    )
    _, found = findings(capsys)
    assert found["[onnx]"]["verdict"] == "missing" and "torchedge[onnx]" in found["[onnx]"]["command"]
    assert found["OpenCL"]["verdict"] == "missing" and "torchedge[opencl]" in found["OpenCL"]["command"]


def test_a_damaged_package_is_broken_and_has_a_command(fast, capsys, monkeypatch):
    real = doctoring.importlib.import_module

    def damaged(name):
        if name in ("sklearn", "pyopencl"):
            raise ImportError(f"{name}: libfoo.so.1: cannot open shared object file")
        return real(name)

    pytest.importorskip("sklearn")
    pytest.importorskip("pyopencl")
    monkeypatch.setattr(doctoring.importlib, "import_module", damaged)
    status, found = findings(capsys)
    assert status == 4
    for subject, package in (("[fit]", "scikit-learn"), ("OpenCL", "pyopencl")):
        assert found[subject]["verdict"] == "broken" and "libfoo.so.1" in found[subject]["detail"]
        assert found[subject]["command"].endswith(f"pip install --force-reinstall --no-deps {package}")


@pytest.mark.parametrize("faults", [["", ""], ["", "builds nothing"], ["builds nothing", "hangs"]])
def test_opencl_devices_are_judged_by_their_probes(faults, fast, capsys, monkeypatch):
    """A driver that is listed may build nothing; beside one that works it is no defect."""
    pytest.importorskip("pyopencl")
    import torchedge.opencl
    from torchedge.opencl import probes

    devices = [
        SimpleNamespace(name=f"device {i}", kind="cpu", platform="P", fault=fault)
        for i, fault in enumerate(faults)
    ]
    monkeypatch.setattr(torchedge.opencl, "list_opencl_devices", lambda: devices)
    monkeypatch.setattr(probes, "fault_of", lambda device, again: device.fault)
    assert cli.main(["doctor", "--json"]) in (0, 4)
    document = json.loads(capsys.readouterr().out)
    found = [f for f in document["findings"] if f["subject"] == "OpenCL"]
    for finding, fault in zip(found, faults, strict=True):
        expected = "works" if not fault else "broken" if all(faults) else "missing"
        assert finding["verdict"] == expected and fault in finding["detail"]
        assert bool(finding["command"]) == bool(fault)


def test_a_folder_that_is_a_file_and_a_damaged_profile_are_named(fast, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "profiles" / "mine").mkdir(parents=True)
    (tmp_path / "profiles" / "mine" / "device.toml").write_text("nonsense = ")
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))
    status, found = findings(capsys)
    assert status == 4
    assert "TORCHEDGE_CACHE" in found["cache folder"]["command"]
    assert found["profiles"]["verdict"] == "broken" and "mine" in found["profiles"]["detail"]


def test_an_unforeseen_failure_is_a_finding(fast, capsys, monkeypatch):
    def fail():
        raise ValueError("driver lost")

    monkeypatch.setattr(doctoring, "_gpu", fail)
    status = cli.main(["doctor"])
    lines = capsys.readouterr().out
    assert status == 4 and "ValueError: driver lost" in lines


def test_the_nvml_library_may_fail(monkeypatch):
    class NVMLError(Exception):
        pass

    def fail():
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail, NVMLError=NVMLError))
    assert doctoring._nvml_names() == "Driver Not Loaded"
