"""`torchedge profile`: measure this machine's processor, or a device of your own by a campaign."""

from __future__ import annotations

import argparse

from torchedge.cli.arguments import add_json
from torchedge.cli.campaigning import add_campaign, is_campaign, run_profile
from torchedge.cli.console import Progress, print_json
from torchedge.errors import DeviceError, InputError

NAME = "profile"
SUMMARY = "measure a device: this machine's processor (20 s), or a campaign"
DESCRIPTION = """\
`torchedge profile local-cpu` measures this machine's processor in 20 seconds
and writes its profile into your own folder, where `predict` and `devices` find
it before the packaged one.

`torchedge profile --device-name my-orin --plan standard --over ssh://my-orin`
measures training and inference of a plan's networks on a device. Stop it, kill
it or unplug the device at any moment: the same command goes on with what is
left. The tables in its folder are what `torchedge fit` reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("device", metavar="DEVICE", nargs="?", help="local-cpu")
    add_campaign(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write, print."""
    if is_campaign(arguments):
        return run_profile(arguments)
    if arguments.device is None:
        raise InputError(
            "nothing to measure is named; expected local-cpu, or --device-name NAME --plan PLAN: run "
            "`torchedge profile --help` for both"
        )
    from torchedge.devices import LOCAL_DEVICE, find_device

    if arguments.device not in (LOCAL_DEVICE, *find_device(LOCAL_DEVICE).aliases):
        raise DeviceError(
            f"{arguments.device[:60]} takes a campaign, expected {LOCAL_DEVICE} alone; "
            "measure it with --device-name NAME --plan PLAN --over WAY"
        )
    from torchedge.cli.listing import device_document, print_device
    from torchedge.profiling.local_cpu import PROBES, measure_local_cpu

    with Progress(len(PROBES), "measuring") as progress:
        first = True

        def tell(probe: str) -> None:
            nonlocal first
            if not first:
                progress.step()
            first = False
            progress.doing(probe)

        device = measure_local_cpu(tell)
        progress.step()
    if arguments.json:
        print_json(device_document(device))
    else:
        print_device(device)
    return 0
