"""Kernel texts: arguments, work-items, statements, and the Kernel that a Program launches.

A kernel is written statement by statement in a `Body`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from torchedge.expressions.dialect import STORED, Site
from torchedge.expressions.indices import Axis
from torchedge.expressions.sizes import argument, as_arguments, as_literals, digits
from torchedge.lowering.kernel_texts import WORDS, KernelText
from torchedge.lowering.nodes import Node, Stored
from torchedge.lowering.programs import MAX_ARGUMENT_BYTES, Access, Kernel, Launch, LoadClassName
from torchedge.lowering.schedules import launch_sizes
from torchedge.textures.layouts import Layout

_SLOT_BYTES = 64
"""Bytes of arguments that a loading slot adds, at most."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel, the nodes of its arguments, and its launch, whose numbers of a Program are still open."""

    kernel: Kernel
    tensors: tuple[Node, ...]
    launch: Launch


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a kernel: where each node lies, and how the kernel uses it.

    checks: the kernel reports accesses outside its tensors. in_place: (argument read, argument written) that
    may be the same memory.
    """

    sites: Mapping[Node, Site]
    tensors: tuple[Node, ...]
    access: tuple[Access, ...]
    checks: bool = False
    in_place: tuple[tuple[int, int], ...] = ()

    def site_of(self, node: Node) -> Site:
        """Return where a node lies."""
        return self.sites[node]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters in OpenCL C."""
        aliased = {f"t{position}" for pair in self.in_place for position in pair}
        parts = []
        for node, access in zip(self.tensors, self.access, strict=True):
            site = self.sites[node]
            if site.layout.storage == "buffer":
                const = "const " if access == "read" else ""
                once = "" if access == "update" or site.name in aliased else " restrict"
                parts.append(f"__global {const}{STORED[site.dtype]}*{once} {site.name}")
            else:
                parts.append(f"{'read' if access == 'read' else 'write'}_only image2d_t {site.name}")
        return (*parts, *[f"__global int* {WORDS}"] * self.checks)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        sites = [self.sites[node] for node in self.tensors]
        return sum(site.layout.nbytes(site.shape, site.dtype) for site in sites)

    def launch(
        self,
        body: Body,
        stem: str,
        kind: str,
        items: tuple[tuple[int, ...], tuple[int, ...]],
        flops: int,
        reference: str,
        scope: str,
        local_bytes: int = 0,
        load_class: LoadClassName = "elemental",
        attributes: str = "",
    ) -> KernelSource:
        """Return the launch of a kernel with these arguments.

        body: its marked numbers (`expressions.sizes`) become arguments, unless they would take more bytes
        than every device has. stem: of the kernel's name. items: global and local size.
        """
        marked = "\n".join([f"  {line}" if line else "" for line in body.lines])
        lines, sizes = as_arguments(marked)
        if 8 * len(self.access) + 4 * len(sizes) > MAX_ARGUMENT_BYTES - _SLOT_BYTES:
            lines, sizes = as_literals(marked), ()
        parameters = (*self.parameters, *[f"const int n{place}" for place in range(len(sizes))])
        before = f"\n{''.join(body.helpers)}{attributes}"
        text = KernelText(before, f"{stem}_HASH", parameters, (lines,)).named(stem)
        kernel = Kernel(
            text.name,
            text.source,
            self.access,
            kind,
            load_class,
            self.checks,
            self.in_place,
            local_bytes,
            len(sizes),
        )
        launch = Launch(0, (), *items, scope, sizes, flops, self.nbytes, reference)
        return KernelSource(kernel, self.tensors, launch)


def arguments_of(
    written: Mapping[Node, Stored | None],
    read: Sequence[Node],
    layouts: Mapping[Node, Layout],
    checks: bool = False,
) -> Arguments:
    """Return the arguments of a kernel that writes and reads nodes.

    written: by node the stored tensor that it overwrites, which is one argument even where it is read too.
    """
    sites: dict[Node, Site] = {}
    tensors: list[Node] = []
    access: list[Access] = []
    for node, target in written.items():
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


@dataclass(frozen=True, slots=True)
class WorkItems:
    """How loops spread over work-items: the statements that find the loop variables, and the launch sizes.

    heads: of loops around the kernel's other statements, the outermost one first; statements of each.
    """

    statements: tuple[str, ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    heads: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def followed(self, statements: Sequence[str]) -> WorkItems:
        """Return the same with statements that need the loop variables."""
        if not self.heads:
            return replace(self, statements=(*self.statements, *statements))
        *outer, (head, own) = self.heads
        return replace(self, heads=(*outer, (head, (*own, *statements))))


def spread(
    loops: Sequence[Axis], counts: Mapping[Axis, int], group: Sequence[int], *, serial: bool = False
) -> WorkItems:
    """Spread loops (outermost first) over work-items: the two innermost as dimensions 0 and 1, the rest as 2.

    counts: work-items of an axis where they are not its extent (vectors). group: the work-group, innermost
    loop first. serial: one work-item does the work of a group, in loops.
    """
    order = list(reversed(loops))
    wanted = launch_sizes([counts.get(a, a.extent) for a in loops])
    groups = [-(-count // part) for count, part in zip(wanted, group, strict=True)]
    looped = [serial and part > 1 for part in group]
    variables = [
        f"i{k}" if loop else f"get_global_id({k})" for k, loop in zip(range(len(group)), looped, strict=True)
    ]
    axes = [[(axis.name, variable)] for axis, variable in zip(order[:2], variables, strict=False)]
    outer = [(axis.name, counts.get(axis, axis.extent)) for axis in order[2:]]
    axes += [digits(variables[2], outer)] if outer else []
    if not serial:
        guards = [
            f"if (get_global_id({k}) >= {argument(count, f'count {k}')}) return;"
            for k, (count, part) in enumerate(zip(wanted, group, strict=True))
            if count % part
        ]
        padded = [count * part for count, part in zip(groups, group, strict=True)]
        return WorkItems(
            (*guards, *declared([axis for part in axes for axis in part])), tuple(padded), tuple(group)
        )
    heads, statements = [], []
    for k in reversed(range(len(axes))):
        if looped[k]:
            part, count = argument(group[k], f"part {k}"), argument(wanted[k], f"count {k}")
            statements.append(f"const int b{k} = get_global_id({k}) * {part};")
            statements.append(f"const int e{k} = min(b{k} + {part}, {count});")
            heads.append((f"for (int i{k} = b{k}; i{k} < e{k}; ++i{k})", tuple(declared(axes[k]))))
        else:
            statements += declared(axes[k])
    return WorkItems(tuple(statements), tuple(groups), (1,) * len(group), tuple(heads))


def declared(axes: Sequence[tuple[str, str]]) -> list[str]:
    """Return the statements that declare loop variables, given as (name, value)."""
    return [f"const int {name} = {value};" for name, value in axes]


@dataclass(slots=True)
class Body:
    """The statements of a kernel, indented by block, and the helper texts that stand before it."""

    lines: list[str] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)
    depth: int = 0

    def add(self, *statements: str) -> None:
        """Add statements to the block that is open."""
        self.lines += ["  " * self.depth + line if line else "" for line in statements]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Open a block such as a loop; statements that are added meanwhile stand in it."""
        self.add(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.add("}")

    def spread(self, items: WorkItems, lines: Sequence[str]) -> None:
        """Add statements, as work-items carry them out."""
        self.add(*items.statements, "")
        with ExitStack() as stack:
            for head, statements in items.heads:
                stack.enter_context(self.block(head))
                self.add(*statements)
            self.add(*lines)
