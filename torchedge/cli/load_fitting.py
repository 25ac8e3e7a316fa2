"""What `torchedge fit` does with rows of `hooks/load_probe.py`: fits latency under load, and scores it."""

from __future__ import annotations

import argparse
from typing import Any

from torchedge.cli.console import Progress, number, print_json, print_table, print_wrapped


def fit_load_table(arguments: argparse.Namespace) -> int:
    """Read, fit, score, write; `arguments` as of `torchedge fit`."""
    from torchedge.devices.device import thaw
    from torchedge.profiling.load_fitting import fit_device_loads
    from torchedge.profiling.profile_folders import check_target, write_profile
    from torchedge.profiling.samples import device_of
    from torchedge.streaming.capacities import TABLE
    from torchedge.streaming.rates import THRESHOLDS

    check_target(arguments.out, force=arguments.force)
    device = device_of(arguments.dataset.absolute().parent, arguments.device)
    with Progress(len(THRESHOLDS), "fitting loads") as progress:
        fit = fit_device_loads(arguments.dataset, device, arguments.out, progress.step)
        written = write_profile(arguments.out, device, {}, loading=fit)
    table: Any = thaw(written.profile[TABLE])
    if arguments.json:
        print_json({"device": device.name, "folder": str(written.folder), TABLE: table})
        return 0
    print_wrapped(
        f"{device.name}: latency under load fitted on {table['points'] - table['disturbed']} points of "
        f"{table['rows']} kernels from {table['dataset']}; {table['disturbed']} disturbed points left out"
    )
    _print_scores(table["accuracy"])
    for name, figure in fit.figures.items():
        print_wrapped(f"{name}: {figure['value']} {figure['unit']}")
    print_wrapped(f"written to {arguments.out}; plan with --device {arguments.out}")
    return 0


def _print_scores(accuracy: dict[str, dict[str, float]]) -> None:
    """Print the errors on sizes left out, and how far kernels slow at the capacities given."""
    head = ["sizes left out", "sizes", "mean error, %", "median, %"]
    print_table(
        head, [[n, str(s["sizes"]), number(s["mean"]), number(s["median"])] for n, s in accuracy.items()]
    )
    head = ["slowed at the capacity, %", "median", "90th percentile", "by the threshold", "90th percentile"]
    keys = ("at_capacity", "at_capacity_p90", "at_threshold", "at_threshold_p90")
    print_table(head, [[n, *(number(s[key]) for key in keys)] for n, s in accuracy.items() if keys[0] in s])
