"""Programs as JSON documents: what is read is checked to the last index before it becomes a Program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, get_args

from torchedge.errors import InputError, PlanError
from torchedge.graphs import ITEM_SIZES
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.program_documents import SCHEMA, program_document
from torchedge.lowering.programs import (
    Access,
    Arena,
    Kernel,
    Launch,
    Program,
    StoredTensor,
    TensorRole,
)
from torchedge.lowering.targets import TARGETS
from torchedge.storage import write_json
from torchedge.storage.documents import parse_json, read_unpacked
from torchedge.storage.fields import Fields
from torchedge.textures.layouts import Layout, Storage
from torchedge.textures.patterns import PATTERNS

__all__ = ["parse_program", "read_program", "write_program"]

MAX_FILE_BYTES = 2**26
MAX_ITEMS = 2**16
"""Tensors, kernels and launches of a program, of each at most."""

MAX_RANK = 16
MAX_SIZE = 2**40
"""Largest dimension, number of work-items, and number of bytes."""

MAX_EXTENT = 2**20
MAX_SOURCE = 2**20
MAX_ARGUMENTS = 256
MAX_ARENA_WORK = 2**26
"""Pairs of tensors that are alive together: far more than any network has, and checked within minutes."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*(?:#|%:|\?\?=)[ \t]*(\w*)", re.MULTILINE)
_ALLOWED = frozenset(["define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "pragma"])


def write_program(path: str | Path, program: Program) -> None:
    """Write a program with its kernels' texts to one file (.json or .json.gz), atomically.

    Raises:
        ProfileError: it cannot be written.
    """
    write_json(path, program_document(program))


def read_program(path: str | Path) -> Program:
    """Read a program that `write_program` wrote.

    Raises:
        InputError: an entry is missing, unknown or out of range, or the arena does not hold the step.
        ProfileError: the file cannot be read, is too large or is no JSON.
    """
    return parse_program(path, parse_json(path, read_unpacked(path, max_bytes=MAX_FILE_BYTES)))


def parse_program(
    source: str | Path, document: Mapping[str, object], sources: Mapping[str, str] | None = None
) -> Program:
    """Build a program from its JSON document; `source` is named in errors.

    sources: the kernels' texts by name, where the document holds none.

    Raises:
        InputError: an entry is missing, unknown or out of range, a text is not the one that was hashed, or
            the arena does not hold the step.
    """
    entry = Fields(str(source), document)
    entry.word("schema", (SCHEMA,))
    tensors = tuple(
        [_tensor(f"{source}: tensor {n}", item) for n, item in enumerate(_items(entry, "tensors"))]
    )
    kernels = tuple(
        [_kernel(f"{source}: kernel {n}", item, sources) for n, item in enumerate(_items(entry, "kernels"))]
    )
    launches = tuple(
        [
            _launch(f"{source}: launch {n}", item, kernels, len(tensors))
            for n, item in enumerate(_items(entry, "launches"))
        ]
    )
    last = len(tensors) - 1
    program = Program(
        entry.text("name"),
        tensors,
        kernels,
        launches,
        entry.numbers("inputs", 0, last, most=MAX_ITEMS),
        entry.numbers("outputs", 0, last, most=MAX_ITEMS),
        _arena(entry.below("arena"), last),
        _hyperparameters(entry.below("hyperparameters"), last),
        entry.word("target", tuple(TARGETS)),
        tuple([_note(str(source), note) for note in entry.entries("notes", most=1000)]),
    )
    entry.done()
    _check_program(str(source), program)
    return program


def _items(entry: Fields, key: str) -> list[object]:
    return entry.entries(key, most=MAX_ITEMS)


def _note(source: str, note: object) -> str:
    if not isinstance(note, str) or not note.isprintable():
        raise InputError(f"{source}: notes hold something that is no printable text; expected texts")
    return note


def _tensor(where: str, item: object) -> StoredTensor:
    entry = Fields(where, item)
    name = entry.text("name")
    shape = entry.numbers("shape", 0, MAX_SIZE, most=MAX_RANK)
    dtype = entry.word("dtype", tuple(ITEM_SIZES))
    role: TensorRole = entry.word("role", get_args(TensorRole))  # type: ignore[assignment]
    layout = _layout(entry.below("layout"), shape)
    tensor = StoredTensor(name, shape, dtype, role, layout, entry.real("fill", 0.0))
    entry.done()
    if prod(shape) > MAX_SIZE or tensor.nbytes > MAX_SIZE:
        raise InputError(f"{where}: shape {list(shape)} is too large; expected at most {MAX_SIZE} bytes")
    return tensor


def _layout(entry: Fields, shape: Sequence[int]) -> Layout:
    order = entry.numbers("order", 0, MAX_RANK, most=MAX_RANK)
    storage: Storage = entry.word("storage", get_args(Storage), "buffer")  # type: ignore[assignment]
    split = entry.whole("split", 0, len(shape), 0)
    pattern = entry.word("pattern", tuple(PATTERNS), "row")
    fold = entry.whole("fold", 1, MAX_EXTENT, 1)
    layout = Layout(order, storage, split, pattern, fold, entry.whole("row_texels", 0, MAX_EXTENT, 0))
    entry.done()
    if sorted(order) != list(range(len(shape))):
        raise InputError(
            f"{entry.where}: order is {list(order)}; expected each of {len(shape)} dimensions once"
        )
    if storage == "buffer":
        if layout != Layout(order):
            raise InputError(f"{entry.where}: a buffer has neither split, pattern, fold nor row_texels")
        return layout
    width, height = layout.extent(shape)
    if max(width, height) > MAX_EXTENT:
        raise InputError(
            f"{entry.where}: an image of {width} x {height}; expected at most {MAX_EXTENT} each way"
        )
    pitched = layout.row_texels >= width if storage == "image_buffer" else layout.row_texels == 0
    if not pitched:
        raise InputError(
            f"{entry.where}: row_texels is {layout.row_texels} for an image {width} wide; expected the pitch "
            "of an image_buffer, and 0 for others"
        )
    return layout


def _kernel(where: str, item: object, sources: Mapping[str, str] | None) -> Kernel:
    entry = Fields(where, item)
    name = entry.text("name")
    if not _NAME.fullmatch(name):
        raise InputError(f"{where}: name is {name[:60]!r}; expected an identifier of OpenCL C")
    access: list[Any] = entry.entries("access", most=MAX_ARGUMENTS)
    if not all(isinstance(word, str) and word in get_args(Access) for word in access):
        raise InputError(f"{where}: access holds another word than {', '.join(get_args(Access))}")
    digest = entry.text("sha256")
    if sources is None:
        text = entry.raw("source")
    elif name not in sources:
        raise InputError(f"{where}: there is no text of kernel {name}; expected one for each kernel")
    else:
        text = sources[name]
    pairs = [
        _pair(where, "in_place", p) for p in entry.entries("in_place", most=MAX_ARGUMENTS**2, default=())
    ]
    kernel = Kernel(
        name,
        _checked_source(where, name, text),
        tuple(access),
        entry.text("kind"),
        entry.whole("flops", 0, 2**62, 0),
        entry.whole("nbytes", 0, 2**62, 0),
        entry.text("reference", "", longest=10_000, empty=True),
        entry.flag("checks", False),
        tuple(pairs),
    )
    entry.done()
    if kernel.digest != digest:
        raise InputError(
            f"{where}: the text of {name} has another SHA-256 than is stored; fetch or make it again"
        )
    for pair in kernel.in_place:
        if max(pair) >= len(access):
            raise InputError(
                f"{where}: in_place names argument {max(pair)} of {len(access)}; expected one it has"
            )
    return kernel


def _checked_source(where: str, name: str, text: object) -> str:
    """Return the text of a kernel: bounded, one `__kernel` of that name, and no file that it includes."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_SOURCE or "\0" in text:
        raise InputError(
            f"{where}: its text is empty, too long or no text; expected OpenCL C up to {MAX_SOURCE}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: its text is no Unicode ({error.reason}); expected OpenCL C") from error
    bare = _COMMENT.sub(" ", re.sub(r"(?:\\|\?\?/)\r?\n", "", text))
    if bare.count("__kernel") != 1 or not re.search(rf"\b__kernel\b[^;{{]*\bvoid\s+{name}\s*\(", bare):
        raise InputError(f"{where}: its text does not define exactly one __kernel void {name}; make it again")
    for word in _DIRECTIVE.findall(bare):
        if word not in _ALLOWED:
            raise InputError(
                f"{where}: its text has the directive #{word[:20]}; expected none that reads files"
            )
    return text


def _pair(where: str, key: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(x) is not int or x < 0 for x in value):
        raise InputError(f"{where}: {key} holds something other than pairs of whole numbers from 0 on")
    return value[0], value[1]


def _launch(where: str, item: object, kernels: Sequence[Kernel], tensors: int) -> Launch:
    entry = Fields(where, item)
    number = entry.whole("kernel", 0, len(kernels) - 1)
    given = entry.numbers("tensors", 0, tensors - 1, most=MAX_ARGUMENTS)
    size = entry.numbers("global_size", 1, MAX_SIZE, most=3)
    local = entry.numbers("local_size", 1, MAX_SIZE, most=3) if "local_size" in entry else None
    launch = Launch(number, given, size, local, entry.text("scope", "", empty=True))
    entry.done()
    wanted = len(kernels[number].access)
    if len(given) != wanted:
        raise InputError(
            f"{where}: {len(given)} tensors for kernel {kernels[number].name}; expected {wanted}"
        )
    if not size or prod(size) > MAX_SIZE:
        raise InputError(f"{where}: global_size is {list(size)}; expected 1 to 3 sizes, {MAX_SIZE} in all")
    if local is not None and (
        len(local) != len(size) or any(whole % part for whole, part in zip(size, local, strict=True))
    ):
        raise InputError(
            f"{where}: {list(size)} work-items in groups of {list(local)}; expected whole groups"
        )
    return launch


def _arena(entry: Fields, last: int) -> Arena:
    arena = Arena(
        entry.whole("nbytes", 0, MAX_SIZE),
        _places(entry, "offsets", last),
        tuple([_slot(entry.where, item) for item in entry.entries("slots", most=MAX_ITEMS)]),
        _places(entry, "slot_of", last),
        entry.whole("live_bytes", 0, MAX_SIZE),
    )
    entry.done()
    return arena


def _slot(where: str, item: object) -> tuple[int, int, str]:
    if isinstance(item, list) and len(item) == 3:
        width, height, dtype = item
        whole = all(type(size) is int and 1 <= size <= MAX_EXTENT for size in (width, height))
        if whole and isinstance(dtype, str) and dtype in ITEM_SIZES:
            return width, height, dtype
    raise InputError(f"{where}: slots hold something other than (width, height, dtype)")


def _places(entry: Fields, key: str, last: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for item in entry.entries(key, most=MAX_ITEMS):
        tensor, place = _pair(entry.where, key, item)
        if tensor > last or tensor in found:
            raise InputError(
                f"{entry.where}: {key} names tensor {tensor} twice or in vain; expected each once"
            )
        found[tensor] = place
    return found


def _hyperparameters(entry: Fields, last: int) -> dict[str, int]:
    found = {key: entry.whole(key, 0, last) for key in entry}
    entry.done()
    return found


def _check_program(source: str, program: Program) -> None:
    """Check what concerns several entries: names, roles, the arena against the launches."""
    kept = [tensor.name for tensor in program.tensors if tensor.role != "intermediate"]
    for what, names in (("tensors", kept), ("kernels", [kernel.name.lower() for kernel in program.kernels])):
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{source}: two {what} are called {twice[:80]!r}; expected each name once")
    for index in program.inputs:
        if program.tensors[index].role != "input":
            raise InputError(f"{source}: input {program.tensors[index].name} has another role than input")
    for index in program.outputs:
        if program.tensors[index].role == "intermediate":
            raise InputError(f"{source}: output {program.tensors[index].name} is an intermediate, not kept")
    for name, index in program.hyperparameters.items():
        if program.tensors[index].shape != () or program.tensors[index].role != "input":
            raise InputError(f"{source}: hyperparameter {name} is no single number that is fed")
    if len(set(program.inputs)) != len(program.inputs):
        raise InputError(f"{source}: a tensor is fed twice; expected each input once")
    work = _arena_work(program)
    if work > MAX_ARENA_WORK:
        raise InputError(
            f"{source}: {work} pairs of tensors are alive at once; expected up to {MAX_ARENA_WORK}"
        )
    try:
        check_arena(program, 1)
    except PlanError as error:
        raise InputError(f"{source}: {error}") from error


def _arena_work(program: Program) -> int:
    """Return how many pairs of tensors the arena's check compares: those alive where another begins."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, launch in enumerate(program.launches):
        for index in launch.tensors:
            first.setdefault(index, position)
            last[index] = position
    changes = [0] * (len(program.launches) + 1)
    for index, position in first.items():
        changes[position] += 1
        changes[last[index] + 1] -= 1
    alive = list(accumulate(changes))
    return sum(alive[position] for position in first.values())
