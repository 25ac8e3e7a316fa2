"""`torchedge accuracy`: predictions beside the measurements of a dataset."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import add_json
from torchedge.cli.console import Progress, number, print_json, print_table, print_wrapped
from torchedge.errors import InputError

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.profiling.accuracy import Report

NAME = "accuracy"
SUMMARY = "predictions beside the measurements of a dataset"
DESCRIPTION = """\
Compare predictions with measurements: errors by network and pruning level,
share of rows inside their 90 % intervals, the rows with the largest errors.

SOURCE is a folder of measurements (of `torchedge profile`), compared with the
profile of its device; or a device's name or profile folder, compared with the
measurements it ships (profile/campaign). If the profile was fitted to these
very rows, networks are left out in turn and predicted by models of the others
(--protocol profile prints the profile's own errors all the same)."""

CAMPAIGN = "campaign"
"""Folder of a profile that holds the measurements it was fitted to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="dataset folder, profile folder or device")
    parser.add_argument("--device", "-d", help="profile to compare with (default: the dataset's device)")
    parser.add_argument(
        "--protocol",
        choices=("profile", "own", "basis", "left-out"),
        help="predict with the profile, or with models of a network's other pruning levels, of three basic "
        "networks, or of other networks",
    )
    parser.add_argument(
        "--intervals",
        action="store_true",
        help="with own, basis or left-out: fit intervals too (ten times slower)",
    )
    parser.add_argument("--out", "-o", type=Path, metavar="FILE", help="draw FILE.png, FILE.svg or FILE.pdf")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare, draw, print."""
    if arguments.out is not None:
        from torchedge.profiling.plots import check_picture

        check_picture(arguments.out)
    with tempfile.TemporaryDirectory() as scratch, Progress(3, "comparing") as progress:
        device, report = compare_source(arguments, Path(scratch), progress)
        if arguments.out is not None:
            from torchedge.profiling.plots import draw_overview

            draw_overview(report, arguments.out)
    if arguments.json:
        print_json(_document(report))
    else:
        _print(device, report)
        if arguments.out is not None:
            print_wrapped(f"written to {arguments.out}")
    return 0


def compare_source(arguments: argparse.Namespace, scratch: Path, progress: Progress) -> tuple[Device, Report]:
    """Return the device and the comparison that the arguments name."""
    from torchedge.devices import find_device
    from torchedge.errors import DeviceError
    from torchedge.profiling.datasets import is_dataset
    from torchedge.profiling.samples import measured_device

    source = Path(arguments.source)
    if is_dataset(source):
        device = measured_device(source, arguments.device, scratch)
        return device, _compare(source, device, arguments, progress)
    if source.is_dir() and not (source / "device.toml").is_file():
        raise InputError(
            f"{source}: holds neither measurements.csv nor device.toml, expected a folder of measurements or "
            "a profile; `torchedge profile --help` says how to measure"
        )
    try:
        device = find_device(source if source.is_dir() else arguments.source)
    except DeviceError as error:
        raise InputError(
            f"{arguments.source[:80]} is neither a folder of measurements nor a device ({error})"
        ) from error
    if arguments.device is not None:
        raise InputError(
            f"--device is given and {device.name} is a device already; give a folder of measurements, or one "
            "device"
        )
    shipped = device.folder / CAMPAIGN
    if not is_dataset(shipped):
        raise InputError(
            f"{device.name} ships no measurements to compare with; give the folder of measurements instead "
            f"(`torchedge devices {device.name}` prints the profile's accuracy)"
        )
    report = _compare(shipped, device, arguments, progress)
    return device, replace(report, dataset=f"{device.name}/{CAMPAIGN}")


def _compare(folder: Path, device: Device, arguments: argparse.Namespace, progress: Progress) -> Report:
    from torchedge.prediction.profiles import load_models
    from torchedge.profiling.accuracy import compare_profile, compare_unseen, splits
    from torchedge.profiling.profile_folders import one_thread
    from torchedge.profiling.samples import read_samples

    for mode in ("train", "infer"):
        load_models(device, mode)  # type: ignore[arg-type] # a damaged profile fails before the work
    with one_thread():
        progress.doing("reading")
        measured = read_samples(folder, device)
        progress.step()
        protocol = arguments.protocol
        if protocol in (None, "profile"):
            progress.doing("predicting")
            report = compare_profile(measured, device)
            several = any(len(samples.networks) > 1 for samples in measured.values())
            protocol = "left-out" if protocol is None and report.seen and several else "profile"
        if protocol != "profile":
            progress.doing("fitting without the rows that are predicted")
            progress.more(sum(1 for samples in measured.values() for _ in splits(samples, protocol)) * 2)
            report = compare_unseen(
                measured, device, protocol, intervals=arguments.intervals, step=progress.step
            )
        progress.step()
    if not report.comparisons:
        raise InputError(f"{folder}: no run passed, so that there is nothing to compare; measure again")
    return report


def _document(report: Report) -> dict[str, Any]:
    from torchedge.profiling.accuracy import report_document

    return {
        "device": report.device.name,
        "dataset": report.dataset,
        "dataset_sha256": report.digest,
        "method": report.method,
        "fitted_to_these_rows": report.seen,
        "notes": list(report.notes),
        "figures": report_document(report),
    }


def _print(device: Device, report: Report) -> None:
    from torchedge.profiling.accuracy import report_document

    print_wrapped(f"{device.name}: {report.dataset}, compared with {report.method}")
    head = ["error, %", "rows", "networks", "mean", "median", "90 % within", "largest", "inside"]
    rows = []
    for figure in report_document(report):
        error = figure["error"]
        cells = (error["mean_over_networks"], error["median"], error["90th_percentile"], error["largest"])
        counts = [f"{figure['rows']:,}", str(len(figure["networks"]))]
        numbers = [number(cell) for cell in (*cells, figure["coverage"])]
        rows.append([f"{figure['symbol']}, {figure['unit']}", *counts, *numbers])
    print_table(head, rows)
    print_wrapped("mean: over networks; inside: share of rows inside their 90 % intervals, %")
    for note in report.notes:
        print_wrapped(note, first="note: ", rest="  ")
