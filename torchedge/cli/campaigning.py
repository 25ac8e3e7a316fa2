"""Campaigns on the command line: `torchedge profile --device-name NAME --plan PLAN --over WAY`."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from torchedge.cli.console import Progress, print_json, print_wrapped, warn
from torchedge.errors import InputError

__all__ = ["add_campaign", "is_campaign", "run_profile"]

_SHOWN = 5


def add_campaign(parser: argparse.ArgumentParser) -> None:
    """Add what describes a campaign."""
    campaign = parser.add_argument_group("campaigns")
    campaign.add_argument("--device-name", metavar="NAME", help="name of the device that is measured")
    campaign.add_argument(
        "--plan", metavar="PLAN", help="quick (30 points), standard (the paper's grid) or a TOML file"
    )
    campaign.add_argument(
        "--over",
        metavar="WAY",
        help="local (default), ssh://[user@]host[:port], adb or adb:SERIAL",
    )
    campaign.add_argument("--out", type=Path, metavar="FOLDER", help="dataset folder (default: your own)")
    campaign.add_argument("--python", metavar="PATH", help="Python with PyTorch on the device")
    campaign.add_argument(
        "--processor", choices=("cuda", "cpu"), help="what to measure there (default: cuda where it works)"
    )
    campaign.add_argument(
        "--convolutions",
        type=_convolutions,
        default=0,
        metavar="N",
        help="on CUDA, measure the workspaces of N convolutions like the plan's too, such as 20000",
    )
    campaign.add_argument("--retry-failed", action="store_true", help="measure failed points again")
    campaign.add_argument(
        "--retry-unsteady", action="store_true", help="measure points whose steps differ much again"
    )
    campaign.add_argument("--tables-only", action="store_true", help="write the tables, measure nothing")
    campaign.add_argument("--show-plan", action="store_true", help="print the plan and its size, do nothing")


def _convolutions(text: str) -> int:
    from torchedge.profiling.campaigns.convolutions import LEAST, MOST

    with contextlib.suppress(ValueError):
        if LEAST <= int(text) <= MOST:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}; expected {LEAST} to {MOST}")


def is_campaign(arguments: argparse.Namespace) -> bool:
    """Whether a command line describes a campaign, and not the 20 s of `torchedge profile local-cpu`."""
    given = (arguments.device_name, arguments.plan, arguments.over, arguments.out, arguments.python)
    retries = (arguments.retry_failed, arguments.retry_unsteady)
    flags = (arguments.processor, arguments.convolutions, arguments.tables_only, arguments.show_plan)
    return any(given) or any(flags) or any(retries)


def run_profile(arguments: argparse.Namespace) -> int:
    """Run a campaign and print how it stands."""
    from torchedge.profiling.campaigns.plans import read_plan

    if arguments.plan is None:
        raise InputError(
            "no --plan is given; expected quick, standard or a TOML file (--show-plan prints one)"
        )
    plan = read_plan(arguments.plan)
    if arguments.show_plan:
        print(plan.text.rstrip())
        items = list(plan.items())
        points = sum(len(item.network.points) for item in items)
        print(f"# {len(items)} networks, {points} points")
        return 0
    from torchedge.profiling.campaigns.running import Campaign, run_campaign
    from torchedge.profiling.campaigns.transports import open_transport

    device = _device_name(arguments)
    folder = arguments.out or _own_folder(device)
    over = arguments.over or "local"
    again = {"failed": arguments.retry_failed, "unsteady": arguments.retry_unsteady}
    retry = tuple(what for what, wanted in again.items() if wanted)
    transport = open_transport(over, arguments.python, folder / "device")
    processor = arguments.processor or ""
    campaign = Campaign(folder, plan, device, over, processor, retry, arguments.convolutions)
    with _Bar() as bar:
        try:
            summary = run_campaign(campaign, None if arguments.tables_only else transport, bar)
        except KeyboardInterrupt:
            bar.note("what was measured is kept: the same command goes on from here")
            raise
    if arguments.json:
        document = {
            name: getattr(summary, name)
            for name in ("points", "measured", "out_of_memory", "unsteady", "left")
        }
        failed, skipped = dict(summary.failed), dict(summary.skipped)
        print_json(
            {"device": device, "folder": str(folder), **document, "failed": failed, "skipped": skipped}
        )
    else:
        _print_summary(summary, device, folder)
    return 0


def _device_name(arguments: argparse.Namespace) -> str:
    from torchedge.devices.parsing import NAME as FORM

    name = arguments.device_name or arguments.device
    if arguments.device and arguments.device_name not in (None, arguments.device):
        raise InputError(f"two names are given, {arguments.device} and {arguments.device_name}; expected one")
    if not name:
        raise InputError("the device has no name; expected --device-name, such as --device-name my-orin")
    if not FORM.fullmatch(name):
        raise InputError(f"--device-name is {name[:60]!r}; expected lower case letters, digits, '-' and '.'")
    return str(name)


def _own_folder(device: str) -> Path:
    from torchedge.storage import user_folder

    return user_folder() / "campaigns" / device


def _print_summary(summary: Any, device: str, folder: Path) -> None:  # noqa: ANN401 - Summary, loaded later
    environment = summary.environment or {}
    if environment:
        facts = [str(environment.get("device_name") or "unknown"), f"torch {environment.get('torch')}"]
        meter = environment.get("memory_meter")
        print_wrapped(f"{device}: {', '.join(facts)}; memory by {meter}")
    print_wrapped(
        f"{summary.points} points: {summary.measured} measured, {summary.out_of_memory} out of memory, "
        f"{len(summary.failed)} failed, {summary.left} left"
    )
    for what, reasons in (("failed", summary.failed), ("skipped", summary.skipped)):
        for reason, count in Counter(reasons.values()).most_common(_SHOWN):
            name = next(key for key, value in reasons.items() if value == reason)
            more = f" and {count - 1} more" if count > 1 else ""
            print_wrapped(f"{what}: {name}{more}: {reason}", rest="  ")
    if summary.failed:
        print_wrapped("measure what failed again with --retry-failed")
    if summary.unsteady:
        print_wrapped(
            f"unsteady: the steps of {summary.unsteady} points differ by over half, as on a machine that "
            "does other work or lowers its clock; measure them again with --retry-unsteady"
        )
    print_wrapped(f"tables in {folder}")
    if summary.measured and not summary.left:
        from torchedge.storage import user_folder

        described = folder if (folder / "device.toml").exists() else device
        target = user_folder() / "profiles" / device
        with contextlib.suppress(OSError):  # fit wants the folder around its profile to be there
            target.parent.mkdir(parents=True, exist_ok=True)
        print(f"next: torchedge fit {folder} --device {described} --out {target}")


class _Bar:
    """Shows how a campaign goes on: one progress bar after another."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kind, error, trace)

    def _end(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, error, trace)
            self._progress = None

    def _begin(self, label: str, total: int, done: int) -> None:
        self._end()
        self._progress = Progress(total, label, done=done, remaining=True)
        self._progress.__enter__()

    def preparing(self, total: int, done: int) -> None:
        """Show the networks that are written."""
        self._begin("preparing networks", total, done)

    def measuring(self, total: int, done: int) -> None:
        """Show the points that are measured."""
        self._begin("measuring", total, done)

    def doing(self, what: str) -> None:
        """Show what is under way."""
        if self._progress is not None:
            self._progress.doing(what)

    def step(self) -> None:
        """Count."""
        if self._progress is not None:
            self._progress.step()

    def note(self, text: str) -> None:
        """Write a line of its own."""
        warn(text)
