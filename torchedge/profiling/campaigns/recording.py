"""The journal of a campaign, and its dataset folder, derived from the journal in the plan's order."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torchedge.devices import find_device, write_device
from torchedge.devices.device import DEVICE_FILE, measured_figure
from torchedge.errors import ProfileError, TorchedgeError
from torchedge.profiling.campaigns.expansion import read_jobs
from torchedge.profiling.campaigns.plans import CampaignPlan
from torchedge.storage.documents import read_bytes, write_json, writing
from torchedge.storage.journals import Journal
from torchedge.storage.replacing import new_file

FILE = "rows.jsonl"
Point = tuple[str, str, int]
"""Job, mode and batch size."""

WITNESSED_LOSSES, LOSSES = 2, 4
"""A point is skipped after this number of lost devices, or of controllers killed, in a row."""

UNSTEADY = 1.5
"""The 90th percentile of a steady point's steps is at most this multiple of the 10th."""


class CampaignJournal(Journal):
    """Rows of a campaign on disk, and their state. Use it as a context; one process at a time.

    Beside the probe's rows ("environment", "start", "point") the controller writes "session" (a controller
    began), "stopped" (it was interrupted during a point) and "lost" (the connection or the device was lost).

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


# the tables -------------------------------------------------------------------------------------------------

COLUMNS = (
    "id", "mode", "batch_size", "fits", "memory_mib", "allocated_mib", "reserved_mib", "latency_ms",
    "latency_p10_ms", "latency_p90_ms", "steps", "clock_mhz", "throttled", "reason",
)  # fmt: skip
"""Columns of measurements.csv; a blank is not known."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Progress of a campaign: numbers of points, and the reasons of failed and skipped ones.

    fittable: one mode at least has the points that a fit needs.
    """

    folder: Path
    points: int
    measured: int
    out_of_memory: int
    unsteady: int
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] | None = None
    fittable: bool = True

    @property
    def left(self) -> int:
        """Points without a row."""
        return self.points - self.measured - self.out_of_memory - len(self.failed)


def write_tables(folder: Path, plan: CampaignPlan, journal: CampaignJournal) -> Summary:
    """Write measurements.csv, networks.jsonl, layers.jsonl, environment.json and, if any, skipped.jsonl.

    Each file is replaced as a whole, and the same rows give the same bytes. Raises ProfileError where the
    folder cannot be written.
    """
    measured = out_of_memory = 0
    failed: dict[str, str] = {}
    with writing(folder, "check the disk"):
        skipped = _write_networks(folder)
        points = plan.points(skipped)
        with (
            _replaced(folder / "measurements.csv") as table,
            _replaced(folder / "layers.jsonl") as layers,
            _replaced(folder / "launches.jsonl") as launches,
        ):
            writer = csv.writer(table, lineterminator="\n")
            writer.writerow(COLUMNS)
            for point in points:
                if point not in journal.done:
                    continue
                row = journal.row_at(journal.done[point])
                writer.writerow([*point, *(row.get(column) for column in COLUMNS[3:])])
                for name, file in (("layers", layers), ("launches", launches)):
                    if row.get(name):
                        file.write(
                            json.dumps({**dict(zip(COLUMNS, point, strict=False)), name: row[name]}) + "\n"
                        )
                if row["fits"] is None:
                    failed["{} {} {}".format(*point)] = str(row.get("reason", ""))
                elif row["fits"]:
                    measured += 1
                else:
                    out_of_memory += 1
    if journal.environment is not None:
        write_json(folder / "environment.json", journal.environment)
    unsteady = len(journal.unsteady.intersection(points))
    return Summary(
        folder, len(points), measured, out_of_memory, unsteady, failed, skipped, journal.environment,
        plan.fittable,
    )  # fmt: skip


def describe_device(folder: Path, name: str, environment: Mapping[str, Any]) -> bool:
    """Write device.toml from the probe's report for a device without a profile; return whether it did.

    `torchedge fit all FOLDER --device FOLDER` then has a device to fit. An existing one stays.
    """
    if (folder / DEVICE_FILE).exists():
        return False
    with contextlib.suppress(TorchedgeError):
        find_device(name)
        return False
    title = str(environment.get("device_name") or name)[:120]
    cuda = environment.get("device") == "cuda"
    document: dict[str, object] = {
        "name": name,
        "title": title,
        "kind": "gpu" if cuda else "cpu",
        "vendor": "NVIDIA" if cuda else "unknown",
        "memory": "dedicated" if environment.get("memory_meter") in ("nvml", "torch") else "unified",
        "aliases": [title],
        "notes": "Written by torchedge campaign from the probe's report; add further facts of the device.",
    }
    total = environment.get("memory_total_mib")
    if isinstance(total, (int, float)) and total >= 1:
        source = f"{environment.get('probe')} on {environment.get('date')}: {environment.get('command')}"
        document["figures"] = {"memory_mib": measured_figure("memory_mib", total, source)}
    versions = {"pytorch": "torch", "cuda": "cuda", "cudnn": "cudnn", "driver": "driver", "python": "python"}
    document["software"] = {
        key: str(environment[of]) for key, of in versions.items() if environment.get(of) is not None
    }
    write_device(document, folder)
    return True


def _write_networks(folder: Path) -> dict[str, str]:
    """Write the job lines of measured networks, and the reasons of skipped ones; return the reasons by id."""
    skipped: dict[str, str] = {}
    with _replaced(folder / "networks.jsonl") as file:
        for job in read_jobs(folder):
            if "skipped" in job:
                skipped[job["skipped"]] = job["reason"]
            else:
                file.write(json.dumps(job) + "\n")
    if skipped:
        with _replaced(folder / "skipped.jsonl") as file:
            for name, reason in skipped.items():
                file.write(json.dumps({"id": name, "reason": reason}) + "\n")
    return skipped


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """Open a text file that takes the place of `path` when the block ends well."""
    with new_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        yield text
        text.detach()
