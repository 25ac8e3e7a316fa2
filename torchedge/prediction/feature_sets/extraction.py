"""`features`: the columns of a feature set for a model or graph at one or many batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from torchedge.errors import InputError, check_choice, checked_call, did_you_mean
from torchedge.graphs import ForwardGraph, Mode
from torchedge.graphs.sizes import LARGEST_BATCH
from torchedge.prediction.feature_sets.convolutions import BatchAmount
from torchedge.prediction.feature_sets.registry import Curve, FeatureInputs, FeatureSet, find_feature_set

if TYPE_CHECKING:
    import torch

Float64 = NDArray[np.float64]

_EXACT = 2.0**53


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Named numbers of one network.

    names: the F columns, in the order of the feature set; values: (F,) float64, or (B, F) for B batch sizes,
    read-only; batch_size: as requested; feature_set: the name of the set.
    """

    names: tuple[str, ...]
    values: Float64
    batch_size: int | tuple[int, ...]
    feature_set: str

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a float, or (B,) of them
        """Return one feature, a float or (B,) of them; raises InputError for an unknown name."""
        if name not in self.names:
            hint = did_you_mean(name, self.names, "see its .names")
            raise InputError(f"feature set {self.feature_set!r} has no feature {name!r}; {hint}")
        column = self.values[..., self.names.index(name)]
        return float(column) if column.ndim == 0 else column

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def as_dict(self) -> dict[str, Any]:
        """Return name -> number (or list of B numbers), plain data ready for JSON."""
        return dict(zip(self.names, self.values.T.tolist(), strict=True))

    def __str__(self) -> str:
        rows = np.atleast_2d(self.values)
        sizes = self.batch_size if isinstance(self.batch_size, tuple) else (self.batch_size,)
        wide = max(map(len, self.names))
        table = [(f"batch {size}", *map(_number, row)) for size, row in zip(sizes, rows, strict=True)]
        columns = [(self.feature_set, *self.names), *table]
        widths = [wide] + [max(map(len, column)) for column in table]
        lines = []
        for cells in zip(*columns, strict=True):
            numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            lines.append("  ".join([cells[0].ljust(wide), *numbers]))
        return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.1f}"


@dataclass(frozen=True, slots=True, eq=False)
class FeaturePlan:
    """A feature set computed for one graph; only the batch size is open.

    const, slope: (F,) float64; the features are ``const + slope * batch_size``, whole numbers exact up to
    2**53. curves: the columns that are not affine in the batch size, with their functions.
    """

    const: Float64
    slope: Float64
    curves: tuple[tuple[int, Curve], ...] = ()

    def at(self, batch_sizes: NDArray[np.int64]) -> Float64:
        """Return the features (B, F) at batch sizes (B,)."""
        values: Float64 = self.const + self.slope * batch_sizes[:, None]
        for column, curve in self.curves:
            values[:, column] = curve(batch_sizes)
        return values


_plans: WeakKeyDictionary[ForwardGraph, dict[str, FeaturePlan]] = WeakKeyDictionary()


def feature_plan(graph: ForwardGraph, feature_set: str = "perf4sight") -> FeaturePlan:
    """Return a feature set computed for a graph, once a graph."""
    plans = _plans.setdefault(graph, {})
    plan = plans.get(feature_set)
    if plan is None:
        plan = plans[feature_set] = _compute(graph, find_feature_set(feature_set))
    return plan


def _compute(graph: ForwardGraph, chosen: FeatureSet) -> FeaturePlan:
    plan = _plan(FeatureInputs(graph), chosen)
    if max(plan.const.max(), plan.slope.max()) < _EXACT:
        return plan  # every sum and product on the way was a whole number that float64 holds
    return _plan(FeatureInputs(graph, exact=True), chosen)


def _plan(net: FeatureInputs, chosen: FeatureSet) -> FeaturePlan:
    values = [net.value(name) for name in chosen.names]
    amounts = [item if isinstance(item, BatchAmount) else BatchAmount() for item in values]
    curves = tuple((column, item) for column, item in enumerate(values) if not isinstance(item, BatchAmount))
    const = np.array([amount.const for amount in amounts], dtype=np.float64)
    return FeaturePlan(const, np.array([amount.slope for amount in amounts], dtype=np.float64), curves)


def feature_rows(
    graphs: Sequence[ForwardGraph], which: NDArray[np.intp], batch: Float64, feature_set: str
) -> Float64:
    """Return the features (R, F) of rows: row r is `graphs[which[r]]` at batch size `batch[r]`."""
    columns = np.empty((len(which), len(find_feature_set(feature_set))))
    for place in np.unique(which):
        rows = which == place
        columns[rows] = feature_plan(graphs[place], feature_set).at(batch[rows].astype(np.int64))
    return columns


@checked_call()
def features(
    model_or_graph: torch.nn.Module | ForwardGraph,
    batch_size: int | Sequence[int] | NDArray[np.integer[Any]],
    *,
    feature_set: str | None = None,
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    mode: Mode | None = None,
) -> Features:
    """Return the prediction features of a model, or of a graph captured before (perf4sight, section 5.2).

    batch_size: one, or B of them for values of shape (B, F).
    feature_set: a registered name; by default "perf4sight" (56 columns) in train mode and
    "perf4sight-infer" (15 columns) in infer mode.
    input_size, example: the model's input, as for `capture`; by default its own metadata decide.
    mode: the mode the model is captured in; by default that of the feature set.
    Raises InputError for an unusable argument and CaptureError for a model that cannot be captured.
    """
    sizes = np.atleast_1d(checked_batches(batch_size))
    if mode is not None:
        check_choice("mode", mode, get_args(Mode))
    if isinstance(model_or_graph, ForwardGraph):
        graphs = [_checked_graph(model_or_graph, input_size, example, mode)] * len(sizes)
        chosen = find_feature_set(
            feature_set or _default_set("train" if model_or_graph.training else "infer")
        )
    else:
        chosen = find_feature_set(feature_set or _default_set(mode or "train"))
        from torchedge.tracing.capturing import CaptureRequest, capture_each

        mode = mode or chosen.mode
        request = CaptureRequest(model_or_graph, None, mode, example, input_size, None)
        graphs = capture_each(request, sizes.tolist())
    different = list({id(graph): graph for graph in graphs}.values())
    which = np.array([different.index(graph) for graph in graphs])
    for place, graph in enumerate(different):
        graph.check_batch_sizes(sizes[which == place].tolist())
    values = feature_rows(different, which, sizes.astype(np.float64), chosen.name)
    values.setflags(write=False)
    if np.ndim(batch_size) == 0:
        return Features(chosen.names, values[0], int(sizes[0]), chosen.name)
    return Features(chosen.names, values, tuple(sizes.tolist()), chosen.name)


def checked_batches(batch_sizes: Any) -> NDArray[np.int64]:  # noqa: ANN401
    """Return a batch size (), or several (B,); raises InputError unless all are whole numbers from 1 on."""
    array = np.asarray(batch_sizes)
    unusable = array.dtype.kind not in "iu" or array.size == 0 or array.ndim > 1
    if unusable or (array < 1).any() or (array > LARGEST_BATCH).any():
        raise InputError(
            f"batch_size is {batch_sizes!r}; expected a whole number from 1 to {LARGEST_BATCH}, or a "
            "sequence of them"
        )
    return array.astype(np.int64)


def _default_set(mode: Mode) -> str:
    return "perf4sight" if mode == "train" else "perf4sight-infer"


def _checked_graph(
    graph: ForwardGraph,
    input_size: tuple[int, ...] | None,
    example: Any,  # noqa: ANN401
    mode: Mode | None,
) -> ForwardGraph:
    if input_size is not None or example is not None:
        raise InputError(
            "a captured graph has its input size already; omit input_size and example, or pass the model"
        )
    captured = "train" if graph.training else "infer"
    if mode not in (None, captured):
        raise InputError(
            f"mode is {mode!r}, but the graph was captured in {captured!r} mode; pass the model instead"
        )
    return graph
