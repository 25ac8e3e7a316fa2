"""device.toml: typed, in its unit, known; or refused in one line that names file, key, given and expected."""

import copy
from pathlib import Path

import pytest

from torchedge.devices import KNOWN_FIGURES, Provenance, parse_device, read_device, weakest, write_device
from torchedge.errors import DeviceError, ProfileError

FIGURE = {"value": 8000, "unit": "MiB", "provenance": "published", "source": "data sheet"}
GOOD = {
    "name": "my-board", "title": "My board", "kind": "gpu", "vendor": "Me", "memory": "unified",
    "aliases": ["MB1"], "figures": {"memory_mib": FIGURE},
    "facts": {"half_arithmetic": {"value": True, "provenance": "assumed", "source": "a guess"}},
    "software": {"pytorch": "2.0"}, "runtime": {"zero_grad": "zero"},
    "profile": {"forests": {"file": "f.safetensors", "error": 0.02, "levels": [0, 30]}},
}  # fmt: skip


def changed(path, value):
    document = copy.deepcopy(GOOD)
    table = document
    *parents, last = path.split("/")
    for key in parents:
        table = table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return document


def test_a_device_is_read_only_hashable_and_copies(tmp_path):
    device = write_device(GOOD, tmp_path)
    assert device == read_device(tmp_path) and hash(device) == hash(read_device(tmp_path))
    assert device.profile["forests"]["levels"] == (0, 30)
    for table in (device.figures, device.profile, device.profile["forests"]):
        with pytest.raises(TypeError):
            table["x"] = 1
    with pytest.raises(AttributeError):
        device.name = "x"
    back = copy.deepcopy(device)
    assert back == device and back.folder == device.folder and back.profile == device.profile
    assert not hasattr(device, "__dict__")


def test_a_missing_figure_names_the_nearest():
    device = parse_device(GOOD, folder=Path("x"))
    assert device.value("memory_mib") == 8000 and device.fact("half_arithmetic").value is True
    with pytest.raises(DeviceError, match="did you mean memory_mib"):
        device.figure("memory_mb")
    with pytest.raises(DeviceError, match=r"bandwidth_gb_s.*it gives: memory_mib"):
        device.value("bandwidth_gb_s")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("name", "../x", "lower case"),
        ("figure", {}, "'figures', the nearest"),
        ("figures/memory_mb", FIGURE, "'memory_mib', the nearest"),
        ("figures/memory_mib/unit", "MB", r"memory_mib\.unit is 'MB'; expected 'MiB'"),
        ("figures/memory_mib/value", -1, "expected a number"),
        ("figures/memory_mib/value", float("nan"), "expected a number"),
        ("figures/warp_size", FIGURE | {"unit": "1", "value": 1.5}, "whole number"),
        ("facts/half_arithmetic/value", "yes", "true or false"),
        ("facts/local_memory", {"value": "l1", "provenance": "assumed", "source": "x"}, "on-chip, global"),
        ("runtime/zero_grad", "maybe", "set_to_none, zero"),
        ("runtime/zero_grads", "zero", "'zero_grad', the nearest"),
        ("runtime/pytorch", 1.6, "text"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path, path, value, says):
    with pytest.raises(ProfileError, match=says) as caught:
        parse_device(changed(path, value), folder=tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "device.toml")) and "\n" not in message and "; " in message


@pytest.mark.parametrize("name", sorted(KNOWN_FIGURES))
def test_the_unit_table_is_enforced(tmp_path, name):
    rule = KNOWN_FIGURES[name]
    value = max(1, rule.low)
    entry = {"value": value, "unit": rule.unit, "provenance": "assumed", "source": "test"}
    assert parse_device(GOOD | {"figures": {name: entry}}, folder=tmp_path).value(name) == value
    with pytest.raises(ProfileError, match=f"expected '{rule.unit}'"):
        parse_device(GOOD | {"figures": {name: entry | {"unit": "furlong"}}}, folder=tmp_path)


def test_a_linked_device_file_that_leaves_the_folder_is_refused(tmp_path):
    write_device(GOOD, tmp_path)
    other = tmp_path / "profile"
    other.mkdir()
    (other / "device.toml").symlink_to(tmp_path / "device.toml")
    with pytest.raises(ProfileError, match="leads out"):
        read_device(other)


def test_a_bad_document_is_not_written(tmp_path):
    with pytest.raises(ProfileError):
        write_device(changed("kind", "tpu"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_provenance_is_ordered():
    ordered = sorted(Provenance, reverse=True)
    words = ["measured", "public data", "published", "transferred", "assumed"]
    assert [item.value for item in ordered] == words
    for place, weaker in enumerate(ordered):
        assert all(stronger > weaker for stronger in ordered[:place])
        assert weakest(ordered[: place + 1]) is weakest([weaker, *ordered[:place]]) is weaker
    assert str(Provenance.PUBLIC_DATA) == "public data"
    with pytest.raises(ValueError):
        weakest([])
