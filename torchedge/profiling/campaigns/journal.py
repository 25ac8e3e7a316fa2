"""The journal of a campaign: rows.jsonl, one JSON object a line, written line by line and never rewritten.

What a crash can leave is a torn last line, which is cut off when the journal is opened again. Beside the
probe's rows ("environment", "start", "point") the controller writes "session" (a controller began), "stopped"
(it was interrupted while a point was under way) and "lost" (the connection or the device went away then).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torchedge.errors import ProfileError
from torchedge.profiling.campaigns.locks import take_lock
from torchedge.storage.documents import read_bytes

__all__ = ["FILE", "Journal", "Point", "point_of"]

FILE = "rows.jsonl"
Point = tuple[str, str, int]
"""Job, mode and batch size."""

WITNESSED_LOSSES, LOSSES = 2, 4
"""So many times in a row a point may go down with its device, or be under way when the controller dies."""

UNSTEADY = 1.5
"""The 90th percentile of a point's steps is at most so many times the 10th, on a machine left alone."""

_LONGEST_LINE = 1 << 24


class Journal:
    """Rows of a campaign on disk, and what is known from them. Use it as a context; one process at a time.

    `done` maps each measured point to the place of its last row; `failed` and `unsteady` are those of them
    without figures, and with steps that differ by more than half; `environment` is the first session's.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.done: dict[Point, int] = {}
        self.failed: set[Point] = set()
        self.unsteady: set[Point] = set()
        self.environment: dict[str, Any] | None = None
        self.session: dict[str, Any] | None = None
        self._losses: dict[Point, list[bool]] = {}
        self._under_way: Point | None = None
        self._boot: str | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        try:
            self._file = open(self.path, "a+b")
            if not take_lock(self._file, wait=False):
                raise ProfileError(
                    f"{self.path.parent}: another torchedge is running this campaign; wait for it, or use "
                    "another --out"
                )
            self._load(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _load(self, file: BinaryIO) -> None:
        """Read what is there and cut off a torn last line."""
        file.seek(0)
        place = number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            row = _parsed(line)
            if row is None:
                rest = file.read(1)
                if rest:
                    raise ProfileError(
                        f"{self.path} line {number}: is no row of a campaign; expected at most a torn last "
                        "line: delete it, or use another --out"
                    )
                file.truncate(place)
                break
            self._take(row, place)
            place += len(line)
        file.seek(0, os.SEEK_END)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on disk when this returns. ProfileError where the disk is full or read-only."""
        assert self._file is not None
        data = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError, UnboundLocalError):
                self._file.truncate(place)  # no half line that a later row would follow
            raise _unwritable(self.path, error) from error
        self._take(row, place)

    def _take(self, row: Mapping[str, Any], place: int) -> None:
        kind = row["row"]
        if kind == "environment":
            self.environment = self.environment or dict(row)
        elif kind == "session":
            self.session = self.session or dict(row)
            self._lose(witnessed=self._boot is not None and row.get("boot") != self._boot)
            self._boot = row.get("boot")
        elif kind == "lost":
            self._lose(witnessed=True)
        elif kind == "stopped":
            self._under_way = None
        elif kind == "start":
            self._under_way = point_of(row)
        elif kind == "point":
            point = point_of(row)
            self.done[point] = place
            self._losses.pop(point, None)
            (self.failed.add if row["fits"] is None else self.failed.discard)(point)
            (self.unsteady.add if _varies(row) else self.unsteady.discard)(point)
            if self._under_way == point:
                self._under_way = None

    def _lose(self, *, witnessed: bool) -> None:
        if self._under_way is not None:
            self._losses.setdefault(self._under_way, []).append(witnessed)
            self._under_way = None

    @property
    def under_way(self) -> Point | None:
        """The point that was begun and has no row yet."""
        return self._under_way

    def given_up(self) -> list[Point]:
        """Points that went down with the device or the controller too often to be tried again."""
        return [p for p, seen in self._losses.items() if sum(seen) >= WITNESSED_LOSSES or len(seen) >= LOSSES]

    def row_at(self, place: int) -> dict[str, Any]:
        """Return the row that begins at a place of the file."""
        assert self._file is not None
        self._file.seek(place)
        row = _parsed(self._file.readline(_LONGEST_LINE))
        assert row is not None, place
        return row


def point_of(row: Mapping[str, Any]) -> Point:
    """Return which point a row is about."""
    return str(row["job"]), str(row["mode"]), int(row["batch_size"])


def _varies(row: Mapping[str, Any]) -> bool:
    """Whether the slow steps of a point took over half as long again as its fast ones."""
    fast, slow = row.get("latency_p10_ms"), row.get("latency_p90_ms")
    return isinstance(fast, (int, float)) and isinstance(slow, (int, float)) and slow > UNSTEADY * fast


def boot_id() -> str | None:
    """Return what tells one run of this machine's system from the next, None where it does not say."""
    with contextlib.suppress(ProfileError):
        return read_bytes("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()
    return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the row of a whole line, None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        if row["row"] in ("start", "point"):
            point_of(row)
        if row["row"] == "point":
            row["fits"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _unwritable(path: Path, error: OSError) -> ProfileError:
    step = (
        "make room and run the same command again" if error.errno == 28 else "check the folder, or use --out"
    )
    return ProfileError(f"{path}: cannot be written ({error.strerror}); {step}")
