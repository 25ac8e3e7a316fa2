"""Scores for spaces without an accuracy predictor: stand-ins for accuracy that know no data."""

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
    """Return a score that is the logarithm of a candidate's forward GFLOPs (a multiply-add is two), a sample.

    A stand-in for accuracy, which larger networks of one family tend to have more of; it knows no data.
    """
    flops: WeakKeyDictionary[GraphFamily, Amounts] = WeakKeyDictionary()

    def score(encodings: Sequence[Any]) -> npt.NDArray[np.float64]:
        genes = np.array([space.encode(encoding) for encoding in encodings], dtype=np.int16)
        counts = np.empty(len(genes))
        for family, values, rows in space.sketch(genes, "infer"):
            if family not in flops:
                of_one_sample = sum(forward_flops(family.template), start=0)
                flops[family] = Amounts([of_one_sample], family.symbols, float)
            counts[rows] = flops[family].at(values)[0]
        return np.log10(np.maximum(counts, 1.0) / 1e9)

    return score
