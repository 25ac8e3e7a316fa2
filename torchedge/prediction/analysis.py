"""The analysis of a graph, done once for all batch sizes: its work, its allocations, its traits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from torchedge.graphs import ForwardGraph
from torchedge.graphs.training_steps import AMP_DTYPES
from torchedge.prediction.latency.compiled_work import compiled_work
from torchedge.prediction.latency.workload import UpdateCost, Workload, count_work, update_cost, updated_at
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.compiled_steps import compiled_scales
from torchedge.prediction.memory.peaks import GraphTraits, graph_traits
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.tape import Tape

_LEAST = 0.01
"""The least share of the multiply-adds in a precision that counts."""


@dataclass(slots=True)
class _GraphResults:
    """Results for one graph, without a reference to it: they go with the graph."""

    tapes: dict[StepSettings, Tape] = field(default_factory=dict)
    works: dict[tuple[str | None, str, UpdateCost | None], Workload] = field(default_factory=dict)
    traits: GraphTraits | None = None


_results: WeakKeyDictionary[ForwardGraph, _GraphResults] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Analysis:
    """Results for one graph, each computed on first use."""

    graph: ForwardGraph
    _results: _GraphResults

    @property
    def work(self) -> Workload:
        """The work of a step in the precision the graph was captured in, updated by SGD with momentum."""
        return self.work_under(StepSettings())

    def work_under(self, settings: StepSettings) -> Workload:
        """Return the work of a step under these settings: autocast, the optimizer and the backend count."""
        works, cost, under = self._results.works, update_cost(settings), (settings.amp, settings.backend)
        if (*under, None) not in works:
            lowered = lower_precision(self.graph, StepSettings(amp=settings.amp, backend=settings.backend))
            works[(*under, None)] = count_work(lowered, tiled=settings.backend == "cuda")
        if (*under, cost) not in works:
            work, partition = updated_at(works[(*under, None)], cost), self.graph.partition
            if partition is not None:
                work = compiled_work(work, partition)
            works[(*under, cost)] = work
        return works[(*under, cost)]

    @property
    def traits(self) -> GraphTraits:
        """Parameters and their dtype, and whether the graph multiplies matrices."""
        if self._results.traits is None:
            self._results.traits = graph_traits(self.graph)
        return self._results.traits

    def precisions(self, settings: StepSettings) -> tuple[tuple[str | None, float], ...]:
        """Return the precisions of products (None: float32) with their shares, the largest first.

        Those of the operators; without products, autocast's or that of most parameters.
        """
        shares = self.work_under(settings).precisions or {settings.amp or self.dtype: 1.0}
        named = {
            name if name in AMP_DTYPES else None: share for name, share in shares.items() if share > _LEAST
        }
        total = sum(named.values())
        return tuple(sorted([(n, s / total) for n, s in named.items()], key=lambda entry: -entry[1]))

    def precision(self, settings: StepSettings) -> str | None:
        """Return the precision of most products; None: float32."""
        return self.precisions(settings)[0][0]

    @property
    def dtype(self) -> str:
        """The dtype of most of the parameters' elements."""
        return self.traits.dtype

    def tape(self, settings: StepSettings) -> Tape:
        """Return the allocations of one step under these settings."""
        tape = self._results.tapes.get(settings)
        if tape is None:
            tape, partition = write_tape(self.graph, settings), self.graph.partition
            if partition is not None:
                tape = replace(tape, scales=compiled_scales(partition, tape))
            self._results.tapes[settings] = tape
        return tape


def analyse(graph: ForwardGraph) -> Analysis:
    """Return the analysis of a graph; its results are computed once."""
    return Analysis(graph, _results.setdefault(graph, _GraphResults()))
