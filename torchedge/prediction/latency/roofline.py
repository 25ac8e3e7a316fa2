"""The analytic time model: the time of each product, sweep and launch from a few coefficients of the device.

One formula serves prediction (numpy) and fitting (torch, for its gradients): functions take the array module
as `xp`. Times are in milliseconds, work in units of `workload`. All coefficients are logarithms, so that
times stay positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device
from torchedge.prediction.latency.rates import (
    REFERENCE_GB_S,
    REFERENCE_GFLOPS,
    REFERENCE_LAUNCH_US,
    figure_of,
    product_rates,
)
from torchedge.prediction.latency.workload import (
    CALL_LAUNCHES,
    FORWARD_SHARE,
    FUSED_COLUMNS,
    LAUNCHES,
    PASSES,
    STEP_PHASES,
    Workload,
)

PHASES = ("fwd", "bwd_x", "bwd_w")
KINDS = ("1x1", "3x3", "other")
"""Products by kernel: volume one (and linear layers), larger with stride 1 (Winograd applies) or a stride."""

_SPECIAL = ("grouped", "matrix")
"""Products whose rate differs: grouped convolutions, and products of matrices, left to other kernels."""

_TILES = (64, 32, 16)
_ALIGNMENT = 4

_STEP_CALL = 5.0
"""How many tiny operators a call within a step costs a processor: autograd's nodes, the start of threads."""

_NO_OVERLAP, _SHORT_STEP = -3.0, -3.0
"""Logarithms, on a processor: of an overlap so small that the times of host and device add up, and of the
constant time of a step over a GPU's, at whose end nobody waits."""

Array = Any
Segment = Callable[[Array, Array, int], Array]


@dataclass(frozen=True)
class Coefficient:
    """One coefficient: prior mean (a logarithm), standard deviation, the device figure that it follows."""

    name: str
    mean: float
    spread: float
    follows: str = ""


def _catalogue() -> tuple[Coefficient, ...]:
    """Every coefficient with its prior, from the hardware's figures."""
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
    table += [Coefficient(f"{kind}_{phase}", 0.0, 0.7) for kind in _SPECIAL for phase in PHASES]
    return tuple(table)


COEFFICIENTS = _catalogue()
COEFFICIENT_NAMES = tuple(c.name for c in COEFFICIENTS)

LAYER_TERMS = tuple(
    Coefficient(f"{term}_{phase}", 0.0, spread)
    for terms, spread in (
        (("uneven", "width", "uneven_width", "image"), 0.5),
        (("window", "wide", "strided", "uneven_depthwise"), 1.0),
    )
    for term in terms
    for phase in PHASES
)
"""Factors of the time of convolutions that only fits with times of single ones have, elsewhere one: for each
side whose channels are no multiple of eight; by the width of a group, in powers of two from 16, and for
widths that are no power of two; for images of at most four channels; for depthwise convolutions with windows
above 7 x 7, above 5 x 5 up to these, with a stride, and with small windows over channels that are no multiple
of four. Where a library has no kernel of its own for a depthwise one, its general one takes 4 to 30 times as
long."""
LAYER_NAMES = tuple(c.name for c in LAYER_TERMS)
_WIDEST_GROUP, _WIDEST_WINDOW, _WIDE_WINDOW, _WIDEST_IMAGE = 64, 49, 25, 4

LAST = "last"
"""Beside the coefficients by name: those of convolutions in channels_last, None where they are the same."""


_HALVED = frozenset(
    f"{kind}_{phase}" for kind in ("traffic", "weights", "depthwise_traffic") for phase in PHASES
)
"""Coefficients that count bytes of products, which half precision halves."""

MATRIX_EXCESS = "matrix_excess"
_MATRIX = frozenset(f"matrix_{phase}" for phase in PHASES)


def prior_mean(device: Device, precision: str | None = None) -> npt.NDArray[np.float64]:
    """Return (K,): the coefficients a device's figures suggest; an unknown figure leaves the TX2's.

    precision: of products: their rate follows the device's for it, and half precision halves their traffic.
    The rate is that of convolutions; `matrix_excess` has that of matrix products.
    """
    mean = _vector_units_mean(device)
    full = figure_of(device, "peak_fp32_gflops", REFERENCE_GFLOPS)
    convolutions, _ = product_rates(device, precision)
    for place, coefficient in enumerate(COEFFICIENTS):
        if coefficient.name == "rate":
            mean[place] -= log(convolutions / full)
        elif precision is not None and coefficient.name in _HALVED:
            mean[place] -= log(2.0)
    return mean


def fitting_prior(device: Device, precision: str | None = None) -> npt.NDArray[np.float64]:
    """Return (K,): the prior of a fit.

    In single precision it is the vector units' for all products: convolutions reach a smaller part of TF32's
    peak than matrix products do of the vector units', so that their ratio by the peaks is no prior of either.
    """
    return _vector_units_mean(device) if precision is None else prior_mean(device, precision)


def rated_mean(device: Device, precision: str | None = None) -> npt.NDArray[np.float64]:
    """Return (K,): `prior_mean` with the rate of matrix products in coefficients of their own."""
    excess = matrix_excess(device, precision)
    return prior_mean(device, precision) + [excess * (c.name in _MATRIX) for c in COEFFICIENTS]


def matrix_excess(device: Device, precision: str | None = None) -> float:
    """Return how much slower matrix products compute than convolutions by a device's figures, in log."""
    convolutions, matrices = product_rates(device, precision)
    return log(convolutions / matrices)


def _vector_units_mean(device: Device) -> npt.NDArray[np.float64]:
    """Return (K,) for products on the units of single precision."""
    ratio = log(figure_of(device, "step_time_ratio", 1.0))
    launch = figure_of(device, "launch_overhead_us", REFERENCE_LAUNCH_US)
    shift = {
        "compute": -log(figure_of(device, "peak_fp32_gflops", REFERENCE_GFLOPS) / REFERENCE_GFLOPS),
        "bandwidth": -log(figure_of(device, "bandwidth_gb_s", REFERENCE_GB_S) / REFERENCE_GB_S),
        "launch": log(figure_of(device, "eager_operator_us", launch) / REFERENCE_LAUNCH_US)
        + (log(_STEP_CALL) if device.kind == "cpu" else 0.0),
        "": 0.0,
    }
    mean = {c.name: c.mean + shift[c.follows] + (ratio if c.follows else 0.0) for c in COEFFICIENTS}
    if device.kind == "cpu":  # the threads that launch also compute, and wait for nobody
        mean |= {"overlap": _NO_OVERLAP, "step": mean["step"] + _SHORT_STEP}
    return np.array(list(mean.values()))


def prior_spread() -> npt.NDArray[np.float64]:
    """Return (K,): the standard deviations of the priors."""
    return np.array([c.spread for c in COEFFICIENTS])


@dataclass(frozen=True)
class WorkRows:
    """Work of R (graph, batch size) pairs: tables of distinct work, and which line belongs to which row.

    products (U, 14) and depthwise (V, 10) are tables; `product_line` (L,) and `product_row` (L,) say that row
    `product_row[i]` runs line `product_line[i]`, and likewise for depthwise convolutions. fused: (R, 3, 6) of
    compiled steps, None where all are eager.
    """

    count: int
    batch: Array
    products: Array
    product_line: Array
    product_row: Array
    depthwise: Array
    depthwise_line: Array
    depthwise_row: Array
    passes: Array
    launches: Array
    training: bool
    tiled: bool = True
    fused: Array | None = None

    def mapped(self, convert: Callable[[Any], Array]) -> WorkRows:
        """Return the same rows with every array passed through `convert`."""
        names = [f.name for f in fields(self) if f.name not in ("count", "training", "tiled", "fused")]
        return replace(self, **{name: convert(getattr(self, name)) for name in names})


def pack(
    workloads: Sequence[Workload],
    which: npt.NDArray[np.intp],
    batch: npt.NDArray[np.float64],
    *,
    calls: bool = False,
    lanes: float = 0.0,
) -> WorkRows:
    """Lay out rows: row r is `workloads[which[r]]` at batch size `batch[r]`.

    calls: calls of views and modules take the host's time, too (`CALL_LAUNCHES`). lanes: as in
    `LatencyModel`.
    """
    launches = np.stack([w.launches for w in workloads])
    if calls:
        launches[:, LAUNCHES.index("pass_fwd")] += CALL_LAUNCHES * launches[:, -1]
    compiled = any(w.fused is not None for w in workloads)
    passes = np.stack([w.passes for w in workloads])
    passes[:, PASSES.index("norm")] += lanes * passes[:, len(PASSES)]
    batch, passes = np.asarray(batch, dtype=float), passes[which, : len(PASSES)]
    return WorkRows(
        len(which),
        batch,
        np.concatenate([w.products for w in workloads]),
        *_lines([len(w.products) for w in workloads], which),
        np.concatenate([w.depthwise for w in workloads]),
        *_lines([len(w.depthwise) for w in workloads], which),
        passes[:, :, 0] * batch[:, None] + passes[:, :, 1],
        launches[which, :-1],
        all(w.training for w in workloads),
        all(w.tiled for w in workloads),
        np.stack([_NOT_FUSED if w.fused is None else w.fused for w in workloads])[which]
        if compiled
        else None,
    )


_NOT_FUSED = np.zeros((len(STEP_PHASES), len(FUSED_COLUMNS)))


def _lines(
    sizes: Sequence[int], which: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the table line and the row of each line run, tables being laid one behind the other."""
    lengths = np.array(sizes, dtype=np.intp)
    starts = np.cumsum(lengths) - lengths
    counts = lengths[which]
    row = np.repeat(np.arange(len(which)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts[which], counts) + offset, row


def numpy_segments(values: Array, index: Array, count: int) -> Array:
    """Sum values that share an index (numpy)."""
    return np.bincount(index, weights=values, minlength=count)


Terms = dict[str, tuple[Array, ...]]
"""By phase, (U,) each: the time of a line of the product table by position, by sample and in any case, ms."""


def product_terms(rows: WorkRows, p: Mapping[str, Any], xp: Any) -> Terms:  # noqa: ANN401
    """Return the part that does not depend on the batch size, to predict a workload again."""
    op, last = _padded_positions(rows, xp), rows.products[:, 13] > 0
    phases = PHASES if rows.training else PHASES[:1]
    terms = {phase: _product_terms(rows.products, op, phase, p, xp) for phase in phases}
    if p[LAST] is None or not last.any():
        return terms
    there = {phase: _product_terms(rows.products, op, phase, p[LAST], xp) for phase in phases}
    return {
        phase: tuple([xp.where(last, a, b) for a, b in zip(there[phase], terms[phase], strict=True)])
        for phase in phases
    }


def product_times(rows: WorkRows, terms: Terms, xp: Any) -> dict[str, Array]:  # noqa: ANN401
    """Time (L,) of each product run in each phase, ms.

    Padded arithmetic, traffic of tensors and of weights, and a start-up latency. Of all these only the
    number of positions (in tiles of 32) and the batch itself change with the batch size, so that a line's
    time is `on_positions * positions + on_batch * batch + constant`.
    """
    line, batched = rows.product_line, rows.products[:, 8]
    batch = rows.batch[rows.product_row] * batched[line] + (1 - batched[line])
    positions = batch * _padded_positions(rows, xp)[line]
    if rows.tiled:
        positions = xp.ceil(positions / 32) * 32
    times = {}
    for phase, (on_positions, on_batch, constant) in terms.items():
        times[phase] = on_batch[line] * batch + constant[line]
        if phase != "bwd_w":
            times[phase] = times[phase] + on_positions[line] * positions
    return times


def _padded_positions(rows: WorkRows, xp: Any) -> Array:  # noqa: ANN401
    """Output positions a sample; Winograd works on tiles of four, so that sides are rounded up to four."""
    k, stride, op = (rows.products[:, i] for i in (2, 3, 5))
    if not rows.tiled:
        return op
    side = xp.ceil(xp.sqrt(op) / 4) * 4
    return xp.where((k > 1) & (stride == 1) & (op > 1), side**2, op)


def _product_terms(
    table: Array,
    op: Array,
    phase: str,
    p: Mapping[str, Any],
    xp: Any,  # noqa: ANN401
) -> tuple[Array, Array, Array]:
    """Return (U,) each: the time of a line by position, by sample and in any case, in one phase, ms."""
    m, n, k, stride, ip = (table[:, i] for i in range(5))
    kinds = [(k == 1) * 1.0, ((k > 1) & (stride == 1)) * 1.0]
    kinds.append(1.0 - kinds[0] - kinds[1])
    height, depth, width = {"fwd": (n, m * k, op), "bwd_x": (m, n * k, op), "bwd_w": (n, op, m * k)}[phase]
    rate = 2e-9 * xp.exp(
        p["rate"]
        + p[f"rate_{phase}"]
        + _chosen(p, "rate_{}_" + phase, kinds)
        + table[:, 10] * p[MATRIX_EXCESS]
    )
    tall, idle = _tiled(height, p, phase, xp), xp.exp(p[f"parallel_{phase}"]) * 4096
    traffic = xp.exp(p[f"traffic_{phase}"] + _chosen(p, "traffic_{}", kinds)) * (n * op + m * ip)
    if phase == "bwd_w":
        matrix = height * width
        on_positions = xp.zeros_like(m)
        on_batch = rate * (tall * _tiled(width, p, phase, xp) + idle) * depth + traffic
        constant = xp.zeros_like(m)
    else:
        matrix = height * depth
        deep = rate * (xp.ceil(depth / 8) * 8 + xp.exp(p[f"depth_{phase}"]))
        on_positions, on_batch, constant = deep * tall, traffic, deep * idle
    constant = constant + xp.exp(p[f"weights_{phase}"] + p["weights_3x3"] * kinds[1]) * matrix
    uneven = sum(
        (size % _ALIGNMENT != 0)
        * (p[f"odd_{side}_{phase}"] + _chosen(p, "odd_{}_" + f"{side}_{phase}", kinds))
        for side, size in (("m", m), ("n", n))
    )
    often = table[:, 7] * table[:, {"fwd": 12, "bwd_x": 6, "bwd_w": 11}[phase]]
    grouped = (table[:, 9] > 1) * 1.0
    special = grouped * p[f"grouped_{phase}"] + table[:, 10] * p[f"matrix_{phase}"]
    special = special + _layer_factors(m, n, grouped, (1 - table[:, 10]) * (1 - grouped), phase, p, xp)
    scale = xp.exp(uneven + special) * often
    latency = xp.exp(p[f"latency_{phase}"]) * often / table[:, 9]
    return on_positions * scale, on_batch * scale, constant * scale + latency


def _layer_factors(
    m: Array,
    n: Array,
    grouped: Array,
    dense: Array,
    phase: str,
    p: Mapping[str, Any],
    xp: Any,  # noqa: ANN401
) -> Array:
    """Return (U,) the logarithm of the factors of `LAYER_TERMS` that a line has."""
    image = (m <= _WIDEST_IMAGE) * dense
    width = xp.minimum(m, n)
    octaves = xp.log2(xp.minimum(width, xp.full_like(width, _WIDEST_GROUP)) / 16)
    odd_width = (width != 2 ** xp.round(xp.log2(width))) * 1.0
    return (
        image * p[f"image_{phase}"]
        + (dense - image) * ((m % 8 != 0) * 1.0 + (n % 8 != 0)) * p[f"uneven_{phase}"]
        + grouped * (octaves * p[f"width_{phase}"] + odd_width * p[f"uneven_width_{phase}"])
    )


def _chosen(p: Mapping[str, Any], pattern: str, kinds: Sequence[Array]) -> Array:
    """The coefficient of each line's kind; `kinds` holds a 0/1 array for each of `KINDS`."""
    return sum(flag * p[pattern.format(kind)] for kind, flag in zip(KINDS, kinds, strict=True))


def _tiled(size: Array, p: Mapping[str, Any], phase: str, xp: Any) -> Array:  # noqa: ANN401
    """A dimension as the best of four tile sizes covers it; smaller tiles work less efficiently."""
    best = xp.ceil(size / 128) * 128
    for tile in _TILES:
        best = xp.minimum(best, xp.ceil(size / tile) * tile * (1 + xp.exp(p[f"tile{tile}_{phase}"])))
    return best


def depthwise_times(rows: WorkRows, p: Mapping[str, Any], xp: Any) -> dict[str, Array]:  # noqa: ANN401
    """Time (D,) of each depthwise convolution by phase, ms."""
    times, last = _depthwise_times(rows, p, xp), rows.depthwise[rows.depthwise_line, 9] > 0
    if p[LAST] is None or not last.any():
        return times
    there = _depthwise_times(rows, p[LAST], xp)
    return {phase: xp.where(last, there[phase], time) for phase, time in times.items()}


def _depthwise_times(rows: WorkRows, p: Mapping[str, Any], xp: Any) -> dict[str, Array]:  # noqa: ANN401
    n, k, stride, ip, op, input_grad, count, weight_grad, runs = (
        rows.depthwise[rows.depthwise_line, i] for i in range(9)
    )
    batch = rows.batch[rows.depthwise_row]
    read, written = n * ip * batch, n * op * batch
    work = {"fwd": written * k, "bwd_x": read * k, "bwd_w": written * k}
    often = {"fwd": runs, "bwd_x": input_grad, "bwd_w": weight_grad}
    times = {}
    for phase in PHASES if rows.training else PHASES[:1]:
        factor = (
            p[f"depthwise_{phase}"]
            + (k > _WIDEST_WINDOW) * p[f"window_{phase}"]
            + ((k > _WIDE_WINDOW) & (k <= _WIDEST_WINDOW)) * p[f"wide_{phase}"]
            + (stride > 1) * p[f"strided_{phase}"]
            + ((n % 4 != 0) & (k <= _WIDE_WINDOW)) * p[f"uneven_depthwise_{phase}"]
        )
        time = xp.exp(factor) * work[phase]
        if phase == "bwd_x":
            time = time * xp.where(stride > 1, xp.exp(p["depthwise_strided"]), xp.ones_like(stride))
        traffic = xp.exp(p[f"depthwise_traffic_{phase}"]) * (read + written)
        times[phase] = (time + traffic) * often[phase] * count
    return times


def pass_times(rows: WorkRows, p: Mapping[str, Any], xp: Any) -> list[Array]:  # noqa: ANN401
    """Time of each kind of element-wise work by row, ms; a forward pass alone does about a third of it."""
    share = 1.0 if rows.training else FORWARD_SHARE
    times = []
    for column, name in enumerate(PASSES):
        skipped = not rows.training and name in ("update", "fan")
        times.append(xp.exp(p[f"pass_{name}"]) * rows.passes[:, column] * (0.0 if skipped else share))
    return times


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """Where the time of rows goes, ms: products (L,) and depthwise (D,) by phase; passes, busy, launch (R,).

    depthwise: empty without such convolutions. fused: (R, 3, 2) by `STEP_PHASES` of compiled steps: what
    they add to the time of the device, and of the host.
    """

    products: dict[str, Array]
    depthwise: dict[str, Array]
    passes: list[Array]
    busy: Array
    launch: Array
    fused: Array | None = None


def work_times(
    rows: WorkRows,
    p: Mapping[str, Any],
    xp: Any = np,  # noqa: ANN401
    segments: Segment = numpy_segments,
    terms: Terms | None = None,
) -> WorkTimes:
    """Return the time the device computes (`busy`) and the host launches (`launch`), with their parts."""
    line_terms = product_terms(rows, p, xp) if terms is None else terms
    products, passes = product_times(rows, line_terms, xp), pass_times(rows, p, xp)
    busy = sum(passes) + segments(sum(products.values()), rows.product_row, rows.count)
    depthwise = depthwise_times(rows, p, xp) if len(rows.depthwise) else {}
    if depthwise:
        busy = busy + segments(sum(depthwise.values()), rows.depthwise_row, rows.count)
    counted = [j for j, name in enumerate(LAUNCHES) if rows.training or name.endswith("fwd")]
    launch = sum(xp.exp(p[f"launch_{LAUNCHES[j]}"]) * rows.launches[:, j] for j in counted)
    return WorkTimes(products, depthwise, passes, busy, launch)


def phase_times(rows: WorkRows, times: WorkTimes, p: Mapping[str, Any]) -> list[tuple[str, Array, Array]]:
    """Return the phases of rows with the times (R,) of host and device, ms; they add up to those of rows."""
    passes = dict(zip(PASSES, times.passes, strict=True))
    summed, updates = passes.pop("fan"), passes.pop("update")
    forward, swept = FORWARD_SHARE if rows.training else 1.0, sum(passes.values())

    def computed(*phases: str) -> Array:
        return sum(
            numpy_segments(table[phase], row, rows.count)
            for table, row in ((times.products, rows.product_row), (times.depthwise, rows.depthwise_row))
            for phase in phases
            if table
        )

    def launched(ending: str) -> Array:
        return sum(
            np.exp(p[f"launch_{name}"]) * rows.launches[:, j]
            for j, name in enumerate(LAUNCHES)
            if name.endswith(ending)
        )

    fused = np.zeros((rows.count, len(STEP_PHASES), 2)) if times.fused is None else times.fused
    device, host = computed("fwd") + forward * swept, launched("fwd")
    phases = [("forward", host + fused[:, 0, 1], device + fused[:, 0, 0])]
    if rows.training:
        device, host = computed("bwd_x", "bwd_w") + (1 - forward) * swept + summed, launched("bwd")
        phases.append(("backward", host + fused[:, 1, 1], device + fused[:, 1, 0]))
        phases.append(("update", launched("parameter") + fused[:, 2, 1], updates + fused[:, 2, 0]))
    return phases


def step_time(busy: Array, launch: Array, p: Mapping[str, Any], xp: Any = np) -> Array:  # noqa: ANN401
    """Φ in ms: launching and computing overlap (a soft maximum), plus a constant a step."""
    power = 1 + xp.exp(p["overlap"])
    most = xp.maximum(busy, launch)
    return most * ((busy / most) ** power + (launch / most) ** power) ** (1 / power) + xp.exp(p["step"])


def launch_share(busy: Array, launch: Array, p: Mapping[str, Any]) -> Array:
    """Return the change of `step_time` in log by that of the time the host launches: 0 to 1, numpy."""
    power = 1 + np.exp(p["overlap"])
    shares = 1 / (1 + (busy / np.maximum(launch, 1e-12)) ** power)
    return shares * (1 - np.exp(p["step"]) / step_time(busy, launch, p))


def named(
    vector: Any,  # noqa: ANN401
    excess: float = 0.0,
    last: Any = None,  # noqa: ANN401
) -> dict[str, Any]:
    """Return coefficients as a mapping by name, with a `matrix_excess` and those of `LAST` beside them.

    vector, last: (K,) of `COEFFICIENTS`, or (K + L,) with `LAYER_TERMS` behind them.
    """
    layers = vector[len(COEFFICIENT_NAMES) :]
    terms = dict(zip(LAYER_NAMES, layers if len(layers) else [0.0] * len(LAYER_NAMES), strict=True))
    base = dict(zip(COEFFICIENT_NAMES, vector[: len(COEFFICIENT_NAMES)], strict=True))
    return base | terms | {MATRIX_EXCESS: excess, LAST: None if last is None else named(last)}
