"""Fits the time model's coefficients to measured steps: maximum a posteriori under the hardware's priors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchedge.prediction.latency.roofline import (
    Rows,
    WorkTimes,
    named,
    prior_spread,
    step_time,
    work_times,
)
from torchedge.prediction.latency.workload import PASSES
from torchedge.profiling.layer_times import KINDS

FloatArray = npt.NDArray[np.float64]

DELTA = 0.03
"""Relative error at which the loss turns from squared to linear."""

RIDGE, RIDGE_ONE_NETWORK = 0.4, 1.5
"""Weight of the priors; a single network pins little down and leans on them more. Chosen by cross-validation
inside the training levels."""

PARTS, RIDGE_PARTS = 0.3, 0.15
"""Weight of the times of layers by kind beside those of steps, and of the priors where these are known."""

_PARTS_DELTA = 0.06
_BOUND = 6.0
_ITERATIONS = 200


def fit_coefficients(
    rows: Rows,
    measured: FloatArray,
    weights: FloatArray,
    prior: FloatArray,
    *,
    ridge: float = RIDGE,
    spread: FloatArray | None = None,
    parts: FloatArray | None = None,
) -> FloatArray:
    """Return the coefficients (K,) that explain measured times (R,) in ms best.

    Minimises the weighted pseudo-Huber loss of log(predicted / measured) plus `ridge` times the mean squared
    distance from the prior in standard deviations, by L-BFGS in float64 from the prior. Deterministic.

    spread: (K, Z) what Z independent standard deviations add to the coefficients; default: the hardware's
    priors, one a coefficient. parts: (R, 6) measured ms of layers by `layer_times.KINDS` (NaN: not known),
    which then join the loss.
    """
    fitted = rows.mapped(lambda a: torch.from_numpy(np.ascontiguousarray(a)))
    moves = torch.from_numpy(np.diag(prior_spread()) if spread is None else spread)
    mean = torch.from_numpy(prior)
    target = torch.from_numpy(np.log(measured))
    share = torch.from_numpy(weights / weights.sum())
    apart = None if parts is None else torch.from_numpy(np.log(parts))
    distance = torch.zeros(moves.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [distance],
        max_iter=_ITERATIONS,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-7,
    )

    def coefficients() -> torch.Tensor:
        return mean + moves @ (_BOUND * torch.tanh(distance / _BOUND))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        p = named(coefficients())
        times = work_times(fitted, p, torch, _torch_segments)
        error = (torch.log(step_time(times.busy, times.launch, p, torch)) - target) / DELTA
        loss = (share * (torch.sqrt(1 + error * error) - 1)).sum() + ridge * (distance * distance).mean()
        if apart is not None:
            loss = loss + PARTS * _parts_loss(fitted, times, apart, share)
        loss.backward()
        return loss

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the arrays are small: more threads only wait for each other
    try:
        optimizer.step(closure)
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        return np.asarray(coefficients().numpy(), dtype=np.float64)


def _parts_loss(rows: Rows, times: WorkTimes, measured: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the loss of the times by kind; measured: (R, 6) logarithms, NaN where there is none."""
    products, passes = times.products, dict(zip(PASSES, times.passes, strict=True))
    sums = {
        "product_forward": _torch_segments(products["fwd"], rows.product_row, rows.count),
        "norm": passes["norm"],
        "activation": passes["activation"],
        "pool": passes["pool_in"] + passes["pool_window"],
    }
    if rows.training:
        back = products["bwd_x"] + products["bwd_w"]
        sums["product_backward"] = _torch_segments(back, rows.product_row, rows.count)
    if times.depthwise is not None:
        sums["depthwise"] = _torch_segments(times.depthwise, rows.depthwise_row, rows.count)
    total = torch.zeros((), dtype=torch.float64)
    for name, predicted in sums.items():
        column = measured[:, KINDS.index(name)]
        known = torch.isfinite(column)
        error = (torch.log(predicted[known].clamp_min(1e-9)) - column[known]) / _PARTS_DELTA
        total = total + (share[known] * (torch.sqrt(1 + error * error) - 1)).sum()
    return total


def _torch_segments(values: Any, index: Any, count: int) -> Any:  # noqa: ANN401
    """Sum values that share an index (torch, differentiable)."""
    return torch.zeros(count, dtype=values.dtype).index_add(0, index, values)
