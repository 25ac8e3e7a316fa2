"""Write the jobs of a campaign over settings from its tables, or the tables from the rows of the probe.

    python benchmarks/accuracy/settings_jobs.py profiles/nvidia-h200/campaign/settings > jobs.jsonl
    python hooks/training_probe.py jobs.jsonl --out rows.jsonl --wave 14 --hurry                 # on the GPU
    python benchmarks/accuracy/settings_jobs.py FOLDER --without rows.jsonl > rest.jsonl    # what is left
    python benchmarks/accuracy/settings_jobs.py FOLDER --rows rows.jsonl.gz --out NEW       # the tables of it

FOLDER holds networks.jsonl.gz (the jobs without their points) and measurements.csv.gz (the points).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, TextIO

from tables import options_of

COLUMNS = (
    "id", "mode", "batch_size", "fits", "memory_mib", "allocated_mib", "reserved_mib", "latency_ms",
    "latency_p10_ms", "latency_p90_ms", "steps", "clock_mhz", "throttled", "limit_mib", "launch_us",
    "step_us", "host_ms", "reason",
)  # fmt: skip
TIMES = ("latency_ms", "latency_p10_ms", "latency_p90_ms", "layers")

Job = dict[str, Any]


def read_jobs(folder: Path) -> dict[str, Job]:
    """Return the jobs of a campaign by id, with the points that were measured."""
    points = defaultdict(list)
    with gzip.open(folder / "measurements.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            points[row["id"]].append([row["mode"], int(row["batch_size"])])
    with gzip.open(folder / "networks.jsonl.gz", "rt") as file:
        return {job["id"]: {**job, "points": points[job["id"]]} for job in map(json.loads, file)}


def write_tables(jobs: dict[str, Job], rows: list[Path], folder: Path) -> None:
    """Write measurements.csv.gz, networks.jsonl.gz, layer_rows.jsonl.gz and environment.json of the rows.

    Rows that were measured while other networks were prepared (--ahead of an earlier probe) keep their memory
    alone; frozen models of text among them also trained their embeddings, and are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points: dict[tuple[str, str, int], Job] = {}
    for file in rows:
        with gzip.open(file, "rt") as lines:
            environment, *others = map(json.loads, lines)
        (folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
        ahead = "--ahead" in environment["command"]
        disturbed = ahead or "--memory" in environment["command"]
        for row in others:
            if row["row"] != "point" or row["fits"] is None or row["job"] not in jobs:
                continue
            if ahead and "frozen" in jobs[row["job"]] and "seq_len" in jobs[row["job"]]:
                continue
            times = dict.fromkeys(TIMES) if disturbed else {}
            points[row["job"], row["mode"], row["batch_size"]] = {**row, **times, "id": row["job"]}
    measured = {key[0] for key in points}
    with _packed(folder / "measurements.csv.gz") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(points.values())
    with _packed(folder / "networks.jsonl.gz") as file:
        for job in jobs.values():
            if job["id"] in measured:
                described = {name: value for name, value in job.items() if name != "points"}
                file.write(json.dumps(described, separators=(",", ":")) + "\n")
    with _packed(folder / "layer_rows.jsonl.gz") as file:
        for row in points.values():
            if row["layers"]:
                file.write(json.dumps({n: row[n] for n in ("id", "mode", "batch_size", "layers")}) + "\n")


def _packed(file: Path) -> TextIO:
    """Return a compressed file to write, the same bytes for the same text."""
    return io.TextIOWrapper(gzip.GzipFile(file, "wb", mtime=0), newline="")


def main() -> int:
    """Write the jobs, or the tables of their rows."""
    parser = options_of(__doc__)
    parser.add_argument("folder", type=Path, help="tables of a campaign")
    parser.add_argument("--rows", type=Path, nargs="+", help="rows of the probe, compressed")
    parser.add_argument("--out", type=Path, help="folder of the tables of --rows")
    parser.add_argument("--without", type=Path, nargs="+", default=[], help="rows of points to leave out")
    arguments = parser.parse_args()
    jobs = read_jobs(arguments.folder)
    if arguments.rows:
        write_tables(jobs, arguments.rows, arguments.out)
        return 0
    done = {
        (row["job"], row["batch_size"])
        for file in arguments.without
        for row in map(json.loads, file.read_text().splitlines())
        if row["row"] == "point"
    }
    for job in jobs.values():
        job["points"] = [point for point in job["points"] if (job["id"], point[1]) not in done]
        if job["points"]:
            sys.stdout.write(json.dumps(job) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
