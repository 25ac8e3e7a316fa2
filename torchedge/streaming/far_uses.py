"""Weights whose uses lie far apart, as separate weights: each group of near uses is a load of its own.

A frozen weight is read in a forward pass and again in the backward; a tied embedding by the first and by the
last layers. Held from the first use to the last it would be there nearly always. A part is a tensor of the
program like the weight, under a name of its own, which the launches from some one on use instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torchedge.graphs import WEIGHT_ROLES
from torchedge.lowering.programs import Index, Program

FAR = 8
"""Launches between two uses from which on the weight is loaded again."""

MOST_PARTS = 3
"""Loads of one weight in a run: a recurrent network uses its weights at every step."""

_PART = re.compile(r"(?s)(.+)~part([2-9])")


@dataclass(frozen=True, slots=True)
class Part:
    """From launch `first` on, launches use a tensor of its own in the place of `tensor`."""

    tensor: Index
    first: Index


def whole_name(name: str) -> str:
    """Return the name under which the values of a weight, or of a part of one, are stored."""
    match = _PART.fullmatch(name)
    return match[1] if match else name


def launches_using(program: Program) -> dict[int, list[int]]:
    """Return the launches that use each weight, in order; weights without a use are omitted."""
    uses: dict[int, list[int]] = {}
    for position, launch in enumerate(program.launches):
        for index in dict.fromkeys(launch.tensors):
            if program.tensors[index].role in WEIGHT_ROLES:
                uses.setdefault(index, []).append(position)
    return uses


def far_parts(program: Program, weights: Collection[int]) -> tuple[Part, ...]:
    """Return the parts of weights beyond their first ones, divided at the widest gaps between uses."""
    names, uses = {tensor.name for tensor in program.tensors}, launches_using(program)
    parts = []
    for index in sorted(weights):
        if any(f"{program.tensors[index].name}~part{n}" in names for n in range(2, MOST_PARTS + 1)):
            continue
        gaps = [
            (after - before, after) for before, after in pairwise(uses.get(index, ())) if after - before > FAR
        ]
        widest = sorted(gaps, key=lambda gap: (-gap[0], gap[1]))[: MOST_PARTS - 1]
        parts += [Part(index, first) for first in sorted(after for _, after in widest)]
    return tuple(parts)


def divided(program: Program, parts: Sequence[Part]) -> Program:
    """Return a program whose launches use parts, its last tensors, for which its arena has no place."""
    if not parts:
        return program
    tensors, launches = list(program.tensors), list(program.launches)
    current: dict[int, int] = {}
    for part in sorted(parts, key=lambda part: (part.tensor, part.first)):
        number = current[part.tensor] = current.get(part.tensor, 1) + 1
        whole, own = program.tensors[part.tensor], len(tensors)
        tensors.append(replace(whole, name=f"{whole.name}~part{number}"))
        for position in range(part.first, len(launches)):
            used = program.launches[position].tensors
            if part.tensor in used:
                now = [
                    own if at == part.tensor else n
                    for at, n in zip(used, launches[position].tensors, strict=True)
                ]
                launches[position] = replace(launches[position], tensors=tuple(now))
    return replace(program, tensors=tuple(tensors), launches=tuple(launches))


def parts_named(program: Program, first_uses: dict[str, int]) -> tuple[Part, ...]:
    """Return the parts of a program among weights by name, with the launch that first uses each."""
    number = {tensor.name: index for index, tensor in enumerate(program.tensors)}
    parts = []
    for name, first in first_uses.items():
        index = number.get(whole_name(name))
        if name not in number and index is not None:
            parts.append(Part(index, first))
    return tuple(sorted(parts, key=lambda part: (part.tensor, part.first)))
