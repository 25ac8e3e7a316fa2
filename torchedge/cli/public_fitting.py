"""What `torchedge fit` does with the folder of a public table: fits a profile of one figure and scores it."""

from __future__ import annotations

import argparse
from typing import Any

from torchedge.cli.console import Progress, number, print_json, print_table, print_wrapped

MOST_GROUPS = 100
"""More groups than this are left out in ten parts, not one at a time."""


def fit_public_table(arguments: argparse.Namespace) -> int:
    """Read, fit, score, write; `arguments` as of `torchedge fit`."""
    from torchedge.devices.device import thaw
    from torchedge.prediction.step_models import MODE_TABLES
    from torchedge.profiling.profile_folders import check_target, device_of, one_thread, write_profile
    from torchedge.profiling.public_data import read_public_samples
    from torchedge.profiling.public_fits import describe_public_fit, fit_public, methods_for, score_left_out

    check_target(arguments.out, force=arguments.force)
    device = device_of(arguments.dataset, arguments.device)
    with one_thread(), Progress(3, "fitting") as progress:
        progress.doing("reading and capturing")
        public = read_public_samples(arguments.dataset, device)
        progress.step()
        progress.doing("fitting")
        models = fit_public(public)
        progress.step()
        scores = None
        if not arguments.no_accuracy:
            progress.doing("scoring")
            strict = len(public.samples.networks) <= MOST_GROUPS
            scores = score_left_out(public, methods_for(public), strict=strict)
        progress.step()
        fit = describe_public_fit(arguments.out, public, models, scores)
        written = write_profile(arguments.out, device, {public.mode: fit})
    table: Any = thaw(written.profile[MODE_TABLES[public.mode]])
    if arguments.json:
        print_json({"device": device.name, "folder": str(written.folder), MODE_TABLES[public.mode]: table})
        return 0
    print_wrapped(
        f"{device.name}: fitted on {table['rows']} rows of {table['groups']} groups from {public.name}"
    )
    if scores is not None:
        rows = [[n, number(s.mean), number(s.median), f"{s.rank:.3f}"] for n, s in scores.items()]
        print_table(["groups left out", "mean error, %", "median, %", "rank correlation"], rows)
    print_wrapped(f"written to {arguments.out}; predict with --device {arguments.out}")
    return 0
