"""`torchedge fit`: a device's profile from a folder of measurements."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torchedge.cli.adapting import add_transfer, fit_from_base, is_transfer
from torchedge.cli.arguments import add_json
from torchedge.cli.output import number, print_json, print_table, print_wrapped, warn
from torchedge.cli.progress import Progress

NAME = "fit"
SUMMARY = "fit a device's profile to a folder of measurements"
DESCRIPTION = """\
Fit memory and latency models to every row of a dataset and write them, with
provenance, digests and accuracy, into a profile folder that `--device FOLDER`
accepts. DATASET is a folder with measurements.csv (network, pruning_level,
batch_size, memory_fits, gamma_mb, allocated_mb, reserved_mb, latency_fits,
phi_ms) and topologies.jsonl. The same data gives the same bytes, but for the
date (SOURCE_DATE_EPOCH fixes it). Needs torchedge[fit]."""


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
    from torchedge.profiling.profile_folders import check_target, device_of
    from torchedge.profiling.public_data import find_public_table

    if find_public_table(arguments.dataset) is not None:
        from torchedge.cli.public_fitting import fit_public_table

        return fit_public_table(arguments)

    check_target(arguments.out, force=arguments.force)
    if not arguments.dataset.is_dir():
        from torchedge.profiling.datasets import read_dataset

        read_dataset(arguments.dataset)  # says what it expects
    device = device_of(arguments.dataset, arguments.device)
    from torchedge.profiling import profile_folders
    from torchedge.profiling.datasets import read_dataset
    from torchedge.profiling.samples import prepare

    steps = 4 if arguments.no_accuracy else 11
    with profile_folders.one_thread(), Progress(steps, "fitting") as progress:
        progress.doing("reading")
        dataset = read_dataset(arguments.dataset)
        progress.step()
        progress.doing("simulating")
        samples = prepare(dataset, device)

        def tell(what: str) -> None:
            progress.step()
            progress.doing(what)

        models = profile_folders.fit_models(samples, tell)
        progress.step()
        accuracy = None
        if not arguments.no_accuracy:
            progress.doing("accuracy")
            accuracy = profile_folders.score_all(samples, progress.step)
        fit = profile_folders.describe_fit(arguments.out, device, dataset, samples, models, accuracy)
        written = profile_folders.write_profile(arguments.out, device, {"train": fit})
    for problem in accuracy.problems if accuracy is not None else ():
        warn(problem)
    from torchedge.devices.device import thaw

    training: Any = thaw(written.profile["training"])
    if arguments.json:
        print_json({"device": device.name, "folder": str(written.folder), "training": training})
        return 0
    rows = f"{training['memory_rows']} memory and {training['latency_rows']} latency measurements"
    print_wrapped(
        f"{device.name}: fitted on {rows} of {len(training['networks'])} networks from {dataset.name}"
    )
    head = ["mean absolute percentage error", "error, %", "coverage of 90 % intervals, %"]
    table = [
        [f"{target}, {protocol}", number(score["mean"]), number(score.get("coverage", float("nan")))]
        for target, by_protocol in training.get("accuracy", {}).items()
        for protocol, score in by_protocol.items()
    ]
    if table:
        print_table(head, table)
    print_wrapped(f"written to {arguments.out}; predict with --device {arguments.out}")
    return 0
