"""What fusing costs the overlap plan, kernel by kernel, and where a fused kernel may be cut (section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchedge.streaming.fusion import BATCH_NORMS, Groups, readers_of, role_of
from torchedge.streaming.instances import Instance
from torchedge.streaming.operations import InferenceGraph
from torchedge.streaming.plans import OverlapPlan

__all__ = ["Cut", "count_crossings", "find_cuts", "weigh_kernels"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A fused kernel and the two it is split into, as positions of their parts; the chunks each can load."""

    whole: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    whole_capacity: int
    first_capacity: int
    second_capacity: int


def find_cuts(
    graph: InferenceGraph,
    groups: Groups,
    capacities: Sequence[int],
    alpha: float,
    *,
    split_rows: bool = False,
) -> tuple[Cut, ...]:
    """Return the best cut of each kernel that may be split, in the kernels' order.

    A kernel is cut behind a part whose result alone the rest of it reads, with the capacity of each side the
    least of its parts' `capacities` (chunks, by position). Both sides together must reach (1 + alpha) times
    what the kernel can load, and more than it. A kernel around a softmax, a norm or another reduction stays
    intact unless `split_rows`, and a batch norm stays with what it is folded into. The cut of most capacity
    is taken; of equal ones the last, so that a bias stays with its product.
    """
    readers = readers_of(graph)
    found = []
    for group in groups:
        if not split_rows and any(role_of(graph.operations[p]) == "row" for p in group):
            continue
        whole = min(capacities[p] for p in group)
        best: Cut | None = None
        for first in _cut_off(graph, readers, group):
            second = tuple(p for p in group if p not in first)
            sides = [min(capacities[p] for p in side) for side in (first, second)]
            enough = sum(sides) >= (1 + alpha) * whole and sum(sides) > whole
            if enough and (best is None or sum(sides) >= best.first_capacity + best.second_capacity):
                best = Cut(group, first, second, whole, *sides)
        if best is not None:
            found.append(best)
    return tuple(found)


def _cut_off(
    graph: InferenceGraph, readers: Sequence[Sequence[int]], group: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield what may be cut off the front of a kernel: a part with all that leads to it inside."""
    members = set(group)
    for last in group[:-1]:
        if any(graph.operations[r].kind in BATCH_NORMS for r in readers[last] if r in members):
            continue
        front, stack = {last}, [last]
        while stack:
            for source in graph.operations[stack.pop()].inputs:
                if source in members and source not in front:
                    front.add(source)
                    stack.append(source)
        if all(reader in front for p in front if p != last for reader in readers[p]):
            yield tuple(sorted(front))


def weigh_kernels(
    groups: Groups, instance: Instance, plan: OverlapPlan, reference: OverlapPlan, mu: float
) -> tuple[float, ...]:
    """Return Penalty(v) = lambda |W_new| + mu * (increase of distance) of every kernel (section 4.3).

    `reference` is the plan of the same graph with every operation a kernel of its own. W_new holds the
    weights it streams and `plan` preloads; a kernel answers for those of their chunks that its parts load
    there. A weight that both stream, and that `plan` loads earlier, counts with its parts' share of it; both
    distances are counted in the layers of `instance`. A plan without objective has preloaded everything.
    """
    layer_of = {p + 1: layer for layer, group in enumerate(groups, 1) for p in group}
    now = _first_loads(plan) if plan.objective is not None else {}
    before: dict[str, int] = {}
    for load in reference.loads:
        layer = layer_of[load.layer]
        before[load.weight] = min(before.get(load.weight, layer), layer)
    sizes = {w.name: 1 if instance.distance == "chunks" else w.chunks for w in instance.weights}
    penalties = [0.0] * len(groups)
    for load in reference.loads:
        name = load.weight
        if name not in now:
            cost = instance.lam * load.chunks
        else:
            cost = mu * max(0, before[name] - now[name]) * load.chunks / sizes[name]
        penalties[layer_of[load.layer] - 1] += cost
    return tuple(penalty if len(group) > 1 else 0.0 for penalty, group in zip(penalties, groups, strict=True))


def count_crossings(instance: Instance, plan: OverlapPlan) -> tuple[int, ...]:
    """Return what one layer more behind each layer adds to the sum of distances: the weights under way there.

    A weight counts as one, or with its chunks where the instance counts distances so.
    """
    starts = _first_loads(plan)
    change = [0] * (len(instance.layers) + 1)
    for weight in instance.weights:
        if weight.name in starts:
            amount = weight.chunks if instance.distance == "chunks" else 1
            change[starts[weight.name] - 1] += amount
            change[weight.first_use - 1] -= amount
    crossings, total = [], 0
    for step in change[:-1]:
        total += step
        crossings.append(total)
    return tuple(crossings)


def _first_loads(plan: OverlapPlan) -> dict[str, int]:
    """z_w of every streamed weight."""
    first: dict[str, int] = {}
    for load in plan.loads:
        first[load.weight] = min(first.get(load.weight, load.layer), load.layer)
    return first
