"""Scores for spaces without an accuracy predictor: stand-ins for accuracy that use no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.graphs import GraphFamily
from torchedge.graphs.sizes import Amounts
from torchedge.ops.specs import forward_flops
from torchedge.searching.evolution import Score
from torchedge.searching.spaces import SearchSpace


def gflops_score(space: SearchSpace) -> Score:
    """Return a score: the logarithm of forward GFLOPs per sample (a multiply-add counts as two).

    A stand-in for accuracy that uses no data: larger networks of one family tend to be more accurate.
    """
    flops: WeakKeyDictionary[GraphFamily, Amounts] = WeakKeyDictionary()

    def score(encodings: Sequence[Any]) -> npt.NDArray[np.float64]:
        genes = np.array([space.encode(encoding) for encoding in encodings], dtype=np.int16)
        counts = np.empty(len(genes))
        for family, values, rows in space.sketch(genes, "infer"):
            if family not in flops:
                sample_flops = sum(forward_flops(family.template), start=0)
                flops[family] = Amounts([sample_flops], family.symbols, float)
            counts[rows] = flops[family].at(values)[0]
        return np.log10(np.maximum(counts, 1.0) / 1e9)

    return score
