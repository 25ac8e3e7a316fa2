"""Choosing an OpenCL device, and what is known of those that are here."""

import sys
from dataclasses import replace

import pytest
from oracles.children import python
from oracles.opencl_devices import GPU, PHONE

from torchedge.errors import DeviceError, MissingExtraError
from torchedge.opencl import choose_device, list_opencl_devices

CPU = replace(
    GPU, index=2, name="pthread-cpu", platform="Portable Computing Language", vendor="x", kind="cpu"
)
ALL = [CPU, PHONE, replace(GPU, index=3, kind="other", name="something"), GPU]


@pytest.mark.parametrize(
    ("query", "index"),
    [(None, 0), (2, 2), ("2", 2), ("gpu", 1), ("cpu", 2), ("adreno", 1), ("portable", 2), ("pthread", 2)],
)
def test_a_device_is_chosen_by_number_type_or_name(query, index, monkeypatch):
    monkeypatch.delenv("TORCHEDGE_OPENCL_DEVICE", raising=False)
    assert choose_device(query, ALL).index == index


def test_the_environment_chooses_where_nobody_else_does(monkeypatch):
    monkeypatch.setenv("TORCHEDGE_OPENCL_DEVICE", "cpu")
    assert choose_device(None, ALL).index == 2
    assert choose_device("adreno", ALL).index == 1


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (9, r"OpenCL device 9 fits no device; expected one of 2: pthread-cpu \(cpu\); .* by its number"),
        (-1, "fits no device"),
        ("accelerator", "fits no device"),
        ("nvidia", "'nvidia' fits 2 devices"),
    ],
)
def test_what_fits_none_or_several_is_refused(query, message):
    with pytest.raises(DeviceError, match=message):
        choose_device(query, ALL)


def test_without_pyopencl_the_pip_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torchedge\[opencl\]'"):
        list_opencl_devices()


def test_this_machine():
    pytest.importorskip("pyopencl")
    devices = list_opencl_devices()
    assert [device.index for device in devices] == list(range(len(devices)))
    for device in devices:
        assert device.name and device.driver and device.kind in ("cpu", "gpu", "accelerator", "other")
        assert 0 < device.allocation_bytes <= device.global_bytes
        assert device.work_group >= 1 and len(device.work_item_sizes) == 3
        assert device.base_alignment & (device.base_alignment - 1) == 0
        assert not device.images or min(device.image_width, device.image_height) >= 2048
    assert devices == list_opencl_devices()


def test_a_loader_without_platforms_says_what_to_install(tmp_path):
    pytest.importorskip("pyopencl")
    code = (
        "from torchedge.errors import DeviceError\nfrom torchedge.opencl import list_opencl_devices\n"
        "try:\n    list_opencl_devices()\nexcept DeviceError as error:\n    print(error)\n"
    )
    done = python("-c", code, OCL_ICD_VENDORS=str(tmp_path / "none"))
    assert done.stdout.startswith("OpenCL finds no device (")
    assert f"unset OCL_ICD_VENDORS, whose folder {tmp_path / 'none'} does not exist" in done.stdout


def test_importing_the_room_loads_no_driver():
    code = "import sys, torchedge.opencl\nprint('pyopencl' in sys.modules)"
    assert python("-c", code).stdout.strip() == "False"
