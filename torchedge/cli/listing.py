"""`torchedge devices`: the devices that have profiles, or the OpenCL devices of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from torchedge.cli.console import MIB, answer, print_table, print_wrapped, warn
from torchedge.cli.options import DEVICE, command
from torchedge.errors import DeviceError, TorchedgeWarning
from torchedge.texts import number

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.opencl import ClDevice


@command(
    "devices",
    examples=[
        "torchedge devices",
        "torchedge devices jetson-tx2",
        "torchedge devices ./my-orin --json",
        "torchedge devices --opencl",
    ],
)
@click.argument("name", required=False, type=DEVICE, metavar="[NAME]")
@click.option("--opencl", is_flag=True, help="List the OpenCL devices of this machine instead.")
def devices(name: str | None, opencl: bool) -> None:
    """List devices, or one with the source of every figure.

    NAME is a name, an alias or a profile folder. The columns training and inference hold the provenance of
    predictions: measured (by our probes), public data (fitted on published measurements), transferred
    (latency is scaled from another device's measurements, with errors known from devices left out) or assumed
    (memory or latency is an estimate from the device's figures).

    With --opencl, NAME is a number, a type (gpu, cpu) or a part of a name. The probe builds and runs a small
    kernel; its result is kept, and a device that failed is tried again. The default device is marked *;
    TORCHEDGE_OPENCL_DEVICE chooses another.
    """
    from torchedge.devices import find_device, scan_profiles

    if opencl:
        _list_opencl(name)
        return
    if name is not None:
        device = find_device(name)
        answer(device_document(device), lambda: print_device(device))
        return
    profiles = scan_profiles()
    for problem in profiles.problems:
        warn(problem)
    summaries = [_summary(device) for device in profiles.devices]

    def show() -> None:
        rows = []
        for summary in summaries:
            memory = "-" if summary["memory_mib"] is None else number(summary["memory_mib"])
            mark = " (yours)" if summary["yours"] else ""
            train, infer = summary["predictions"].values()
            rows.append([summary["name"] + mark, summary["title"], train, infer, memory])
        print_table(["name", "device", "training", "inference", "MiB"], rows, left=4)

    answer(summaries, show)


# devices with profiles --------------------------------------------------------------------------------------


def predictions_of(device: Device) -> dict[str, str]:
    """Return the provenance of a device's predictions by mode, without loading its models."""
    from torchedge.devices import prediction_provenance

    return {mode: str(prediction_provenance(device, mode)) for mode in ("train", "infer")}


def device_document(device: Device) -> dict[str, Any]:
    """Return a device's profile, for JSON."""
    parts = ("notes", "figures", "facts", "software", "runtime", "profile")
    return {**_summary(device), **{name: getattr(device, name) for name in parts}}


def print_device(device: Device) -> None:
    """Print a device's profile."""
    print_wrapped(f"{device.name}: {device.title}")
    train, infer = predictions_of(device).values()
    print_wrapped(f"{device.kind} by {device.vendor}, {device.memory} memory")
    print_wrapped(f"predictions of training: {train}; of inference: {infer}")
    if device.aliases:
        print_wrapped(", ".join(device.aliases), first="also: ", rest="  ")
    if device.notes:
        print_wrapped(device.notes)
    print_wrapped(f"folder: {device.folder}")
    sources: dict[str, int] = {}
    rows = []
    for name, figure in device.figures.items():
        mark = sources.setdefault(figure.source, len(sources) + 1)
        unit = "" if figure.unit == "1" else figure.unit
        rows.append([name, f"{figure.value:,.10g}", unit, str(figure.provenance), f"[{mark}]"])
    for name, fact in device.facts.items():
        mark = sources.setdefault(fact.source, len(sources) + 1)
        value = ("yes" if fact.value else "no") if isinstance(fact.value, bool) else str(fact.value)
        rows.append([name, value, "", str(fact.provenance), f"[{mark}]"])
    if rows:
        print()
        print_table(["figure", "value", "unit", "provenance", "source"], rows, left=5)
        print()
    for source, mark in sources.items():
        print_wrapped(source, first=f"[{mark}] ", rest="    ")
    for title, pairs in (("software", device.software), ("simulated behaviour", device.runtime)):
        if pairs:
            print_wrapped(", ".join(f"{k} {v}" for k, v in pairs.items()), first=f"{title}: ", rest="  ")
    keys = ("dataset", "rows", "precision", "date", "command")
    for mode in ("training", "inference"):
        table = device.profile.get(mode)
        if not isinstance(table, Mapping):
            continue
        facts = ", ".join(f"{key} {table[key]}" for key in keys if key in table)
        print_wrapped(facts, first=f"{mode}, fitted: ", rest="  ")
        accuracy = table.get("accuracy")
        for target, by_protocol in accuracy.items() if isinstance(accuracy, Mapping) else ():
            scores = by_protocol.items() if isinstance(by_protocol, Mapping) else ()
            means = [f"{p} {s['mean']:.1f} %" for p, s in scores if isinstance(s, Mapping) and "mean" in s]
            if means:
                print_wrapped(", ".join(means), first=f"mean absolute error of {target}: ", rest="  ")


def _summary(device: Device) -> dict[str, Any]:
    from torchedge.storage import user_folder

    memory = {
        name: device.figures[name].value if name in device.figures else None
        for name in ("memory_mib", "usable_memory_mib")
    }
    return {
        **{name: getattr(device, name) for name in ("name", "title", "kind", "vendor", "memory")},
        "aliases": list(device.aliases),
        **memory,
        "predictions": predictions_of(device),
        "yours": device.folder.is_relative_to(user_folder().resolve()),
        "folder": str(device.folder),
    }


# OpenCL devices ---------------------------------------------------------------------------------------------


def _list_opencl(name: str | None) -> None:
    """Print the OpenCL devices, or the one that `name` chooses, each with the result of its probe."""
    from torchedge.opencl import choose_device, list_opencl_devices
    from torchedge.opencl.probes import fault_of, remark_of
    from torchedge.storage.locks import warnings_ignored

    available = list_opencl_devices()
    chosen = None if name is None else choose_device(name, available)
    faults = {device.index: fault_of(device, again=True) for device in available}
    remarks = {device.index: remark_of(device) for device in available}
    default = None
    try:
        with warnings_ignored(TorchedgeWarning):  # the list shows them
            default = choose_device(None, available, lambda d: faults[d.index], lambda d: remarks[d.index])
    except DeviceError as error:  # a wrong environment variable; where none can be used, the list shows why
        if not all(faults.values()):
            warn(str(error))

    def document(device: ClDevice) -> dict[str, Any]:
        properties = {field.name: getattr(device, field.name) for field in fields(device)}
        verdict = {"fault": faults[device.index], "remark": remarks[device.index]}
        return {**properties, **verdict, "default": device == default}

    if chosen is not None:
        said = faults[chosen.index] or remarks[chosen.index]
        answer(document(chosen), lambda: print_opencl_device(chosen, said))
    else:
        answer([*map(document, available)], lambda: print_opencl_devices(available, default, faults, remarks))


def print_opencl_devices(
    available: list[ClDevice],
    default: ClDevice | None,
    faults: Mapping[int, str],
    remarks: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Print a line for each device, why one cannot be used or what it does wrong; * marks the default."""
    from torchedge.opencl.choosing import remedy

    head = ["", "device", "platform", "driver", "type", "OpenCL", "MiB", "probe"]
    rows = [
        [
            f"{device.index}{'*' if device == default else ''}",
            device.name,
            device.platform,
            device.driver,
            device.kind,
            (re.findall(r"\d+\.\d+", device.version) or ["?"])[0],
            f"{device.global_bytes // MIB:,}",
            "fails" if faults.get(device.index) else "doubtful" if remarks.get(device.index) else "works",
        ]
        for device in available
    ]
    print_table(head, rows, left=5)
    for device in available:
        if fault := faults.get(device.index):
            print_wrapped(f"{fault}; {remedy(device)}", first=f"{device.index}: ", rest="   ")
        elif remark := remarks.get(device.index):
            print_wrapped(remark, first=f"{device.index}: ", rest="   ")


def print_opencl_device(device: ClDevice, fault: str) -> None:
    """Print the properties of one device, and the fault that its probe found."""
    print_wrapped(device.name, first=f"{device.index}: ", rest="   ")
    image = f"up to {device.image_width} x {device.image_height} texels" if device.images else "no"
    half = ["buffers", *["images"] * device.half_images, *["arithmetic"] * device.half_arithmetic]
    rows = {
        "type": device.kind,
        "vendor": device.vendor,
        "platform": f"{device.platform} ({device.platform_version})",
        "version": device.version,
        "driver": device.driver,
        "probe": f"fails: {fault}" if fault else "works",
        "compute units": f"{device.compute_units} at {device.clock_mhz} MHz",
        "global memory": f"{device.global_bytes // MIB:,} MiB",
        "allocations": f"at most {device.allocation_bytes // MIB:,} MiB at once",
        "local memory": f"{device.local_bytes // 1024:,} KiB",
        "work-group": f"{device.work_group} work-items within {' x '.join(map(str, device.work_item_sizes))}",
        "image2d": image,
        "image from buffer": _images_from_buffers(device),
        "half floats": ", ".join(half),
        "double": "yes" if device.double else "no",
        "sub-buffers": f"aligned to {device.base_alignment} bytes",
        "extensions": ", ".join(device.extensions) or "none that torchedge uses",
    }
    columns = max(map(len, rows))
    for name, value in rows.items():
        print_wrapped(value, first=f"{name:<{columns}}  ", rest=" " * (columns + 2))


def _images_from_buffers(device: ClDevice) -> str:
    if not device.image_from_buffer:
        return "no"
    alignments = (device.pitch_alignment, device.address_alignment)
    rows = "rows in multiples of {} texels, beginning at multiples of {}".format(*alignments)
    return f"up to {device.image_buffer_texels:,} texels, {rows if all(alignments) else 'alignment unknown'}"
