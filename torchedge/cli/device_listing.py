"""`torchedge devices`: which devices there are, and what is known of one, figure by figure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchedge.cli.arguments import add_json
from torchedge.cli.opencl_listing import list_opencl
from torchedge.cli.output import WIDTH, number, print_json, print_wrapped, warn

if TYPE_CHECKING:
    from torchedge.devices import Device

NAME = "devices"
SUMMARY = "the known devices, or one with the source of every figure"
DESCRIPTION = """\
List the devices that predictions can be made for, with the provenance of the
best of their models: measured (by our probes), public data (fitted on published
measurements) or assumed (an analytic estimate from the device's figures); a
prediction says what it rests on. With NAME print that device's figures, each
with where it comes from, and what was fitted. With --opencl list the OpenCL
devices of this machine, which kernels run on, instead; NAME is then a number, a
type (gpu, cpu) or a part of a name. The one marked * is taken where none is
named; TORCHEDGE_OPENCL_DEVICE chooses another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name, alias or profile folder")
    parser.add_argument("--opencl", action="store_true", help="the OpenCL devices of this machine")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print all devices, or one."""
    from torchedge.devices import find_device, scan_profiles

    if arguments.opencl:
        list_opencl(arguments.name, as_json=arguments.json)
        return 0
    if arguments.name is not None:
        device = find_device(arguments.name)
        if arguments.json:
            print_json(device_document(device))
        else:
            print_device(device)
        return 0
    profiles = scan_profiles()
    for problem in profiles.problems:
        warn(problem)
    if arguments.json:
        print_json([_summary(device) for device in profiles.devices])
        return 0
    rows = []
    for device in profiles.devices:
        summary = _summary(device)
        memory = summary["memory_mib"]
        mark = " (yours)" if summary["yours"] else ""
        rows.append(
            [
                device.name,
                device.title,
                "-" if memory is None else number(memory),
                summary["predictions"] + mark,
            ]
        )
    head = ["name", "device", "MiB", "predictions"]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
    widths[1] = min(widths[1], max(WIDTH - widths[0] - widths[2] - widths[3] - 6, 12))
    for name, title, memory, predictions in [head, *rows]:
        shown = title if len(title) <= widths[1] else title[: widths[1] - 1].rstrip(" (,") + "…"
        print(f"{name:<{widths[0]}}  {shown:<{widths[1]}}  {memory:>{widths[2]}}  {predictions}")
    return 0


def predictions_of(device: Device) -> str:
    """Return where the best-founded of a device's models comes from, without loading models."""
    from torchedge.devices import Provenance

    words = [str(table.get("provenance", "public data")) for _, table in _fitted_tables(device)]
    known = [item for item in Provenance if item.value in words]
    return str(max(known, default=Provenance.ASSUMED))


def _fitted_tables(device: Device) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the tables of `[profile]` that describe fitted models, by mode."""
    tables = [(mode, device.profile.get(mode)) for mode in ("training", "inference")]
    return [(mode, table) for mode, table in tables if isinstance(table, Mapping)]


def _summary(device: Device) -> dict[str, Any]:
    from torchedge.storage import user_folder

    figures = device.figures
    values = {
        name: figures[name].value if name in figures else None for name in ("memory_mib", "usable_memory_mib")
    }
    return {
        "name": device.name,
        "title": device.title,
        "kind": device.kind,
        "vendor": device.vendor,
        "memory": device.memory,
        "aliases": list(device.aliases),
        **values,
        "predictions": predictions_of(device),
        "yours": device.folder.is_relative_to(user_folder().resolve()),
        "folder": str(device.folder),
    }


def device_document(device: Device) -> dict[str, Any]:
    """Return what is known of one device as plain data."""
    from torchedge.devices.device import thaw

    items = {
        "figures": {
            name: {"value": f.value, "unit": f.unit, "provenance": str(f.provenance), "source": f.source}
            for name, f in device.figures.items()
        },
        "facts": {
            name: {"value": f.value, "provenance": str(f.provenance), "source": f.source}
            for name, f in device.facts.items()
        },
    }
    return {
        **_summary(device),
        "notes": device.notes,
        **items,
        "software": thaw(device.software),
        "runtime": thaw(device.runtime),
        "profile": thaw(device.profile),
    }


def print_device(device: Device) -> None:
    """Print what is known of one device."""
    print(f"{device.name}: {device.title}")
    print(f"{device.kind} by {device.vendor}, {device.memory} memory, predictions: {predictions_of(device)}")
    if device.aliases:
        print_wrapped(", ".join(device.aliases), first="also: ", rest="  ")
    if device.notes:
        print_wrapped(device.notes)
    print(f"folder: {device.folder}")
    sources: dict[str, int] = {}
    rows = []
    for name, figure in device.figures.items():
        mark = sources.setdefault(figure.source, len(sources) + 1)
        unit = "" if figure.unit == "1" else figure.unit
        rows.append([name, f"{figure.value:,.10g}", unit, str(figure.provenance), f"[{mark}]"])
    for name, fact in device.facts.items():
        mark = sources.setdefault(fact.source, len(sources) + 1)
        value = ("yes" if fact.value else "no") if isinstance(fact.value, bool) else fact.value
        rows.append([name, value, "", str(fact.provenance), f"[{mark}]"])
    if rows:
        print()
        _print_rows([["figure", "value", "unit", "provenance", "source"], *rows])
        print()
    for source, mark in sources.items():
        print_wrapped(source, first=f"[{mark}] ", rest="    ")
    for title, pairs in (("software", device.software), ("simulated behaviour", device.runtime)):
        if pairs:
            print_wrapped(", ".join(f"{k} {v}" for k, v in pairs.items()), first=f"{title}: ", rest="  ")
    _print_fitted(device)


def _print_rows(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for name, value, unit, provenance, mark in rows:
        amount = f"{value:>{widths[1]}} {unit:<{widths[2]}}"
        print(f"{name:<{widths[0]}}  {amount}  {provenance:<{widths[3]}}  {mark}")


def _print_fitted(device: Device) -> None:
    for mode, table in _fitted_tables(device):
        known = [
            (key, table[key]) for key in ("dataset", "rows", "precision", "date", "command") if key in table
        ]
        print_wrapped(
            ", ".join(f"{key} {value}" for key, value in known), first=f"{mode}, fitted: ", rest="  "
        )
        accuracy = table.get("accuracy")
        for target, by_protocol in accuracy.items() if isinstance(accuracy, Mapping) else ():
            if isinstance(by_protocol, Mapping):
                means = [
                    f"{p} {s['mean']:.1f} %"
                    for p, s in by_protocol.items()
                    if isinstance(s, Mapping) and "mean" in s
                ]
                print_wrapped(", ".join(means), first=f"mean absolute error of {target}: ", rest="  ")
