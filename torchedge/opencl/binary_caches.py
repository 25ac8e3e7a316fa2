"""Compiled programs on disk: written atomically, read only if they are this user's own and undamaged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchedge.errors import ProfileError
from torchedge.opencl.platforms import ClDevice
from torchedge.storage import cache_folder
from torchedge.storage.documents import read_bytes, write_bytes

MAGIC = b"torchedge opencl binary 2\n"
SUFFIX = ".clbin"
MAX_ENTRY_BYTES = 128 << 20
MAX_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class BinaryCache:
    """A folder of compiled programs of at most `max_bytes`; the least recently used ones are deleted.

    An entry that is damaged, too large, another key's or not this user's own counts as absent, since a driver
    would run it.
    """

    folder: Path
    max_bytes: int = MAX_CACHE_BYTES

    def read(self, key: str) -> bytes | None:
        """Return the entry of a key, or None."""
        path = self._path(key)
        if not (_is_private(self.folder) and _is_private(path)):
            return None
        try:
            data = read_bytes(path, max_bytes=MAX_ENTRY_BYTES)
        except ProfileError:
            return None
        head = len(MAGIC) + 32
        if not data.startswith(MAGIC) or _digest(key, data[head:]) != data[len(MAGIC) : head]:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data[head:]

    def holds(self, key: str) -> bool:
        """Whether there is an entry of a key, damaged or not."""
        return self._path(key).exists()

    def write(self, key: str, binary: bytes) -> None:
        """Store an entry; a folder that cannot be written stores none."""
        if len(binary) > min(MAX_ENTRY_BYTES - 64, self.max_bytes):
            return
        with contextlib.suppress(OSError, ProfileError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(self.folder):
                write_bytes(self._path(key), MAGIC + _digest(key, binary) + binary)
                os.chmod(self._path(key), 0o600)
                self._evict(keep=self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _evict(self, keep: Path) -> None:
        entries = []
        for path in self.folder.glob(f"*{SUFFIX}*"):  # with temporary files of writers that were killed
            with contextlib.suppress(OSError):
                status = path.stat()
                entries.append((path == keep, status.st_mtime_ns, path.name, status.st_size))
        total = sum(size for *_, size in entries)
        for is_newest, _, name, size in sorted(entries):
            if total <= self.max_bytes or is_newest:
                break
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
            total -= size


def _digest(key: str, binary: bytes) -> bytes:
    """Return the hash that binds an entry to its key."""
    return hashlib.sha256(key.encode() + b"\n" + binary).digest()


def default_cache() -> BinaryCache:
    """Return the cache in the user's cache folder (`torchedge.storage.cache_folder`)."""
    return BinaryCache(cache_folder() / "opencl")


def key_of(device: ClDevice, source: str, options: Sequence[str]) -> str:
    """Return a hash (sha256, hex) of device, driver, platform, options and source."""
    state = hashlib.sha256(MAGIC)
    parts = (
        device.name,
        device.vendor,
        device.version,
        device.driver,
        device.platform,
        device.platform_version,
        "\0".join(options),
        source,
    )
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _is_private(path: Path) -> bool:
    """Whether only this user may write a path; true on systems without users."""
    if not hasattr(os, "getuid"):
        return True
    try:
        status = path.lstat()
    except OSError:
        return False
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not writable and not stat.S_ISLNK(status.st_mode)
