"""What is worked out once a graph for all batch sizes: work, the tape of allocations, parameter figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchedge.graphs import ForwardGraph
from torchedge.ops import call_of, registry
from torchedge.prediction.latency.workload import Workload, count_work
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.peaks import Traits, graph_traits
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.tape import Tape


@dataclass(slots=True)
class Analysis:
    """Results for one graph, made when first asked for."""

    graph: ForwardGraph
    tapes: dict[StepSettings, Tape] = field(default_factory=dict)
    works: dict[str | None, Workload] = field(default_factory=dict)
    _traits: Traits | None = None

    @property
    def work(self) -> Workload:
        """What the step makes the device compute and move, in the precision it was captured in."""
        return self.work_under(None)

    def work_under(self, amp: str | None) -> Workload:
        """What the step makes the device compute and move under autocast to a dtype; None: without."""
        work = self.works.get(amp)
        if work is None:
            work = self.works[amp] = count_work(lower_precision(self.graph, StepSettings(amp=amp)))
        return work

    @property
    def traits(self) -> Traits:
        """Parameters, and whether the graph multiplies matrices."""
        if self._traits is None:
            self._traits = graph_traits(self.graph)
        return self._traits

    def tape(self, settings: StepSettings) -> Tape:
        """Return the allocations of one step under these settings."""
        tape = self.tapes.get(settings)
        if tape is None:
            tape = self.tapes[settings] = write_tape(self.graph, settings)
        return tape


def analyse(graph: ForwardGraph) -> Analysis:
    """Return the analysis of a graph, remembered on the graph itself and forgotten with it."""
    found = graph.__dict__.get("_analysis")
    if not isinstance(found, Analysis):
        found = graph.__dict__["_analysis"] = Analysis(graph)
    return found


def forward_flops(graph: ForwardGraph, batch_size: int) -> int:
    """Return the FLOPs of one forward pass (a multiply-add is two); unknown operators count nothing."""
    known = registry()
    from torchedge.graphs.sizes import poly, poly_at

    total = 0
    for op in graph.ops:
        spec = known.get(op.kind)
        if spec is not None:
            total += poly_at(poly(int(spec.flops(call_of(graph, op)))), batch_size)
    return total
