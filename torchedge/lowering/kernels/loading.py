"""Loading slots: kernels that also copy a part of another weight (FlashMem, section 4.4, Fig. 5).

Every work-item of such a kernel copies its share of a weight's packed bytes from a buffer in unified memory
to another buffer or into a texture. The copying is pipelined into the kernel's own main loop: each round
stores the vector that the round before has fetched, and fetches the next one. A final pass copies the
remainder; it is the whole copy for kernels without a loop. All threads follow the same path: the only
condition is true for all work-items of a group, save in one round of the last group that copies.

A slot is text that is added to the text of a kernel, so that a kernel with a slot follows from the kernel of
a program alone. Kernels mark their main loops with the comment `TURN`; the kernel's own statements stay as
they are, and so do its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from torchedge.errors import LoweringError
from torchedge.lowering.kernel_texts import text_of
from torchedge.lowering.programs import Kernel, StoredTensor
from torchedge.lowering.targets import DeviceClass

TURN = "// loading slot"
"""The line in a main loop that a turn of the slot replaces; a comment in kernels without a slot."""

VECTOR_BYTES = 16
"""Bytes that a work-item copies at once into a buffer or a texture of floats; 8 into one of halves."""

MOST_BYTES = 2**32 - VECTOR_BYTES
"""Largest load of one launch."""

LoadingWay = Literal["copy", "kernel", "slot"]
"""How weights are loaded beside kernels: by copy commands, by loading kernels, by the kernels' slots."""

Destination = Literal["buffer", "float32 image", "float16 image"]
"""Memory that a slot fills: the slot's text depends on it."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One copy of a work-item: the target's argument, bytes, type in registers, its fetch and its store."""

    argument: str
    nbytes: int
    type: str
    fetch: str
    store: str


_TEXEL = "write_imagef(slot_target, (int2)(slot_at % slot_width, slot_to + slot_at / slot_width), {0});"
_UNITS: dict[Destination, _Unit] = {
    "buffer": _Unit(
        "__global uint4* restrict slot_target",
        VECTOR_BYTES,
        "uint4",
        "slot_source[{0}]",
        "slot_target[slot_at] = {0};",
    ),
    "float32 image": _Unit(
        "write_only image2d_t slot_target", VECTOR_BYTES, "float4", "as_float4(slot_source[{0}])", _TEXEL
    ),
    "float16 image": _Unit(
        "write_only image2d_t slot_target",
        VECTOR_BYTES // 2,
        "float4",
        "vload_half4({0}, (__global const half*)slot_source)",
        _TEXEL,
    ),
}


def destination_of(tensor: StoredTensor) -> Destination:
    """Return the memory that a tensor lies in.

    Raises:
        LoweringError: an image of another dtype than float32 and float16.
    """
    if tensor.layout.storage == "buffer":
        return "buffer"
    if tensor.dtype == "float32":
        return "float32 image"
    if tensor.dtype == "float16":
        return "float16 image"
    raise LoweringError(
        f"{tensor.role} {tensor.name} lies in an image of {tensor.dtype}; kernels load images of float32 and "
        "float16: load it by copy commands"
    )


@lru_cache(maxsize=1024)
def with_slot(kernel: Kernel, destination: Destination, device_class: DeviceClass) -> Kernel:
    """Return a kernel that computes the same and has a loading slot.

    Its own arguments are followed by the source (a buffer of packed bytes), the target (the buffer or
    image of a tensor), and the numbers of 32 bits that `slot_numbers` returns: the source's first vector of
    16 bytes; the target's first vector, or first row; bytes; for images, texels of a row, since an image may
    be larger than its tensor. Every work-item of the launch takes part, whatever its number.

    Raises:
        LoweringError: the text is not one that this package writes.
    """
    text = text_of(kernel)
    if text is None:
        raise LoweringError(
            f"kernel {kernel.name} has no head as this package writes it; load by copies or loading kernels"
        )
    unit = _UNITS[destination]
    lines = _indented(_begin(unit, contiguous=device_class == "cpu"), "  ")
    for line in text.lines:
        statement = line.lstrip(" ")
        indent = line[: len(line) - len(statement)]
        if statement == TURN:
            lines += _indented(_turn(unit), indent)
        elif statement.endswith("return;"):
            lines.append(f"{line.removesuffix('return;')}{{")
            lines += [*_indented(_finish(unit), f"{indent}  "), f"{indent}  return;", f"{indent}}}"]
        else:
            lines.append(line)
    lines += _indented(_finish(unit), "  ")
    numbers = ["slot_from", "slot_to", "slot_bytes"] + ["slot_width"] * (destination != "buffer")
    more = [
        "__global const uint4* restrict slot_source",
        unit.argument,
        *[f"const uint {n}" for n in numbers],
    ]
    changed = replace(text, name="", parameters=(*text.parameters, *more), lines=tuple(lines))
    changed = changed.named(f"{kernel.name.rpartition('_')[0] or kernel.name}_slot")
    return replace(kernel, name=changed.name, source=changed.source)


def _begin(unit: _Unit, *, contiguous: bool) -> Iterator[str]:
    """Yield the statements before all others: a work-item's share, and its first vector.

    contiguous: a work-item copies neighbours, as the caches of a processor want it; otherwise neighbouring
    work-items do, as GPUs want it.
    """
    yield "slot_source += slot_from;"
    yield (
        "const uint slot_item = (get_global_id(2) * get_global_size(1) + get_global_id(1)) * "
        "get_global_size(0) + get_global_id(0);"
    )
    yield "const uint slot_items = get_global_size(0) * get_global_size(1) * get_global_size(2);"
    yield f"const uint slot_count = slot_bytes / {unit.nbytes};"
    if contiguous:
        yield "const uint slot_share = (slot_count + slot_items - 1) / slot_items, slot_step = 1;"
        yield "uint slot_at = slot_item * slot_share;"
        yield "const uint slot_end = min(slot_at + slot_share, slot_count);"
    else:
        yield "const uint slot_end = slot_count, slot_step = slot_items;"
        yield "uint slot_at = slot_item;"
    if unit.argument.startswith("__global"):
        yield "slot_target += slot_to;"
    yield f"{unit.type} slot_vector = 0;"
    yield f"if (slot_at < slot_end) slot_vector = {unit.fetch.format('slot_at')};"


def _turn(unit: _Unit) -> Iterator[str]:
    """Yield the statements of one round of a main loop: store one vector, fetch the next."""
    yield "if (slot_at < slot_end) {"
    yield f"  {unit.store.format('slot_vector')}"
    yield "  slot_at += slot_step;"
    yield f"  slot_vector = {unit.fetch.format('min(slot_at, slot_end - 1)')};"
    yield "}"


def _finish(unit: _Unit) -> Iterator[str]:
    """Yield the statements behind all others: the vector in flight, those left, a buffer's last bytes."""
    yield "if (slot_at < slot_end) {"
    yield f"  {unit.store.format('slot_vector')}"
    yield "  for (slot_at += slot_step; slot_at < slot_end; slot_at += slot_step)"
    yield f"    {unit.store.format(unit.fetch.format('slot_at'))}"
    yield "}"
    if unit.argument.startswith("__global"):
        yield "if (slot_item == 0)"
        yield f"  for (uint slot_byte = slot_count * {VECTOR_BYTES}; slot_byte < slot_bytes; ++slot_byte)"
        yield (
            "    ((__global uchar*)slot_target)[slot_byte] = ((__global const uchar*)slot_source)[slot_byte];"
        )


def _indented(lines: Iterator[str], indent: str) -> list[str]:
    return [indent + line for line in lines]


# loading kernels ----------------------------------------------------------------------------------------

_GROUP = 256
_PER_ITEM = 4
"""Vectors a work-item of a GPU copies at least."""
_MOST_GROUPS = 1024
_CPU_SHARE = 1 << 16
"""Bytes a work-item of a processor copies at least."""
_CPU_ITEMS = 64


def loading_kernel(destination: Destination, device_class: DeviceClass) -> Kernel:
    """Return the kernel that only loads, a slot without a host; launch it by `loading_size`."""
    source = "\n__kernel void loading() {\n}\n"
    return with_slot(Kernel("loading", source, (), "loading"), destination, device_class)


def loading_size(
    nbytes: int, device_class: DeviceClass, largest_group: int = _GROUP
) -> tuple[tuple[int], tuple[int]]:
    """Return the global and the local size of a loading kernel for so many bytes.

    largest_group: work-items of a work-group at most.
    """
    if device_class == "cpu":
        return (max(1, min(_CPU_ITEMS, nbytes // _CPU_SHARE)),), (1,)
    group = min(_GROUP, largest_group)
    groups = -(-nbytes // (group * _PER_ITEM * VECTOR_BYTES))
    return (max(1, min(_MOST_GROUPS, groups)) * group,), (group,)


def slot_numbers(tensor: StoredTensor, start: int, stop: int, offset: int) -> tuple[int, ...]:
    """Return a slot's numbers for the bytes `start` to `stop` of a packed tensor, as `with_slot` takes them.

    offset: bytes of the source before them, a multiple of 16.

    Raises:
        LoweringError: bytes that do not begin at a multiple of 16 (or a row of texels), or end within a row.
    """
    layout, image = tensor.layout, tensor.layout.storage != "buffer"
    unit = layout.unit_bytes(tensor.shape, tensor.dtype) if image else VECTOR_BYTES
    ordered = 0 <= start <= stop <= start + MOST_BYTES
    if start % unit or offset % VECTOR_BYTES or (image and stop % unit) or not ordered:
        raise LoweringError(
            f"{tensor.role} {tensor.name}: bytes {start} to {stop}, at byte {offset} of the source; expected "
            f"multiples of {unit} bytes, from a multiple of {VECTOR_BYTES}, {MOST_BYTES} at most"
        )
    numbers = offset // VECTOR_BYTES, start // unit, stop - start
    return (*numbers, layout.extent(tensor.shape)[0]) if image else numbers
