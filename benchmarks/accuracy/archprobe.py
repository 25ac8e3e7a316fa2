"""Fit the cost model of kernels to tables of ArchProbe (microsoft/ArchProbe), micro-benchmarks of phones.

    python benchmarks/accuracy/archprobe.py DATA/mobile-gpus/archprobe_adreno640 --out FOLDER

Writes the device's profile with these coefficients into FOLDER (seconds). ArchProbe's image kernels use 1-D
images: along y, strides are taken to cost what they cost along x.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from math import isfinite
from pathlib import Path

from torchedge.devices import Device, Provenance, find_device
from torchedge.errors import ProfileError
from torchedge.profiling.profile_folders import PartFit, today, write_profile
from torchedge.storage.documents import read_unpacked, reading
from torchedge.textures.coefficients import CODEC, KernelCoefficients, MemoryPath, Origin, coefficients_of
from torchedge.textures.work import BLOCK_SHAPES

_MOST_BYTES = 32 * 2**20
_TEXEL = 16.0
_FIRST, _SECOND = (0.0, 512.0), (4096.0, 65536.0)
"""Footprints in bytes that lie in the first-level texture cache, and in the second-level cache."""


def read_archprobe(folder: Path, device: Device, source: str) -> KernelCoefficients:
    """Return the coefficients that ArchProbe's tables give; the others are the class's, with their origin.

    Raises:
        ProfileError: a table is missing or damaged.
    """
    base = coefficients_of(replace(device, profile={}))
    image, buffer = (_latencies(folder, f"{kind}CacheHierarchyPChase") for kind in ("Image", "Buffer"))
    rates = {kind: _rates(folder, f"{kind}Bandwidth") for kind in ("Image", "Buffer", "LocalMem", "ConstMem")}
    main = rates["Buffer"][max(rates["Buffer"])]
    first, second = (_plateau(image, limits) for limits in (_FIRST, _SECOND))
    near = _plateau(buffer, _SECOND)
    public = Origin(Provenance.PUBLIC_DATA, source)
    guessed = "C from the cache and line sizes, D and accesses in flight assumed, y as x"
    image_path, buffer_path = (
        replace(
            base.image,
            hit_ns=first,
            across=_across({(2, 1): 2 * (second - first), (4, 1): 4 * (image[max(image)] - second)}),
            cache_gb_s=_rate_at(rates["Image"], _FIRST[1]),
            l2_gb_s=_rate_at(rates["Image"], _SECOND[0]),
            main_gb_s=main,
        ),
        replace(
            base.buffer,
            hit_ns=near,
            across=_across({(4, 1): 4 * (buffer[max(buffer)] - near)}),
            cache_gb_s=_rate_at(rates["Buffer"], _SECOND[0]),
            l2_gb_s=_rate_at(rates["Buffer"], _SECOND[0]),
            main_gb_s=main,
        ),
    )
    partly = Origin(Provenance.ASSUMED, f"latencies and bandwidths: {source}; {guessed}")
    peak = device.figures.get("peak_fp32_gflops")
    arithmetic = Origin(peak.provenance, peak.source) if peak else base.origins["arithmetic"]
    return replace(
        base,
        local_gb_s=max(rates["LocalMem"].values()),
        constant_gb_s=max(rates["ConstMem"].values()),
        origins={
            **base.origins, "image": partly, "buffer": partly, "local": public, "arithmetic": arithmetic,
        },
        image=replace(image_path, issue_ns=_issue_ns(image_path, base)),
        buffer=replace(buffer_path, issue_ns=_issue_ns(buffer_path, base)),
    )  # fmt: skip


def _across(steps: Mapping[tuple[int, int], float]) -> tuple[float, ...]:
    """Return beta, ns: a walk along a row enters one block of width w in w accesses."""
    return tuple([max(0.0, round(steps.get(shape, 0.0), 2)) for shape in BLOCK_SHAPES] * 2)


def _issue_ns(path: MemoryPath, base: KernelCoefficients) -> float:
    """Return the time of a unit for a warp's vectors of 16 bytes at the first cache's bandwidth."""
    return round(base.warp * _TEXEL * base.compute_units / path.cache_gb_s, 3)


def _table(folder: Path, name: str) -> list[dict[str, float]]:
    plain = folder / f"{name}.csv"
    path = plain if plain.is_file() else plain.with_name(f"{name}.csv.gz")
    text = read_unpacked(path, max_bytes=_MOST_BYTES).decode("utf-8", errors="replace")
    with reading(str(path), "a table of ArchProbe", "numbers below the names of columns"):
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(StringIO(text))]
        if not rows or not all(isfinite(value) and value >= 0 for row in rows for value in row.values()):
            raise ValueError("no rows, or numbers that are negative or not finite")
        return rows


def _latencies(folder: Path, name: str) -> dict[float, float]:
    """Return ns of an access by footprint in bytes, of walks from texel to texel."""
    rows = _table(folder, name)
    with reading(f"{folder / name}", "a table of pointer chases", "columns of ArchProbe"):
        steps = [row for row in rows if row["stride (byte)"] == _TEXEL]
        return {row["range (byte)"]: 1e3 * row["t (us)"] / row["niter"] for row in steps}


def _rates(folder: Path, name: str) -> dict[float, float]:
    """Return GB/s by footprint in bytes."""
    rows = _table(folder, name)
    with reading(f"{folder / name}", "a table of bandwidths", "columns of ArchProbe"):
        return {row["range (byte)"]: row["bandwidth (gbps)"] for row in rows}


def _plateau(latencies: Mapping[float, float], limits: tuple[float, float]) -> float:
    inside = [ns for size, ns in latencies.items() if limits[0] <= size <= limits[1]]
    if not inside:
        raise ProfileError(f"ArchProbe's pointer chase has no footprints from {limits[0]:g} to {limits[1]:g}")
    return round(statistics.median(inside), 2)


def _rate_at(rates: Mapping[float, float], size: float) -> float:
    return rates[min(rates, key=lambda known: abs(known - size))]


def main(argv: list[str] | None = None) -> None:
    """Write the profile of a device with the coefficients of a folder of tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="ArchProbe's tables of one device (.csv, .csv.gz)")
    parser.add_argument("--device", default="adreno-640", help="the measured device, or its profile folder")
    parser.add_argument("--out", type=Path, required=True, help="profile folder to write")
    given = parser.parse_args(argv)
    device, source = find_device(given.device), f"ArchProbe's tables in {given.folder.resolve().name}"
    coefficients = read_archprobe(given.folder, device, source)
    CODEC.check(coefficients)
    described = {"provenance": str(coefficients.provenance), "dataset": source, "date": today()}
    write_profile(given.out, device, {}, kernels=PartFit(coefficients, described))


if __name__ == "__main__":
    main()
