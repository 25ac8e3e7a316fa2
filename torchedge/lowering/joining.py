"""Programs that run one after the other, as one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchedge.errors import InputError
from torchedge.lowering.arenas import planned
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor


def join_programs(programs: Sequence[Program]) -> Program:
    """Return programs of inferences as one: the launches of each in turn, all inputs and outputs, one arena.

    Tensor NAME of the program in place k (from 1) is called k/NAME, and so are scopes. Kernels with the same
    text are one.

    Raises:
        InputError: there are no programs, or they are lowered for different targets.
    """
    targets = sorted({program.target for program in programs})
    if len(targets) != 1:
        raise InputError(f"programs of targets {', '.join(targets) or 'none'}; expected one target for all")
    tensors: list[StoredTensor] = []
    kernels: dict[Kernel, int] = {}
    launches: list[Launch] = []
    inputs: list[int] = []
    outputs: list[int] = []
    for place, program in enumerate(programs, 1):
        base = len(tensors)
        tensors += [replace(tensor, name=f"{place}/{tensor.name}") for tensor in program.tensors]
        numbers = [kernels.setdefault(kernel, len(kernels)) for kernel in program.kernels]
        launches += [
            replace(
                launch,
                kernel=numbers[launch.kernel],
                tensors=tuple([base + index for index in launch.tensors]),
                scope=f"{place}/{launch.scope}",
            )
            for launch in program.launches
        ]
        inputs += [base + index for index in program.inputs]
        outputs += [base + index for index in program.outputs]
    limits = [program.arena.allocation_bytes for program in programs if program.arena.allocation_bytes]
    joined = Program(
        " + ".join(program.name for program in programs)[:1000],
        tuple(tensors),
        tuple(kernels),
        tuple(launches),
        tuple(inputs),
        tuple(outputs),
        Arena(0, allocation_bytes=min(limits, default=0)),
        target=programs[0].target,
        notes=tuple(dict.fromkeys(note for program in programs for note in program.notes)),
    )
    return planned(joined, ALIGNMENT)
