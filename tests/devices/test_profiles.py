"""The shipped profiles: each loads, each figure has a source, and what is shipped agrees with itself."""

import pytest

from torchedge.devices import KNOWN_FACTS, KNOWN_FIGURES, RUNTIME_KEYS, Provenance, read_device, scan_profiles
from torchedge.storage import data_folder

EXPECTED = {
    "jetson-tx2", "jetson-nano", "jetson-xavier-nx", "jetson-orin-nano", "rtx-2080ti", "rtx-3090",
    "adreno-540", "adreno-640", "adreno-740", "adreno-750", "mali-g77", "mali-g715", "local-cpu",
}  # fmt: skip
FOLDERS = sorted(path.parent for path in data_folder("profiles").glob("*/device.toml"))


@pytest.fixture(autouse=True)
def no_user_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))


def test_all_profiles_are_there_and_none_is_broken():
    profiles = scan_profiles()
    assert profiles.problems == ()
    assert {device.name for device in profiles.devices} >= EXPECTED


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_figure_has_its_unit_and_a_source(folder):
    device = read_device(folder)
    assert device.name == folder.name
    for name, figure in device.figures.items():
        assert figure.unit == KNOWN_FIGURES[name].unit
        assert len(figure.source) > 10, name
        assert not any(word in figure.source for word in ("http", "/work", "/home", "~/")), name
    # What every consumer needs: the memory there is and the two roofs.
    assert {"memory_mib", "peak_fp32_gflops", "bandwidth_gb_s", "launch_overhead_us"} <= set(device.figures)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_figures_agree_with_each_other(folder):
    figures = {name: figure.value for name, figure in read_device(folder).figures.items()}
    assert figures.get("usable_memory_mib", 0) <= figures["memory_mib"]
    assert figures.get("measured_bandwidth_gb_s", 0) <= figures["bandwidth_gb_s"]
    assert figures.get("unified_to_texture_gb_s", 0) <= figures["bandwidth_gb_s"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_nvidia_rates_are_those_of_the_cores_at_the_clock(folder):
    """A multiprocessor has 64 or 128 lanes of single precision, two operations a clock each."""
    device = read_device(folder)
    needed = ("peak_fp32_gflops", "compute_units", "clock_mhz")
    if device.vendor != "NVIDIA" or not set(needed) <= set(device.figures):
        return
    rate, units, clock = map(device.value, needed)
    lanes = 1e3 * rate / (2 * units * clock)
    assert min(abs(lanes / count - 1) for count in (64, 128)) < 0.01
    half = device.figures.get("peak_fp16_matrix_gflops")
    tensor = device.figures.get("peak_tf32_gflops")
    if half is not None and tensor is not None:
        assert 1.9 * tensor.value < half.value < 2.1 * tensor.value


def test_no_two_profiles_share_a_name():
    names = [
        name.lower() for device in scan_profiles().devices for name in {device.name, *device.aliases} - {""}
    ]
    assert len(names) == len(set(names))


def test_the_jetson_tx2_of_the_paper():
    device = read_device(data_folder("profiles") / "jetson-tx2")
    assert device.value("memory_mib") == 7859
    assert device.figure("memory_mib").provenance is Provenance.PUBLIC_DATA
    assert device.software["pytorch"] == device.runtime["pytorch"] == "1.6"
    assert dict(device.runtime) == {
        "pytorch": "1.6",
        "zero_grad": "zero",
        "clamp_keeps": "output",
        "sum_in_place": False,
        "foreach": False,
        "winograd_tile": 2,
    }


def test_phones_have_what_textures_and_streaming_need():
    needed = {
        "max_image_width", "max_image_height", "image_pitch_alignment_px", "image_base_alignment_bytes",
        "local_memory_kib", "max_work_group_size", "warp_size", "texture_cache_bytes", "compute_units",
        "disk_read_gb_s", "unified_to_texture_gb_s",
    }  # fmt: skip
    for device in scan_profiles().devices:
        if device.vendor in ("Qualcomm", "Arm"):
            assert needed <= set(device.figures), device.name
            assert set(device.facts) == set(KNOWN_FACTS), device.name


def test_the_local_template_claims_nothing():
    device = read_device(data_folder("profiles") / "local-cpu")
    assert {figure.provenance for figure in device.figures.values()} == {Provenance.ASSUMED}


def test_the_tables_are_well_formed():
    for rule in KNOWN_FIGURES.values():
        assert rule.unit and rule.meaning and rule.low < rule.high
    for switch in RUNTIME_KEYS.values():
        assert switch.meaning and switch.type in (bool, int, float, str)
