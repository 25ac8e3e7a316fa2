"""The controller: brings a campaign from where its journal stands to its end. Needs no torch itself."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchedge import __version__
from torchedge.errors import DeviceError, InputError
from torchedge.profiling.campaigns import convolutions
from torchedge.profiling.campaigns.expansion import JOBS, PLAN, Listener, read_jobs, run_child
from torchedge.profiling.campaigns.plans import CampaignPlan, parse_plan
from torchedge.profiling.campaigns.recording import (
    FILE,
    CampaignJournal,
    Point,
    Summary,
    boot_id,
    describe_device,
    point_of,
    write_tables,
)
from torchedge.profiling.campaigns.transports import Run, Transport, explain, row_of
from torchedge.storage import data_folder
from torchedge.storage.documents import read_text, write_bytes, writing
from torchedge.storage.journals import read_rows
from torchedge.storage.replacing import make_folder, new_file

PROBE, LEASH, LEFT = "training_probe.py", "leash.py", "left.jsonl"
PAUSES = (2.0, 10.0, 30.0, 60.0, 60.0, 60.0)
"""Seconds before each attempt to reach a lost device again."""


class OtherMachineError(DeviceError):
    """The device is not the one that the campaign began on."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """A plan, a device and the way to it: `device` names the future profile, `processor` is "", cuda or cpu.

    retry: "failed", "unsteady" or both: which points that have a row are measured again. convolutions: how
    many single ones are measured too, on CUDA. hurry: fewer steps a point. runner: `torchedge-run` for a
    device without Python, on which each point runs as a bundle; opencl: its driver's device, by a part of its
    name.
    """

    folder: Path
    plan: CampaignPlan
    device: str
    over: str
    processor: str = ""
    retry: Sequence[str] = ()
    convolutions: int = 0
    probe: Path | None = None
    pauses: Sequence[float] = PAUSES
    hurry: bool = False
    runner: Path | None = None
    opencl: str = ""


def run_campaign(campaign: Campaign, transport: Transport | None, listener: Listener) -> Summary:
    """Measure the remaining points of a campaign and write its tables; without a transport only the tables.

    May be killed at any moment: the journal loses at most the current point, and the next call continues. The
    tables are written at the end and also when the run is interrupted or fails.

    A plan other than the folder's is added to it: points that were measured stay, and what is left of both
    plans is measured. A plan whose points are too few for a fit is said before anything is measured.

    Raises InputError for a plan with other settings than the folder's, DeviceError for a device that is
    out of reach, lacks Python or PyTorch, or is another machine than before, and ProfileError for a folder
    that cannot be used.
    """
    folder = campaign.folder
    # A folder of something else, and without measuring one of no campaign.
    measures = transport is not None
    begun = any((folder / name).exists() for name in (FILE, JOBS))
    if not measures and not begun:
        raise InputError(
            f"{folder} holds no campaign whose tables could be written; correct --out, or omit --tables-only"
        )
    if folder.is_dir() and not begun and any(folder.iterdir()):
        raise InputError(
            f"{folder} holds other files and no campaign; expected its folder or a new one: choose another "
            "--out"
        )
    with writing(folder, "choose another with --out"):
        make_folder(folder)
    with CampaignJournal(folder) as journal:
        campaign = _with_stored(campaign, journal, measures=transport is not None)
        if transport is not None and not journal.done.keys() >= set(campaign.plan.points(())):
            for line in campaign.plan.shortages():
                listener.note(f"the plan has {line}: add networks or batch sizes, or adapt with `fit --base`")
        _prepare(campaign, transport, listener)
        try:
            if transport is not None:
                _Session(campaign, transport, journal, listener).run()
                _measure_convolutions(campaign, transport, journal.environment or {}, listener)
        finally:
            summary = write_tables(folder, campaign.plan, journal)
            if journal.environment is not None:
                describe_device(folder, campaign.device, journal.environment)
    return summary


def _measure_convolutions(
    campaign: Campaign, transport: Transport, environment: Mapping[str, Any], listener: Listener
) -> None:
    """Measure single convolutions too, if the campaign includes them and runs on CUDA."""
    if not campaign.convolutions:
        return
    if environment.get("device") != "cuda":
        listener.note("no convolutions are measured: workspaces are measured on CUDA only")
        return
    hooks = [data_folder("hooks") / name for name in (LEASH, convolutions.PROBE)]
    count, seed = campaign.convolutions, campaign.plan.seed
    convolutions.measure_convolutions(campaign.folder, count, seed, environment, transport, hooks, listener)


def _with_stored(campaign: Campaign, journal: CampaignJournal, *, measures: bool) -> Campaign:
    """Return the campaign of the folder's plan and the new one, stored if it measures, else of the first.

    Raises InputError for another device or other settings.
    """
    device = (journal.session or {}).get("device", campaign.device)
    if device != campaign.device:
        raise InputError(
            f"{campaign.folder} holds measurements of {device}; expected the same name: correct it, "
            "or use another --out"
        )
    path, plan = campaign.folder / PLAN, campaign.plan
    if path.exists():
        stored = parse_plan(str(path), read_text(path, "TOML"))
        plan = stored.joined(plan)
        if plan is stored or not measures:
            return replace(campaign, plan=stored)
    write_bytes(path, plan.text.encode())
    return replace(campaign, plan=plan)


def _prepare(campaign: Campaign, transport: Transport | None, listener: Listener) -> None:
    """Write the plan's job lines in a child process, whose memory is freed at its end."""
    items = campaign.plan.items()
    there = sum(1 for _ in read_jobs(campaign.folder))
    if there == len(items):
        return
    if transport is not None:
        transport.put([])  # a device out of reach fails before the work
    listener.begin("preparing networks", len(items), there)
    begun = 0

    def listen(row: Mapping[str, Any]) -> None:
        nonlocal begun
        if begun:
            listener.step()
        begun += 1
        listener.doing(row["item"])

    run_child("torchedge.profiling.campaigns.expansion", [str(campaign.folder)], listen)
    listener.step()


class _Session:
    """One run of the controller: starts the probe, records its rows, restarts it after a failure."""

    def __init__(
        self, campaign: Campaign, transport: Transport, journal: CampaignJournal, listener: Listener
    ) -> None:
        self.campaign, self.transport = campaign, transport
        self.journal, self.listener = journal, listener
        self.left: dict[Point, None] = {}
        self.answered = False

    def run(self) -> None:
        """Measure until nothing is left."""
        skipped = {job["skipped"] for job in read_jobs(self.campaign.folder) if "skipped" in job}
        points = self.campaign.plan.points(skipped)
        journal = self.journal
        again = {"failed": journal.failed, "unsteady": journal.unsteady}
        retried = set().union(*(again[what] for what in self.campaign.retry))
        left = [p for p in points if p not in journal.done or p in retried]
        if not left:
            return
        journal.append(
            {
                "row": "session",
                "device": self.campaign.device,
                "over": self.campaign.over,
                "torchedge": __version__,
                "controller": f"Python {platform.python_version()}, {platform.system()}",
                "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
                "boot": boot_id(),
            }
        )
        self.listener.begin("measuring", len(points), len(points) - len(left))
        self.left = dict.fromkeys(left)
        silent = 0
        while self._give_up():
            before = len(self.left)
            reason = self._attempt()
            if not self.left:
                return
            silent = 0 if len(self.left) < before else silent + 1
            if silent >= len(self.campaign.pauses):
                raise DeviceError(f"{self.campaign.over}: {reason}; run the same command again to continue")
            self.listener.note(f"{reason}; starting again")
            time.sleep(self.campaign.pauses[silent])

    def _give_up(self) -> bool:
        """Record points that crashed the device too often as failed; return whether any point is left."""
        reason = "the device, the connection or the controller was lost at this point several times in a row"
        for job, mode, batch in self.journal.given_up():
            label = {"job": job, "mode": mode, "batch_size": batch}
            self._record({"row": "point", **label, "fits": None, "reason": reason})
        return bool(self.left)

    def _attempt(self) -> str:
        """Measure the remaining points once; return why that ended early.

        A device that does not answer is an error at first, and waited for once it has answered.
        """
        runner = self.campaign.runner
        write_left(self.campaign.folder, self.left)
        try:
            return self._run_probe() if runner is None else self._run_exported(runner)
        except DeviceError as error:
            if not self.answered or isinstance(error, OtherMachineError):
                raise
            if self.journal.under_way is not None:
                self.journal.append({"row": "lost", "status": 255, "said": str(error)[:300]})
            return str(error)
        except KeyboardInterrupt:
            if self.journal.under_way is not None:
                self.journal.append({"row": "stopped"})
            raise

    def _run_exported(self, runner: Path) -> str:
        """Export the remaining points and run them without Python; return why that ended early."""
        from torchedge.profiling.campaigns.exported import measure_points
        from torchedge.profiling.remote_devices import (
            ask_device,
            describe_there,
            device_called,
            states_limits,
        )
        from torchedge.profiling.remote_runs import RemoteRunner

        campaign = self.campaign
        command = f"torchedge campaign run {campaign.device} --over {campaign.over} --runner"
        with RemoteRunner(self.transport, runner, campaign.opencl) as remote:
            there = ask_device(remote)
            self._take(there.environment(command))
            self.answered = True
            device = device_called(campaign.device)
            if device is None or not states_limits(device):
                device = describe_there(campaign.folder, campaign.device, there, command)
            for row in measure_points(read_rows(campaign.folder / LEFT), device, there, remote):
                self._take(row)
        return "not every point was measured"

    def _run_probe(self) -> str:
        """Record the probe's rows until it ends."""
        probe, heard = self.campaign.probe or data_folder("hooks") / PROBE, False
        options = ["--device", self.campaign.processor] if self.campaign.processor else []
        options += ["--hurry"] if self.campaign.hurry else []
        self.transport.put([data_folder("hooks") / LEASH, probe, self.campaign.folder / LEFT])
        with self.transport.start(probe.name, [f"/{LEFT}", *options]) as run:
            for line in run.lines():
                row = row_of(line, _is_row)
                if row is not None:
                    heard = self.answered = True
                    self._take(row)
            status = run.wait()
        if not heard:
            raise DeviceError(f"{self.campaign.over}: {_why_not(run, status, self.transport.python)}")
        if self.journal.under_way is not None:
            self.journal.append({"row": "lost", "status": status, "said": run.last_error[:300]})
        return f"the probe ended with status {status} ({run.last_error[:200] or 'no message'})"

    def _take(self, row: Mapping[str, Any]) -> None:
        if row["row"] == "environment":
            before = self.journal.environment
            if before is not None and before.get("machine") != row.get("machine"):
                raise OtherMachineError(_other_machine(self.campaign, before, row))
            self.journal.append(row)
        elif row["row"] == "start":
            self.journal.append(row)
            self.listener.doing("{} {} {}".format(*point_of(row)))
        elif point_of(row) in self.left:
            self._record(row)

    def _record(self, row: Mapping[str, Any]) -> None:
        self.journal.append(row)
        self.left.pop(point_of(row), None)
        self.listener.step()


def write_left(folder: Path, left: Mapping[Point, None]) -> None:
    """Write the jobs of points that are left into left.jsonl, in the plan's order."""
    points: dict[str, list[list[object]]] = {}
    for job, mode, batch in left:
        points.setdefault(job, []).append([mode, batch])
    with new_file(folder / LEFT) as file:
        for line in read_jobs(folder):
            if line.get("id") in points:
                file.write(json.dumps({**line, "points": points[line["id"]]}).encode() + b"\n")


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row has all that its kind needs; a missing entry may raise."""
    if row["row"] in ("start", "point"):
        point_of(row)
    if row["row"] == "point":
        row["fits"]
    return row["row"] in ("environment", "start", "point")


def _why_not(run: Run, status: int, python: str) -> str:
    """Return the reason for no rows at all, and the next step."""
    missing = run.error_with("No module named")
    if "torch" in missing:
        return f"{python} there has no PyTorch ({missing}); install it, or name another with --python"
    if status == 127 or "not found" in run.last_error:
        return f"{python} was not found there; name the interpreter with --python"
    return f"the probe ended with status {status} before it measured anything: {explain(run.last_error)}"


def _other_machine(campaign: Campaign, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    ignored = {"machine", "date", "command", "row", "hostname_hash", "host"}
    keys = [k for k in {**before, **now} if k not in ignored and before.get(k) != now.get(k)]
    differ = [f"{key} was {before.get(key)} and is {now.get(key)}" for key in keys[:4]]
    what = ", ".join(differ) or "its identity"
    return (
        f"{campaign.over} is not the machine that {campaign.folder} was measured on: {what}; restore "
        "that, or start again with another --out"
    )
