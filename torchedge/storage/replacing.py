"""Files and folders that replace others whole: whatever stops the process or the power, old or new is there.

Where the system can exchange two names at once (Linux: RENAME_EXCHANGE), it does. Elsewhere the old folder
first moves to `.NAME.old` beside its place, then the new one takes the place; `recover` completes what was
stopped between the two. Files are on the disk before their folder has its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torchedge.errors import InputError, ProfileError
from torchedge.storage.locks import lock_file

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
_UNKNOWN = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path`, on the disk, if the block ends without an error.

    A link stays: the file that it names is replaced.
    Raises ProfileError: the folder is missing or cannot be written, or `path` is a folder, a device or a
    pipe.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ValueError("it is no regular file")  # a rename would replace a device or a pipe
        temporary = _hidden(target, f"{secrets.token_hex(8)}.tmp")
        try:
            with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(
            f"{path}: cannot be written ({reason}), expected a writable folder; check that it exists"
        ) from error


def _hidden(target: Path, ending: str) -> Path:
    """Return a place beside a file or folder, whose name is not too long however long that one's is."""
    name = os.fsencode(target.name)[:200].decode(errors="ignore")
    return target.with_name(f".{name}.{ending}")


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there; it is on the disk when this returns."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can: of new files, and of renamed ones."""
    with contextlib.suppress(OSError):
        _flush_entry(folder)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder; it replaces `target` if the block ends without an error.

    Raises InputError: the folder cannot be made, filled or put in place.
    """
    try:
        with side_folder(target) as new:
            yield new
            _flush(new)
            _replace(target, new)
    except OSError as error:
        raise InputError(
            f"{target}: cannot be written ({error.strerror or error}), expected a folder with room; "
            "choose another, or free some space"
        ) from error


@contextlib.contextmanager
def side_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside a target, removed at the end with those that killed processes left.

    Raises OSError: the folder cannot be made.
    """
    new = _hidden(target, f"{secrets.token_hex(8)}.tmp")
    # Folders whose process has ended: no one holds their lock.
    form = re.compile(re.escape(_hidden(target, "").name) + r"[0-9a-f]{16}\.tmp")
    with os.scandir(target.parent) as entries:
        left = [Path(e) for e in entries if form.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    for folder in left:
        with contextlib.suppress(OSError), _locked(folder) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)
    try:
        new.mkdir()
        with _locked(new):
            yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock inside, as long as the process lives; yield False if another process has it."""
    if os.name != "posix":  # only POSIX opens folders
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock_file(descriptor, wait=False)
    finally:
        os.close(descriptor)


def recover(target: Path) -> None:
    """Put the old folder back where a process was stopped after it had moved the folder away."""
    target = target.absolute()
    if target.name and not os.path.lexists(target) and (old := _old(target)).is_dir():
        with contextlib.suppress(OSError):
            old.rename(target)


def _old(target: Path) -> Path:
    return _hidden(target, "old")


def _replace(target: Path, new: Path) -> None:
    """Give the new folder the name of the target; `new` or nothing is then what was there before."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not _exchange(new, target):
        old = _old(target)
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
        sync_folder(target.parent)  # before the old one goes
        shutil.rmtree(old, ignore_errors=True)
    _flush_entry(target.parent)


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two names at once; return whether this system and file system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(two), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNKNOWN:
        return False
    raise OSError(code, os.strerror(code))


def _flush(folder: Path) -> None:
    """Wait until every file and name in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    if path.is_dir() and os.name != "posix":  # only POSIX opens folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
