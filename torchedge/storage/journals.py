"""Journals: JSON objects in a file, one a line, appended and synchronised one by one, never rewritten.

Long jobs (campaigns, searches) record every result this way, so that a job that was killed continues where
it was. A crash or a loss of power can leave at most a torn last line, without its newline or with zeros; it
is cut off when the journal is read again. Each line ends with its checksum.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from torchedge.errors import InputError, ProfileError, TorchedgeError
from torchedge.storage.documents import Document, parse_json
from torchedge.storage.locks import lock_file
from torchedge.storage.replacing import sync_folder

_LONGEST_LINE = 1 << 26


class Journal:
    """A journal on disk. Use it as a context; one process at a time.

    path: the file, created where it does not exist. error: the exception for a file that cannot be written or
    is in use. wait: wait for another process instead. Reading raises ProfileError as `parse_rows`.
    """

    def __init__(self, path: Path, *, error: type[TorchedgeError] = ProfileError, wait: bool = False) -> None:
        self.path = path
        self._error, self._wait = error, wait
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        try:
            self._file = open(self.path, "a+b")
        except OSError as error:
            raise self._unwritable(error) from error
        if not lock_file(self._file, wait=self._wait):
            self._file.close()
            raise self._error(
                f"{self.path}: another torchedge is writing this file; wait for it, or choose another place"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def rows(self) -> Iterator[tuple[int, Document]]:
        """Yield every row with its place in the file, in order; cut off a torn last line."""
        file = self._opened()
        end = yield from parse_rows(self.path, file)
        if end != file.seek(0, os.SEEK_END):
            self._cut(end)

    def row_at(self, place: int) -> Document:
        """Return the row that begins at a place, as `rows` and `append` gave it."""
        file = self._opened()
        file.seek(place)
        return _parse(str(self.path), file.readline(_LONGEST_LINE))

    def append(self, row: Mapping[str, Any]) -> int:
        """Append a row and return its place; the row is on disk when this returns."""
        file = self._opened()
        data = json.dumps(row, separators=(",", ":"), allow_nan=False).encode()
        data = data[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(data)  # the checksum is the last entry
        place = file.seek(0, os.SEEK_END)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if not place:
                sync_folder(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(place)  # a later row must not follow half a line
            raise self._unwritable(error) from error
        return place

    def _opened(self) -> BinaryIO:
        assert self._file is not None, "a journal is used as a context"
        return self._file

    def _cut(self, place: int) -> None:
        try:
            self._opened().truncate(place)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> TorchedgeError:
        step = (
            "make room and run the same command again"
            if error.errno == errno.ENOSPC
            else "check the folder, or choose another place"
        )
        return self._error(f"{self.path}: cannot be written ({error.strerror}); {step}")


def read_rows(path: Path) -> Iterator[Document]:
    """Yield the rows of a journal (without a file: none) without its lock and without a torn last line.

    Raises ProfileError as `parse_rows`.
    """
    if path.exists():
        with path.open("rb") as file:
            for _, row in parse_rows(path, file):
                yield row


def parse_rows(path: str | Path, file: BinaryIO) -> Generator[tuple[int, Document], None, int]:
    """Yield each row of a file with its place; return the place of a torn last line, or the end.

    Lines of earlier versions, and of probes, have no checksum. The caller may move in the file between rows.

    Raises ProfileError for a line that is no JSON object, or was changed since it was written, and for a file
    that no journal began.
    """
    place = number = 0
    sealed = False
    while True:
        file.seek(place)
        line = file.readline(_LONGEST_LINE)
        number += 1
        if not line.endswith(b"\n") or b"\0" in line:  # after a loss of power, zeros stand for lost bytes
            if not file.read(1):
                if not place and not _is_torn(line):
                    raise ProfileError(
                        f"{path}: is no journal of torchedge; expected rows that it wrote: choose another"
                    )
                return place
            if not line.endswith(b"\n"):
                raise ProfileError(
                    f"{path} line {number}: has over {_LONGEST_LINE >> 20} MiB, which no journal "
                    "writes; delete the line, or choose another place"
                )
        sealed = sealed or _CHECKSUM.search(line) is not None
        yield place, _parse(f"{path} line {number}", line, sealed=sealed)
        place += len(line)


def _is_torn(line: bytes) -> bool:
    """Return whether the only line of a file can be the beginning of a row, and not a file of the user's."""
    if not line.startswith((b"{", b"\0")) and line:
        return False
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return line.isascii()
    return _CHECKSUM.search(line) is not None


def parse_lines(source: str | Path, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a text with one a line, each with its place, as errors name it.

    Raises ProfileError: as `parse_json`, or a line was changed since a journal wrote it; the message names
    it.
    """
    for number, line in enumerate(data.splitlines(), start=1):
        place = f"{source} line {number}"
        yield place, _parse(place, line)


_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n?$')


def _unsealed(line: bytes, *, sealed: bool = False) -> bytes:
    """Return a line without its checksum, which it has if it is `sealed`.

    Raises ValueError if the checksum is another one.
    """
    checksum = _CHECKSUM.search(line)
    data = line if checksum is None else line[: checksum.start()] + b"}"
    if (sealed and checksum is None) or (checksum is not None and int(checksum[1], 16) != zlib.crc32(data)):
        raise ValueError("its checksum differs: it was changed or damaged since it was written")
    return data


def _parse(place: str, line: bytes, *, sealed: bool = False) -> Document:
    try:
        data = _unsealed(line, sealed=sealed)
    except ValueError as error:
        raise ProfileError(f"{place}: {error}; restore the file, or delete the line") from error
    return parse_json(place, data)


# measurements of a device, which a second start of the same command continues -------------------------------

Row = dict[str, Any]
_Key = TypeVar("_Key")


@contextlib.contextmanager
def continued(
    out: Path, environment: Row, fixed: Sequence[str], key_of: Callable[[Row], _Key]
) -> Iterator[tuple[Journal, dict[_Key, Row]]]:
    """Open a journal that begins with its environment; yield it with its rows by key.

    fixed: entries of the environment that must be those of the journal. key_of: raises KeyError, TypeError or
    ValueError for what is no row. Raises InputError for another environment, ProfileError for another file.
    """
    done: dict[_Key, Row] = {}
    with Journal(out) as journal:
        empty = True
        for number, (_, row) in enumerate(journal.rows(), start=1):
            known, empty = dict(row), False
            if known.get("row") == "environment":
                for name in fixed:
                    if known.get(name) != environment[name]:
                        raise InputError(
                            f"{out}: was measured with {name} {str(known.get(name))[:60]}, now "
                            f"{environment[name]}; choose another --out"
                        )
                continue
            try:
                done[key_of(known)] = known
            except (KeyError, TypeError, ValueError) as error:
                command = " ".join(environment["command"].split()[:3])
                raise ProfileError(
                    f"{out} line {number}: is no row of `{command}`; choose another --out"
                ) from error
        if empty:
            journal.append(environment)
        yield journal, done
