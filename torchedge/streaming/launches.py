"""The launches of a Program as layers of the overlap problem, and the weights that they use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torchedge.lowering.programs import LoadClassName, Program

__all__ = ["WEIGHT_ROLES", "LaunchWork", "WeightUse", "weights_of", "works_of"]

WEIGHT_ROLES = frozenset({"parameter", "buffer", "constant"})
"""Roles of the tensors that a run may preload or stream; states and inputs are allocated beside them."""


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """The amounts of one launch: FLOPs, bytes, work-items in all and in a work-group (None: the driver's).

    `input_bytes` and `output_bytes` count each tensor once, with the padding of its layout; a tensor that is
    updated in place counts as both. `name` is the scope in the model and the kernel.
    """

    name: str
    load_class: LoadClassName
    flops: int
    input_bytes: int
    output_bytes: int
    work_items: int
    group_items: int | None

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.input_bytes + self.output_bytes


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A resident tensor (place in `Program.tensors`) with the first and last launch that use it, from 1.

    A weight that a launch writes or the program returns is used by all launches: it cannot be streamed.
    """

    tensor: int
    name: str
    nbytes: int
    first_use: int
    last_use: int


def works_of(program: Program) -> tuple[LaunchWork, ...]:
    """Return the amounts of each launch, in order."""
    sizes = [tensor.nbytes for tensor in program.tensors]
    works = []
    for launch in program.launches:
        kernel = program.kernels[launch.kernel]
        reads, writes = set(), set()
        for tensor, access in zip(launch.tensors, kernel.access, strict=True):
            if access != "write":
                reads.add(tensor)
            if access != "read":
                writes.add(tensor)
        works.append(
            LaunchWork(
                f"{launch.scope} {kernel.name}".strip(),
                kernel.load_class,
                kernel.flops,
                sum(sizes[t] for t in reads),
                sum(sizes[t] for t in writes),
                prod(launch.global_size),
                prod(launch.local_size) if launch.local_size else None,
            )
        )
    return tuple(works)


def weights_of(program: Program) -> tuple[WeightUse, ...]:
    """Return the weights that launches use or the program returns, by first use."""
    uses: dict[int, tuple[int, int]] = {}

    def use(tensors: Iterable[int], first: int, last: int) -> None:
        for index in tensors:
            tensor = program.tensors[index]
            if tensor.role in WEIGHT_ROLES and tensor.nbytes:
                earliest, latest = uses.get(index, (first, last))
                uses[index] = (min(earliest, first), max(latest, last))

    count = len(program.launches)
    for number, launch in enumerate(program.launches, 1):
        use(launch.tensors, number, number)
        access = program.kernels[launch.kernel].access
        use([t for t, how in zip(launch.tensors, access, strict=True) if how != "read"], 1, count)
    use(program.outputs, 1, count)
    weights = [
        WeightUse(index, program.tensors[index].name, program.tensors[index].nbytes, *span)
        for index, span in uses.items()
    ]
    return tuple(sorted(weights, key=lambda weight: (weight.first_use, weight.tensor)))
