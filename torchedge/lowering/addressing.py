"""What kernels can address: they count elements, loops and work-items in whole numbers of 32 bits.

A number that wraps reads and writes elsewhere, and may end the process. So what is larger is refused while a
step is lowered and when a program is read, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Axis, Index
from torchedge.expressions.rendering import is_within
from torchedge.lowering.programs import Program

MOST = 2**31 - 1
"""Largest offset, in elements, and largest number of an `int`."""
ROOM = 2**20
"""Numbers above a loop's extent that its variable may reach: steps and padding to whole work-groups."""
_ADVICE = "use a smaller batch, or split the computation"


def check_shapes(tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Raise LoweringError for the first of some (name, shape) with more elements than offsets address."""
    for name, shape in tensors:
        if message := _beyond_shape(name, shape):
            raise LoweringError(message)


def check_loops(name: str, positions: Iterable[Sequence[Axis]], indices: Iterable[Index]) -> None:
    """Raise LoweringError where numbers of a kernel would wrap.

    name: what the kernel computes. positions: loops that one number stands for. indices: all its index
    arithmetic.
    """
    for loops in positions:
        count = prod([axis.extent for axis in loops])
        if count > MOST - ROOM:
            raise LoweringError(
                f"{name} runs through {count} points; expected at most {MOST - ROOM}; {_ADVICE}"
            )
    for index in indices:
        if not is_within(index, MOST):
            low, high = index.range
            between = "" if low < -MOST or high > MOST else " through larger products"
            raise LoweringError(
                f"{name} computes places from {low} to {high}{between}; expected numbers of 32 bits, at most "
                f"{MOST}; {_ADVICE}"
            )


def beyond_offsets(program: Program) -> str | None:
    """Return what of a program needs numbers of more than 32 bits, as an error; None where nothing does."""
    for tensor in program.tensors:
        if message := _beyond_shape(f"{tensor.role} {tensor.name}", tensor.shape):
            return message
    for position, launch in enumerate(program.launches):
        kernel = program.kernels[launch.kernel].name if launch.kernel < len(program.kernels) else "?"
        scope = f" of {launch.scope}" if launch.scope else ""
        name, sizes = f"launch {position}, kernel {kernel}{scope}", list(launch.global_size)
        if max(sizes) > MOST or prod(sizes) > 2 * MOST:
            return (
                f"{name} has {sizes} work-items; expected at most {MOST} each way and {2 * MOST} in all; "
                f"{_ADVICE}"
            )
        wide = [size for size in launch.sizes if not -MOST - 1 <= size <= MOST]
        if wide:
            return f"{name} has the size {wide[0]}; expected a number of 32 bits; {_ADVICE}"
    return None


def _beyond_shape(name: str, shape: Sequence[int]) -> str | None:
    count = prod(shape)
    if count <= MOST:
        return None
    return (
        f"{name} of shape {list(shape)} has {count} elements; expected at most {MOST}, which offsets of "
        f"32 bits address; {_ADVICE}"
    )
