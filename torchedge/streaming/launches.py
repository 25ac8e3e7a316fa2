"""The launches of a Program as layers of the overlap problem, and the weights that they use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

from torchedge.lowering.arenas import in_place_pairs, lifetimes_of
from torchedge.lowering.programs import LoadClassName, Program
from torchedge.streaming.instances import Weight
from torchedge.streaming.schedules import fixed_tensors, weight_uses


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
                launch.flops,
                sum(sizes[t] for t in reads),
                sum(sizes[t] for t in writes),
                prod(launch.global_size),
                prod(launch.local_size) if launch.local_size else None,
            )
        )
    return tuple(works)


SMALL_BYTES = 2**16
"""A smaller weight takes longer to hand over than to copy."""

SMALL_SHARE = 0.01
"""Of the bytes of all weights: small ones that are not streamed take at most so many."""


def weights_of(program: Program, chunk_bytes: int) -> tuple[Weight, ...]:
    """Return the weights that are worth streaming, by first use: those that launches read and none writes.

    The smallest ones, such as biases, are left out: each would cost a transfer and save next to no memory.
    """
    fixed = fixed_tensors(program)
    weights = []
    for index, (first, last) in weight_uses(program).items():
        tensor = program.tensors[index]
        if index not in fixed and tensor.nbytes:
            chunks = -(-tensor.nbytes // chunk_bytes)
            weights.append(Weight(tensor.name, tensor.nbytes, chunks, first + 1, last + 1))
    left = int(SMALL_SHARE * sum(weight.nbytes for weight in weights))
    small = set()
    for weight in sorted(weights, key=lambda weight: weight.nbytes):
        left -= weight.nbytes
        if left < 0 or weight.nbytes > SMALL_BYTES:
            break
        small.add(weight.name)
    return tuple([weight for weight in weights if weight.name not in small])


def activations_of(program: Program) -> tuple[int, ...]:
    """Return the bytes of inputs, outputs, states and intermediates in use while each launch runs.

    A result that takes the memory of an intermediate, as the arena is planned, is counted with it once.
    """
    tensors, offset = program.tensors, program.arena.offset
    change = [0] * (len(program.launches) + 1)
    change[0] = sum(t.nbytes for t in tensors if t.role in ("input", "output", "state"))
    lifetimes = lifetimes_of(program)
    for index, (start, stop) in lifetimes.items():
        change[start] += tensors[index].nbytes
        change[stop] -= tensors[index].nbytes
    for before, after in in_place_pairs(program, lifetimes):
        if before in offset and offset[before] == offset[after]:
            meet = lifetimes[after][0]
            change[meet] -= tensors[before].nbytes
            change[meet + 1] += tensors[before].nbytes
    return tuple(accumulate(change[:-1]))
