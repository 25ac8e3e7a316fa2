"""Overlap plans by the paper's own model and solver: FlashMem, sections 3.1 and 3.2, in OR-Tools CP-SAT.

It shares nothing with the library's solver but the problem's nouns, and reaches instances that are too large
for an exhaustive search.
"""

from __future__ import annotations

import math
from typing import Any

from ortools.sat.python import cp_model

from torchedge.streaming.instances import Instance, Weight
from torchedge.streaming.plans import OverlapPlan, infeasible_plan, make_plan


def plan_by_cp_sat(instance: Instance, deterministic: float = 60.0) -> OverlapPlan | None:
    """Return CP-SAT's plan with its bound; an INFEASIBLE one where it proved so; None where it found none.

    deterministic: its deterministic time, about a second of one worker each.
    """
    model = _Model(instance)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = deterministic
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return infeasible_plan({}, "CP-SAT proves it")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    bound = math.ceil(solver.best_objective_bound - 1e-3)  # whole, but its float may come as 6.999
    return make_plan(instance, model.read(solver), {}, optimal=status == cp_model.OPTIMAL, bound=bound)


class _Model:
    """Variables x_{w,l}, z_w and whether w is in W, with C0 to C3."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.weights = instance, instance.weights
        self.most = instance.total_chunks
        self.model: Any = cp_model.CpModel()
        self.preloaded = [self.model.new_bool_var("") for _ in self.weights]
        self.start: list[Any] = []
        self.loaded: list[dict[int, Any]] = []
        for w, preloaded in zip(self.weights, self.preloaded, strict=True):
            self._add_weight(w, preloaded)
        for number, layer in enumerate(instance.layers, 1):  # C3
            self.model.add(self._loads(number) <= min(layer.capacity_chunks, self.most))
        whole = instance.residency == "weights"
        for number in range(1, len(instance.layers) + 1):  # C2 and the limit on all memory
            flying = self._whole_weights(number) if whole else self._chunks(number)
            if instance.m_peak_chunks is not None:
                self.model.add(flying <= min(instance.m_peak_chunks, self.most))
            if instance.memory_chunks is not None:
                kept = sum(w.chunks * b for w, b in zip(self.weights, self.preloaded, strict=True))
                self.model.add(flying + kept <= min(instance.memory_chunks, self.most))
        p, d, _ = instance.prices
        distances = (
            (w.chunks if instance.distance == "chunks" else 1) * (w.first_use - z)
            for w, z in zip(self.weights, self.start, strict=True)
        )
        kept = sum(p * w.chunks * b for w, b in zip(self.weights, self.preloaded, strict=True))
        self.model.minimize(kept + d * sum(distances))

    def _add_weight(self, w: Weight, preloaded: Any) -> None:
        model = self.model
        z, loaded = model.new_int_var(1, w.first_use, ""), {}
        for number in range(1, w.first_use):
            capacity = self.instance.layers[number - 1].capacity_chunks
            x = loaded[number] = model.new_int_var(0, min(capacity, w.chunks), "")
            loads = model.new_bool_var("")
            model.add(x == 0).only_enforce_if(~loads)
            model.add(z <= number).only_enforce_if(loads)  # C1
        model.add(sum(loaded.values()) + w.chunks * preloaded == w.chunks)  # C0
        self.start.append(z)
        self.loaded.append(loaded)

    def _loads(self, number: int) -> Any:
        return sum(loaded[number] for loaded in self.loaded if number in loaded)

    def _chunks(self, number: int) -> Any:
        """Return the chunks in flight: loaded by now, of weights that are not used for the last time."""
        return sum(
            x
            for w, loaded in zip(self.weights, self.loaded, strict=True)
            if number <= w.last_use
            for layer, x in loaded.items()
            if layer <= number
        )

    def _whole_weights(self, number: int) -> Any:
        """Return the chunks of streamed weights from z_w to their last use."""
        present = []
        for w, z, preloaded in zip(self.weights, self.start, self.preloaded, strict=True):
            if number <= w.last_use:
                is_there = self.model.new_bool_var("")
                self.model.add(z > number).only_enforce_if(~is_there, ~preloaded)
                present.append(w.chunks * is_there)
        return sum(present)

    def read(self, solver: Any) -> dict[str, dict[int, int]]:
        """Return the chunks by layer of the weights that the solution streams."""
        return {
            w.name: {number: n for number, x in loaded.items() if (n := solver.value(x))}
            for w, loaded, preloaded in zip(self.weights, self.loaded, self.preloaded, strict=True)
            if not solver.boolean_value(preloaded)
        }
