"""Where the time of a step goes, as features free of its scale: what the correction forest sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchedge.prediction.latency.roofline import KINDS, PHASES, Rows, WorkTimes, numpy_segments
from torchedge.prediction.latency.workload import PASSES

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


def time_shares(rows: Rows, times: WorkTimes) -> npt.NDArray[np.float64]:
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
    deep = times.depthwise
    columns.append((zero if deep is None else numpy_segments(deep, rows.depthwise_row, rows.count)) / busy)
    columns += [np.broadcast_to(time, (rows.count,)) / busy for time in times.passes]
    weight = times.products["fwd"]
    total = np.maximum(numpy_segments(weight, rows.product_row, rows.count), 1e-12)
    for size in (np.log2(m), np.log2(n), np.log2(op), ((m % 4 != 0) * 1.0 + (n % 4 != 0)) / 2):
        columns.append(numpy_segments(weight * size[rows.product_line], rows.product_row, rows.count) / total)
    columns += [np.log2(rows.batch), np.log2(busy / launch), np.log2(busy / rows.batch), np.log2(launch)]
    return np.stack([np.asarray(c, dtype=float) for c in columns], axis=1)
