"""The memory of a training step under torch.compile: fused kernels, and the buffers between them.

The partition says which operators the forward and the backward graph run and which tensors are saved between
them. Element-wise operators compute inside of the kernels that read them; a buffer is allocated for a
reduction, for what a library's kernel reads or writes, and for results. Kernels over the same elements are
fused, and a buffer that is read inside of its own kernel alone is never allocated. A kernel's output takes
the place of an input of the same size that dies there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from torchedge.graphs.partitions import Buffer, PartGraph, Partition
from torchedge.prediction.memory.tape import CATEGORIES, Tape

_MOST_READS, _MOST_REUSED_READS, _MOST_REUSED_OPS = 8, 4, 30
"""Inductor's `realize_acc_reads_threshold`, `realize_reads_threshold` and `realize_opcount_threshold`."""
_FUSED = ("pointwise", "reduction")
_UPDATE = 2
"""The phase of a tape's events in the optimizer."""


def compiled_scales(partition: Partition, tape: Tape) -> tuple[float, float]:
    """Return the allocated and the reserved memory of a compiled step over those of the eager step.

    tape: of the eager step. What is there before the step, the update, and the libraries' workspaces at the
    peak are those of the eager step. CUDA graphs keep the memory of forward and backward pass, gradients too,
    in a pool of their own, which the update cannot use.
    """
    plain = tape.without_scratch
    sizes = plain.bytes_at(np.array([partition.batch_size]))
    before, update, eager = _live_peaks(plain, sizes)
    graphs = step_bytes(partition)
    allocated = max(before + graphs, update)
    if not partition.recorded:
        return allocated / eager, allocated / eager
    sizes[plain.category == CATEGORIES.index("gradients")] = 0
    outside = _live_peaks(plain, sizes)[1]
    return allocated / eager, (outside + graphs) / eager


def _live_peaks(tape: Tape, sizes: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """Return the bytes before a step, and the most in its update and in all of it."""
    before = int(sizes[tape.persistent].sum())
    live = tape.live_of(sizes)[:, 0]
    update = int(live[tape.phases == _UPDATE].max(initial=before))
    return before, update, int(live.max(initial=before))


def step_bytes(partition: Partition) -> int:
    """Return the most bytes that the forward and the backward pass allocate beside their arguments."""
    forward, backward = FusedGraph(partition.forward), FusedGraph(partition.backward)
    saved, owners = 0, dict[Buffer, list[Buffer]]()
    for argument, buffer in partition.saved:
        owners.setdefault(buffer, []).append(argument)
    arguments = dict(partition.tangents)
    for (position, number), several in owners.items():
        size = partition.forward.ops[position].sizes[number]
        saved += size
        arguments |= dict.fromkeys(several, 0)
        arguments[max(several, key=lambda argument: backward.last.get(argument, -1))] = size
    tangents = sum(size for _, size in partition.tangents)
    return max(forward.peak({}), saved + tangents + partition.apart, backward.peak(arguments, partition.lent))


class FusedGraph:
    """A graph as kernels. reads: the buffers that each operator reads. last: the last kernel to read each."""

    def __init__(self, graph: PartGraph) -> None:
        self.graph, self.results = graph, frozenset(graph.results)
        self.reads, self._allocated = _inlined(graph)
        self.kernels = self._fused()
        self.last = {
            buffer: place
            for place, kernel in enumerate(self.kernels)
            for position in kernel
            for buffer in self.reads[position]
        }

    def peak(self, arguments: Mapping[Buffer, int], lent: Collection[Buffer] = ()) -> int:
        """Return the most bytes alive, with arguments that are freed after their last use.

        lent: arguments whose place no output takes.
        """
        ops, results, last = self.graph.ops, self.results, self.last
        alive = {b: size for b, size in arguments.items() if b in last or b in results}
        live = most = sum(alive.values())
        for place, kernel in enumerate(self.kernels):
            library = ops[kernel[0]].role == "kernel"
            outputs = {
                (position, number): size
                for position in kernel
                for number, size in enumerate(ops[position].sizes)
                if library or self.is_stored((position, number), place)
            }
            dying = [
                b for b in {b for position in kernel for b in self.reads[position]}
                if last[b] == place and b in alive and b not in results
            ]  # fmt: skip
            reused = 0
            free = [] if library else [alive[b] for b in dying if b not in lent]
            for size in outputs.values():
                if size in free:
                    free.remove(size)
                    reused += size
            live += sum(outputs.values())
            most = max(most, live - reused)
            alive |= outputs
            unused = [b for b in outputs if b not in results and b not in last]
            live -= sum(alive.pop(b) for b in (*dying, *unused))
        return most

    def is_stored(self, buffer: Buffer, place: int) -> bool:
        """Whether a generated kernel writes a buffer that it computes; place: of the kernel."""
        return buffer in self.results or self.last.get(buffer, -1) > place

    def _fused(self) -> list[list[int]]:
        """Return the kernels in the order in which they run, each as its operators that write buffers."""
        ops, reads = self.graph.ops, self.reads
        group = list(range(len(ops)))

        def head(position: int) -> int:
            while group[position] != position:
                group[position] = group[group[position]]
                position = group[position]
            return position

        level, shared = [0] * len(ops), dict[tuple[Buffer, int, int], int]()
        computed = [p for p, allocated in enumerate(self._allocated) if allocated and ops[p].role != "input"]
        for position in computed:
            for source, _ in reads[position]:
                if ops[source].role != "input":
                    apart = not self._joins(source, position)
                    level[position] = max(level[position], level[source] + apart)
            if ops[position].role == "kernel":
                continue
            for source, number in reads[position]:
                if level[source] == level[position] and self._joins(source, position):
                    group[head(source)] = head(position)
                key = ((source, number), level[position], ops[position].elements)
                if key in shared:
                    group[head(shared[key])] = head(position)
                shared[key] = position
        kernels: dict[int, list[int]] = {}
        for position in computed:
            kernels.setdefault(head(position), []).append(position)
        return self._ordered([*kernels.values()])

    def _joins(self, source: int, reader: int) -> bool:
        """Whether the reader of a buffer can compute in the kernel that writes it."""
        one, other = self.graph.ops[source], self.graph.ops[reader]
        if one.role not in _FUSED or other.role not in _FUSED:
            return False
        alike = one.elements == other.elements
        if one.role == "pointwise":
            return alike
        if other.role == "reduction":
            return alike and one.rows == other.rows and one.inner == other.inner
        return (alike and one.inner) or other.elements == one.rows

    def _ordered(self, kernels: list[list[int]]) -> list[list[int]]:
        """Return kernels so that each runs as late as its last operator and after those it reads."""
        owner = {position: k for k, kernel in enumerate(kernels) for position in kernel}
        before = [
            {owner[source] for position in kernel for source, _ in self.reads[position] if source in owner}
            - {k}
            for k, kernel in enumerate(kernels)
        ]
        after: list[list[int]] = [[] for _ in kernels]
        for k, sources in enumerate(before):
            for source in sources:
                after[source].append(k)
        waiting = [len(sources) for sources in before]
        ready = [(kernels[k][-1], k) for k, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        ordered = []
        while ready:
            k = heapq.heappop(ready)[1]
            ordered.append(kernels[k])
            for reader in after[k]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (kernels[reader][-1], reader))
        if len(ordered) == len(kernels):
            return ordered
        return [[position] for position in sorted(owner)]  # fused kernels wait for each other: none is fused


def _inlined(graph: PartGraph) -> tuple[list[frozenset[Buffer]], list[bool]]:
    """Return the allocated buffers that each operator reads, and whether it allocates buffers itself."""
    ops = graph.ops
    readers: list[set[int]] = [set() for _ in ops]
    for position, op in enumerate(ops):
        for source, _ in op.reads:
            readers[source].add(position)
    returned = {position for position, _ in graph.results}
    reads, allocated, work = list[frozenset[Buffer]](), list[bool](), list[int]()
    for position, op in enumerate(ops):
        own = set[Buffer]()
        count = 1
        for buffer in op.reads:
            if allocated[buffer[0]]:
                own.add(buffer)
            else:
                own |= reads[buffer[0]]
                count += work[buffer[0]]
        reused = len(readers[position]) > 1 and (len(own) > _MOST_REUSED_READS or count > _MOST_REUSED_OPS)
        for_library = any(ops[reader].role == "kernel" for reader in readers[position])
        needed = position in returned or for_library or reused or len(own) > _MOST_READS
        allocated.append(op.role not in ("pointwise", "view") or (op.role == "pointwise" and needed))
        reads.append(frozenset(own))
        work.append(count)
    return reads, allocated
