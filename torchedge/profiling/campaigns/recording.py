"""The dataset folder of a campaign, derived from its journal in the plan's order."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torchedge.devices import Provenance, find_device, write_device
from torchedge.devices.device import DEVICE_FILE
from torchedge.errors import TorchedgeError
from torchedge.profiling.campaigns.expansion import read_jobs
from torchedge.profiling.campaigns.journal import CampaignJournal
from torchedge.profiling.campaigns.plans import CampaignPlan
from torchedge.storage.documents import write_json, writing
from torchedge.storage.replacing import new_file

COLUMNS = (
    "id", "mode", "batch_size", "fits", "memory_mib", "allocated_mib", "reserved_mib", "latency_ms",
    "latency_p10_ms", "latency_p90_ms", "steps", "clock_mhz", "throttled", "reason",
)  # fmt: skip
"""Columns of measurements.csv; a blank is not known."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Progress of a campaign: numbers of points, and the reasons of failed and skipped ones."""

    folder: Path
    points: int
    measured: int
    out_of_memory: int
    unsteady: int
    failed: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] | None = None

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
        with _replaced(folder / "measurements.csv") as table, _replaced(folder / "layers.jsonl") as layers:
            writer = csv.writer(table, lineterminator="\n")
            writer.writerow(COLUMNS)
            for point in points:
                if point not in journal.done:
                    continue
                row = journal.row_at(journal.done[point])
                writer.writerow([*point, *(_cell(row.get(column)) for column in COLUMNS[3:])])
                if row.get("layers"):
                    line = dict(zip(COLUMNS, point, strict=False), layers=row["layers"])
                    layers.write(json.dumps(line) + "\n")
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
        folder, len(points), measured, out_of_memory, unsteady, failed, skipped, journal.environment
    )


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
        figure = {"value": total, "unit": "MiB", "provenance": str(Provenance.MEASURED), "source": source}
        document["figures"] = {"memory_mib": figure}
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


def _cell(value: Any) -> Any:  # noqa: ANN401 - JSON
    return "" if value is None else value


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """Open a text file that takes the place of `path` when the block ends well."""
    with new_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        yield text
        text.detach()
