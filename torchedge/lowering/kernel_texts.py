"""A kernel's text: its parts, what it may say, and the parameters against which launches are checked.

Kernels are C, and a compiler reads more into C than a reader sees: files, assembly, lines that continue. A
text is accepted only in the small part of C in which exports write: printable ASCII, no strings, no comments
but of words, no directives but those of `expressions.dialect`. Every check is one search of linear time.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from math import prod

from torchedge.errors import InputError
from torchedge.expressions.dialect import CHECK, HALVES, SAMPLER, STORED, TYPE_BYTES, UNALIGNED, WIDE
from torchedge.lowering.programs import Kernel, Launch, StoredTensor

_PREAMBLE = re.compile(
    "^(?:"
    + "".join([re.escape(helper) + "|" for helper in (CHECK, SAMPLER, HALVES, WIDE)])
    + re.escape(UNALIGNED.format(stored="STORED", width="WIDTH"))
    .replace("STORED", r"(?P<stored>\w+?)", 1)
    .replace("WIDTH", r"(?P<width>\d+)", 1)
    .replace("STORED", r"(?P=stored)")
    .replace("WIDTH", r"(?P=width)")
    + r"|[ \t]*#pragma unroll$)",
    re.MULTILINE | re.ASCII,
)
_STRANGE = (
    re.compile(r"[^\t\n -!%&(-?A-\[\]-_a-~]"),  # other characters, strings, directives, lines that continue
    re.compile(r"\?\?|%:|<:|:>|<%|%>"),  # other spellings of such characters
    re.compile(r"/\*|//(?! [\w ]*\n)", re.ASCII),  # comments that hide something
    re.compile(r"\b(?:asm|goto|_[A-Z]\w*|__(?!(?:kernel|global|local|attribute__)\b)\w*)\b", re.ASCII),
    re.compile(r"__attribute__(?! ?\(\((?:reqd_work_group_size|aligned)\()"),
)
_HEAD = re.compile(
    r"(?:__attribute__\(\(reqd_work_group_size\((\d{1,9}), (\d{1,9}), (\d{1,9})\)\)\) )?"
    r"(?P<kernel>__kernel void )(?P<name>\w+)\((?P<list>[^(){};]*)\) \{",
    re.ASCII,
)
BUFFER = re.compile(
    r"__global (?P<const>const )?(?P<type>\w+)(?:\*(?: restrict)? | \*)(?P<name>\w+)", re.ASCII
)
"""A parameter that is a buffer."""
_IMAGE = re.compile(r"(read|write)_only image2d_t \w+", re.ASCII)
_SIZE = re.compile(r"const int \w+", re.ASCII)
_LOCAL = re.compile(r"__local ([a-z]+)(\d*) \w+((?:\[\d{1,9}\])+)", re.ASCII)

WORDS = "te_words"
"""The parameter of kernels with checks."""
ITEMS_PER_ELEMENT = 64
"""Work-items that a launch may have for each element of its tensors: far more than any schedule takes."""
ITEMS_ANYWAY = 1 << 18
"""Work-items that any launch may have: a long sum may read few numbers, such as the bounds of a mask."""


@dataclass(frozen=True, slots=True)
class KernelText:
    """The text of one kernel in parts: what stands before it, name, parameters, and the lines of its body.

    before: helpers, then the kernel's attributes.
    """

    before: str
    name: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def source(self) -> str:
        """The whole text."""
        head = f"{self.before}__kernel void {self.name}({', '.join(self.parameters)}) {{"
        return "\n".join([head, *self.lines, "}\n"])

    def named(self, stem: str, digits: int = 10) -> KernelText:
        """Return the same kernel under a name that ends in a hash of its text."""
        return replace(self, name=f"{stem}_{hashlib.sha256(self.source.encode()).hexdigest()[:digits]}")


def text_of(kernel: Kernel) -> KernelText | None:
    """Return the parts of a kernel's text; None if it is not one that this package writes."""
    head = _HEAD.search(kernel.source)
    first, *lines = kernel.source[head.end() :].split("\n") if head else ["none"]
    if head is None or first or lines[-2:] != ["}", ""]:
        return None
    before, parameters = kernel.source[: head.start("kernel")], tuple(filter(None, head["list"].split(", ")))
    return KernelText(before, head["name"], parameters, tuple(lines[:-2]))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of tensors: ("buffer", element type, writable) or ("image", "", writable); the work-group.

    group: the size that the text demands, None for any.
    """

    tensors: tuple[tuple[str, str, bool], ...]
    group: tuple[int, int, int] | None


def read_parameters(where: str, kernel: Kernel) -> Parameters:
    """Return what a kernel's text declares.

    Raises:
        InputError: the text says more than exports write, defines another kernel or none, or does not have
            the arguments or the local memory that `kernel` lists.
    """
    bare = _PREAMBLE.sub("", kernel.source)
    strange = next(filter(None, [pattern.search(bare) for pattern in _STRANGE]), None)
    if strange:
        lines = bare.count("\n", strange.start())
        raise InputError(
            f"{where}: its text has {strange[0][:20]!r} {lines} lines before its end; expected the part of C "
            "that export writes"
        )
    heads = list(_HEAD.finditer(bare))
    if bare.count("__kernel") != 1 or len(heads) != 1 or heads[0]["name"] != kernel.name:
        raise InputError(f"{where}: its text does not define exactly one __kernel void {kernel.name}")
    declared = heads[0]["list"].split(", ") if heads[0]["list"] else []
    count, expected = len(kernel.access), len(kernel.access) + kernel.checks + kernel.sizes
    tensors = tuple([_tensor(text) for text in declared[:count]])
    rest = declared[count:]
    if kernel.checks and rest[:1] == [f"__global int* {WORDS}"]:
        rest = rest[1:]
    if (
        len(declared) != expected
        or None in tensors
        or len(rest) != kernel.sizes
        or not all(map(_SIZE.fullmatch, rest))
    ):
        raise InputError(
            f"{where}: its text declares {len(declared)} parameters; expected {count} tensors, then "
            f"{kernel.sizes} sizes"
        )
    arguments = tuple([tensor for tensor in tensors if tensor is not None])
    for place, ((kind, _, writable), access) in enumerate(zip(arguments, kernel.access, strict=True)):
        if writable != (access != "read") or (kind == "image" and access == "update"):
            raise InputError(f"{where}: access[{place}] is {access}; expected the one that its text declares")
    local = sum(
        TYPE_BYTES.get(kind, 1) * int(lanes or 1) * prod(map(int, re.findall(r"\d+", sizes)))
        for kind, lanes, sizes in _LOCAL.findall(bare)
    )
    if local != kernel.local_bytes:
        raise InputError(f"{where}: local_bytes is {kernel.local_bytes}; its text declares {local}")
    group = heads[0].group(1, 2, 3)
    return Parameters(arguments, None if group[0] is None else (int(group[0]), int(group[1]), int(group[2])))


def _tensor(text: str) -> tuple[str, str, bool] | None:
    buffer, image = BUFFER.fullmatch(text), _IMAGE.fullmatch(text)
    if buffer:
        return "buffer", buffer["type"], not buffer["const"]
    return ("image", "", image[1] == "write") if image else None


def check_arguments(
    where: str, launch: Launch, kernel: Kernel, parameters: Parameters, tensors: list[StoredTensor]
) -> None:
    """Check a launch against its kernel's parameters; `tensors` are those of its arguments.

    Raises:
        InputError: an argument is of another kind or dtype than its parameter, a tensor that is written is
            not the kernel's own or stays the same, or there are other work-items than tensors ask for.
    """
    for place, (tensor, (kind, element, writable)) in enumerate(
        zip(tensors, parameters.tensors, strict=True)
    ):
        fits = tensor.layout.storage != "buffer" if kind == "image" else tensor.layout.storage == "buffer"
        if not fits or (kind == "buffer" and STORED.get(tensor.dtype) != element):
            raise InputError(
                f"{where}: argument {place} is {tensor.name[:80]}, a {tensor.layout.storage} of "
                f"{tensor.dtype}; kernel {kernel.name} takes a {kind}{f' of {element}' if element else ''}"
            )
        if writable and tensor.role in ("input", "constant"):
            raise InputError(
                f"{where}: writes {tensor.role} {tensor.name[:80]}; expected it to stay the same"
            )
        if writable and launch.tensors.count(launch.tensors[place]) > 1:
            raise InputError(f"{where}: writes {tensor.name[:80]}, which is another argument, too")
    group = launch.local_size or (1,) * len(launch.global_size)
    if parameters.group is not None and (*group, 1, 1)[:3] != parameters.group:
        raise InputError(
            f"{where}: local_size is {list(group)}; kernel {kernel.name} demands {list(parameters.group)}"
        )
    items = prod([whole - part + 1 for whole, part in zip(launch.global_size, group, strict=True)])
    most = ITEMS_PER_ELEMENT * sum([max(1, prod(tensor.shape)) for tensor in tensors])
    if items > max(most, ITEMS_ANYWAY):
        raise InputError(
            f"{where}: global_size is {list(launch.global_size)}; expected at most "
            f"{max(most, ITEMS_ANYWAY)} work-items for tensors of these sizes"
        )
