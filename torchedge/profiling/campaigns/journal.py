"""The journal of a campaign: rows.jsonl, written row by row and never rewritten.

Beside the probe's rows ("environment", "start", "point") the controller writes "session" (a controller
began), "stopped" (it was interrupted during a point) and "lost" (the connection or the device was lost).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchedge.errors import ProfileError
from torchedge.storage.documents import read_bytes
from torchedge.storage.journals import Journal

FILE = "rows.jsonl"
Point = tuple[str, str, int]
"""Job, mode and batch size."""

WITNESSED_LOSSES, LOSSES = 2, 4
"""A point is skipped after this number of lost devices, or of controllers killed, in a row."""

UNSTEADY = 1.5
"""The 90th percentile of a steady point's steps is at most this multiple of the 10th."""


class CampaignJournal(Journal):
    """Rows of a campaign on disk, and their state. Use it as a context; one process at a time.

    `done` maps each measured point to the place of its last row; `failed` are those without figures,
    `unsteady` those whose steps differ by more than half; `environment` is the first session's.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE)
        self.done: dict[Point, int] = {}
        self.failed: set[Point] = set()
        self.unsteady: set[Point] = set()
        self.environment: dict[str, Any] | None = None
        self.session: dict[str, Any] | None = None
        self.under_way: Point | None = None
        """The point that was begun and has no row yet."""
        self._losses: dict[Point, list[bool]] = {}
        self._boot: str | None = None

    def __enter__(self) -> CampaignJournal:
        super().__enter__()
        try:
            for number, (place, row) in enumerate(self.rows(), start=1):
                try:
                    self._take(row, place)
                except (KeyError, TypeError, ValueError) as error:
                    raise ProfileError(
                        f"{self.path} line {number}: is not a row of a campaign; delete it, or use "
                        "another --out"
                    ) from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def append(self, row: Mapping[str, Any]) -> int:
        """Append a row; it is on disk when this returns. ProfileError if the disk is full or read-only."""
        place = super().append(row)
        self._take(row, place)
        return place

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
            self.under_way = None
        elif kind == "start":
            self.under_way = point_of(row)
        elif kind == "point":
            point = point_of(row)
            self.done[point] = place
            self._losses.pop(point, None)
            (self.failed.add if row["fits"] is None else self.failed.discard)(point)
            (self.unsteady.add if _varies(row) else self.unsteady.discard)(point)
            if self.under_way == point:
                self.under_way = None

    def _lose(self, *, witnessed: bool) -> None:
        if self.under_way is not None:
            self._losses.setdefault(self.under_way, []).append(witnessed)
            self.under_way = None

    def given_up(self) -> list[Point]:
        """Points that were lost with the device or the controller too often to be tried again."""
        return [p for p, seen in self._losses.items() if sum(seen) >= WITNESSED_LOSSES or len(seen) >= LOSSES]


def point_of(row: Mapping[str, Any]) -> Point:
    """Return the point of a row."""
    return str(row["job"]), str(row["mode"]), int(row["batch_size"])


def _varies(row: Mapping[str, Any]) -> bool:
    """Whether the slow steps of a point took over half as long again as its fast ones."""
    fast, slow = row.get("latency_p10_ms"), row.get("latency_p90_ms")
    return isinstance(fast, (int, float)) and isinstance(slow, (int, float)) and slow > UNSTEADY * fast


def boot_id() -> str | None:
    """Return the identity of this machine's present boot, None if the system has none."""
    with contextlib.suppress(ProfileError):
        return read_bytes("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()
    return None
