"""When the intermediates of a program are alive, counted in launches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchedge.errors import InputError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.programs import Kernel, Launch, StoredTensor

Lifetime = tuple[int, int]
"""Half-open: from the launch that first writes a tensor to the one behind the last that touches it."""


def lifetimes_of(
    tensors: Sequence[StoredTensor],
    kernels: Sequence[Kernel],
    launches: Sequence[Launch],
    outputs: Collection[int] = (),
) -> dict[int, Lifetime]:
    """Return the lifetime of each intermediate that a launch touches; `outputs` live to the end.

    Raises:
        InputError: a launch reads an intermediate that none before it has written.
    """
    found: dict[int, Lifetime] = {}
    for position, launch in enumerate(launches):
        kernel = kernels[launch.kernel]
        written = []
        for index, access in zip(launch.tensors, kernel.access, strict=True):
            if tensors[index].role != "intermediate":
                continue
            if index in found:
                found[index] = (found[index][0], position + 1)
            elif access == "write":
                written.append(index)
            else:
                raise InputError(
                    f"launch {position}, kernel {kernel.name}, reads {tensors[index].name} before any launch "
                    "writes it; order the launches by what they need"
                )
        found |= {index: (position, position + 1) for index in written}
    end = len(launches)
    return {i: (start, end if i in outputs else stop) for i, (start, stop) in found.items()}


def in_place_pairs(
    tensors: Sequence[StoredTensor],
    kernels: Sequence[Kernel],
    launches: Sequence[Launch],
    lifetimes: dict[int, Lifetime],
) -> list[tuple[int, int]]:
    """Return (input, output) of launches where the output may take the place of the input.

    The kernel declares the pair of arguments, the input dies there, the output begins there, both lie in
    buffers of one size and item size, and the launch takes the input in no argument that is not declared.
    """
    found = []
    for position, launch in enumerate(launches):
        declared = set(kernels[launch.kernel].in_place)
        for read, written in sorted(declared):
            before, after = launch.tensors[read], launch.tensors[written]
            if before not in lifetimes or after not in lifetimes or before == after:
                continue
            places = [at for at, index in enumerate(launch.tensors) if index == before]
            if (
                lifetimes[before][1] == position + 1
                and lifetimes[after][0] == position
                and all((at, written) in declared for at in places)
                and _same_bytes(tensors[before], tensors[after])
                and (before, after) not in found
            ):
                found.append((before, after))
    return found


def _same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    return (
        first.layout.storage == second.layout.storage == "buffer"
        and first.nbytes == second.nbytes
        and ITEM_SIZES[first.dtype] == ITEM_SIZES[second.dtype]
    )
