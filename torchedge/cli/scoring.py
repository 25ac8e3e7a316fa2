"""`torchedge accuracy`: predictions beside the measurements of a dataset."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli.console import Progress, answer, print_notes, print_table, print_wrapped
from torchedge.cli.options import DEVICE, PICTURE, Choice, command
from torchedge.errors import InputError
from torchedge.texts import number

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.profiling.accuracy import Report

CAMPAIGN = "campaign"
"""Folder of a profile that holds the measurements it was fitted to."""


@command(
    "accuracy",
    examples=[
        "torchedge accuracy measured/my-orin",
        "torchedge accuracy my-orin --device ./profile --out overview.png",
        "torchedge accuracy nvidia-h200 --protocol profile --json",
    ],
)
@click.argument("source", type=DEVICE, metavar="SOURCE")
@click.option("--device", "-d", type=DEVICE, help="Profile to compare with. [default: the dataset's device]")
@click.option(
    "--protocol",
    type=Choice(["profile", "own", "basis", "left-out", "levels"]),
    help="Models that predict: the profile's, or models of a network's other pruning levels, of three basic "
    "networks, of other networks, of all networks at other levels.",
)
@click.option("--intervals", is_flag=True, help="Also fit intervals, ten times slower; not with profile.")
@click.option("--out", "-o", type=PICTURE, metavar="FILE", help="Draw an overview (.png, .svg, .pdf).")
def accuracy(
    source: str, device: str | None, protocol: str | None, intervals: bool, out: Path | None
) -> None:
    """Compare predictions with the measurements of a dataset.

    Errors by network and pruning level, share of rows inside their 90 % intervals, rows with the largest
    errors (--json). SOURCE is a folder of measurements (`torchedge campaign run`), compared with the profile
    of its device; or a device's name or profile folder, compared with the measurements it ships.

    If the profile was fitted to these rows, networks are left out in turn and predicted by models of the
    others; --protocol profile prints the profile's own errors.
    """
    from torchedge.profiling.accuracy import comparison_document

    with tempfile.TemporaryDirectory() as scratch, Progress(3, "comparing") as progress:
        compared, report = _compare_source(
            source, device, Path(scratch), progress, protocol=protocol, intervals=intervals
        )
        if out is not None:
            from torchedge.profiling.plots import draw_overview

            draw_overview(report, out)
    document: dict[str, Any] = {
        "device": report.device.name,
        "dataset": report.dataset,
        "dataset_sha256": report.digest,
        "method": report.method,
        "fitted_to_these_rows": report.seen,
        "notes": list(report.notes),
        "figures": [comparison_document(comparison) for comparison in report.comparisons],
    }
    answer(document, lambda: _print(compared, report, document["figures"]), written=out)


def _compare_source(
    text: str,
    name: str | None,
    scratch: Path,
    progress: Progress,
    **how: Any,  # noqa: ANN401 - see _compare
) -> tuple[Device, Report]:
    """Return the device and its comparison with measurements."""
    from torchedge.devices import find_device
    from torchedge.errors import DeviceError
    from torchedge.profiling.datasets import is_dataset
    from torchedge.profiling.samples import measured_device

    source = Path(text)
    if is_dataset(source):
        device = measured_device(source, name, scratch)
        return device, _compare(source, device, progress, **how)
    if source.is_dir() and not (source / "device.toml").is_file():
        raise InputError(
            f"{source}: holds neither measurements.csv nor device.toml, expected a folder of measurements or "
            "a profile; `torchedge campaign run --help` says how to measure"
        )
    try:
        device = find_device(source if source.is_dir() else text)
    except DeviceError as error:
        raise InputError(f"{text[:80]} is neither a folder of measurements nor a device ({error})") from error
    if name is not None:
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
    report = _compare(shipped, device, progress, **how)
    return device, replace(report, dataset=f"{device.name}/{CAMPAIGN}")


def _compare(
    folder: Path, device: Device, progress: Progress, *, protocol: str | None, intervals: bool
) -> Report:
    """Return the comparison; protocol None: chosen by the data."""
    from torchedge.prediction.profiles import load_models
    from torchedge.profiling.accuracy import compare_profile, compare_unseen, splits
    from torchedge.profiling.latency_fitting import one_thread
    from torchedge.profiling.samples import read_samples

    for mode in ("train", "infer"):
        load_models(device, mode)  # a damaged profile fails before the work
    with one_thread():
        progress.begin("reading")
        measured = read_samples(folder, device)
        if protocol in (None, "profile"):
            progress.begin("predicting")
            report = compare_profile(measured, device)
            several = any(len(samples.networks) > 1 for samples in measured.values())
            protocol = "left-out" if protocol is None and report.seen and several else "profile"
        if protocol != "profile":
            progress.begin("fitting without the rows that are predicted")
            progress.more(sum(1 for samples in measured.values() for _ in splits(samples, protocol)) * 2)
            report = compare_unseen(measured, device, protocol, intervals=intervals, step=progress.step)
    if not report.comparisons:
        raise InputError(f"{folder}: no run passed, so that there is nothing to compare; measure again")
    return report


def _print(device: Device, report: Report, figures: list[dict[str, Any]]) -> None:
    print_wrapped(f"{device.name}: {report.dataset}, compared with {report.method}")
    head = ["error, %", "rows", "networks", "mean", "median", "90 % within", "largest", "inside"]
    rows = []
    for figure in figures:
        error = figure["error"]
        cells = (error["mean_over_networks"], error["median"], error["90th_percentile"], error["largest"])
        counts = [f"{figure['rows']:,}", str(len(figure["networks"]))]
        numbers = [number(cell) for cell in (*cells, figure["coverage"])]
        rows.append([f"{figure['symbol']}, {figure['unit']}", *counts, *numbers])
    print_table(head, rows)
    print_wrapped("mean: over networks; inside: share of rows inside their 90 % intervals, %")
    print_notes(report.notes)
