"""`torchedge profile`: measure a device; today this machine's processor."""

from __future__ import annotations

import argparse

from torchedge.cli.arguments import add_json
from torchedge.cli.output import print_json
from torchedge.cli.progress import Progress
from torchedge.errors import DeviceError

NAME = "profile"
SUMMARY = "measure this machine's processor (20 s) for predictions"
DESCRIPTION = """\
Measure a device and write its profile into your own folder, where `predict`
and `devices` find it before the packaged one. DEVICE is local-cpu: this
machine's processor, which takes about 20 seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("device", metavar="DEVICE", help="local-cpu")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write, print."""
    from torchedge.devices import LOCAL_DEVICE, find_device

    if arguments.device != LOCAL_DEVICE and find_device(arguments.device).name != LOCAL_DEVICE:
        raise DeviceError(
            f"{arguments.device} cannot be measured from here, expected {LOCAL_DEVICE}; "
            "fit a dataset of its measurements with `torchedge fit`"
        )
    from torchedge.cli.device_listing import device_document, print_device
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
