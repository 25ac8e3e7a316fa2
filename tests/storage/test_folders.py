"""Folders: where data lies, and that no name leads out of a folder."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.errors import InputError, ProfileError
from torchedge.storage import cache_folder, data_folder, resolve_inside, user_folder


@pytest.mark.parametrize("name", ["profiles", "hooks", "export"])
def test_data_folders_exist(name):
    assert data_folder(name).is_dir()


def test_an_unknown_data_folder_is_refused():
    with pytest.raises(InputError, match="expected one of profiles"):
        data_folder("../etc")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folder", "own", "shared", "default"),
    [
        (cache_folder, "TORCHEDGE_CACHE", "XDG_CACHE_HOME", ".cache"),
        (user_folder, "TORCHEDGE_HOME", "XDG_DATA_HOME", ".local/share"),
    ],
)
def test_folders_follow_the_environment(monkeypatch, tmp_path, folder, own, shared, default):
    monkeypatch.setenv(own, str(tmp_path))
    monkeypatch.setenv(shared, "/elsewhere")
    assert folder() == tmp_path
    monkeypatch.delenv(own)
    assert folder() == Path("/elsewhere/torchedge")
    monkeypatch.setenv(shared, "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / default / "torchedge"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "a\\b",
        "c:x",
        "a\0b",
        "a\nb",
        "x" * 300,
        "a/" * 9,
    ],
)
def test_names_that_climb_are_refused(tmp_path, name):
    with pytest.raises(ProfileError, match="rename"):
        resolve_inside(tmp_path, name)


def test_links_must_stay_inside(tmp_path):
    folder = tmp_path / "profile"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "in").symlink_to("other")
    (folder / "loop").symlink_to("loop")
    assert resolve_inside(folder, "in") == (folder / "other").resolve()
    with pytest.raises(ProfileError, match="leads out"):
        resolve_inside(folder, "out")
    try:
        assert resolve_inside(folder, "loop").is_relative_to(folder.resolve())
    except ProfileError as error:
        assert "loop" in str(error)


@given(st.text(max_size=30))
def test_any_name_stays_inside_or_is_refused(name):
    try:
        assert resolve_inside(Path("/tmp"), name).is_relative_to(Path("/tmp").resolve())
    except ProfileError as error:
        assert "\n" not in str(error)
