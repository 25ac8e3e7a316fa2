"""Programs as JSON documents: what is read is checked to the last index before it becomes a Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from torchedge.errors import InputError, PlanError
from torchedge.lowering.addressing import beyond_offsets
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.kernel_texts import Parameters, check_arguments, read_parameters
from torchedge.lowering.programs import MAX_SIZE, Kernel, Launch, Program
from torchedge.storage import Document
from torchedge.storage.codecs import Codec
from torchedge.storage.documents import first_repeated
from torchedge.textures.layouts import MAX_EXTENT, Layout

MAX_FILE_BYTES = 2**26


def program_document(program: Program, *, sources: bool = True) -> Document:
    """Return the JSON document of a program; without `sources` the kernels' texts go elsewhere, by name."""
    document = PROGRAMS.document(program)
    if not sources:
        for kernel in document["kernels"]:  # type: ignore[attr-defined]
            del kernel["source"]
    return document


def program_schema() -> Document:
    """Return the JSON schema of a program; the texts of a bundle's kernels are files of their own."""
    schema = PROGRAMS.schema()
    schema["$defs"]["Kernel"]["required"].remove("source")  # type: ignore[index]
    return schema


def parse_program(
    source: str | Path, document: Mapping[str, object], sources: Mapping[str, str] | None = None
) -> Program:
    """Build a program from its JSON document; `source` is named in errors.

    sources: the kernels' texts by name, where the document holds none.

    Raises:
        InputError: an entry is missing, unknown or out of range, a text is not the one that was hashed, or
            the arena does not hold the step.
    """
    if sources is not None:
        document = _with_sources(source, document, sources)
    return PROGRAMS.parse(source, document)


def _with_sources(
    source: str | Path, document: Mapping[str, object], sources: Mapping[str, str]
) -> Mapping[str, object]:
    kernels = document.get("kernels")
    if not isinstance(kernels, list) or not all(isinstance(kernel, Mapping) for kernel in kernels):
        return document
    for kernel in kernels:
        name = str(kernel.get("name"))[:80]
        if not isinstance(kernel.get("name"), str) or kernel["name"] not in sources:
            raise InputError(f"{source}: there is no text of kernel {name}; expected one for each kernel")
    return {**document, "kernels": [{**kernel, "source": sources[kernel["name"]]} for kernel in kernels]}


# what no single entry shows ---------------------------------------------------------------------------------


def _check_program(program: Program) -> None:
    """Check what concerns several entries: indices, names, roles, layouts, the arena against the launches."""
    for number, tensor in enumerate(program.tensors):
        _check_layout(f"tensors[{number}].layout", tensor.layout, tensor.shape)
        if max(prod(tensor.shape), tensor.nbytes) > MAX_SIZE:
            raise InputError(
                f"tensors[{number}]: shape {list(tensor.shape)} is too large; "
                f"expected at most {MAX_SIZE} bytes"
            )
    if message := beyond_offsets(program):
        raise InputError(message)
    parameters = [
        _check_kernel(f"kernels[{number}]", kernel) for number, kernel in enumerate(program.kernels)
    ]
    launched = ((f"launches[{n}].tensors", launch.tensors) for n, launch in enumerate(program.launches))
    single = [(f"hyperparameters.{key}", (place,)) for key, place in program.hyperparameters.items()]
    for where, indices in [*launched, ("inputs", program.inputs), ("outputs", program.outputs), *single]:
        for index in indices:
            _check_index(where, index, len(program.tensors))
    for number, launch in enumerate(program.launches):
        _check_launch(f"launches[{number}]", launch, program, parameters)
    named = [tensor.name for tensor in program.tensors if tensor.role != "intermediate"]
    for what, names in (("tensors", named), ("kernels", [kernel.name.lower() for kernel in program.kernels])):
        if len(set(names)) != len(names):
            raise InputError(f"two {what} are called {first_repeated(names)[:80]!r}; expected each name once")
    for index in program.inputs:
        if program.tensors[index].role != "input":
            raise InputError(f"input {program.tensors[index].name} has another role than input")
    for index in program.outputs:
        if program.tensors[index].role == "intermediate":
            raise InputError(
                f"output {program.tensors[index].name} is an intermediate; expected another role"
            )
    for name, index in program.hyperparameters.items():
        if program.tensors[index].shape != () or program.tensors[index].role != "input":
            raise InputError(f"hyperparameter {name} is not a single number with the role input")
    if len(set(program.inputs)) != len(program.inputs):
        raise InputError("inputs lists a tensor twice; expected each input once")
    try:
        check_arena(program, 1)
    except PlanError as error:
        raise InputError(str(error)) from error


PROGRAMS = Codec(
    Program,
    "Program",
    schema="torchedge-program-1",
    verify=_check_program,
    remedy="export the model again",
    max_bytes=MAX_FILE_BYTES,
)
read_program, write_program = PROGRAMS.read, PROGRAMS.write
"""A program with its kernels' texts as one file: .json or .json.gz."""


def _check_layout(where: str, layout: Layout, shape: tuple[int, ...]) -> None:
    if sorted(layout.order) != list(range(len(shape))):
        raise InputError(
            f"{where}: order is {list(layout.order)}; expected each of {len(shape)} dimensions once"
        )
    if layout.split > len(shape):
        raise InputError(f"{where}: split is {layout.split}; expected at most {len(shape)}, the dimensions")
    if layout.storage == "buffer":
        if layout != Layout(layout.order):
            raise InputError(f"{where}: a buffer has neither split, pattern, fold nor row_texels")
        return
    width, height = layout.extent(shape)
    if max(width, height) > MAX_EXTENT:
        raise InputError(f"{where}: an image of {width} x {height}; expected at most {MAX_EXTENT} each way")
    pitched = layout.row_texels >= width if layout.storage == "image_buffer" else layout.row_texels == 0
    if not pitched:
        raise InputError(
            f"{where}: row_texels is {layout.row_texels} for an image {width} wide; expected the pitch "
            "of an image_buffer, and 0 for others"
        )


def _check_kernel(where: str, kernel: Kernel) -> Parameters:
    """Return the parameters that a kernel's text declares, checked against its other entries."""
    parameters = read_parameters(where, kernel)
    for pair in kernel.in_place:
        if max(pair) >= len(kernel.access):
            raise InputError(
                f"{where}: in_place names argument {max(pair)} of {len(kernel.access)}; expected one it has"
            )
        if kernel.access[pair[0]] == "write" or kernel.access[pair[1]] == "read":
            raise InputError(
                f"{where}: in_place is {list(pair)}; expected an argument that is read and one written"
            )
    return parameters


def _check_launch(where: str, launch: Launch, program: Program, parameters: Sequence[Parameters]) -> None:
    _check_index(f"{where}.kernel", launch.kernel, len(program.kernels))
    kernel, size, local = program.kernels[launch.kernel], launch.global_size, launch.local_size
    if len(launch.tensors) != len(kernel.access):
        raise InputError(
            f"{where}: {len(launch.tensors)} tensors for kernel {kernel.name}; expected {len(kernel.access)}"
        )
    if len(launch.sizes) != kernel.sizes:
        raise InputError(
            f"{where}: {len(launch.sizes)} sizes for kernel {kernel.name}; expected {kernel.sizes}"
        )
    if local is not None and (
        len(local) != len(size) or any(whole % part for whole, part in zip(size, local, strict=True))
    ):
        raise InputError(
            f"{where}: {list(size)} work-items in groups of {list(local)}; expected whole groups"
        )
    tensors = [program.tensors[index] for index in launch.tensors]
    check_arguments(where, launch, kernel, parameters[launch.kernel], tensors)


def _check_index(where: str, index: int, count: int) -> None:
    if index >= count:
        raise InputError(f"{where} is {index}; expected a whole number from 0 to {count - 1}")
