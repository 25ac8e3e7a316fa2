"""Where packed weights come from: a file, read in three ways, or arrays in memory."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from torchedge.errors import ProfileError
from torchedge.opencl.memory import PAGE_BYTES

Bytes = npt.NDArray[np.uint8]
Reads = Literal["plain", "mmap", "direct"]

ATTEMPTS = 4
"""Attempts at a read that fails with an error that may pass."""
FIRST_PAUSE = 0.01
"""Seconds before the second attempt; each later pause is twice as long."""

_PASSING = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.ETIMEDOUT})
_GAP = 2**40
_JOINED_GAP = 2**60


class WeightSource(Protocol):
    """Packed tensors by name in one space of addresses."""

    places: Mapping[str, tuple[int, int]]
    """Address and packed bytes of each tensor by name."""

    def read(self, address: int, needed: int, into: Bytes) -> None:
        """Fill at least the first `needed` bytes of `into`, which has whole pages, from a page's address.

        Raises ProfileError.
        """

    def check(self) -> None:
        """Raise ProfileError if the source has changed since it was opened."""
        return

    def close(self) -> None:
        """Close it; a second call does nothing."""
        return


class RawFile(Protocol):
    """An open file: what faults are injected into by tests."""

    def read_into(self, offset: int, into: Bytes) -> int:
        """Read at an offset and return the number of bytes, 0 at the end; raises OSError."""

    def state(self) -> tuple[int, int]:
        """Return (bytes, time of the last change in ns)."""

    def close(self) -> None:
        """Close it."""


class FileSource(WeightSource):
    """A file with packed tensors.

    places: (offset, bytes) of each tensor by name. reads: "plain" goes through the page cache; "mmap" maps
    the file; "direct" goes past the page cache in whole pages (O_DIRECT). A read that fails with an error
    that may pass is tried again. opener: opens the file. state: bytes and time of change (ns) that the file
    had when it was checked.
    Raises ProfileError: the file is missing, too short, changed since `state` or no regular file, or its file
    system refuses the way of reading.
    """

    def __init__(
        self,
        path: str | Path,
        places: Mapping[str, tuple[int, int]],
        reads: Reads = "plain",
        *,
        opener: Callable[[Path, Reads], RawFile] | None = None,
        state: tuple[int, int] | None = None,
    ) -> None:
        self._file: RawFile | None = None
        self._path, self.places = Path(path), dict(places)
        self._alignment = PAGE_BYTES if reads == "direct" else 1
        self._file = (opener or open_raw)(self._path, reads)
        self._state = self._file.state()
        if state not in (None, self._state):
            self.close()
            raise ProfileError(f"{path}: was changed after it was checked; load the bundle again")
        for name, (offset, nbytes) in self.places.items():
            if offset < 0 or nbytes < 0 or offset + nbytes > self._state[0]:
                self.close()
                raise ProfileError(
                    f"{path}: {name!r} lies at bytes {offset} to {offset + nbytes} of a file of "
                    f"{self._state[0]}; export or copy it again"
                )

    def read(self, address: int, needed: int, into: Bytes) -> None:
        """Read, over short reads and passing errors."""
        done = failures = 0
        while done < needed:
            try:
                count = self._opened().read_into(address + done, into[done:])
            except OSError as error:
                failures += 1
                if error.errno not in _PASSING or failures == ATTEMPTS:
                    raise ProfileError(
                        f"{self._path}: reading {needed - done} bytes at offset {address + done} failed "
                        f"({error.strerror or error}); check the disk, or copy the file again"
                    ) from error
                time.sleep(FIRST_PAUSE * 2 ** (failures - 1))
                continue
            if done + count < needed:  # the next read begins at a page again
                count -= count % self._alignment
            if count <= 0:
                raise ProfileError(
                    f"{self._path}: ends near byte {address + done}, expected {needed - done} bytes more; it "
                    "was cut while it was open: export or copy it again"
                )
            done += count

    def check(self) -> None:
        """Raise ProfileError if the file's size or time of change is another than at opening."""
        if self._opened().state() != self._state:
            raise ProfileError(
                f"{self._path}: was changed while it was open, so outputs may be wrong; run again, and "
                "replace weight files by renaming, not by writing into them"
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _opened(self) -> RawFile:
        if self._file is None:
            raise ProfileError(f"{self._path}: is closed; open it again")
        return self._file


class ArraysSource(WeightSource):
    """Packed arrays in memory, by name; they must not change while an executor uses them."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._bytes = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
        named = zip(arrays, self._bytes, strict=True)
        self.places = {name: (number * _GAP, own.size) for number, (name, own) in enumerate(named)}

    def read(self, address: int, needed: int, into: Bytes) -> None:
        """Copy from an array."""
        number, start = divmod(address, _GAP)
        into[:needed] = self._bytes[number][start : start + needed]


class JoinedSource(WeightSource):
    """The sources of joined programs: tensor NAME of the program in place k (from 1) is called k/NAME."""

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self._sources = tuple(sources)
        self.places = {
            f"{number}/{name}": ((number - 1) * _JOINED_GAP + address, nbytes)
            for number, source in enumerate(sources, 1)
            for name, (address, nbytes) in source.places.items()
        }

    def read(self, address: int, needed: int, into: Bytes) -> None:
        """Read from the source of an address."""
        number, own = divmod(address, _JOINED_GAP)
        self._sources[number].read(own, needed, into)

    def check(self) -> None:
        """Raise ProfileError if a source has changed."""
        for source in self._sources:
            source.check()

    def close(self) -> None:
        """Close all sources."""
        for source in self._sources:
            source.close()


def open_raw(path: Path, reads: Reads) -> RawFile:
    """Open a regular file for one way of reading; raises ProfileError."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if reads == "direct" and not hasattr(os, "O_DIRECT"):
        raise ProfileError(f"{path}: this system has no direct reads; choose 'plain' or 'mmap'")
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if reads == "direct" else 0))
    except (OSError, ValueError) as error:
        hint = "choose 'plain' reads" if getattr(error, "errno", 0) == errno.EINVAL else "check the path"
        reason = getattr(error, "strerror", None) or str(error)
        raise ProfileError(f"{path}: cannot be opened for {reads} reads ({reason}); {hint}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProfileError(f"{path}: is not a regular file, expected one; check the path")
    return {"plain": _File, "mmap": _MappedFile, "direct": _DirectFile}[reads](descriptor)


class _File:
    """A file read at offsets, by several threads at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, offset: int, into: Bytes) -> int:
        return os.preadv(self._descriptor, [into.data], offset)

    def state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def close(self) -> None:
        os.close(self._descriptor)


class _DirectFile(_File):
    """A file read past the page cache, into whole pages."""

    def read_into(self, offset: int, into: Bytes) -> int:
        try:
            return super().read_into(offset, into)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
        # Memory that some drivers map takes no direct reads.
        with mmap.mmap(-1, into.size) as pages:
            count = os.preadv(self._descriptor, [pages], offset)
            into[:count] = np.frombuffer(pages.read(count), np.uint8)
        return count


class _MappedFile(_File):
    """A file in the address space; what lies behind its end is not touched."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else None
        self._bytes = np.frombuffer(self._map or b"", np.uint8)

    def read_into(self, offset: int, into: Bytes) -> int:
        count = max(0, min(into.size, self.state()[0] - offset, self._bytes.size - offset))
        into[:count] = self._bytes[offset : offset + count]
        return count

    def close(self) -> None:
        self._bytes = np.zeros(0, np.uint8)
        if self._map is not None:
            self._map.close()
        super().close()
