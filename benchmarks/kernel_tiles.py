"""Measure how fast each tile of a contraction runs on a device: alone, and where groups fill the device.

    python benchmarks/kernel_tiles.py --device gpu --out tiles.jsonl

Products of two inner depths, of one work-group and of many: the difference is the time of an inner point.
The rows show what a model of the inner loop has to explain. A second start continues.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from math import isqrt
from pathlib import Path
from typing import Any

from torchedge.lowering.candidates import GROUPS, LOCAL_BLOCKS, PANEL_TILES, TILES
from torchedge.lowering.kernels.nests import write_kernel
from torchedge.lowering.nodes import Node, Stored
from torchedge.lowering.schedules import ContractionSchedule, multiple
from torchedge.lowering.targets import Target, target_for
from torchedge.opencl import open_context
from torchedge.opencl.binary_caches import BinaryCache
from torchedge.opencl.compiling import cache_for
from torchedge.profiling.operator_cases import OperatorCase, operator_kernel
from torchedge.runtime.kernel_times import kernel_times
from torchedge.textures.layouts import LANES, Layout, fitted

DEPTHS = (256, 1280)
STORAGES = ("buffer", "row", "block-4")
ITEMS = 1024
"""Work-items of a compute unit where groups fill the device."""
MOST_ROWS = 4096
"""Of a product, whose operands must fit an image."""


def tiles_of(target: Target) -> Iterator[tuple[str, list[ContractionSchedule]]]:
    """Yield the tiles of a device class by name, each with its work-groups."""
    if target.schedule == "panel":
        for rows, vectors in PANEL_TILES:
            block = multiple(64, rows), multiple(128, vectors * 16)
            yield f"panel {rows}x{vectors}", [ContractionSchedule("panel", *block, 256, rows, vectors, 16)]
        return
    if target.schedule == "local":
        for rows, cols, depth, tile_rows, vectors, band in LOCAL_BLOCKS:
            one = ContractionSchedule("local", rows, cols, depth, tile_rows, vectors, LANES, band=band)
            yield f"local {rows}x{cols}x{depth} {tile_rows}x{vectors}", [one]
    for (tile_rows, vectors), unroll in product(TILES, (1, 2)):
        cols = vectors * LANES
        yield (
            f"register {tile_rows}x{vectors} u{unroll}",
            [
                ContractionSchedule(
                    "register", tile_rows, cols, LANES, tile_rows, vectors, LANES, group=group, unroll=unroll
                )
                for group in GROUPS
                if group[0] * group[1] <= target.group
            ],
        )


def cover_of(schedule: ContractionSchedule) -> tuple[int, int, int]:
    """Return rows and columns of a work-group, and its work-items."""
    if schedule.kind == "register":
        across, down = schedule.group
        return schedule.tile_rows * down, schedule.tile_cols * across, across * down
    return schedule.block_rows, schedule.block_cols, schedule.threads if schedule.kind == "local" else ITEMS


def main() -> None:
    """Append a row for each tile, storage and work-group: ms by number of groups and by depth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="OpenCL device")
    parser.add_argument("--out", type=Path, required=True, help="file that receives the rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no tile after so long")
    parser.add_argument("--only", default="", help="tiles whose name begins so")
    given = parser.parse_args()
    context = open_context(given.device)
    target, units = target_for(context.device), context.device.compute_units
    done = set()
    if given.out.is_file():
        done = {json.loads(line)["tile"] for line in given.out.read_text().splitlines()}
    storages = list(product(STORAGES, STORAGES)) if context.device.images else [("buffer", "buffer")]
    storages = [("buffer", "buffer")] if target.name == "cpu" else storages
    began = time.monotonic()
    for name, schedules in tiles_of(target):
        if name in done or not name.startswith(given.only) or time.monotonic() - began > given.seconds:
            continue
        trials: list[tuple[dict[str, Any], Any]] = []
        kernels = []
        for schedule in schedules:
            rows, cols, items = cover_of(schedule)
            many = units * max(2, ITEMS // items)
            tall = min(isqrt(many), MOST_ROWS // rows)
            down = next(n for n in range(tall, 0, -1) if many % n == 0)
            for groups, depth in product((1, many), DEPTHS):
                scale = (1, 1) if groups == 1 else (down, many // down)
                sizes = (rows * scale[0], cols * scale[1], depth)
                kernel = operator_kernel(OperatorCase("MatMul", sizes), target)
                reads = [node for node in kernel.group.reads if isinstance(node, Stored)]
                reads.sort(key=lambda node: node.shape != (sizes[0], depth))
                candidates = []
                for kinds in storages:
                    placed: dict[Node, Layout] = dict(kernel.layouts)
                    for node, kind in zip(reads, kinds, strict=True):
                        layout = Layout(placed[node].order)
                        if kind != "buffer":
                            layout = Layout(layout.order, "image", 1, kind)
                            layout = fitted(layout, node.shape, target.image_width, target.image_height)
                        placed[node] = layout
                    candidates.append(
                        (write_kernel(kernel.group, kernel.nest, placed, schedule, target), placed)
                    )
                kernels.append(candidates)
                trials.append(({"group": list(schedule.group), "groups": groups, "depth": depth}, sizes))
        with tempfile.TemporaryDirectory() as binaries:
            cache = BinaryCache(Path(binaries)) if cache_for(context.device) else None
            times = kernel_times(context, kernels, cache)
        cells = [
            {**trial, "sizes": sizes, "ms": [round(value, 6) for value in ms]}
            for (trial, sizes), ms in zip(trials, times, strict=True)
        ]
        row = {"tile": name, "units": units, "storages": storages, "cells": cells}
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
