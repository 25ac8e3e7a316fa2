"""One spelling for each view: sizes and dimensions written out, so that rules need no cases for defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Attributes = dict[str, Any]
_Rule = Callable[[Attributes, tuple[int, ...], tuple[int, ...]], Attributes]


def canonical(kind: str, attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    """Return the attributes with sizes of the result, dimensions from 0 on, and bounds within the source.

    source: shape of the operator's argument `input` (of the first tensor, for `cat`); made: of its result.
    """
    rule = _RULES.get(kind)
    return attrs if rule is None else {**attrs, **rule(attrs, source, made)}


def _size(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    return {"size": made}


def _dim(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    return {"dim": attrs.get("dim", 0) % max(len(source), 1)}


def _new_dim(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    return {"dim": attrs["dim"] % len(made)}


def _permute(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    return {"dims": tuple([d % len(source) for d in attrs["dims"]])}


def _squeeze(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    given = attrs.get("dim", tuple(range(len(source))))
    dims = given if isinstance(given, tuple) else (given,)
    return {"dim": tuple(sorted({d % len(source) for d in dims if source[d] == 1})) if source else ()}


def _reduction(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    given = attrs.get("dim")
    dims = given if isinstance(given, tuple) else () if given is None else (given,)
    everything = tuple(range(len(source)))
    return {"dim": tuple(sorted(d % len(source) for d in dims)) if dims and source else everything}


def _slice(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    dim = int(attrs.get("dim", 0)) % len(source)
    step = int(attrs.get("step", 1))
    start, end, _ = slice(attrs.get("start"), attrs.get("end"), step).indices(source[dim])
    return {"dim": dim, "start": start, "end": max(start, end), "step": step}


def _select(attrs: Attributes, source: tuple[int, ...], made: tuple[int, ...]) -> Attributes:
    dim = attrs["dim"] % len(source)
    return {"dim": dim, "index": attrs["index"] % source[dim]}


_RULES: Mapping[str, _Rule] = {
    "view": _size, "expand": _size, "permute": _permute, "squeeze": _squeeze, "unsqueeze": _new_dim,
    "slice": _slice, "slice_scatter": _slice, "select": _select, "select_scatter": _select, "cat": _dim,
    "_softmax": _dim, "_log_softmax": _dim, "_safe_softmax": _dim, "index_select": _dim, "gather": _dim,
    "scatter": _dim, "scatter_add": _dim, "sum": _reduction, "mean": _reduction, "amax": _reduction,
    "amin": _reduction, "var": _reduction, "var_mean": _reduction,
}  # fmt: skip
