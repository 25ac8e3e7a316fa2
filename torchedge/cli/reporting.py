"""`torchedge report`: predicted against measured, as tables, pictures or one HTML file."""

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
    from torchedge.prediction.step_models import Mode
    from torchedge.profiling.reports import Report

NAME = "report"
SUMMARY = "predicted against measured, as tables, pictures or one HTML file"
DESCRIPTION = """\
Compare predictions with measurements: errors by network and pruning level,
memory and latency against batch size, intervals, the rows that err most.

SOURCE is a folder of measurements (of `torchedge profile`, or a public
table), compared with the profile of its device; or a device's name or
profile folder, compared with the measurements it ships (profile/campaign).
Where the profile was fitted to these very rows, networks are left out in
turn and predicted by models of the others (--protocol profile shows the
profile's own errors all the same)."""

_SUFFIXES = (".html", ".htm", ".png")
CAMPAIGN = "campaign"
"""Folder of a profile that holds the measurements it was fitted to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="dataset folder, profile folder or device")
    parser.add_argument("--device", "-d", help="profile to compare with (default: the dataset's device)")
    parser.add_argument(
        "--protocol",
        choices=("profile", "own", "left-out"),
        help="who predicts: the profile, or models of a network's other pruning levels, or of other networks",
    )
    parser.add_argument(
        "--intervals", action="store_true", help="with own or left-out: fit intervals too (ten times slower)"
    )
    parser.add_argument(
        "--out",
        "-o",
        type=Path,
        metavar="FILE",
        help="FILE.html (one file), FILE.png (an overview) or a folder (a PNG each)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare, draw, print."""
    if arguments.out is not None:
        _check_out(arguments.out)
    from torchedge.profiling.measured import holds_measurements

    source = Path(arguments.source)
    report: Report | None
    with tempfile.TemporaryDirectory() as aside, Progress(3, "reporting") as progress:
        if holds_measurements(source):
            device, report = _compare(source, arguments, Path(aside), progress)
        else:
            device, report = _of_profile(arguments, Path(aside), progress)
        written = [] if arguments.out is None else _write(arguments.out, device, report, progress)
    if arguments.json:
        print_json(_document(device, report, written))
    else:
        _print(device, report, written)
    return 0


# what is compared -------------------------------------------------------------------------------------------


def _of_profile(
    arguments: argparse.Namespace, aside: Path, progress: Progress
) -> tuple[Device, Report | None]:
    """Return a device and, where its profile ships measurements, the comparison with them."""
    from torchedge.devices import find_device
    from torchedge.errors import DeviceError
    from torchedge.profiling.measured import holds_measurements

    source = Path(arguments.source)
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
    if holds_measurements(shipped):
        report = _compare(shipped, arguments, aside, progress, device)[1]
        return device, replace(report, dataset=f"{device.name}/{CAMPAIGN}")
    if arguments.protocol is not None or arguments.intervals:
        raise InputError(
            f"{device.name} ships no measurements to compare with; give the folder of measurements instead"
        )
    return device, None


def _compare(
    folder: Path,
    arguments: argparse.Namespace,
    aside: Path,
    progress: Progress,
    device: Device | None = None,
) -> tuple[Device, Report]:
    from torchedge.prediction.profiles import load_models
    from torchedge.profiling.accuracy import splits
    from torchedge.profiling.measured import measured_device, read_measured
    from torchedge.profiling.profile_folders import one_thread
    from torchedge.profiling.reports import compare_device, compare_unseen

    found = device if device is not None else measured_device(folder, arguments.device, aside)
    modes: tuple[Mode, ...] = ("train", "infer")
    for mode in modes:
        load_models(found, mode)  # a damaged profile is told now, not after minutes
    with one_thread():
        progress.doing("reading")
        measured = read_measured(folder, found)
        progress.step()
        protocol = arguments.protocol
        if protocol in (None, "profile"):
            progress.doing("predicting")
            report = compare_device(measured, found)
            several = any(len(samples.networks) > 1 for samples, _ in measured.values())
            protocol = "left-out" if protocol is None and report.seen and several else "profile"
        if protocol != "profile":
            progress.doing("fitting without the rows that are predicted")
            progress.more(sum(1 for samples, _ in measured.values() for _ in splits(samples, protocol)) * 2)
            report = compare_unseen(
                measured, found, protocol, intervals=arguments.intervals, tell=progress.step
            )
        progress.step()
    if not report.compared:
        raise InputError(f"{folder}: no run passed, so that there is nothing to compare; measure again")
    return found, report


# files ------------------------------------------------------------------------------------------------------


def _check_out(out: Path) -> None:
    """Refuse what could not be written before the work is done."""
    from torchedge.profiling.report_figures import require_matplotlib

    suffix = out.suffix.lower()
    if suffix and suffix not in _SUFFIXES and not out.is_dir():
        raise InputError(f"--out is {out}; expected a file that ends in {', '.join(_SUFFIXES)}, or a folder")
    if suffix in _SUFFIXES and out.is_dir():
        raise InputError(
            f"--out is {out}, which is a folder; expected a file of that ending, or another name"
        )
    if not suffix and out.exists() and not out.is_dir():
        raise InputError(f"--out is {out}, which is a file; expected a folder, or a file that ends in .html")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out is {out}; expected it in a folder that exists: make {out.parent} first")
    require_matplotlib()


def _write(out: Path, device: Device, report: Report | None, progress: Progress) -> list[Path]:
    """Write the report in the form its name asks for; return the files."""
    from torchedge.profiling.report_figures import overview, pictures, png_bytes
    from torchedge.profiling.report_pages import page

    suffix = out.suffix.lower()
    if suffix != "" and suffix != ".png" and not out.is_dir():
        return [_save(out, page(report, device, progress.doing).encode("utf-8"))]
    if report is None:
        raise InputError(
            f"{device.name} ships no measurements to draw; write FILE.html, or give a folder of measurements"
        )
    if suffix == ".png" and not out.is_dir():
        progress.doing("drawing")
        return [_save(out, png_bytes(overview(report)))]
    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made ({error.strerror}); choose another --out") from error
    written = []
    for picture in pictures(report):
        progress.doing(picture.name)
        written.append(_save(out / f"{picture.name}.png", png_bytes(picture)))
    return written


def _save(path: Path, data: bytes) -> Path:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error
    return path


# output -----------------------------------------------------------------------------------------------------


def _document(device: Device, report: Report | None, written: list[Path]) -> dict[str, Any]:
    from torchedge.cli.listing import device_document
    from torchedge.profiling.reports import figures_document

    document: dict[str, Any] = {"device": device.name, "files": [str(path) for path in written]}
    if report is None:
        return {**document, "dataset": None, "profile": device_document(device)["profile"]}
    return {
        **document,
        "dataset": report.dataset,
        "dataset_sha256": report.digest,
        "method": report.method,
        "fitted_to_these_rows": report.seen,
        "notes": list(report.notes),
        "figures": figures_document(report),
    }


def _print(device: Device, report: Report | None, written: list[Path]) -> None:
    if report is None:
        from torchedge.cli.listing import print_device

        print_device(device)
        print()
        print_wrapped(f"{device.name} ships no measurements to compare its predictions with")
    else:
        _print_comparison(report)
    for path in written:
        print_wrapped(f"written: {path}")


def _print_comparison(report: Report) -> None:
    from torchedge.profiling.reports import summarise

    print_wrapped(f"{report.device.name}: {report.dataset}, compared with {report.method}")
    head = ["error, %", "rows", "networks", "mean", "median", "90 % within", "largest", "inside"]
    rows = []
    for compared in report.compared:
        found = summarise(compared)
        figures = (found.mean, found.median, found.tenth, found.largest, found.coverage)
        counts = [f"{found.rows:,}", str(len(found.networks))]
        rows.append([f"{compared.symbol}, {compared.unit}", *counts, *(number(f) for f in figures)])
    print_table(head, rows)
    print_wrapped("mean: over networks; inside: share of rows inside their 90 % intervals, %")
    for note in report.notes:
        print_wrapped(note, first="note: ", rest="  ")
