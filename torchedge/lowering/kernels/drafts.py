"""What all kernel makers share: arguments, work-items, the template folder, and the finished draft."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from torchedge.expressions.dialect import STORED, Site
from torchedge.expressions.indices import Axis
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.nodes import Node, Stored
from torchedge.lowering.programs import Access, Kernel
from torchedge.lowering.targets import Target
from torchedge.textures.layouts import Layout

if TYPE_CHECKING:
    from jinja2 import Environment

NAME = "KERNEL_NAME"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One launch to be: the kernel, the tensors it is given (nodes, in order) and its work-items."""

    kernel: Kernel
    tensors: tuple[Node, ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a kernel: where each node lies, and how the kernel uses it.

    in_place: (argument read, argument written) that may be the same memory.
    """

    sites: Mapping[Node, Site]
    tensors: tuple[Node, ...]
    access: tuple[Access, ...]
    checks: bool = False
    in_place: tuple[tuple[int, int], ...] = ()

    @property
    def aliased(self) -> frozenset[str]:
        """Names of arguments of which one may lie where another does."""
        return frozenset(f"t{position}" for pair in self.in_place for position in pair)

    def site_of(self, node: Node) -> Site:
        """Return where a node lies."""
        return self.sites[node]

    @property
    def text(self) -> str:
        """The parameter list in OpenCL C."""
        parts = []
        for node, access in zip(self.tensors, self.access, strict=True):
            site = self.sites[node]
            if site.layout.storage == "buffer":
                const = "const " if access == "read" else ""
                once = "" if access == "update" or site.name in self.aliased else " restrict"
                parts.append(f"__global {const}{STORED[site.dtype]}*{once} {site.name}")
            else:
                parts.append(f"{'read' if access == 'read' else 'write'}_only image2d_t {site.name}")
        return ", ".join([*parts, "__global int* te_words"] if self.checks else parts)


def arguments_of(
    written: Sequence[tuple[Node, Stored | None]],
    read: Sequence[Node],
    layouts: Mapping[Node, Layout],
    checks: bool = False,
) -> Arguments:
    """Return the arguments of a kernel that writes and reads nodes; an overwritten tensor is one argument.

    checks: the kernel reports accesses outside its tensors.
    """
    sites: dict[Node, Site] = {}
    tensors: list[Node] = []
    access: list[Access] = []
    for node, target in written:
        key = target or node
        site = Site(f"t{len(tensors)}", key.shape, key.dtype, layouts[key], checks * (len(tensors) + 1))
        sites[node] = sites[key] = site
        tensors.append(key)
        access.append("update" if key in read else "write")
    for node in read:
        if node not in sites:
            number = checks * (len(tensors) + 1)
            sites[node] = Site(f"t{len(tensors)}", node.shape, node.dtype, layouts[node], number)
            tensors.append(node)
            access.append("read")
    return Arguments(sites, tuple(tensors), tuple(access), checks)


def written_by(group: FusionGroup) -> list[tuple[Node, Stored | None]]:
    """Return what a group stores, with what that overwrites."""
    return list(group.stored.items())


@dataclass(frozen=True, slots=True)
class Items:
    """Work-items: (axis, how to find it) lines, guards (dimension, size), and the sizes of the launch."""

    axes: tuple[tuple[str, str], ...]
    guards: tuple[tuple[int, int], ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]


def spread(loops: Sequence[Axis], counts: Mapping[Axis, int], target: Target) -> Items:
    """Spread loops (outermost first) over work-items: the two innermost as dimensions 0 and 1, the rest as 2.

    counts: how many work-items an axis needs where that is not its extent (vectors).
    """
    order = list(reversed(loops))
    sizes = [counts.get(a, a.extent) for a in order]
    axes = [(a.name, f"get_global_id({k})") for k, a in enumerate(order[:2])]
    rest, step = order[2:], 1
    for number, axis in enumerate(rest):
        text = "get_global_id(2)" if step == 1 else f"get_global_id(2) / {step}"
        size = counts.get(axis, axis.extent)
        last = number == len(rest) - 1
        axes.append((axis.name, text if last else f"({text}) % {size}"))
        step *= size
    wanted = [*sizes[:2], *([prod(sizes[2:])] if rest else [])] or [1]
    local, left = [], group_size(prod(wanted), target)
    for size in wanted:
        part = min(_power_below(size), left)
        local.append(part)
        left //= part
    padded = [-(-size // part) * part for size, part in zip(wanted, local, strict=True)]
    guards = [(k, size) for k, (size, p) in enumerate(zip(wanted, padded, strict=True)) if p != size]
    return Items(tuple(axes), tuple(guards), tuple(padded), tuple(local))


def group_size(items: int, target: Target) -> int:
    """Return how many work-items a work-group has: fewer where else some processors had nothing to do."""
    return min(target.group, max(target.least_group, items // target.work_items))


def _power_below(size: int) -> int:
    """Return the size itself where it is small, else the largest power of two below it."""
    return size if size <= 64 else 1 << (size.bit_length() - 1)


@cache
def environment() -> Environment:
    """Return the Jinja2 environment over the kernel templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from torchedge.storage import data_folder

    return Environment(
        loader=FileSystemLoader(data_folder("export") / "kernels"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def fill(template: str, **values: Any) -> str:  # noqa: ANN401 - what a template needs
    """Return a kernel text from its template, named by its content."""
    text = environment().get_template(template).render(name=NAME, **values)
    stem = template.split(".")[0]
    return text.replace(NAME, f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:10]}")


def name_in(source: str) -> str:
    """Return the name of the kernel that a text defines."""
    return source.split("__kernel void ", 1)[1].split("(", 1)[0]


def preamble_of(helpers: Mapping[str, None]) -> str:
    """Return the helper texts that stand before a kernel."""
    return "".join(helpers)
