"""A step as a Program: rules, fusion, placement, kernels, arena."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchedge.errors import InputError, LoweringError
from torchedge.expressions.scalars import Scalar, constant, where
from torchedge.graphs import WEIGHT_ROLES
from torchedge.graphs.steps import Step
from torchedge.lowering.addressing import beyond_offsets, check_shapes
from torchedge.lowering.arenas import planned
from torchedge.lowering.building import full, reduced
from torchedge.lowering.common_places import share_places
from torchedge.lowering.copies import copied_updates
from torchedge.lowering.fusion import Fused, FusionGroup, form_groups, is_access
from torchedge.lowering.index_ranges import index_ranges, zero_divisions
from torchedge.lowering.joined_rows import join_rows, join_siblings
from torchedge.lowering.kernels.alike import Forms
from torchedge.lowering.kernels.nests import Nest, beyond_texels, write_kernel
from torchedge.lowering.kernels.sources import KernelSource
from torchedge.lowering.kernels.updates import gather_updates, write_updates
from torchedge.lowering.node_checks import check_nodes
from torchedge.lowering.nodes import Contraction, Node, Pointwise
from torchedge.lowering.placement import (
    as_images,
    place_tensors,
    share_images,
    store_half,
    store_weights_half,
)
from torchedge.lowering.programs import Arena, IndexRange, Kernel, Program, StoredTensor, TensorRole
from torchedge.lowering.schedules import Schedule, default_schedule
from torchedge.lowering.targets import Target, target_of
from torchedge.lowering.translation import Translation, translate
from torchedge.lowering.tuning import Timer, tune
from torchedge.storage.locks import collection_paused
from torchedge.textures.layouts import Layout, Storage, row_major

ALIGNMENT = 512
"""Bytes to which tensors in the arena are aligned: what the strictest OpenCL devices ask of sub-buffers."""


@dataclass(frozen=True, slots=True)
class FusedLaunch:
    """A launch of a contraction that computes element-wise values, too: `values` names them, in order.

    Each can be kept apart: computed by a kernel of its own (adaptive fusion, FlashMem section 4.3).
    """

    launch: int
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A Program, and what its launches fuse. Launches of rows and of slices are not listed: never split."""

    program: Program
    fused: tuple[FusedLaunch, ...]


def lower(
    step: Step,
    target: str | Target = "cpu",
    layouts: Mapping[str, Layout] | None = None,
    timer: Timer | None = None,
) -> Program:
    """Return the Program of a step for a device class.

    layouts: of inputs, parameters, buffers, states and constants that another program shares, by name. timer:
    measures kernels, so that the tuner takes the fastest of the best predicted ones, in buffers or images.

    Raises:
        LoweringError: operators without a rule, a request that no kernel supports, or a tensor with more
            elements than offsets of 32 bits address.
    """
    return lower_step(step, target, layouts, timer=timer).program


@collection_paused()
def lower_step(
    step: Step,
    target: str | Target = "cpu",
    layouts: Mapping[str, Layout] | None = None,
    apart: Collection[str] = frozenset(),
    timer: Timer | None = None,
) -> Lowered:
    """Return the Program of a step as `lower` does, with the values that its launches fuse.

    apart: element-wise values of the step, by name, that a kernel of their own computes and stores.

    Raises InputError where `apart` names no element-wise value, and as `lower` does.
    """
    device = target_of(target) if isinstance(target, str) else target
    translation, ranges = translate(step), index_ranges(step)
    checks = _checks(step, translation, ranges)
    translation = replace(translation, outputs=(*translation.outputs, *checks))
    roots = [*translation.outputs, *[n for _, n in translation.updates]]
    check_nodes(roots)
    share_places(roots)
    join_rows(roots)
    join_siblings(roots)
    stored, shared = list(translation.stored.values()), layouts or {}
    settled = [node for node in stored if node.name in shared]
    images = {node for node in settled if shared[node.name].storage != "buffer"}
    fused = form_groups(translation, device, _named(translation, apart), [*checks], images)
    check_shapes(_named_shapes(translation, fused.groups))
    inputs = [translation.stored[i] for i in step.inputs]
    placed = place_tensors(fused.groups, stored, inputs, shared)
    if device.half:
        store_half(fused.groups, fused.outputs[: len(step.outputs)])
    if device.half_weights:
        updated = {node for node, _ in translation.updates}
        weights = [n for i, n in translation.stored.items() if step.values[i].role in WEIGHT_ROLES]
        store_weights_half([n for n in weights if n not in updated])
    groups = copied_updates(fused.groups, images, placed)
    alone, together = gather_updates([group for group in groups if group.host.numel])
    fixed = {*inputs, *settled, *fused.outputs, *[n for batch in together for g in batch for n in g.reads]}
    forms = Forms()
    kernels, placed, schedules = _tuned(alone, placed, fixed, device, timer, forms)
    sources = write_kernels(kernels, placed, device, schedules, forms)
    sources += [write_updates(batch, placed, device) for batch in together]
    others = [group for batch in [*together, [g for g in groups if not g.host.numel]] for group in batch]
    fused = replace(fused, groups=(*kernels, *others))
    program = _program(step, translation, fused, sources, placed, device, ranges, [*checks.values()])
    return Lowered(program, _fused_launches(kernels, sources, translation.names))


def _tuned(
    groups: Sequence[FusionGroup],
    layouts: Mapping[Node, Layout],
    fixed: Collection[Node],
    target: Target,
    timer: Timer | None,
    forms: Forms,
) -> tuple[Sequence[FusionGroup], dict[Node, Layout], Mapping[FusionGroup, Schedule]]:
    """Return the kernels, where tensors lie, and the schedules that are not the default.

    With a timer, buffers and images are tuned, and those whose kernels take less time in all are taken.
    """
    if target.coefficients is None:
        return groups, as_images(groups, layouts, fixed, target), {}
    storages: list[Storage] = [target.storage]
    if timer is not None and target.name != "cpu" and target.image_width:
        storages += [other for other in ("buffer", "image") if other != target.storage]
    tuned = []
    for storage in storages:
        stored = replace(target, storage=storage)
        placed = as_images(groups, layouts, fixed, stored)
        tuned.append(tune(groups, placed, fixed, stored, target.coefficients, timer, forms))
    best = min(tuned, key=lambda choice: choice.ms)
    return best.groups, best.layouts, best.schedules


def _named(translation: Translation, names: Collection[str]) -> frozenset[Node]:
    """Return the element-wise nodes of a step that have these names."""
    nodes = {name: n for n, name in translation.names.items() if isinstance(n, Pointwise) and n.numel}
    unknown = [name for name in names if name not in nodes or is_access(nodes[name].body)]
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is no element-wise value of the step; expected names that `lower_step` returns"
        )
    return frozenset([nodes[name] for name in names])


def _named_shapes(
    translation: Translation, groups: Sequence[FusionGroup]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor that kernels read or write."""
    for stored in translation.stored.values():
        yield f"tensor {stored.name}", stored.shape
    for group in groups:
        for node in group.stored:
            kind = getattr(group.host, "name", "an element-wise operator")
            scope = node.scope or group.scope
            name = translation.names.get(node, f"the result of {kind}")
            yield f"{name} in {scope}" if scope else name, node.shape


def _fused_launches(
    groups: Sequence[FusionGroup], sources: Sequence[KernelSource], names: Mapping[Node, str]
) -> tuple[FusedLaunch, ...]:
    writer: dict[Node, int] = {}
    for place, source in enumerate(sources):
        written = zip(source.tensors, source.kernel.access, strict=True)
        writer.update({node: place for node, access in written if access != "read"})
    launches = []
    for group in groups:
        if not isinstance(group.host, Contraction):
            continue
        place = writer[next(over or node for node, over in group.stored.items())]
        fused = [*group.operands, *[n for n in group.computed if n is not group.host]]
        values = [names[n] for n in fused if n in names and not any(map(is_access, n.roots))]
        if values and sources[place].kernel.load_class == "reusable":
            launches.append(FusedLaunch(place, tuple(values)))
    return tuple(sorted(launches, key=lambda launch: launch.launch))


def write_kernels(
    groups: Sequence[FusionGroup],
    layouts: dict[Node, Layout],
    target: Target,
    schedules: Mapping[FusionGroup, Schedule] | None = None,
    forms: Forms | None = None,
) -> list[KernelSource]:
    """Return the kernels of groups, in order.

    A result that lies in an image which its kernel cannot write by whole texels goes to a buffer: `layouts`
    is changed. schedules: by group, where they are not the defaults of the target. forms: of the groups.
    """
    forms = Forms() if forms is None else forms
    schedules = {} if schedules is None else schedules
    decided: dict[Any, tuple[FusionGroup, Nest, Schedule, list[int]]] = {}
    drafts = []
    for group in groups:
        form = forms.of(group)
        key = form.text, form.layouts(layouts), schedules.get(group)
        if key not in decided:
            nest = forms.nest(group, layouts)
            chosen = schedules.get(group) or default_schedule(nest.extents, target)
            beyond = beyond_texels(group, nest, layouts, chosen, target)
            decided[key] = group, nest, chosen, [form.nodes.index(node) for node in beyond]
        for number in decided[key][-1]:
            layouts[form.nodes[number]] = Layout(layouts[form.nodes[number]].order)
        drafts.append((group, key))
    kernels: list[KernelSource] = []
    written: dict[Any, tuple[FusionGroup, Sequence[KernelSource]]] = {}
    for group, key in drafts:
        form, (first, nest, chosen, _) = forms.of(group), decided[key]
        place = key, form.layouts(layouts)
        if place not in written:
            if group is not first:  # its tensors came to lie elsewhere
                before = zip(form.nodes, key[1], strict=True)
                nest = forms.nest(group, {node: layout for node, layout in before if layout is not None})
            written[place] = group, write_kernel(group, nest, layouts, chosen, target)
        like, sources = written[place]
        kernels += sources if like is group else forms.moved(sources, like, group)
    return kernels


@dataclass(frozen=True, slots=True)
class _Check:
    """What a flag says of a value: that it holds other indices than these, or None: that it divides by 0."""

    value: int
    indices: IndexRange | None


def _checks(step: Step, translation: Translation, ranges: Mapping[int, IndexRange]) -> dict[Node, _Check]:
    """Return a number for each value of indices that changes within a step: 1 where one is out of range.

    So for each divisor of whole numbers: 1 where one is zero.
    """
    changing = {before for before, _ in step.updates}
    changing |= {index for index in ranges if step.values[index].role == "activation"}
    checks: dict[Node, _Check] = {}
    for index in sorted(changing.intersection(ranges)):
        bound = ranges[index]

        def outside(place: Scalar, bound: IndexRange = bound) -> Scalar:
            inside = (place >= bound.low) & (place < bound.high)
            if bound.ignored is not None:
                inside = inside | place.equals(bound.ignored)
            return where(inside, constant(0, "int32"), 1)

        checks[reduced("max", translation.nodes[index], body=outside, dtype="int32")] = _Check(index, bound)
    for index, divisor in zero_divisions(step).items():
        node = full((1,), 0, "int32") if divisor is None else translation.nodes[divisor]
        is_zero = reduced(
            "max", node, body=lambda n: where(n.equals(0), constant(1, "int32"), 0), dtype="int32"
        )
        checks[is_zero] = _Check(index, None)
    return checks


def _tensors(
    step: Step,
    translation: Translation,
    fused: Fused,
    sources: Sequence[KernelSource],
    layouts: Mapping[Node, Layout],
    ranges: Mapping[int, IndexRange],
    checked: Sequence[_Check],
) -> tuple[list[StoredTensor], dict[Node, int]]:
    """Return all tensors of a program, and which of them holds a node."""
    tensors: list[StoredTensor] = []
    number: dict[Node, int] = {}
    computed = {check.value for check in checked if check.indices is not None}
    flags = dict(zip(fused.outputs[len(step.outputs) :], checked, strict=True))

    def add(node: Node, name: str, role: TensorRole, layout: Layout, value: int | None = None) -> None:
        initial = step.initial.get(value, 0.0) if value is not None else 0.0
        indices = ranges.get(value) if value is not None and value not in computed else None
        divisor = False
        if node in flags:
            indices, divisor = flags[node].indices, flags[node].indices is None
            name = f"{'~~' if divisor else '~'}{step.values[flags[node].value].name}"[:1000]
        number[node] = len(tensors)
        tensors.append(StoredTensor(name, node.shape, node.dtype, role, layout, initial, indices, divisor))

    for index, stored in translation.stored.items():
        role = step.values[index].role
        assert role != "activation"
        add(stored, stored.name, role, layouts[stored], index)
    for group in fused.groups:
        for node, over in group.stored.items():
            if over is not None:
                number[node] = number[over]
            else:
                add(
                    node,
                    f"t{len(tensors)}",
                    "output" if node in fused.outputs else "intermediate",
                    layouts[node],
                )
    for source in sources:
        for node in source.tensors:
            if node not in number:  # the slices of a split contraction
                add(node, f"t{len(tensors)}", "intermediate", row_major(len(node.shape)))
    return tensors, number


def _program(
    step: Step,
    translation: Translation,
    fused: Fused,
    sources: Sequence[KernelSource],
    layouts: Mapping[Node, Layout],
    target: Target,
    ranges: Mapping[int, IndexRange],
    checked: Sequence[_Check],
) -> Program:
    tensors, number = _tensors(step, translation, fused, sources, layouts, ranges, checked)
    kernels: dict[str, Kernel] = {}
    for source in sources:
        kernel = kernels.setdefault(source.kernel.name, source.kernel)
        if kernel.in_place != source.kernel.in_place:  # other sizes: what holds for all of them
            pairs = tuple([pair for pair in kernel.in_place if pair in source.kernel.in_place])
            kernels[kernel.name] = replace(kernel, in_place=pairs)
    place = {name: k for k, name in enumerate(kernels)}
    launches = [
        replace(s.launch, kernel=place[s.kernel.name], tensors=tuple([number[t] for t in s.tensors]))
        for s in sources
    ]
    program = Program(
        step.name,
        tuple(tensors),
        tuple(kernels.values()),
        tuple(launches),
        tuple([number[translation.stored[i]] for i in step.inputs]),
        tuple([number[n] for n in fused.outputs[: len(step.outputs)]]),
        Arena(0, allocation_bytes=target.allocation_bytes),
        {name: number[translation.stored[i]] for name, i in step.hyperparameters.items()},
        target.name,
    )
    if message := beyond_offsets(program):
        raise LoweringError(message)
    return planned(share_images(program, target.shared_pitch), target.alignment)
