"""Where the time of a step goes, as features that do not depend on its scale: what the correction forest sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.prediction.latency.roofline import (
    KINDS,
    PHASES,
    Rows,
    busy_and_launch,
    depthwise_times,
    numpy_segments,
    pass_times,
    product_times,
)
from torchedge.prediction.latency.workload import PASSES

SHARE_NAMES = (
    *(f"share_{kind}_{phase}" for phase in PHASES for kind in KINDS), "share_depthwise",
    *(f"share_{name}" for name in PASSES), "log2_m", "log2_n", "log2_op", "odd_channels", "log2_batch", "log2_busy_over_launch",
    "log2_busy_a_sample", "log2_launch",
)  # fmt: skip


def time_shares(rows: Rows, p: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Return (R, F), F = len(SHARE_NAMES): shares of the busy time by work, time-weighted mean sizes of products, and the step's scale."""
    busy, launch = busy_and_launch(rows, p)
    times = product_times(rows, p, np)
    m, n, k, stride, _, op = (rows.products[:, i] for i in range(6))
    kinds = {"1x1": k == 1, "3x3": (k > 1) & (stride == 1), "other": (k > 1) & (stride != 1)}
    zero = np.zeros(rows.count)
    columns = []
    for phase in PHASES:
        for kind in KINDS:
            time = times.get(phase)
            part = zero if time is None else numpy_segments(time * kinds[kind], rows.product_row, rows.count)
            columns.append(part / busy)
    deep = depthwise_times(rows, p, np) if len(rows.depthwise) else np.zeros(0)
    columns.append((numpy_segments(deep, rows.depthwise_row, rows.count) if len(deep) else zero) / busy)
    columns += [np.broadcast_to(time, (rows.count,)) / busy for time in pass_times(rows, p, np)]
    weight = times["fwd"]
    total = np.maximum(numpy_segments(weight, rows.product_row, rows.count), 1e-12)
    for size in (np.log2(m), np.log2(n), np.log2(op), ((m % 4 != 0) * 1.0 + (n % 4 != 0)) / 2):
        columns.append(numpy_segments(weight * size, rows.product_row, rows.count) / total)
    columns += [np.log2(rows.batch), np.log2(busy / launch), np.log2(busy / rows.batch), np.log2(launch)]
    return np.stack([np.asarray(c, dtype=float) for c in columns], axis=1)
