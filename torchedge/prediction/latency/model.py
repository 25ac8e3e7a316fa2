"""The latency of a device: the time model's coefficients, a forest for its bias, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.arrays import FloatArray
from torchedge.forests.trees import Forest, evaluate, features_outside, outside_hull
from torchedge.prediction.feature_sets import set_of_names
from torchedge.prediction.intervals import DistanceScale, ErrorModel
from torchedge.prediction.latency.compiled_work import with_fused
from torchedge.prediction.latency.lanes import Phase
from torchedge.prediction.latency.rates import CompiledRates
from torchedge.prediction.latency.roofline import (
    KINDS,
    PHASES,
    Terms,
    WorkRows,
    WorkTimes,
    launch_share,
    named,
    numpy_segments,
    pack,
    phase_times,
    product_terms,
    step_time,
    work_times,
)
from torchedge.prediction.latency.workload import PASSES, Workload

SHARE_NAMES = (
    *(f"share_{kind}_{phase}" for phase in PHASES for kind in KINDS),
    "share_depthwise",
    *(f"share_{name}" for name in PASSES),
    "log2_m",
    "log2_n",
    "log2_op",
    "odd_channels",
    "log2_batch",
    "log2_busy_over_launch",
    "log2_busy_a_sample",
    "log2_launch",
)
"""Shares of the time of a step, free of its scale: the features of the correction forest."""

WIDEST = 1.6
"""Largest half-width of a 90 % interval in log, a factor of five: twice that of an unmeasured device.

Far from all measured rows the difficulty grows without bound, but the time model's physics still holds."""


@dataclass(frozen=True, slots=True)
class Times:
    """Latencies of R rows: value, low, high (R,) in ms; outside (R,): features leave the training hull.

    features: (R, F) of `SHARE_NAMES`; seen: (R, F) the features that the forest read. phases: of a single
    row, as the time model counts them.
    """

    value: FloatArray
    low: FloatArray
    high: FloatArray
    outside: npt.NDArray[np.bool_]
    features: FloatArray
    seen: FloatArray
    phases: tuple[Phase, ...] = ()

    def mixed(self, other: Times, share: float) -> Times:
        """Return the mean with the times of the same rows in another precision, which has a share of it."""
        return replace(self._summed(1 - share, other, share), outside=self.outside | other.outside)

    def after(self, other: Times, count: int) -> Times:
        """Return the times of the same rows behind `count` others, one after the other."""
        return replace(self._summed(1, other, count), phases=count * other.phases + self.phases)

    def _summed(self, weight: float, other: Times, by: float) -> Times:
        parts = {n: weight * getattr(self, n) + by * getattr(other, n) for n in ("value", "low", "high")}
        return replace(self, **parts)


@dataclass(frozen=True, slots=True, eq=False)
class LatencyModel:
    """Φ (or φ) of one device. Without forest and scale it is the analytic estimate alone.

    coefficients: (K,) as `roofline.COEFFICIENTS`; forest: over `SHARE_NAMES`, or over a registered
    feature set, predicting log(measured / analytic). amp: the autocast dtype of the steps it describes; count
    their work in it (`Analysis.work_under`). excess: how much slower matrix products compute than the
    coefficients say, in log, where these were scaled to another device or precision. host: times as long as
    the coefficients say that a launch takes on the host in use; unsure: half-width in log of the interval
    that this lies in. matrices: the model of steps that mostly
    multiply matrices (transformers), where one was fitted apart. spread: half-width in log of the
    interval in which the predicted steps lie around the described ones (compiled ones around eager ones);
    pace: the time of the predicted steps over that of the described ones. compiled: what the graphs of
    compiled steps cost, where those are known. calls: whether calls of views and modules take the host's
    time, as in fits of networks of matrices. lanes: how many channels batch norms read side by side, each as
    one block: those of fewer channels take hardly less time. last: the coefficients of convolutions of images
    that lie in channels_last, where those differ.
    """

    coefficients: FloatArray
    errors: ErrorModel
    forest: Forest | None = None
    scale: DistanceScale | None = None
    amp: str | None = None
    excess: float = 0.0
    host: float = 1.0
    unsure: float = 0.0
    known: WeakKeyDictionary[Workload, Terms] = field(default_factory=WeakKeyDictionary, repr=False)
    matrices: LatencyModel | None = None
    spread: float = 0.0
    pace: float = 1.0
    calls: bool = False
    compiled: CompiledRates | None = None
    lanes: float = 0.0
    last: FloatArray | None = None

    @property
    def feature_set(self) -> str | None:
        """The registered feature set that the forest reads; None: `SHARE_NAMES`, or no forest."""
        return None if self.forest is None else set_of_names(self.forest.feature_names)

    def analytic(
        self, work: Sequence[Workload], which: npt.NDArray[np.intp], batch: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the analytic time (R,) in ms and the scale-free features (R, F) of rows.

        Row r is `work[which[r]]` at batch size `batch[r]`.
        """
        return self._timed(work, which, batch)[:2]

    def _timed(
        self, work: Sequence[Workload], which: npt.NDArray[np.intp], batch: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, tuple[Phase, ...]]:
        """Return `analytic`, by how much of its own time in log a slower host's moves a row, its phases."""
        p = named(self.coefficients, self.excess, self.last)
        rows = pack(work, which, batch, calls=self.calls, lanes=self.lanes)
        terms = None
        if len(work) == 1:  # the same graph at another batch size, as when a batch size is sought
            terms = self.known.get(work[0])
            if terms is None:
                terms = self.known[work[0]] = product_terms(rows, p, np)
        times = work_times(rows, p, terms=terms)
        if rows.fused is not None and self.compiled is not None:
            times, p = with_fused(rows, times, self.compiled), p | {"overlap": self.compiled.overlap}
        described = self.forest is not None or self.scale is not None
        features = time_shares(rows, times) if described else np.zeros((rows.count, 0))
        launch = times.launch * self.host
        value = np.asarray(step_time(times.busy, launch, p))
        waits = launch_share(times.busy, launch, p)
        phases: list[Phase] = []
        if rows.count == 1:
            apart = phase_times(rows, times, p)
            phases = [(name, float(host[0]) * self.host, float(device[0])) for name, host, device in apart]
            phases.insert(0, ("begin", float(np.exp(p["step"])), 0.0))
        return value, features, waits, tuple(phases)

    def predict(
        self,
        work: Sequence[Workload],
        which: npt.NDArray[np.intp],
        batch: FloatArray,
        columns: FloatArray | None = None,
    ) -> Times:
        """Predict R rows; vectorised, numpy only. columns: (R, F) of `feature_set`, where there is one."""
        if self.matrices is not None:
            apart = np.array([w.of_matrices for w in work], dtype=np.bool_)[which]
            if apart.any():
                return self._split(work, which, batch, columns, apart)
        value, features, waits, phases = self._timed(work, which, batch)
        seen = features if columns is None else columns
        outside = np.zeros(len(value), dtype=np.bool_)
        if self.forest is not None:
            value = value * np.exp(evaluate(self.forest, seen))
            outside = outside_hull(self.forest, seen)
        value = value * self.pace
        difficulty = np.ones(len(value)) if self.scale is None else self.scale.difficulty(features)
        half = np.minimum(self.errors.half_width(difficulty), WIDEST)
        half = np.sqrt(half**2 + self.spread**2 + (self.unsure * waits) ** 2)
        return Times(value, value * np.exp(-half), value * np.exp(half), outside, features, seen, phases)

    def _split(
        self,
        work: Sequence[Workload],
        which: npt.NDArray[np.intp],
        batch: FloatArray,
        columns: FloatArray | None,
        apart: npt.NDArray[np.bool_],
    ) -> Times:
        """Predict rows of matrix products (`apart`) by their own model; features of theirs are NaN."""
        assert self.matrices is not None
        theirs = self.matrices.predict(work, which[apart], batch[apart])
        width = 0 if self.forest is None else len(self.forest.feature_names)
        size, count = len(which), len(SHARE_NAMES)
        value, low, high = (np.empty(size) for _ in range(3))
        outside = np.zeros(size, dtype=np.bool_)
        features, seen = np.full((size, count), np.nan), np.full((size, width), np.nan)
        value[apart], low[apart], high[apart] = theirs.value, theirs.low, theirs.high
        if not apart.all():
            own = ~apart
            ours = replace(self, matrices=None).predict(
                work, which[own], batch[own], None if columns is None else columns[own]
            )
            value[own], low[own], high[own], outside[own] = ours.value, ours.low, ours.high, ours.outside
            if self.forest is not None:
                seen[own] = ours.seen
            if ours.features.shape[1] == count:
                features[own] = ours.features
        return Times(value, low, high, outside, features, seen, theirs.phases if size == 1 else ())

    def outside_names(self, features: FloatArray) -> tuple[str, ...]:
        """Name the features of rows (R, F), as `Times.seen`, that leave the training hull."""
        read = features[np.isfinite(features).all(axis=1)]  # without rows that another model predicts
        return () if self.forest is None or not len(read) else tuple(features_outside(self.forest, read))


def time_shares(rows: WorkRows, times: WorkTimes) -> npt.NDArray[np.float64]:
    """Return (R, F), F = len(SHARE_NAMES).

    Shares of the busy time by work, time-weighted mean sizes of products, and the step's scale.
    """
    busy, launch = times.busy, times.launch
    m, n, k, stride, _, op = (rows.products[:, i] for i in range(6))
    kinds = {"1x1": k == 1, "3x3": (k > 1) & (stride == 1), "other": (k > 1) & (stride != 1)}
    masks = {kind: flag[rows.product_line] for kind, flag in kinds.items()}
    zero = np.zeros(rows.count)
    columns = []
    for phase in PHASES:
        time = times.products.get(phase)
        for kind in KINDS:
            part = zero if time is None else numpy_segments(time * masks[kind], rows.product_row, rows.count)
            columns.append(part / busy)
    deep = sum(times.depthwise.values())
    columns.append((numpy_segments(deep, rows.depthwise_row, rows.count) if times.depthwise else zero) / busy)
    columns += [np.broadcast_to(time, (rows.count,)) / busy for time in times.passes]
    weight = times.products["fwd"]
    total = np.maximum(numpy_segments(weight, rows.product_row, rows.count), 1e-12)
    for size in (np.log2(m), np.log2(n), np.log2(op), ((m % 4 != 0) * 1.0 + (n % 4 != 0)) / 2):
        columns.append(numpy_segments(weight * size[rows.product_line], rows.product_row, rows.count) / total)
    columns += [np.log2(rows.batch), np.log2(busy / launch), np.log2(busy / rows.batch), np.log2(launch)]
    return np.stack([np.asarray(c, dtype=float) for c in columns], axis=1)
