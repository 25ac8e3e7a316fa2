"""Fusion: which operations of an inference graph become a kernel, and the graph of kernels (section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from torchedge.errors import InputError
from torchedge.ops import UNKNOWN, Work, spec_of
from torchedge.streaming.instances import LoadClassName
from torchedge.streaming.operations import InferenceGraph, Operation

__all__ = [
    "BATCH_NORMS",
    "FOLLOWERS",
    "Groups",
    "Role",
    "as_part",
    "assemble",
    "find_groups",
    "fuse",
    "readers_of",
    "role_of",
]

Groups = tuple[tuple[int, ...], ...]
"""The kernels of a graph: positions of the operations that each is made of, by the place of the last one."""

Role = Literal["product", "row", "element", "other"]

FOLLOWERS: Mapping[Role, frozenset[Role]] = MappingProxyType(
    {
        "product": frozenset({"element"}),  # linear/matmul/convolution (+ bias, batch norm, activation, add)
        "row": frozenset({"element"}),  # softmax, layer norm, mean, ... (+ scale, activation, add)
        "element": frozenset({"element"}),  # chains; into a product or a row it would be computed repeatedly
        "other": frozenset(),  # moves data, creates it, draws it or loops: a kernel of its own
    }
)
"""What may read the result of what inside one kernel. A kernel holds at most one product or row."""

_ELEMENTWISE = frozenset({Work.ARITHMETIC, Work.SUM, Work.ACTIVATION})
_NOT_ELEMENTWISE = frozenset({"glu"})
BATCH_NORMS = frozenset(
    {
        *("batch_norm", "native_batch_norm", "cudnn_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "sync_batch_norm"),
    }
)
"""In inference a scale and a shift by channel, computed from stored statistics: element-wise."""


def role_of(operation: Operation) -> Role:
    """Return what an operation is to fusion, by its operator's work and load class; a kernel is "other"."""
    if operation.parts:
        return "other"
    if operation.kind in BATCH_NORMS:
        return "element"
    spec = spec_of(operation.kind)
    if operation.load_class == "hierarchical":
        return "row"
    if operation.load_class == "reusable":
        return "other" if spec.work is Work.RECURRENT or spec is UNKNOWN else "product"
    if spec is UNKNOWN or operation.kind in _NOT_ELEMENTWISE:
        return "other"
    return "element" if spec.work in _ELEMENTWISE else "other"


def fuse(graph: InferenceGraph) -> InferenceGraph:
    """Return the graph with operations merged into kernels by `FOLLOWERS`, without more activation memory.

    An operation joins the kernel that alone reads its result, where both are of the same size. The kernel
    stands where its last part stood, so that all its inputs are there and no weight is needed earlier.
    """
    return assemble(graph, find_groups(graph))


def find_groups(graph: InferenceGraph) -> Groups:
    """Return the operations of each kernel of the fused graph; every operation is in one."""
    return _Fuser(graph).groups()


class _Fuser:
    """Grows kernels backwards from their last operation; `place[p]` is where operation p runs now."""

    def __init__(self, graph: InferenceGraph) -> None:
        self.operations = graph.operations
        self.returned = frozenset(graph.outputs)
        self.roles = [role_of(operation) for operation in graph.operations]
        self.place = list(range(len(graph.operations)))
        self.readers = readers_of(graph)
        for last in reversed(range(len(self.operations))):
            if self.place[last] == last:
                self._grow(last)

    def groups(self) -> Groups:
        members: dict[int, list[int]] = {}
        for position, last in enumerate(self.place):
            members.setdefault(last, []).append(position)
        return tuple(tuple(members[last]) for last in sorted(members))

    def _grow(self, last: int) -> None:
        """Take in producers, along one path to its product or row first, until none may join."""
        group = {last}
        path = [last]
        while path:
            sources = sorted(self.operations[path[-1]].inputs, reverse=True)
            found = next((s for s in sources if s not in group and self._joins(s, group, last)), None)
            if found is None:
                path.pop()
            else:
                group.add(found)
                path.append(found)
                self.place[found] = last

    def _joins(self, source: int, group: set[int], last: int) -> bool:
        role = self.roles[source]
        readers = self.readers[source]
        if source in self.returned or not all(reader in group for reader in readers):
            return False
        if not all(self.roles[reader] in FOLLOWERS[role] for reader in readers):
            return False
        headed = any(self.roles[member] != "element" for member in group)
        if headed and (role != "element" or self._has_head(source)):
            return False
        size = self.operations[source].output_bytes
        if any(self.operations[reader].output_bytes != size for reader in readers):
            return False
        return self._is_next(source, last) or self._held_bytes(source, last) <= size

    def _has_head(self, position: int) -> bool:
        """Whether an element-wise operation ends a chain behind a product or row of its own."""
        found = True
        while found:
            found = False
            for source in self.operations[position].inputs:
                if self.readers[source] == [position] and "element" in FOLLOWERS[self.roles[source]]:
                    if self.roles[source] != "element":
                        return True
                    position, found = source, True
                    break
        return False

    def _is_next(self, source: int, last: int) -> bool:
        """Whether no other kernel runs between an operation and the kernel it would join."""
        return all(self.place[between] == last for between in range(source + 1, last))

    def _held_bytes(self, source: int, last: int) -> int:
        """Bytes of inputs that would live longer if the operation ran at `last`."""
        return sum(
            self.operations[value].output_bytes
            for value in set(self.operations[source].inputs)
            if value not in self.returned and max(self.place[reader] for reader in self.readers[value]) < last
        )


def readers_of(graph: InferenceGraph) -> list[list[int]]:
    """Return the positions of the operations that read each operation's result."""
    readers: list[list[int]] = [[] for _ in graph.operations]
    for position, operation in enumerate(graph.operations):
        for source in dict.fromkeys(operation.inputs):
            readers[source].append(position)
    return readers


def assemble(graph: InferenceGraph, groups: Groups) -> InferenceGraph:
    """Return the graph whose kernels are these groups of operations, each at the place of its last one.

    The parts of a kernel are the operations as `graph` has them (and `as_part`), their inputs being positions
    there.

    Raises:
        InputError: an operation is in no group or in two, or a result inside a kernel is read outside it.
    """
    groups = tuple(sorted((tuple(sorted(group)) for group in groups), key=lambda group: group[-1]))
    if sorted(position for group in groups for position in group) != list(range(len(graph.operations))):
        raise InputError(f"groups of {graph.name} are no partition; expected each operation in one of them")
    kernel = {position: place for place, group in enumerate(groups) for position in group}
    result = {group[-1]: place for place, group in enumerate(groups)}
    needed = {
        source
        for position, operation in enumerate(graph.operations)
        for source in operation.inputs
        if kernel[source] != kernel[position]
    }
    if hidden := sorted((needed | set(graph.outputs)) - set(result)):
        name = graph.operations[hidden[0]].name
        raise InputError(f"{name} is read outside its kernel; expected only a kernel's last result to be")
    operations = tuple(_merge(graph, group, result) for group in groups)
    outputs = tuple(result[position] for position in graph.outputs)
    return replace(graph, operations=operations, outputs=outputs)


def _merge(graph: InferenceGraph, group: Sequence[int], result: Mapping[int, int]) -> Operation:
    """One kernel: FLOPs summed, what parts hand to one another not moved."""
    parts = [graph.operations[position] for position in group]
    inside = set(group)
    outside = dict.fromkeys(source for part in parts for source in part.inputs if source not in inside)
    inputs = tuple(result[source] for source in outside)
    if len(parts) == 1:
        return replace(parts[0], inputs=inputs)
    handed = sum(
        graph.operations[source].output_bytes for part in parts for source in part.inputs if source in inside
    )
    handed += sum(part.output_bytes for part in parts[:-1])
    head = next((part for part in parts if role_of(part) != "element"), parts[0])
    return Operation(
        name=head.name,
        kind="+".join(part.kind for part in parts),
        load_class=_dominating(parts),
        flops=sum(part.flops for part in parts),
        bytes_moved=max(sum(part.bytes_moved for part in parts) - handed, parts[-1].output_bytes),
        weights=tuple(dict.fromkeys(name for part in parts for name in part.weights)),
        inputs=inputs,
        output_bytes=parts[-1].output_bytes,
        parts=tuple(as_part(part) for part in parts),
    )


def as_part(operation: Operation) -> Operation:
    """Return an operation as it is inside a kernel: a batch norm is folded, and no longer hierarchical."""
    return replace(operation, load_class="elemental") if operation.kind in BATCH_NORMS else operation


def _dominating(parts: Iterable[Operation]) -> LoadClassName:
    """The class of the kernel's product or row; elemental where it has none."""
    roles = {role_of(part) for part in parts}
    if "product" in roles:
        return "reusable"
    return "hierarchical" if "row" in roles else "elemental"
