"""`torchedge fit`: a device's profile from a folder of measurements."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.adapting import add_transfer, fit_from_base, is_transfer
from torchedge.cli.arguments import add_json
from torchedge.cli.console import Progress, number, print_json, print_table, print_wrapped, warn

if TYPE_CHECKING:
    from torchedge.devices import Device

NAME = "fit"
SUMMARY = "fit a device's profile to a folder of measurements"
DESCRIPTION = """\
Fit memory and latency models to every row of a dataset and write them, with
provenance, digests and accuracy, into a profile folder that `--device FOLDER`
accepts. DATASET is the folder of a campaign (`torchedge profile --plan`), or
one with measurements.csv (network, pruning_level, batch_size, memory_fits,
gamma_mb, allocated_mb, reserved_mb, latency_fits, phi_ms) and
topologies.jsonl. If DATASET is a file written by load_probe.py, fit the
latency-under-load model that streaming plans with. The same data gives the
same bytes except for the date (SOURCE_DATE_EPOCH fixes it). Needs
torchedge[fit]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument(
        "--out", "-o", type=Path, required=True, metavar="FOLDER", help="profile folder to write"
    )
    parser.add_argument(
        "--device",
        "-d",
        help="measured device, whose device.toml is copied (default: the dataset folder's name)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite a profile that is there")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the accuracy tables (minutes)")
    add_transfer(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read, fit, score, write."""
    if is_transfer(arguments):
        return fit_from_base(arguments)
    if arguments.dataset.is_file():
        from torchedge.cli.load_fitting import fit_load_table

        return fit_load_table(arguments)
    from torchedge.profiling.datasets import read_dataset
    from torchedge.profiling.profile_folders import check_target
    from torchedge.profiling.samples import device_of

    check_target(arguments.out, force=arguments.force)
    if not arguments.dataset.is_dir():
        read_dataset(arguments.dataset)  # says what it expects
    device = device_of(arguments.dataset, arguments.device)
    written, fitted, problems = _fitted(arguments, device)
    for problem in problems:
        warn(problem)
    from torchedge.devices.device import thaw

    profile: Any = {name: thaw(written.profile[name]) for name in fitted}
    if arguments.json:
        print_json({"device": device.name, "folder": str(written.folder), **profile})
        return 0
    for name, described in profile.items():
        _print_mode(device.name, name, described)
    print_wrapped(f"written to {arguments.out}; predict with --device {arguments.out}")
    return 0


def _fitted(arguments: argparse.Namespace, device: Device) -> tuple[Device, list[str], list[str]]:
    """Fit every mode of a dataset and write the profile; return it, its modes, what could not be scored."""
    from torchedge.graphs import Mode
    from torchedge.prediction.profiles import MODE_TABLES
    from torchedge.profiling import profile_folders
    from torchedge.profiling.datasets import read_dataset
    from torchedge.profiling.samples import PROTOCOL, prepare
    from torchedge.profiling.workspace_fitting import fit_device_workspaces

    problems: list[str] = []
    with profile_folders.one_thread(), Progress(2, "fitting") as progress:
        progress.doing("reading")
        dataset = read_dataset(arguments.dataset)
        progress.step()
        progress.doing("workspaces")
        workspaces = fit_device_workspaces(arguments.dataset)
        settings = PROTOCOL if workspaces is None else replace(PROTOCOL, workspaces=workspaces.model)
        progress.step()
        steps = 3 if arguments.no_accuracy else 3 + profile_folders.SCORES
        progress.more(steps * max(len(dataset.modes), 1))

        def tell(what: str) -> None:
            progress.step()
            progress.doing(what)

        fits: dict[Mode, profile_folders.ModeFit] = {}
        for mode in dataset.modes or ("train",):
            progress.doing("simulating")
            samples = prepare(dataset, device, settings, mode)
            models = profile_folders.fit_models(samples, tell)
            progress.step()
            accuracy = None
            if not arguments.no_accuracy:
                progress.doing("accuracy")
                accuracy = profile_folders.score_all(samples, progress.step)
                problems += accuracy.problems
            fits[mode] = profile_folders.describe_fit(arguments.out, samples, models, accuracy)
        written = profile_folders.write_profile(arguments.out, device, fits, workspaces)
        return written, [MODE_TABLES[mode] for mode in fits], problems


def _print_mode(device: str, name: str, described: Any) -> None:  # noqa: ANN401 - a parsed document
    rows = f"{described['memory_rows']} memory and {described['latency_rows']} latency measurements"
    networks = len(described["networks"])
    print_wrapped(f"{device}, {name}: fitted on {rows} of {networks} networks from {described['dataset']}")
    head = ["mean absolute percentage error", "error, %", "coverage of 90 % intervals, %"]
    table = [
        [f"{target}, {protocol}", number(score["mean"]), number(score.get("coverage", float("nan")))]
        for target, by_protocol in described.get("accuracy", {}).items()
        for protocol, score in by_protocol.items()
    ]
    if table:
        print_table(head, table)
