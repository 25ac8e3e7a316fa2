"""Devices are chosen by what they can do: drivers that cannot build or compute are named and skipped."""

import os
import platform
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles.children import python
from oracles.opencl_devices import GPU, PHONE
from oracles.spoiled_drivers import spoiled

from torchedge.errors import DeviceError, TorchedgeWarning
from torchedge.opencl import choose_device, choosing, drivers
from torchedge.opencl.platforms import driver_message, handles
from torchedge.opencl.probes import NO_TIMES, remark_of

cl = pytest.importorskip("pyopencl")

CPU = replace(GPU, index=2, name="pthread-cpu", platform="Portable Computing Language", kind="cpu")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv("TORCHEDGE_OPENCL_DEVICE", raising=False)
    monkeypatch.setattr(choosing, "_warned", set())


def test_a_device_that_fails_is_warned_with_one_warning():
    faults = {GPU: "its driver ends the process (SIGSEGV)", PHONE: "", CPU: ""}
    with pytest.warns(TorchedgeWarning, match=r"NVIDIA H200.*driver 580.*SIGSEGV.*install") as caught:
        assert choose_device(None, [GPU, CPU], faults.get) is CPU
        assert choose_device(None, [GPU, CPU], faults.get) is CPU
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_device("gpu", [replace(GPU, index=0), PHONE], lambda device: "") == GPU


def test_a_device_that_was_asked_for_and_fails_is_an_error(monkeypatch):
    with pytest.raises(DeviceError, match=r"'nvidia cuda' cannot be used: .*: broken; install a newer"):
        choose_device("nvidia cuda", [replace(PHONE, platform="x"), GPU], lambda device: "broken")
    monkeypatch.setenv("TORCHEDGE_OPENCL_DEVICE", "2")
    with pytest.raises(DeviceError, match="'2' cannot be used"):
        choose_device(None, [GPU, CPU], lambda device: "broken")
    with pytest.raises(DeviceError, match=r"no OpenCL device can be used: .*broken.*broken"):
        choose_device("gpu", [GPU, PHONE], lambda device: "broken")


def test_a_device_that_computes_long_loops_wrong_is_used_where_there_is_no_other():
    """Llvmpipe of Mesa 22.3 ends the loops of a work-item after 65,535 rounds."""
    remarks = {GPU: "its loops end after 65535 rounds", PHONE: "", CPU: ""}

    def chosen(query, *devices):
        return choose_device(query, devices, lambda device: "", remarks.get)

    assert chosen(None, GPU, CPU) is CPU and chosen("gpu", GPU, PHONE) is PHONE
    with pytest.warns(TorchedgeWarning, match="NVIDIA H200.*65535 rounds; use another device") as caught:
        assert chosen(None, GPU) is GPU and chosen("gpu", GPU) is GPU and chosen("nvidia", GPU) is GPU
    assert len(caught) == 1


def test_a_simulator_is_the_last_choice():
    simulator = replace(GPU, index=0, name="Oclgrind Simulator", platform="Oclgrind")
    assert choose_device(None, [simulator, CPU]) is CPU
    assert choose_device("oclgrind", [simulator, CPU]) is simulator


@pytest.mark.parametrize(
    ("machine", "named"), [("x86_64", "pip install 'torchedge[opencl]'"), ("aarch64", "pocl-opencl-icd")]
)
def test_the_advice_is_what_this_machine_can_install(machine, named, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(drivers, "installed_runtime", lambda: None)
    assert named in drivers.driver_advice()
    with pytest.raises(DeviceError) as caught:
        choose_device("cpu", [CPU], lambda device: "broken")
    assert named in str(caught.value)


def test_a_message_of_a_driver_says_each_thing_once():
    text = (
        "clBuildProgram failed: BUILD_PROGRAM_FAILURE - clBuildProgram failed: BUILD_PROGRAM_FAILURE - "
        "clBuildProgram failed: BUILD_PROGRAM_FAILURE\n\nBuild on <pyopencl.Device 'x' on 'y' at 0x1>:\n\n"
        "error: unknown target CPU 'generic'\nDevice x failed to build\n\n(options: -cl-std=CL1.2)"
    )
    message = "clBuildProgram failed: BUILD_PROGRAM_FAILURE: unknown target CPU 'generic'"
    assert driver_message(Exception(text)) == message
    assert driver_message(Exception("create_buffer failed: INVALID_VALUE")) == (
        "create_buffer failed: INVALID_VALUE"
    )


@pytest.mark.parametrize("there", [False, True])
def test_the_runtime_of_pip_is_added_to_the_vendors_once(there, tmp_path, monkeypatch):
    library = tmp_path / "libintelocl.so"
    library.touch()
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "other.icd").write_text("libother.so\n")
    if there:
        (vendors / "intel.icd").write_text(f"{library}\n")
    monkeypatch.setattr(drivers, "installed_runtime", lambda: library)
    monkeypatch.setattr(drivers, "_asked", [])
    monkeypatch.setenv("OCL_ICD_VENDORS", str(vendors))
    seen = []

    class Loader:
        @staticmethod
        def get_platforms():
            folder = Path(os.environ["OCL_ICD_VENDORS"])
            seen.append([path.read_text().strip() for path in sorted(folder.glob("*.icd"))])
            return []

    for _ in range(2):
        drivers.find_platforms(Loader)
    before = [str(library), "libother.so"] if there else ["libother.so"]
    assert seen == [before if there else [*before, str(library)], before]
    assert os.environ["OCL_ICD_VENDORS"] == str(vendors)
    assert drivers.is_added("Intel(R) OpenCL") is not there


LOOP = "__kernel void rounds(__global float *to) { for (int k = 0; k < 100000; k++) to[0] += 1; }"


def test_a_remark_says_what_long_loops_give_here():
    device = choose_device()
    context = cl.Context([handles()[device.index]])
    queue, to = cl.CommandQueue(context), np.zeros(1, np.float32)
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=to)
    cl.Program(context, LOOP).build().rounds(queue, (1,), None, buffer)
    cl.enqueue_copy(queue, to, buffer)
    remark = remark_of(device)
    assert bool(to[0] == 100_000) is ("loops end after" not in remark)


FAULTS = """
import sys
from torchedge.opencl import list_opencl_devices, probes
probes.PATIENCE_S = int(sys.argv[1])
device = list_opencl_devices()[0]
print(probes.fault_of(device) or probes.remark_of(device) or "works")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the loader of another system")
@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("build", "unknown target CPU 'generic'"),
        ("crash", "its driver ends the process (SIGABRT"),
        ("times", NO_TIMES),
        pytest.param("hang", "has not built and run a small kernel within 4 s", marks=pytest.mark.slow),
        pytest.param("wrong", "computes wrong numbers", marks=pytest.mark.slow),
        pytest.param("memory", "MEM_OBJECT_ALLOCATION_FAILURE", marks=pytest.mark.slow),
    ],
)
def test_a_driver_that_fails_leaves_this_process_alone(how, fault, tmp_path):
    environment = spoiled(how, tmp_path)
    for seconds in ("4", "0") if how == "hang" else ("60", "0"):  # the second verdict is the first one's
        assert fault in python("-c", FAULTS, seconds, **environment).stdout
