"""What holds of every captured graph, and whether two of them compute the same."""

import hashlib

from torchedge.errors import CaptureError
from torchedge.graphs.graph import canonical_text, verify_operators


def digest(graph):
    """Return a content hash: equal for graphs that compute the same, whatever the names."""
    values = [(canonical_text(v.shape), v.dtype, v.role, v.alias, v.trainable, v.exact) for v in graph.values]
    ops = [
        (op.kind, op.inputs, op.outputs, canonical_text(op.attrs), op.inplace, op.grad, op.region, op.stored,
         op.autocast, op.outer)
        for op in graph.ops
    ]  # fmt: skip
    unread = [(v.shape, v.dtype, v.role, v.trainable) for v in graph.unread]
    ends = (graph.inputs, graph.outputs, graph.loss, graph.releases)
    kind = (graph.training, graph.fixed_batch, graph.channels_last)
    return hashlib.sha256(repr((values, ops, unread, ends, kind)).encode()).hexdigest()


def verify(graph):
    """Raise CaptureError that names the first invariant that a ForwardGraph breaks."""
    ends = (*graph.inputs, *graph.outputs, *(() if graph.loss is None else (graph.loss,)))
    verify_operators(graph.name, graph.values, graph.ops, ends)
    if graph.releases is None:
        return
    require(len(graph.releases) == len(graph.ops), graph, "releases and operators differ in number")
    released = set()
    for position, op in enumerate(graph.ops):
        # The tensor behind a view that an operator wrote in place: its memory lives as long as the view.
        used = [i for i in op.inputs if i in released and op.kind != "copy_slices"]
        require(not used, graph, f"operator {position} ({op.kind}) reads value {used} after it was released")
        for index in graph.releases[position]:
            require(index not in released, graph, f"value {index} is released twice")
            released.add(index)


def require(holds, graph, fault):
    if not holds:
        raise CaptureError(f"graph {graph.name} is broken: {fault}; this is a bug in torchedge")
