"""The one registry of prediction features and of named feature sets.

A feature is one function of a `FeatureInputs`, registered by name::

    @feature("parameters")
    def parameters(net: FeatureInputs) -> BatchAmount:
        return BatchAmount(sum(v.numel[0] for v in net.graph.parameters))

and a feature set an order of such names, ``add_feature_set("my-set", ("mem_w", "parameters"))``. A forest
stores the hash of its set's order, so that it never reads the columns of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchedge.errors import InputError, did_you_mean
from torchedge.graphs import ForwardGraph, Mode
from torchedge.prediction.feature_sets.convolutions import (
    BatchAmount,
    ConvolutionCall,
    Convolutions,
    convolution_calls,
)
from torchedge.storage.locks import cached_property

Curve = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""(B,) batch sizes -> (B,) values: a feature that is not affine in the batch size (a peak)."""


class FeatureInputs:
    """The argument of feature functions: a graph, its convolutions as columns, and other features by name.

    calls: the convolutions, by default those of the graph. exact: Python integers in place of float64.
    """

    def __init__(
        self, graph: ForwardGraph, calls: Sequence[ConvolutionCall] | None = None, *, exact: bool = False
    ) -> None:
        self.graph = graph
        self._calls, self._exact = calls, exact
        self._values: dict[str, BatchAmount | Curve] = {}

    @cached_property
    def convolutions(self) -> Convolutions:
        """The 2-D convolution calls."""
        calls = convolution_calls(self.graph) if self._calls is None else self._calls
        return Convolutions(calls, exact=self._exact)

    def value(self, name: str) -> BatchAmount | Curve:
        """Return a feature, computed once."""
        value = self._values.get(name)
        if value is None:
            value = self._values[name] = _FEATURES[name](self)
        return value

    def __getitem__(self, name: str) -> BatchAmount:
        """Return a feature that is affine in the batch size, for sums of features."""
        value = self.value(name)
        if not isinstance(value, BatchAmount):
            raise TypeError(
                f"feature {name!r} is a curve over the batch size; expected a BatchAmount to add up"
            )
        return value


Feature = Callable[[FeatureInputs], BatchAmount | Curve]
AnyFeature = TypeVar("AnyFeature", bound=Feature)


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """A named order of features; `mode`: of the capture, if it is computed from a model."""

    name: str
    names: tuple[str, ...]
    mode: Mode = "train"

    def __len__(self) -> int:
        return len(self.names)


_FEATURES: dict[str, Feature] = {}
_SETS: dict[str, FeatureSet] = {}


def feature(name: str) -> Callable[[AnyFeature], AnyFeature]:
    """Register a function of `FeatureInputs` as the feature `name`; raises InputError for a taken name."""
    if name in _FEATURES:
        raise InputError(f"a feature named {name!r} is registered already; choose another name")

    def register(function: AnyFeature) -> AnyFeature:
        _FEATURES[name] = function
        return function

    return register


def add_feature_set(name: str, names: Sequence[str], *, mode: Mode = "train") -> FeatureSet:
    """Register an order of features under a name and return it.

    Raises InputError for a taken name, an unregistered feature, none at all or one given twice.
    """
    order = tuple(names)
    if name in _SETS:
        raise InputError(f"a feature set named {name!r} is registered already; choose another name")
    unknown = [item for item in order if item not in _FEATURES]
    if unknown:
        raise InputError(
            f"feature set {name!r} names {unknown[0]!r}, which no function computes; use @feature"
        )
    if not order or len(set(order)) != len(order):
        raise InputError(
            f"feature set {name!r} has {len(order)} names, {len(set(order))} different; expected each once"
        )
    _SETS[name] = FeatureSet(name, order, mode)
    return _SETS[name]


def find_feature_set(name: str) -> FeatureSet:
    """Return a feature set by name; raises InputError with the names of all sets where there is none."""
    chosen = _SETS.get(name)
    if chosen is None:
        hint = did_you_mean(name, _SETS, f"expected one of {', '.join(_SETS)}")
        raise InputError(f"no feature set is named {name!r}; {hint}")
    return chosen


def list_feature_sets() -> tuple[FeatureSet, ...]:
    """Return all feature sets, in order of registration."""
    return tuple(_SETS.values())


def set_of_names(names: Sequence[str]) -> str | None:
    """Return the name of the feature set with exactly these features in this order, if there is one."""
    wanted = tuple(names)
    return next((chosen.name for chosen in _SETS.values() if chosen.names == wanted), None)
