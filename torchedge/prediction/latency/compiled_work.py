"""The work of a training step under torch.compile: eager PyTorch's products, and the kernels of Inductor.

The partition says which operators the forward and the backward graph run, and `FusedGraph` which of them one
kernel computes. Generated kernels move the bytes that they read and write. Products, convolutions, attention
and the optimizer's calls are those of the eager step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchedge.graphs.partitions import Buffer, PartGraph, Partition
from torchedge.prediction.latency.rates import CompiledRates
from torchedge.prediction.latency.roofline import WorkRows, WorkTimes
from torchedge.prediction.latency.workload import (
    FUSED_COLUMNS,
    LAUNCHES,
    PRODUCT_COLUMNS,
    STEP_PHASES,
    Workload,
    update_bytes,
)
from torchedge.prediction.memory.compiled_steps import FusedGraph

_ITEM = 4
"""Bytes of an element that a kernel reads of a larger buffer, as of a table of embeddings."""


def compiled_work(work: Workload, partition: Partition) -> Workload:
    """Return the work of a step under torch.compile from that of the eager step.

    The bytes of both graphs are taken as proportional to the batch size around that of the partition.
    """
    launches = np.zeros_like(work.launches)
    parameter = LAUNCHES.index("parameter")
    launches[parameter] = work.launches[parameter]
    table = dict.fromkeys(FUSED_COLUMNS, np.zeros(len(STEP_PHASES)))
    moved, generated, called = np.array([_fused(partition.forward), _fused(partition.backward), (0, 0, 0)]).T
    table |= {"moved": moved / partition.batch_size, "generated": generated}
    table["fixed"] = np.array([0, 0, update_bytes(work)])
    arguments = sum(op.role == "input" for op in partition.forward.ops)
    table["replayed" if partition.recorded else "arguments"] = np.array([arguments, 0, 0])
    if not partition.recorded:
        table["launches"] = generated + called
    fused = np.column_stack([*table.values()])
    products, depthwise = work.products.copy(), work.depthwise.copy()
    if partition.channels_last:
        products[:, -1] = 1 - products[:, PRODUCT_COLUMNS.index("matrix")]
        depthwise[:, -1] = 1
    passes = np.zeros_like(work.passes)
    return replace(
        work, products=products, depthwise=depthwise, passes=passes, launches=launches, fused=fused
    )


def _fused(graph: PartGraph) -> tuple[int, int, int]:
    """Return the bytes that generated kernels move, their number, and the calls of libraries' kernels."""
    fused, ops = FusedGraph(graph), graph.ops
    moved = generated = called = 0
    for place, kernel in enumerate(fused.kernels):
        if ops[kernel[0]].role == "kernel":
            called += 1
            continue
        own = {(position, number) for position in kernel for number in range(len(ops[position].sizes))}
        stored = {buffer for buffer in own if fused.is_stored(buffer, place)}
        moved += sum(_size(graph, buffer) for buffer in stored)
        for stage in _stages(fused, kernel, own):
            most = _ITEM * max(ops[position].elements for position in stage)
            read = {buffer for position in stage for buffer in fused.reads[position]}
            computed = {
                (position, number) for position in stage for number in range(len(ops[position].sizes))
            }
            moved += sum(min(_size(graph, b), most) for b in (read - own) | (read & stored - computed))
            generated += 1
        generated += sum(ops[position].split for position in kernel)
    return moved, generated, called


def _stages(fused: FusedGraph, kernel: list[int], own: set[Buffer]) -> list[list[int]]:
    """Return the parts of a fused kernel that run one behind the other.

    Split reductions leave the kernel: those of its results in one part, those of its inputs in another.
    """
    parts: dict[int, list[int]] = {}
    for position in kernel:
        part = 0
        if fused.graph.ops[position].split:
            part = 1 + bool(fused.reads[position] & own)
        parts.setdefault(part, []).append(position)
    return [*parts.values()]


def _size(graph: PartGraph, buffer: Buffer) -> int:
    return graph.ops[buffer[0]].sizes[buffer[1]]


def with_fused(rows: WorkRows, times: WorkTimes, rates: CompiledRates) -> WorkTimes:
    """Return the times of rows with those of compiled steps' graphs, and of their updates on the device."""
    assert rows.fused is not None
    amounts = dict(zip(FUSED_COLUMNS, np.moveaxis(rows.fused, 2, 0), strict=True))
    moved = amounts["moved"] * rows.batch[:, None] + amounts["fixed"]
    device = rates.byte * moved + rates.kernel * amounts["generated"]
    host = rates.launch * amounts["launches"] + rates.argument * amounts["arguments"]
    host = host + rates.replayed * amounts["replayed"]
    return replace(
        times,
        busy=times.busy + device.sum(axis=1),
        launch=times.launch + host.sum(axis=1),
        fused=np.stack([device, host], axis=2),
    )
