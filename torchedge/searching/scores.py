"""Scores for spaces without an accuracy predictor: stand-ins that say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from torchedge.graphs import GraphFamily
from torchedge.graphs.sizes import Amount, Amounts
from torchedge.ops import call_of, registry
from torchedge.searching.evolution import Score
from torchedge.searching.spaces import SearchSpace

_BATCH = 1


def gflops_score(space: SearchSpace) -> Score:
    """Return a score that is the logarithm of a candidate's forward GFLOPs (a multiply-add is two), a sample.

    A stand-in for accuracy, which larger networks of one family tend to have more of; it knows no data.
    """
    known: WeakKeyDictionary[GraphFamily, Amounts] = WeakKeyDictionary()

    def score(encodings: Sequence[Any]) -> npt.NDArray[np.float64]:
        genes = np.array([space.encode(encoding) for encoding in encodings], dtype=np.int16)
        found = np.empty(len(genes))
        for family, values, rows in space.sketch(genes, "infer"):
            if family not in known:
                known[family] = Amounts([_flops(family)], family.symbols, float)
            found[rows] = known[family].at(values)[0]
        return np.log10(np.maximum(found, 1.0) / 1e9)

    return score


def _flops(family: GraphFamily) -> Amount:
    """Return the FLOPs of a family's forward pass for one sample, by its symbols."""
    from torchedge.graphs.sizes import poly

    specs = registry()
    total: Amount = 0
    for op in family.template.ops:
        spec = specs.get(op.kind)
        if spec is not None:
            c0, c1, c2 = poly(spec.flops(call_of(family.template, op)))
            total = total + (c0 + c1 + c2)
    return total
