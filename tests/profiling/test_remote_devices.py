"""What a device without Python states, as its device.toml and its row of a campaign; canned reports."""

import pytest

from torchedge.devices import find_device
from torchedge.errors import DeviceError, ProfileError
from torchedge.lowering.limits import profile_limits
from torchedge.profiling.remote_devices import (
    DeviceLimits,
    RemoteDevice,
    ask_device,
    describe_there,
    states_limits,
)
from torchedge.profiling.remote_runs import RemoteRunner

ADRENO = {
    "name": "QUALCOMM Adreno(TM)", "vendor": "QUALCOMM", "platform": "QUALCOMM Snapdragon(TM)",
    "opencl": "OpenCL 3.0", "type": 4, "unified": True, "compute_units": 2, "clock_mhz": 1,
    "memory_bytes": 5 << 30, "allocation_bytes": 1 << 30, "local_bytes": 32768, "base_alignment": 128,
    "work_group": 1024, "work_item_sizes": [1024, 1024, 1024], "image_width": 16384, "image_height": 16384,
    "pitch_alignment": 64, "image_from_buffer": True, "half": True, "double": False, "warp": 64,
}  # fmt: skip
SYSTEM = (
    "kernel Linux 5.15 aarch64\nmemory 7640000 kB\nprocessor\nmodel Acme Phone 7\nandroid 14\nserial R58\n"
)


class FakeTransport:
    """A phone that answers with canned texts."""

    name = "adb"

    def ask(self, line):
        assert "getprop" in line
        return SYSTEM


class FakeRunner:
    """A runner whose description of a bundle is canned."""

    program, transport = "torchedge-run", FakeTransport()
    measure_program = RemoteRunner.measure_program

    def __init__(self, document):
        self.document = document

    def measure(self, folder, manifest, words):
        assert set(manifest.files) == {"kernels/te_nothing.cl", "program.json", "weights.safetensors"}
        return self.document


def phone(**changes):
    return ask_device(FakeRunner({"limits": {**ADRENO, **changes}, "driver": "615.77"}))


def test_a_phone_s_profile_has_its_own_limits(tmp_path):
    device = phone()
    assert device.gpu and device.device_class == "mobile" and device.memory_mib == 7460
    profile = describe_there(tmp_path / "acme-7", "acme-7", device, "torchedge profile acme-7 --over adb")
    limits = profile_limits(profile)
    assert (limits.local_bytes, limits.work_group, limits.image_width) == (32768, 1024, 16384)
    assert (limits.allocation_bytes, limits.pitch_texels, limits.address_bytes) == (1 << 30, 64, 128)
    assert limits.half_arithmetic and limits.image_from_buffer and limits.double is False
    assert states_limits(profile) and profile.title == "QUALCOMM Adreno(TM) (Acme Phone 7)"
    assert all("driver 615.77" in figure.source for figure in profile.figures.values())


def test_a_known_device_keeps_its_other_figures(tmp_path):
    known = find_device("adreno-740")
    assert not states_limits(known)
    profile = describe_there(tmp_path / "adreno-740", "adreno-740", phone(local_bytes=16384), "command")
    assert profile.figures["local_memory_kib"].value == 16 and states_limits(profile)
    assert profile.figures["bandwidth_gb_s"] == known.figures["bandwidth_gb_s"]
    with pytest.raises(DeviceError, match="describes 'adreno-740'"):
        describe_there(tmp_path / "adreno-740", "another", phone(), "command")


def test_the_serial_number_makes_the_machine_and_is_not_stored():
    device = phone()
    row = device.environment("command")
    assert "R58" not in str(row) and row["memory_meter"] == "resident set and device memory"
    other = RemoteDevice(device.limits, device.driver, {**device.system, "serial": "R59"})
    assert other.machine != device.machine and phone().machine == device.machine


def test_a_processor_s_memory_is_the_resident_set():
    device = phone(type=2, image_width=0, image_height=0)
    assert not device.gpu and device.device_class == "cpu"
    assert device.environment("command")["memory_meter"] == "resident set"


@pytest.mark.parametrize(
    "document",
    [{}, {"limits": {}}, {"limits": ADRENO}, {"limits": {**ADRENO, "work_group": "1"}, "driver": "1"}],
)
def test_a_runner_of_another_version_is_named(document):
    with pytest.raises(ProfileError, match="build this version's runner"):
        ask_device(FakeRunner(document))


def test_a_runner_that_is_no_file_is_named(tmp_path):
    from torchedge.errors import InputError

    with pytest.raises(InputError, match="expected torchedge-run"):
        RemoteRunner(FakeTransport(), tmp_path / "no")


def test_limits_hold_numbers_in_range():
    assert {field for field in DeviceLimits.__dataclass_fields__} == set(ADRENO)
