"""Analyses of a model at any sequence length, without its graph at that length.

Amounts follow the length in polynomials of degree two. They go through the analyses at three lengths and have
to meet those at two others, bytes exactly; else each length is analysed itself. So is a length that equals
another size of the graph, which a rule may treat apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from torchedge.errors import CaptureError, InputError
from torchedge.graphs.sizes import Affine
from torchedge.prediction.analysis import Analysis, analyse
from torchedge.prediction.latency.workload import Workload, update_cost
from torchedge.prediction.memory.compiled_replay import expect_replays
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import Tape
from torchedge.storage.locks import cached_property
from torchedge.tracing.capturing import Method, capture_request
from torchedge.tracing.sequence_lengths import LengthFamily

T = TypeVar("T", Tape, Workload)

_SMALL, _LARGE = 9, 4096
"""Lengths near which the polynomials are checked; shorter and longer ones are analysed themselves."""
_LEAST_POSITIONS = 64
"""Models with fewer positions have too few lengths to check."""
_ROUNDING = 1e-9
_REMEMBERED = 64
"""Lengths whose results stay."""


def analyse_length(family: LengthFamily, length: int) -> Analysis:
    """Return the analysis of a family's graph at one length."""
    curves = family.results.setdefault(__name__, _Curves(family))
    return LengthAnalysis(family.own, analyse(family.own)._results, curves, length)


@dataclass(frozen=True, slots=True)
class LengthAnalysis(Analysis):
    """An analysis at another length than its graph's."""

    curves: _Curves
    length: int

    def work_under(self, settings: StepSettings) -> Workload:
        """Return the work of a step under these settings."""
        kind = ("work", settings.amp, settings.backend, update_cost(settings))
        return self.curves.at(self.length, kind, lambda analysis: analysis.work_under(settings))

    def tape(self, settings: StepSettings) -> Tape:
        """Return the allocations of one step under these settings."""
        return self.curves.at(self.length, ("tape", settings), lambda analysis: analysis.tape(settings))


@dataclass(frozen=True, eq=False)
class _Curves:
    """What was computed of a family: results by kind and length, and their polynomials by kind."""

    family: LengthFamily
    results: dict[Hashable, dict[int, Any]] = field(default_factory=dict)
    curves: dict[Hashable, Any] = field(default_factory=dict)

    def at(self, length: int, kind: Hashable, compute: Callable[[Analysis], T]) -> T:
        """Return `compute` of the analysis at a length."""
        results = self.results.setdefault(kind, {})
        if kind in self.curves:
            expect_replays()  # more than one prediction of five captures: loading the kernel is little beside
        if length not in results:
            if len(results) >= _REMEMBERED:
                del results[next(iter(results))]
            results[length] = self._curve_at(length, kind, compute)
        result: T = results[length]
        return result

    def _curve_at(self, length: int, kind: Hashable, compute: Callable[[Analysis], T]) -> T:
        def itself(length: int) -> T:
            return compute(analyse(self.family.graph(length)))

        if self.family.most < _LEAST_POSITIONS or self.sizes is None:
            return itself(length)
        least, *_, most = self.checked
        if length == self.family.length or not least <= length <= most or length in self.sizes:
            return itself(length)
        if kind not in self.curves:
            self.curves[kind] = _through([itself(n) for n in self.checked], self.checked)
        curve = self.curves[kind]
        return itself(length) if curve is None else curve(length)

    @cached_property
    def sizes(self) -> frozenset[int] | None:
        """All numbers among the sizes of the graph's values that do not follow the length.

        None if the number of values follows the length, as in a loop over the positions.
        """
        numbers = [_numbers(value.shape) for value in self.family.graph(self._unusual).values]
        others = [_numbers(value.shape) for value in self.family.graph(self._unusual + 2).values]
        if len(numbers) != len(others):
            return None
        return frozenset(n for a, b in zip(numbers, others, strict=True) for n in a if n in b)

    @cached_property
    def _unusual(self) -> int:
        """A length that is allowed, as is the second one above it."""
        return min(max(self.family.length, 37), self._reach - 2)

    @cached_property
    def _reach(self) -> int:
        """The longest length up to `_LARGE` that is captured, halved until it is: tables of positions end."""
        family, length = self.family, min(self.family.most, _LARGE)
        method: Method = "trace" if family.own.captured_by == "trace" else "auto"
        captured: Callable[[int], object] = family.graph
        while length > max(family.length, _LEAST_POSITIONS):
            try:
                captured(length)
            except (CaptureError, InputError):
                length //= 2
                captured = partial(_tried, family, method)
            else:
                return length
        return max(length, family.length)

    @cached_property
    def checked(self) -> tuple[int, ...]:
        """The lengths that are analysed: a small one, three in a row, a large one."""
        most = self._reach
        middle = min(self.family.length, most - 8)
        free = [n for n in range(2, most + 1) if n not in (self.sizes or ())]
        row = [n for n in free if n + 1 in free and n + 2 in free]
        if not row:
            return (0, 0)
        first = min(row, key=lambda n: abs(n - middle))
        return (min(free, key=lambda n: abs(n - _SMALL)), first, first + 1, first + 2, free[-1])


def _tried(family: LengthFamily, method: Method, length: int) -> None:
    """Capture at a length by one method: after failures, where all of them would take seconds."""
    capture_request(replace(family.at(length), method=method))


def _numbers(shape: Sequence[Any]) -> set[int]:
    return {n for d in shape for n in ((d.slope, d.const) if isinstance(d, Affine) else (d,))}


def _through(samples: Sequence[T], lengths: Sequence[int]) -> Callable[[int], T] | None:
    """Return the samples as a function of the length, None where they are no polynomials of degree two.

    samples: dataclasses at lengths (small, n, n + 1, n + 2, large). Arrays of amounts follow the length;
    places and categories, which are narrower numbers, and other fields are the same in all samples.
    """
    first, functions = samples[0], dict[str, Callable[[int], Any]]()
    for name in (f.name for f in fields(first) if f.init and f.name != "known"):
        parts = [getattr(sample, name) for sample in samples]
        if isinstance(parts[0], np.ndarray):
            if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
                return None
            if any(not np.array_equal(part, parts[0]) for part in parts):
                if parts[0].dtype not in (np.int64, np.float64):
                    return None
                curve, off = _parabola(parts, lengths), 0.0 if parts[0].dtype.kind == "i" else _ROUNDING
                if any(not np.allclose(curve(n), p, off, 0) for n, p in zip(lengths, parts, strict=True)):
                    return None
                functions[name] = curve
        elif hasattr(parts[0], "__dataclass_fields__") and name in ("from_start", "scratch"):
            function = _through(parts, lengths)
            if function is None:
                return None
            functions[name] = function
        elif any(part != parts[0] for part in parts):
            return None
    return lambda length: replace(first, **{name: function(length) for name, function in functions.items()})


def _parabola(parts: Sequence[npt.NDArray[Any]], lengths: Sequence[int]) -> Callable[[int], npt.NDArray[Any]]:
    """Return the polynomial of degree two through arrays at three of the lengths (small, n, n+1, n+2, large).

    Whole numbers: through those in a row, where differences are exact. Floats: through those far apart.
    """
    if parts[0].dtype.kind == "i":
        zero, step, bend = parts[1], parts[2] - parts[1], parts[3] - 2 * parts[2] + parts[1]
        start = lengths[1]
        return lambda length: (
            zero + step * (length - start) + bend * ((length - start) * (length - start - 1) // 2)
        )
    knots = [lengths[place] for place in (0, 1, 4)]
    first, second, third = (parts[place] for place in (0, 1, 4))
    x, y, z = knots
    slope = (second - first) / (y - x)
    bend = ((third - second) / (z - y) - slope) / (z - x)
    return lambda length: first + (length - x) * (slope + bend * (length - y))
