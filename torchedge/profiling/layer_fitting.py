"""Fits what single convolutions cost in a precision and layout to their times (`hooks/convolution_probe.py`).

Steps of networks hardly separate the kernels of convolutions; the coefficients fitted here are the prior
of theirs (`kind_fitting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchedge.arrays import FloatArray
from torchedge.errors import ProfileError
from torchedge.prediction.latency.roofline import (
    LAYER_TERMS,
    PHASES,
    WorkRows,
    depthwise_times,
    named,
    prior_spread,
    product_terms,
    product_times,
)
from torchedge.prediction.latency.workload import DEPTHWISE_COLUMNS, LAUNCHES, PASSES, PRODUCT_COLUMNS
from torchedge.prediction.memory.workspaces import PHASES as PROBED
from torchedge.profiling.latency_fitting import most_likely
from torchedge.storage.documents import read_unpacked, reading
from torchedge.storage.journals import parse_lines

LAYER_TIMES = "convolution-times.jsonl.gz"
"""The file of a campaign over settings that holds timed convolutions, as the probe writes them."""

Layout = tuple[str | None, bool]
"""The precision of convolutions (None: float32), and whether they are in channels_last."""

_EVENTS_MS = 0.004
"""What a pair of events adds to the time of the kernels between them."""
_DELTA, _RIDGE = 0.1, 0.15
_FEWEST = 200
_MOST_BYTES = 128 * 2**20


@dataclass(frozen=True)
class LayerTimes:
    """Timed convolutions, a row each: their work, and ms (R, 3) of `PHASES`; depthwise ones come last."""

    rows: WorkRows
    measured: FloatArray


def read_layer_times(folder: Path) -> Mapping[Layout, LayerTimes]:
    """Read a folder's timed convolutions by precision and layout; empty where it has no such file.

    Raises ProfileError for a line that is not one of the probe's rows with times.
    """
    file = folder / LAYER_TIMES
    if not file.exists():
        return {}
    tables: dict[Layout, tuple[list[Any], list[Any]]] = {}
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    for place, row in parse_lines(file, data):
        with reading(place, "a timed convolution", "a line of hooks/convolution_probe.py with times"):
            if row.get("reason"):
                continue
            dtype = str(row.get("dtype", "float32"))
            layout = (None if dtype == "float32" else dtype, bool(row.get("channels_last")))
            depthwise, line = _work(row)
            times = [float(row[f"{phase}_ms"]) for phase in PROBED]
            if not all(np.isfinite([*line, *times])) or min(*times, *line[:3]) <= 0:
                raise ProfileError(f"{place}: sizes and times are not all positive; measure again")
            tables.setdefault(layout, ([], []))[depthwise].append((line, int(row["batch"]), times))
    return {layout: _table(*parts) for layout, parts in tables.items() if sum(map(len, parts)) >= _FEWEST}


def _work(row: Mapping[str, Any]) -> tuple[bool, list[float]]:
    """Return whether a convolution is depthwise, and its line of the table of a `Workload`."""
    kernel, stride, padding, dilation, size = (
        row[name] for name in ("kernel", "stride", "padding", "dilation", "size")
    )
    after = prod(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    )
    inputs, outputs, groups = row["inputs"], row["outputs"], row["groups"]
    sides = {"k": prod(kernel), "stride": max(stride), "ip": prod(size), "op": after}
    sides["last"] = bool(row.get("channels_last"))
    if inputs == groups > 1:
        sides |= {"n": outputs, "count": 1}
        return True, [float(sides.get(name, 1)) for name in DEPTHWISE_COLUMNS]
    sides |= {"m": inputs / groups, "n": outputs / groups, "count": groups, "groups": groups, "matrix": 0}
    return False, [float(sides.get(name, 1)) for name in PRODUCT_COLUMNS]


def _table(products: list[Any], depthwise: list[Any]) -> LayerTimes:
    both = [*products, *depthwise]
    count, whole = len(both), len(products)
    lines, alone = np.arange(whole), np.arange(count - whole)
    rows = WorkRows(
        count,
        np.array([batch for _, batch, _ in both], dtype=float),
        np.array([line for line, _, _ in products]).reshape(-1, len(PRODUCT_COLUMNS)),
        lines,
        lines,
        np.array([line for line, _, _ in depthwise]).reshape(-1, len(DEPTHWISE_COLUMNS)),
        alone,
        whole + alone,
        np.zeros((count, len(PASSES))),
        np.zeros((count, len(LAUNCHES))),
        True,
    )
    return LayerTimes(rows, np.array([times for _, _, times in both]))


def fit_layers(times: LayerTimes, prior: FloatArray, *, terms: bool = True) -> FloatArray:
    """Return the coefficients that explain the times best: (K,), and with `LAYER_TERMS` (K + L,).

    Those that single convolutions do not depend on stay at the prior (K,).
    """
    rows = times.rows.mapped(lambda a: torch.from_numpy(np.ascontiguousarray(a)))
    target = torch.from_numpy(np.log(times.measured))

    def loss(coefficients: torch.Tensor) -> torch.Tensor:
        p = named(coefficients)
        products = product_times(rows, product_terms(rows, p, torch), torch)
        deep = depthwise_times(rows, p, torch)
        both = [torch.cat([products[phase], deep[phase]]) for phase in PHASES]
        error = (torch.log(torch.stack(both, 1) + _EVENTS_MS) - target) / _DELTA
        return (torch.sqrt(1 + error * error) - 1).mean()

    spread, start = prior_spread(), prior
    if terms:
        spread = np.append(spread, [term.spread for term in LAYER_TERMS])
        start = np.append(prior, np.zeros(len(LAYER_TERMS)))
    return most_likely(start, np.diag(spread), _RIDGE, loss)
