"""Which few points of a device to measure: those that tell most about all others (optimal design).

A new device's step is taken to be linear, in logarithms, in unknowns of standard normal prior: how each
row's figures react to them is known before anything is measured. Points are chosen one after the other, each
the one that lowers the remaining variance over all rows most (Bayesian V-optimality).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["NOISE", "choose_points"]

FloatArray = npt.NDArray[np.float64]

NOISE = 0.05
"""Standard deviation, in log, of what a measured figure has that no model explains."""


def choose_points(
    reactions: Sequence[FloatArray], weights: FloatArray, candidates: npt.NDArray[np.intp], count: int
) -> npt.NDArray[np.intp]:
    """Return the rows (count,) to measure, in the order of what they tell; all candidates if there are fewer.

    reactions: for each figure that a measurement of a row gives, (R, Z): its change in log by one standard
    deviation of each of Z unknowns (other unknowns for every figure). weights: (R,) how much a row counts.
    candidates: rows that may be chosen. Deterministic; of equals the first wins.
    """
    left = [int(c) for c in candidates]
    covariances = [np.eye(r.shape[1]) for r in reactions]
    chosen: list[int] = []
    while left and len(chosen) < count:
        gain = np.zeros(len(left))
        for reaction, covariance in zip(reactions, covariances, strict=True):
            spread = reaction[left] @ covariance
            shared = reaction @ spread.T
            own = np.einsum("ij,ij->i", spread, reaction[left])
            gain += (weights @ shared**2) / (own + NOISE**2)
        best = left.pop(int(np.argmax(gain)))
        chosen.append(best)
        for place, (reaction, covariance) in enumerate(zip(reactions, covariances, strict=True)):
            moved = covariance @ reaction[best]
            covariances[place] = covariance - np.outer(moved, moved) / (reaction[best] @ moved + NOISE**2)
    return np.array(chosen, dtype=np.intp)
