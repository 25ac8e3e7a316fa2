"""Finding a device: names, aliases, folders, what drivers say, and what the user chose."""

import warnings

import pytest

from torchedge import devices
from torchedge.devices import (
    Provenance,
    board_name,
    default_device_name,
    find_device,
    is_phone_gpu,
    list_devices,
    match_device,
    write_device,
)
from torchedge.errors import DeviceError, InputError, ProfileError, TorchedgeWarning
from torchedge.storage import data_folder

MINE = {
    "name": "mine",
    "title": "Mine",
    "kind": "cpu",
    "vendor": "Me",
    "memory": "unified",
    "aliases": ["Meins X1"],
}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHEDGE_DEVICE", raising=False)
    return tmp_path


def add(home, document, folder=None):
    path = home / "profiles" / (folder or document["name"])
    path.mkdir(parents=True)
    return write_device(document, path)


@pytest.mark.parametrize(
    "name", ["jetson-tx2", "Jetson-TX2", " JETSON-TX2 ", "tx2", "Tegra X2", "jetson tx2"]
)
def test_by_name_and_alias_in_any_case(name):
    assert find_device(name).name == "jetson-tx2"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("jetson-tx3", "jetson-tx2"),
        ("adreno740", "adreno-740"),
        ("rtx-2080", "rtx-2080ti"),
        ("RTX 309", "rtx-3090"),
    ],
)
def test_did_you_mean(name, suggestion):
    with pytest.raises(DeviceError, match="did you mean") as caught:
        find_device(name)
    assert suggestion in str(caught.value) and "\n" not in str(caught.value)


def test_a_family_s_name_is_announced():
    words = "'Adreno' stands for adreno-740; name one of adreno-540, adreno-630"
    with pytest.warns(TorchedgeWarning, match=words):
        assert find_device("Adreno").name == "adreno-740"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("adreno-740", "Adreno (TM) 740", "snapdragon 8 gen 2", "orin", "cpu"):
            find_device(name)


def test_by_folder(home, monkeypatch):
    folder = data_folder("profiles") / "adreno-640"
    assert find_device(folder) == find_device(str(folder)) == find_device("adreno-640")
    with pytest.raises(DeviceError, match=r"holds no device\.toml"):
        find_device("/nowhere/at-all")
    monkeypatch.chdir(add(home, MINE).folder.parent)
    monkeypatch.setenv("TORCHEDGE_HOME", "/nowhere")
    assert find_device("mine").name == "mine"


@pytest.mark.parametrize("name", ["", "  ", "x" * 600, "a\0b", "a\nb"])
def test_names_that_are_none(name):
    with pytest.raises(InputError, match="expected"):
        find_device(name)


def test_the_user_s_profile_comes_first(home):
    packaged = find_device("local-cpu")
    mine = add(home, MINE | {"name": "local-cpu"})
    assert find_device("local-cpu") == mine != packaged
    assert find_device("Meins X1") == mine
    assert sum(device.name == "local-cpu" for device in list_devices()) == 1


def test_a_changed_file_is_read_again(home):
    first = add(home, MINE)
    assert find_device("mine") == first
    write_device(MINE | {"title": "Another title"}, first.folder)
    assert find_device("mine").title == "Another title"


def test_a_broken_profile_hides_no_other(home):
    add(home, MINE)
    (home / "profiles/broken").mkdir()
    (home / "profiles/broken/device.toml").write_text("kind = 3")
    add(home, MINE | {"aliases": []}, "renamed")
    with pytest.warns(UserWarning, match=r"broken|renamed"):
        assert "mine" in {device.name for device in list_devices()}
    assert len(devices.scan_profiles().problems) == 2
    assert find_device("tx2").name == "jetson-tx2"
    with pytest.raises(ProfileError, match="broken"):
        find_device("broken")
    with pytest.raises(DeviceError, match="2 profiles could not be read"):
        find_device("qqqqqqqq")


def test_a_linked_profile_that_leaves_the_folder_is_refused(home):
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    write_device(MINE, elsewhere)
    (home / "profiles").mkdir()
    (home / "profiles/mine").symlink_to(elsewhere)
    with pytest.raises(ProfileError, match="leads out"):
        find_device("mine")


@pytest.mark.parametrize(
    ("reported", "memory", "name"),
    [
        ("NVIDIA GeForce RTX 3090", None, "rtx-3090"),
        ("GeForce RTX 3090", 24268.0, "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
        ("NVIDIA GeForce RTX 2080 Ti", 11019.0, "rtx-2080ti"),
        ("NVIDIA GeForce RTX 2080", None, None),
        ("Orin", None, "jetson-orin-nano"),
        ("Orin", 7620.0, "jetson-orin-nano"),
        ("Orin", 62800.0, None),
        ("Xavier", 7765.0, "jetson-xavier-nx"),
        ("Xavier", 31918.0, None),
        ("NVIDIA Tegra X2", None, "jetson-tx2"),
        ("NVIDIA Tegra X1", None, "jetson-nano"),
        ("NVIDIA Jetson TX2 Developer Kit", None, "jetson-tx2"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", None, "jetson-orin-nano-super"),
        ("QUALCOMM Adreno(TM) 740", None, "adreno-740"),
        ("Mali-G715 r0p0", None, "mali-g715"),
        ("NVIDIA H200", None, "nvidia-h200"),
        ("NVIDIA H100 PCIe", None, "nvidia-h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 81559.0, "nvidia-h100"),
        ("NVIDIA A100-SXM4-80GB", 81920.0, "nvidia-a100-80gb"),
        ("NVIDIA L4", 23034.0, "nvidia-l4"),
        ("Tesla T4", 15360.0, "nvidia-t4"),
        ("NVIDIA B200", None, None),
        ("", None, None),
        ("NVIDIA", None, None),
    ],
)
def test_what_drivers_and_boards_report(reported, memory, name):
    device = match_device(reported, memory)
    assert (device and device.name) == name


def test_the_default_follows_environment_then_config(home, monkeypatch):
    assert default_device_name() is None
    (home / "config.toml").write_text('device = "adreno-750"\n')
    assert default_device_name() == "adreno-750"
    monkeypatch.setenv("TORCHEDGE_DEVICE", "jetson-nano")
    assert default_device_name() == "jetson-nano"
    monkeypatch.setenv("TORCHEDGE_DEVICE", " ")
    assert default_device_name() == "adreno-750"


def test_a_wrong_config_is_one_line(home):
    (home / "config.toml").write_text("device = 3\n")
    with pytest.raises(InputError, match=r"config\.toml: device: got '3'"):
        default_device_name()
    (home / "config.toml").write_text("device = \n")
    with pytest.raises(ProfileError, match="not valid TOML"):
        default_device_name()
    (home / "config.toml").write_text('other = "x"\n')
    assert default_device_name() is None


def test_the_board_s_name_comes_from_the_device_tree(monkeypatch, tmp_path):
    file = tmp_path / "model"
    monkeypatch.setattr("torchedge.devices.catalog.BOARD_FILE", file)
    assert board_name() is None
    file.write_bytes(b"NVIDIA Jetson Nano Developer Kit\0")
    assert board_name() == "NVIDIA Jetson Nano Developer Kit"


@pytest.mark.parametrize(
    ("words", "phone"),
    [
        (("Qualcomm",), True),
        (("Arm",), True),
        (("QUALCOMM Adreno(TM)", "QUALCOMM", "QUALCOMM Snapdragon(TM)"), True),
        (("Mali-G715-Immortalis", "ARM", "ARM Platform"), True),
        (("Samsung Xclipse 940",), True),
        (("NVIDIA",), False),
        (("Orin", "NVIDIA Corporation", "NVIDIA CUDA"), False),
        (("Radeon RX 6600 (charm)", "AMD", "Clover"), False),
    ],
)
def test_phone_gpus_are_told_by_their_words(words, phone):
    assert is_phone_gpu(*words) is phone


def test_the_template_has_the_cores_of_this_machine(monkeypatch):
    from torchedge.devices import catalog

    peaks = []
    for cores in (1, 3):
        monkeypatch.setattr(catalog, "usable_cores", lambda cores=cores: cores)
        device = find_device("local-cpu")
        assert device.figure("compute_units").value == cores
        assert device.figure("peak_fp32_gflops").provenance is Provenance.ASSUMED
        peaks.append(device.value("peak_fp32_gflops"))
    assert peaks[1] == 3 * peaks[0] > 0


def test_the_template_has_the_memory_of_this_machine(monkeypatch):
    from torchedge.devices import catalog

    monkeypatch.setattr(catalog, "memory_mib", lambda: (24064.0, None))
    device = find_device("local-cpu")
    assert device.value("memory_mib") == 24064.0
    assert device.figure("memory_mib").provenance is Provenance.MEASURED
    assert device.figure("bandwidth_gb_s").provenance is Provenance.ASSUMED

    def unknown():
        raise DeviceError("this system does not report its memory")

    monkeypatch.setattr(catalog, "memory_mib", unknown)
    assert find_device("local-cpu").value("memory_mib") == 8192
