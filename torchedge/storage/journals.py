"""Journals: JSON objects in a file, one a line, appended and synchronised one by one, never rewritten.

Long jobs (campaigns, searches) record every result this way, so that a job that was killed continues where
it was. A crash can leave at most a torn last line, without its newline; it is cut off when the journal is
read again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torchedge.errors import ProfileError, TorchedgeError
from torchedge.storage.documents import Document, parse_json
from torchedge.storage.locks import lock_file

_LONGEST_LINE = 1 << 26


class Journal:
    """A journal on disk. Use it as a context; one process at a time.

    path: the file, created where it does not exist. error: the exception for a file that cannot be written or
    is in use. wait: wait for another process instead. Reading raises ProfileError for a line that is no JSON
    object.
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
        place = number = 0
        file.seek(0)
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if file.read(1):
                    raise ProfileError(
                        f"{self.path} line {number}: has over {_LONGEST_LINE >> 20} MiB, which no journal "
                        "writes; delete the line, or choose another place"
                    )
                self._cut(place)
                return
            row = parse_json(f"{self.path} line {number}", line)
            following = place + len(line)
            yield place, row
            place = following
            file.seek(place)

    def row_at(self, place: int) -> Document:
        """Return the row that begins at a place, as `rows` and `append` gave it."""
        file = self._opened()
        file.seek(place)
        return parse_json(self.path, file.readline(_LONGEST_LINE))

    def append(self, row: Mapping[str, Any]) -> int:
        """Append a row and return its place; the row is on disk when this returns."""
        file = self._opened()
        data = json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        place = file.seek(0, os.SEEK_END)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
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

    Raises ProfileError for a line that is no JSON object.
    """
    if path.exists():
        with path.open("rb") as file:
            while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
                yield parse_json(path, line)
