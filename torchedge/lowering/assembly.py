"""A step as a Program: rules, fusion, placement, kernels, arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchedge.graphs.steps import Step
from torchedge.lowering.arenas import planned
from torchedge.lowering.fusion import Fused, FusionGroup, form_groups
from torchedge.lowering.kernels.contractions import write_contraction
from torchedge.lowering.kernels.drafts import KernelSource
from torchedge.lowering.kernels.pointwise import write_pointwise
from torchedge.lowering.kernels.rows import write_rows
from torchedge.lowering.kernels.updates import gather_updates, write_updates
from torchedge.lowering.nodes import Contraction, Node, Rows
from torchedge.lowering.placement import place_tensors
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor, TensorRole
from torchedge.lowering.splitting import split_reductions
from torchedge.lowering.storages import choose_storages, store_half
from torchedge.lowering.targets import Target, target_of
from torchedge.lowering.translation import Translation, translate
from torchedge.textures.layouts import Layout, row_major

ALIGNMENT = 512
"""Bytes to which tensors in the arena are aligned: what the strictest OpenCL devices ask of sub-buffers."""


def lower(step: Step, target: str | Target = "cpu", layouts: Mapping[str, Layout] | None = None) -> Program:
    """Return the Program of a step for a device class.

    layouts: how inputs, parameters, buffers, states and constants lie, by name, where another program that
    shares them has settled it.

    Raises:
        LoweringError: operators without a rule, or what no kernel can do.
    """
    device = target_of(target) if isinstance(target, str) else target
    translation = translate(step)
    split_reductions([*translation.outputs, *[n for _, n in translation.updates]], device)
    fused = form_groups(translation)
    inputs = [translation.stored[i] for i in step.inputs]
    placed = place_tensors(fused.groups, list(translation.stored.values()), inputs, layouts)
    alone, together = gather_updates([group for group in fused.groups if group.host.numel])
    if device.half:
        store_half(fused.groups, fused.outputs)
    settled = [node for node in translation.stored.values() if node.name in (layouts or {})]
    fixed = {*inputs, *settled, *fused.outputs, *[n for batch in together for g in batch for n in g.reads]}
    placed = choose_storages(alone, placed, fixed, device, lambda group, known: _drafts(group, known, device))
    drafts = [draft for group in alone for draft in _drafts(group, placed, device)]
    drafts += [write_updates(batch, placed, device) for batch in together]
    return _program(step, translation, fused, drafts, placed, device)


def _drafts(group: FusionGroup, layouts: Mapping[Node, Layout], target: Target) -> Sequence[KernelSource]:
    """Return the kernels of a group, in order."""
    if isinstance(group.host, Contraction):
        return write_contraction(group, layouts, target)
    return [
        write_rows(group, layouts, target)
        if isinstance(group.host, Rows)
        else write_pointwise(group, layouts, target)
    ]


def _tensors(
    step: Step,
    translation: Translation,
    fused: Fused,
    drafts: Sequence[KernelSource],
    layouts: Mapping[Node, Layout],
) -> tuple[list[StoredTensor], dict[Node, int]]:
    """Return all tensors of a program, and which of them holds a node."""
    tensors: list[StoredTensor] = []
    number: dict[Node, int] = {}

    def add(node: Node, name: str, role: TensorRole, layout: Layout, initial: float = 0.0) -> None:
        number[node] = len(tensors)
        tensors.append(StoredTensor(name, node.shape, node.dtype, role, layout, initial))

    for index, stored in translation.stored.items():
        role = step.values[index].role
        assert role != "activation"
        add(stored, stored.name, role, layouts[stored], step.initial.get(index, 0.0))
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
    for draft in drafts:
        for node in draft.tensors:
            if node not in number:  # the parts of a split contraction
                add(node, f"t{len(tensors)}", "intermediate", row_major(len(node.shape)))
    return tensors, number


def _program(
    step: Step,
    translation: Translation,
    fused: Fused,
    drafts: Sequence[KernelSource],
    layouts: Mapping[Node, Layout],
    target: Target,
) -> Program:
    tensors, number = _tensors(step, translation, fused, drafts, layouts)
    kernels: dict[str, Kernel] = {}
    launches = []
    for draft in drafts:
        kernels.setdefault(draft.kernel.source, draft.kernel)
        place = list(kernels).index(draft.kernel.source)
        given = tuple([number[t] for t in draft.tensors])
        launches.append(Launch(place, given, draft.global_size, draft.local_size, draft.scope))
    program = Program(
        step.name,
        tuple(tensors),
        tuple(kernels.values()),
        tuple(launches),
        tuple([number[translation.stored[i]] for i in step.inputs]),
        tuple([number[n] for n in fused.outputs]),
        Arena(0),
        {name: number[translation.stored[i]] for name, i in step.hyperparameters.items()},
        target.name,
    )
    return planned(program, ALIGNMENT)
