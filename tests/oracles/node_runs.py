"""Nodes run through OpenCL, by a schedule of the test's choice."""

from dataclasses import replace

import pytest
from oracles.targets import target_here

from torchedge.lowering.arenas import planned
from torchedge.lowering.assembly import write_kernels
from torchedge.lowering.fusion import form_groups
from torchedge.lowering.nodes import Contraction, Pointwise, Rows, Stored, nodes_below
from torchedge.lowering.placement import as_images, place_tensors
from torchedge.lowering.programs import Arena, Program, StoredTensor
from torchedge.lowering.schedules import ContractionSchedule
from torchedge.lowering.targets import TARGETS
from torchedge.lowering.translation import Translation
from torchedge.opencl import choose_device
from torchedge.runtime import Executor
from torchedge.textures.layouts import row_major


def program_of(nodes, target="cpu", schedule=None, updates=(), inputs=(), own=()):
    """Return the program that computes nodes.

    target: a Target or its name. schedule: of all kernels of its kind. updates: (stored tensor, its new
    content). inputs: stored tensors that lie row-major.
    """
    below = nodes_below([*nodes, *[node for _, node in updates]])
    stored = {n.index: n for n in (*[t for t, _ in updates], *below) if isinstance(n, Stored)}
    device = TARGETS[target] if isinstance(target, str) else target
    fused = form_groups(Translation(tuple(nodes), tuple(updates), stored), device)
    layouts = place_tensors(fused.groups, list(stored.values()), list(inputs))
    layouts = as_images(fused.groups, layouts, [*fused.outputs, *inputs], device)
    layouts |= {node: own[node.name] for node in stored.values() if node.name in own}
    rows = any(isinstance(group.host, Rows) for group in fused.groups)
    host = Contraction if isinstance(schedule, ContractionSchedule) else Rows if rows else Pointwise
    chosen = {group: schedule for group in fused.groups if isinstance(group.host, host)}
    sources = write_kernels(fused.groups, layouts, device, chosen)
    tensors, number = [], {}

    def add(node, name, role):
        if node not in number:
            number[node] = len(tensors)
            tensors.append(
                StoredTensor(
                    name, node.shape, node.dtype, role, layouts.get(node, row_major(len(node.shape)))
                )
            )

    for node in stored.values():
        add(node, node.name, "parameter")
    for source in sources:
        for node in source.tensors:
            add(node, f"t{len(tensors)}", "output" if node in fused.outputs else "intermediate")
    made = Program(
        "nodes",
        tuple(tensors),
        tuple(s.kernel for s in sources),
        tuple(
            replace(source.launch, kernel=k, tensors=tuple([number[node] for node in source.tensors]))
            for k, source in enumerate(sources)
        ),
        (),
        tuple(number[n] for n in fused.outputs),
        Arena(0),
        {},
        device.name,
    )
    return planned(made, 512)


def run_nodes(nodes, data, target="cpu", schedule=None, updates=(), inputs=(), own=()):
    """Return what nodes hold, and after them what updated tensors hold. data: arrays by `Stored.name`."""
    target = target_here(target) if isinstance(target, str) else target
    made = program_of(nodes, target, schedule, updates, inputs, own)
    if any(tensor.dtype == "float64" for tensor in made.tensors) and not choose_device().double:
        pytest.skip("the device has no float64")
    with Executor(made, checks=True) as executor:
        for tensor in made.tensors:
            if tensor.role == "parameter":
                executor.write(tensor.name, data[tensor.name].astype(tensor.dtype))
        return [*executor.run(), *[executor.read(t.name) for t, _ in updates]]
