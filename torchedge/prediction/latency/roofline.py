"""The analytic time model: the time of each product, sweep and launch from a few coefficients of the device.

One formula serves prediction (numpy) and fitting (torch, for its gradients): functions take the array module as `xp`.
Times are in milliseconds, work in units of `workload`. All coefficients are logarithms, so that times stay positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.prediction.latency.workload import LAUNCHES, PASSES, Workload

PHASES = ("fwd", "bwd_x", "bwd_w")
KINDS = ("1x1", "3x3", "other")
"""Products by kernel: volume one (and linear layers), larger with stride 1 (Winograd applies), larger with a stride."""

_TILES = (64, 32, 16)
_ALIGNMENT = 4
_REFERENCE_GFLOPS, _REFERENCE_GB_S, _REFERENCE_LAUNCH_US = 665.6, 59.7, 10.0
"""The Jetson TX2's figures, for which the prior means below were chosen; another device scales them."""

Array = Any
Segment = Callable[[Array, Array, int], Array]


@dataclass(frozen=True)
class Coefficient:
    """One coefficient: prior mean (a logarithm), standard deviation, and the figure of the device it follows."""

    name: str
    mean: float
    spread: float
    follows: str = ""


def _catalogue() -> tuple[Coefficient, ...]:
    """Every coefficient with its prior: what the hardware's figures suggest, and how far measurements may move it."""
    table = [Coefficient("rate", log(2.2), 1.0, "compute")]
    element = log(4 / 40e6)
    for phase in PHASES:
        table += [
            Coefficient(f"rate_{phase}", 0.0, 0.3),
            Coefficient(f"depth_{phase}", log(16.0), 1.0),
            Coefficient(f"traffic_{phase}", element, 0.7, "bandwidth"),
            Coefficient(f"weights_{phase}", element + log(3.0), 0.7, "bandwidth"),
            Coefficient(f"latency_{phase}", log(0.03), 1.0, "launch"),
            Coefficient(f"parallel_{phase}", log(2.0), 1.0),
        ]
        tiles = zip(_TILES, (0.15, 0.4, 0.9), strict=True)
        table += [Coefficient(f"tile{size}_{phase}", log(cost), 0.5) for size, cost in tiles]
        table += [Coefficient(f"rate_{kind}_{phase}", -0.4 if kind == "3x3" else 0.0, 0.3) for kind in KINDS]
        table += [Coefficient(f"odd_{side}_{phase}", 0.0, 0.2) for side in "mn"]
        table += [Coefficient(f"odd_{kind}_{side}_{phase}", 0.0, 0.1) for kind in KINDS for side in "mn"]
    table += [Coefficient(f"traffic_{kind}", 0.0, 0.3) for kind in KINDS]
    table.append(Coefficient("weights_3x3", log(2.0), 0.5))
    for phase, cost in zip(PHASES, (5e-8, 2e-7, 2e-7), strict=True):
        table.append(Coefficient(f"depthwise_{phase}", log(cost), 0.7, "compute"))
        table.append(Coefficient(f"depthwise_traffic_{phase}", element, 0.7, "bandwidth"))
    table.append(Coefficient("depthwise_strided", 0.0, 0.5))
    for name, times in zip(PASSES, (8, 5, 3, 4, 3, 1, 3, 14, 3), strict=True):
        table.append(
            Coefficient(
                f"pass_{name}", element + log(times), 1.5 if name == "pool_window" else 0.5, "bandwidth"
            )
        )
    for name, cost in zip(LAUNCHES, (0.15, 0.2, 0.12, 0.1, 0.06, 0.05, 0.2), strict=True):
        table.append(Coefficient(f"launch_{name}", log(cost), 0.5, "launch"))
    table += [Coefficient("step", log(3.0), 0.7, "launch"), Coefficient("overlap", log(4.0), 0.5)]
    return tuple(table)


COEFFICIENTS = _catalogue()
COEFFICIENT_NAMES = tuple(c.name for c in COEFFICIENTS)


def prior_mean(device: Device) -> npt.NDArray[np.float64]:
    """Return (K,): the coefficients a device's figures suggest; a figure that is not known leaves the TX2's."""
    shift = {
        "compute": -log(_figure(device, "peak_fp32_gflops", _REFERENCE_GFLOPS) / _REFERENCE_GFLOPS),
        "bandwidth": -log(_figure(device, "bandwidth_gb_s", _REFERENCE_GB_S) / _REFERENCE_GB_S),
        "launch": log(_figure(device, "launch_overhead_us", _REFERENCE_LAUNCH_US) / _REFERENCE_LAUNCH_US),
        "": 0.0,
    }
    return np.array([c.mean + shift[c.follows] for c in COEFFICIENTS])


def prior_spread() -> npt.NDArray[np.float64]:
    """Return (K,): the standard deviations of the priors."""
    return np.array([c.spread for c in COEFFICIENTS])


def _figure(device: Device, name: str, default: float) -> float:
    figure = device.figures.get(name)
    return figure.value if figure is not None else default


@dataclass(frozen=True)
class Rows:
    """Work of R (graph, batch size) pairs as flat arrays: a line a product, with the row it belongs to."""

    count: int
    batch: Array
    products: Array
    product_row: Array
    depthwise: Array
    depthwise_row: Array
    passes: Array
    launches: Array
    training: bool

    def mapped(self, convert: Callable[[Any], Array]) -> Rows:
        """Return the same rows with every array passed through `convert`."""
        arrays = ("batch", "products", "product_row", "depthwise", "depthwise_row", "passes", "launches")
        return Rows(
            self.count, training=self.training, **{name: convert(getattr(self, name)) for name in arrays}
        )


def pack(workloads: Sequence[Workload], which: npt.NDArray[np.intp], batch: npt.NDArray[np.float64]) -> Rows:
    """Flatten rows: row r is `workloads[which[r]]` at batch size `batch[r]`."""
    products, depthwise = (
        _lines([w.products for w in workloads], which),
        _lines([w.depthwise for w in workloads], which),
    )
    return Rows(
        len(which), np.asarray(batch, dtype=float), products[0], products[1], depthwise[0], depthwise[1],
        np.stack([w.passes for w in workloads])[which], np.stack([w.launches for w in workloads])[which],
        all(w.training for w in workloads),
    )  # fmt: skip


def _lines(tables: Sequence[npt.NDArray[np.float64]], which: npt.NDArray[np.intp]
           ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:  # fmt: skip
    sizes = np.array([len(t) for t in tables], dtype=np.intp)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    counts = sizes[which]
    row = np.repeat(np.arange(len(which)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.concatenate(tables)[np.repeat(starts[which], counts) + offset], row


def numpy_segments(values: Array, index: Array, count: int) -> Array:
    """Sum values that share an index (numpy)."""
    return np.bincount(index, weights=values, minlength=count)


def product_times(rows: Rows, p: Mapping[str, Any], xp: Any) -> dict[str, Array]:  # noqa: ANN401
    """Time of each product line in each phase, ms: padded arithmetic, traffic of tensors and weights, a start-up latency."""
    m, n, k, stride, ip, op, input_grad, count, batched = (rows.products[:, i] for i in range(9))
    batch = rows.batch[rows.product_row] * batched + (1 - batched)
    is_1x1, is_3x3 = k == 1, (k > 1) & (stride == 1)
    side = xp.sqrt(op)
    op_padded = xp.where(is_3x3 & (op > 1), (xp.ceil(side / 4) * 4) ** 2, op)
    odd = {"m": m % _ALIGNMENT != 0, "n": n % _ALIGNMENT != 0}
    positions = batch * op_padded
    shapes = {"fwd": (n, positions, m * k), "bwd_x": (m, positions, n * k), "bwd_w": (n, m * k, positions)}
    times = {}
    for phase in PHASES if rows.training else PHASES[:1]:
        height, width, depth = shapes[phase]
        by_kind = _chosen(p, "rate_{}_" + phase, is_1x1, is_3x3, xp)
        rate = xp.exp(p["rate"] + p[f"rate_{phase}"] + by_kind)
        tall = _tiled(height, p, phase, xp)
        if phase == "bwd_w":
            wide, deep, matrix = _tiled(width, p, phase, xp), depth, height * width
        else:
            wide, deep = xp.ceil(width / 32) * 32, xp.ceil(depth / 8) * 8 + xp.exp(p[f"depth_{phase}"])
            matrix = height * depth
        arithmetic = (
            2e-9 * tall * wide * deep * rate * (1 + xp.exp(p[f"parallel_{phase}"]) * 4096 / (tall * wide))
        )
        moved = batch * (n * op_padded + m * ip)
        traffic = xp.exp(p[f"traffic_{phase}"] + _chosen(p, "traffic_{}", is_1x1, is_3x3, xp)) * moved
        weights = xp.exp(p[f"weights_{phase}"] + p["weights_3x3"] * is_3x3) * matrix
        uneven = sum(
            flag * (p[f"odd_{s}_{phase}"] + _chosen(p, "odd_{}_" + f"{s}_{phase}", is_1x1, is_3x3, xp))
            for s, flag in odd.items()
        )
        time = (arithmetic + traffic + weights) * xp.exp(uneven) + xp.exp(p[f"latency_{phase}"])
        times[phase] = time * count * (input_grad if phase == "bwd_x" else 1.0)
    return times


def _chosen(p: Mapping[str, Any], pattern: str, is_1x1: Array, is_3x3: Array, xp: Any) -> Array:  # noqa: ANN401
    """The coefficient of each line's kind."""
    one, three, other = (p[pattern.format(kind)] for kind in KINDS)
    return is_1x1 * one + is_3x3 * three + (1.0 - (is_1x1 * 1.0 + is_3x3 * 1.0)) * other


def _tiled(size: Array, p: Mapping[str, Any], phase: str, xp: Any) -> Array:  # noqa: ANN401
    """A dimension as the best of four tile sizes covers it; smaller tiles work less efficiently."""
    best = xp.ceil(size / 128) * 128
    for tile in _TILES:
        best = xp.minimum(best, xp.ceil(size / tile) * tile * (1 + xp.exp(p[f"tile{tile}_{phase}"])))
    return best


def depthwise_times(rows: Rows, p: Mapping[str, Any], xp: Any) -> Array:  # noqa: ANN401
    """Time of each depthwise convolution over all phases, ms."""
    n, k, stride, ip, op, input_grad, count = (rows.depthwise[:, i] for i in range(7))
    batch = rows.batch[rows.depthwise_row]
    read, written = n * ip * batch, n * op * batch
    work = {"fwd": written * k, "bwd_x": read * k, "bwd_w": written * k}
    total: Any = 0.0
    for phase in PHASES if rows.training else PHASES[:1]:
        time = xp.exp(p[f"depthwise_{phase}"]) * work[phase]
        if phase == "bwd_x":
            time = (
                time * xp.where(stride > 1, xp.exp(p["depthwise_strided"]), xp.ones_like(stride)) * input_grad
            )
        total = total + time + xp.exp(p[f"depthwise_traffic_{phase}"]) * (read + written)
    return total * count


def pass_times(rows: Rows, p: Mapping[str, Any], xp: Any) -> list[Array]:  # noqa: ANN401
    """Time of each kind of element-wise work for each row, ms; a forward pass alone does about a third of it."""
    share = 1.0 if rows.training else 1 / 3
    times = []
    for column, name in enumerate(PASSES):
        scale = 1.0 if name == "update" else rows.batch
        if not rows.training and name in ("update", "fan"):
            scale = 0.0
        times.append(xp.exp(p[f"pass_{name}"]) * rows.passes[:, column] * scale * share)
    return times


def busy_and_launch(rows: Rows, p: Mapping[str, Any], xp: Any = np, segments: Segment = numpy_segments  # noqa: ANN401
                    ) -> tuple[Array, Array]:  # fmt: skip
    """Return (R,) time the device computes and (R,) time the host needs to launch, ms."""
    busy = sum(pass_times(rows, p, xp))
    for time in product_times(rows, p, xp).values():
        busy = busy + segments(time, rows.product_row, rows.count)
    if len(rows.depthwise):
        busy = busy + segments(depthwise_times(rows, p, xp), rows.depthwise_row, rows.count)
    counted = [j for j, name in enumerate(LAUNCHES) if rows.training or name.endswith("fwd")]
    launch = sum(xp.exp(p[f"launch_{LAUNCHES[j]}"]) * rows.launches[:, j] for j in counted)
    return busy, launch


def step_time(busy: Array, launch: Array, p: Mapping[str, Any], xp: Any = np) -> Array:  # noqa: ANN401
    """Φ in ms: launching and computing overlap (a soft maximum), plus a constant a step."""
    power = 1 + xp.exp(p["overlap"])
    most = xp.maximum(busy, launch)
    return most * ((busy / most) ** power + (launch / most) ** power) ** (1 / power) + xp.exp(p["step"])


def named(vector: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a coefficient vector (K,) as a mapping by name."""
    return {name: vector[i] for i, name in enumerate(COEFFICIENT_NAMES)}
