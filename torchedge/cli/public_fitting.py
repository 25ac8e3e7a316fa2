"""What `torchedge fit` does with the folder of a public table: fits a profile of one figure and scores it."""

from __future__ import annotations

import argparse
from typing import Any

from torchedge.cli.output import number, print_json, print_table, print_wrapped
from torchedge.cli.progress import Progress

METHODS = {"own": "own", "time model or simulation alone": None}
"""What is scored for every profile: a forest on our features, and no forest."""


def fit_public_table(arguments: argparse.Namespace) -> int:
    """Read, fit, score, write; `arguments` as of `torchedge fit`."""
    from torchedge.devices.device import thaw
    from torchedge.prediction.step_models import MODE_TABLES
    from torchedge.profiling.profile_folders import check_target, device_of, one_thread, write_profile
    from torchedge.profiling.public_data import read_public_samples
    from torchedge.profiling.public_fits import describe_public_fit, fit_public, score_left_out

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
            methods: dict[str, str | None] = dict(METHODS)
            if public.mode == "infer":
                methods |= {"forest on the paper's 15 columns": "perf4sight-infer", "published": "published"}
            strict = len(public.samples.networks) <= 100
            scores = {name: score_left_out(public, which, strict=strict) for name, which in methods.items()}
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
