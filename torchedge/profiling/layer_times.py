"""Measured times of layers, summed by kind: what tells the parts of a step's time apart.

A step's time alone leaves open which work took it. The probe's hooks time every layer; summed by kind they
are targets of their own for the time model (`latency_fitting`), where the device and not the host sets the
pace.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.errors import ProfileError
from torchedge.storage.documents import read_unpacked

__all__ = ["KINDS", "LAYERS", "LAYER_TIMES", "format_layer_times", "read_layer_times", "sum_layers"]

LAYERS, LAYER_TIMES = "layers.jsonl", "layer_times.csv"
"""Files of a dataset folder: every layer of every point, and their sums by kind."""

KINDS = ("product_forward", "product_backward", "depthwise", "norm", "activation", "pool")
"""Sums over dense convolutions and linear layers, forward and backward; over others, both together; ms."""

FloatArray = npt.NDArray[np.float64]
Point = tuple[str, str, int]
LayerTimes = dict[Point, FloatArray]
"""(id, mode, batch size) to the sums (6,) by `KINDS`, NaN where grouped convolutions mix with the dense."""

_KEYS = ("id", "mode", "batch_size")
_MOST_BYTES = 512 * 2**20
_ACTIVATIONS = ("ReLU", "ReLU6", "SiLU", "GELU", "Hardswish", "Hardsigmoid", "Sigmoid", "LeakyReLU", "Mish")


def read_layer_times(file: Path) -> LayerTimes:
    """Read a table of sums (also compressed); ProfileError names a line that is none."""
    text = io.StringIO(read_unpacked(file, max_bytes=_MOST_BYTES).decode("utf-8", "replace"))
    reader = csv.DictReader(text)
    found: LayerTimes = {}
    try:
        for row in reader:
            sums = [float(row[kind]) if row[kind] != "" else math.nan for kind in KINDS]
            found[row["id"], row["mode"], int(row["batch_size"])] = np.array(sums)
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ProfileError(
            f"{file} line {reader.line_num}: not a row of layer times ({error}); "
            f"expected {', '.join((*_KEYS, *KINDS))}"
        ) from error
    return found


def format_layer_times(times: Mapping[Point, FloatArray]) -> str:
    """Return sums as the text of a table that `read_layer_times` reads."""
    lines = [",".join((*_KEYS, *KINDS))]
    for (name, mode, batch), sums in times.items():
        numbers = ["" if math.isnan(x) else f"{x:.4g}" for x in sums.tolist()]
        lines.append(",".join((name, mode, str(batch), *numbers)))
    return "\n".join(lines) + "\n"


def sum_layers(file: Path, recipes: Mapping[str, Mapping[str, Any]]) -> LayerTimes:
    """Sum the layers of every point by kind; recipes: how each network is built, by its id.

    Raises ProfileError for lines that are none of the probe's.
    """
    kinds: dict[str, dict[str, str]] = {}
    found: LayerTimes = {}
    data = read_unpacked(file, max_bytes=_MOST_BYTES)
    for number, line in enumerate(data.splitlines(), 1):
        try:
            row = json.loads(line)
            name, layers = str(row["id"]), row["layers"]
            if layers is None or name not in recipes:
                continue
            if name not in kinds:
                kinds[name] = _kinds_of(recipes[name])
            found[name, str(row["mode"]), int(row["batch_size"])] = _sums(layers, kinds[name])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ProfileError(
                f"{file} line {number}: not the layers of a point ({error}); expected id, mode, batch_size, "
                "layers"
            ) from error
    return found


def _sums(layers: list[tuple[str, float, float | None]], kinds: Mapping[str, str]) -> FloatArray:
    forward, backward = dict.fromkeys(_CLASSES, 0.0), dict.fromkeys(_CLASSES, 0.0)
    for path, fore, back in layers:
        kind = kinds.get(path, "other")
        forward[kind] += float(fore or 0.0)
        backward[kind] += float(back or 0.0)
    both = [forward[k] + backward[k] for k in ("depthwise", "norm", "activation", "pool")]
    products = [forward["product"], backward["product"]]
    if forward["grouped"] > 0:
        products = [math.nan, math.nan]
    return np.array([*products, *both])


_CLASSES = ("product", "grouped", "depthwise", "norm", "activation", "pool", "other")


def _kinds_of(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of each layer of a network by its path."""
    from torchedge.profiling.campaigns.networks import build_network

    modules = build_network(recipe).named_modules()
    return {path: _kind(module) for path, module in modules if not list(module.children())}


def _kind(module: Any) -> str:  # noqa: ANN401 - a module
    name = type(module).__name__
    if name == "Conv2d":
        if module.groups == 1:
            return "product"
        return "depthwise" if module.groups == module.in_channels else "grouped"
    if name == "Linear":
        return "product"
    if "Norm" in name:
        return "norm"
    if "Pool" in name:
        return "pool"
    return "activation" if name in _ACTIVATIONS else "other"
