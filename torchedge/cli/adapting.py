"""`torchedge fit --base`: another device's profile adapted to few measurements."""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchedge.cli.console import Progress, number, print_json, print_table, print_wrapped, warn
from torchedge.errors import InputError

if TYPE_CHECKING:
    from torchedge.graphs import Mode
    from torchedge.profiling.transfer import Transfer

__all__ = ["add_transfer", "fit_from_base", "is_transfer"]

_LETTERS = {("train", "gamma"): "Γ", ("train", "phi"): "Φ", ("infer", "gamma"): "γ", ("infer", "phi"): "φ"}


def add_transfer(parser: argparse.ArgumentParser) -> None:
    """Add the options of a transfer."""
    transfer = parser.add_argument_group("few measurements")
    transfer.add_argument(
        "--base", metavar="DEVICE", help="adapt this device's profile in place of fitting from nothing"
    )
    transfer.add_argument(
        "--points", metavar="N", help="rows of each mode to adapt to, chosen well, or all (default)"
    )
    transfer.add_argument("--seed", metavar="N", help="of the choice of points (default 0)")


def is_transfer(arguments: argparse.Namespace) -> bool:
    """Whether a base is given; refuses options that only make sense with one."""
    if arguments.base is not None:
        return True
    for name in ("points", "seed"):
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name} is given without --base; add --base DEVICE, or leave it out")
    return False


def fit_from_base(arguments: argparse.Namespace) -> int:
    """Read, choose points, adapt, score, write."""
    from torchedge.devices.device import thaw
    from torchedge.prediction.profiles import MODE_TABLES
    from torchedge.profiling.datasets import is_dataset, read_dataset
    from torchedge.profiling.profile_folders import check_target, one_thread, write_profile
    from torchedge.profiling.samples import PROTOCOL, measured_device, read_samples
    from torchedge.profiling.transfer import FEWEST, adapt_mode, base_of, describe_transfer
    from torchedge.profiling.workspace_fitting import fit_device_workspaces

    points, seed = _points(arguments.points), _seed(arguments.seed)
    if points is not None and points < FEWEST:
        raise InputError(f"--points is {points}, expected at least {FEWEST}, or all")
    check_target(arguments.out, force=arguments.force)
    base_of(arguments.base, "train")
    transfers: list[Transfer] = []
    with (
        one_thread(),
        tempfile.TemporaryDirectory() as aside,
        Progress(6, "adapting") as progress,
    ):
        progress.doing("reading")
        if not is_dataset(arguments.dataset):
            read_dataset(arguments.dataset)  # raises: says what it expects
        device = measured_device(arguments.dataset, arguments.device, Path(aside))
        workspaces = fit_device_workspaces(arguments.dataset)
        settings = PROTOCOL if workspaces is None else replace(PROTOCOL, workspaces=workspaces.model)
        measured = read_samples(arguments.dataset, device, settings)
        progress.step()
        fits = {}
        for mode, samples in measured.items():
            base = base_of(arguments.base, mode)
            if base is None:
                warn(f"{arguments.base} has no models of mode {mode}; these measurements are not used")
                continue

            def tell(what: str, mode: Mode = mode) -> None:
                progress.step()
                progress.doing(f"{what} ({MODE_TABLES[mode]})")

            transfer = adapt_mode(base, samples, mode, points, seed, tell)
            used = int(transfer.used.sum())
            if points is not None and used < points:
                warn(f"{points} points of mode {mode} are asked for, {used} are there; all are used")
            fits[mode] = describe_transfer(arguments.out, transfer, points, seed)
            transfers.append(transfer)
        if not fits:
            raise InputError(
                f"{arguments.base} has models of none of the modes measured in {arguments.dataset}; "
                "choose another --base, or fit without it"
            )
        written = write_profile(arguments.out, device, fits, workspaces)
    if arguments.json:
        tables: dict[str, Any] = {MODE_TABLES[m]: thaw(written.profile[MODE_TABLES[m]]) for m in fits}
        print_json({"device": written.name, "folder": str(written.folder), **tables})
        return 0
    _print(written.name, transfers, arguments)
    return 0


def _points(text: str | None) -> int | None:
    if text is None or text == "all":
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise InputError(f"--points is {text!r}, expected a whole number such as 30, or all")
    return int(text)


def _seed(text: str | None) -> int:
    if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):
        raise InputError(f"--seed is {text!r}, expected a whole number from 0 on")
    return int(text or 0)


def _print(name: str, transfers: list[Transfer], arguments: argparse.Namespace) -> None:
    rows = []
    for transfer in transfers:
        networks = len(set(transfer.samples.network[transfer.used].tolist()))
        print_wrapped(
            f"{name}: {transfer.base.name} adapted to {int(transfer.used.sum())} points ({transfer.mode}) "
            f"of {networks} networks from {arguments.dataset.resolve().name}"
        )
        for target, score in transfer.scores.items():
            letter = _LETTERS[transfer.mode, target]
            rows.append([letter, number(score.mean), number(score.mean_coverage)])
    if rows:
        print_table(["on the other points", "error, %", "inside 90 % intervals, %"], rows)
    print_wrapped(f"written to {arguments.out}; predict with --device {arguments.out}")
