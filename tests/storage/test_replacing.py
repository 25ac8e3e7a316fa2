"""Folders that replace others: a process killed at any step leaves the old one or the new one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchedge
from torchedge.errors import InputError, ProfileError
from torchedge.storage import replacing
from torchedge.storage.replacing import new_file, new_folder, recover

STOPPED = """
import os, shutil, signal, sys
from pathlib import Path
from torchedge.storage import replacing
step, exchanges = int(sys.argv[2]), sys.argv[3] == "True"
if not exchanges:
    replacing._exchange = lambda one, two: False

def counted(function):
    def call(*arguments, **options):
        global step
        step -= 1
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

Path.rename, os.fsync, shutil.rmtree = counted(Path.rename), counted(os.fsync), counted(shutil.rmtree)
replacing._exchange = counted(replacing._exchange)
with replacing.new_folder(Path(sys.argv[1])) as folder:
    (folder / "content").write_text("new")
"""


def content_of(target):
    recover(target)
    return (target / "content").read_text()


@pytest.fixture
def target(tmp_path):
    target = tmp_path / "b"
    target.mkdir()
    (target / "content").write_text("old")
    return target


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new_one(target, exchanges):
    contents = []
    for step in range(20):
        (target / "content").write_text("old")
        process = subprocess.run(
            [sys.executable, "-c", STOPPED, str(target), str(step), str(exchanges)],
            check=False,
            env={"PYTHONPATH": str(Path(torchedge.__file__).parents[1])},
        )
        contents.append(content_of(target))
        if process.returncode == 0:
            break
    assert process.returncode == 0 and len(contents) > 3
    assert contents == sorted(contents, reverse=True) and set(contents) == {"old", "new"}


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_and_nothing_is_left(target, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(replacing, "_exchange", lambda one, two: False)
    with new_folder(target) as folder:
        (folder / "content").write_text("new")
        assert content_of(target) == "old"
    assert content_of(target) == "new" and [p.name for p in target.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_rename_that_fails_puts_the_old_folder_back(target, monkeypatch, exchanges):
    def fail(one, two):
        if exchanges:
            raise OSError(5, "Input/output error")
        one.joinpath("content").unlink()
        one.rmdir()
        return False

    monkeypatch.setattr(replacing, "_exchange", fail)
    with pytest.raises(InputError, match="cannot be written"), new_folder(target) as folder:
        (folder / "content").write_text("new")
    assert content_of(target) == "old" and [p.name for p in target.parent.iterdir()] == ["b"]


def test_a_system_without_exchange_is_told_by_the_call(tmp_path, monkeypatch):
    monkeypatch.setattr(replacing.ctypes, "CDLL", lambda *_, **__: object())
    assert replacing._exchange(tmp_path / "a", tmp_path / "b") is False


@pytest.mark.parametrize("path", [".", "/", ".."])
def test_folders_without_a_name_are_recovered_and_no_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recover(Path(path))
    with pytest.raises(ProfileError, match="cannot be written"), new_file(path):
        pass


def test_a_link_stays_and_no_pipe_is_replaced(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    with new_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    with pytest.raises(ProfileError, match="it is no regular file"), new_file(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "\N{GRINNING FACE}" * 63])
def test_names_as_long_as_the_system_takes(tmp_path, name):
    for content in ("old", "new"):
        with new_file(tmp_path / f"{name[:-1]}f") as file:
            file.write(content.encode())
        recover(tmp_path / name)
        with new_folder(tmp_path / name) as folder:
            (folder / "entry").write_text(content)
    assert sorted(p.read_text() for p in tmp_path.rglob("*") if p.is_file()) == ["new", "new"]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_process_left_is_removed_and_nothing_of_one_that_runs(tmp_path):
    target = tmp_path / "b"
    left = [tmp_path / f".b.{digit * 16}.tmp" for digit in "0a"]
    others = [tmp_path / name for name in (".b.old", f".c.{'0' * 16}.tmp", ".b.mine.tmp")]
    for folder in (*left, *others):
        folder.mkdir()
        (folder / "part").write_text("half")
    with new_folder(target) as running:
        assert not any(folder.exists() for folder in left)
        with new_folder(target):
            assert running.exists()
    assert sorted(tmp_path.iterdir()) == sorted([target, *others])
