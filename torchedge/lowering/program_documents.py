"""Programs as JSON documents: what `program_files` writes, and the bundle with its kernels beside it."""

from __future__ import annotations

from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor
from torchedge.storage import Document

__all__ = ["SCHEMA", "program_document"]

SCHEMA = "torchedge-program-1"


def program_document(program: Program, *, sources: bool = True) -> Document:
    """Return the JSON document of a program; without `sources` the kernels' texts go elsewhere, by name."""
    return {
        "schema": SCHEMA,
        "name": program.name,
        "target": program.target,
        "tensors": [_tensor_document(tensor) for tensor in program.tensors],
        "kernels": [_kernel_document(kernel, sources) for kernel in program.kernels],
        "launches": [_launch_document(launch) for launch in program.launches],
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "hyperparameters": dict(program.hyperparameters),
        "arena": _arena_document(program.arena),
        "notes": list(program.notes),
    }


def _without(document: Document, **defaults: object) -> Document:
    """Return a document without the keys that stand at their defaults."""
    return {key: value for key, value in document.items() if key not in defaults or value != defaults[key]}


def _tensor_document(tensor: StoredTensor) -> Document:
    layout = tensor.layout
    placed: Document = {
        "order": list(layout.order),
        "storage": layout.storage,
        "split": layout.split,
        "pattern": layout.pattern,
        "fold": layout.fold,
        "row_texels": layout.row_texels,
    }
    document: Document = {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "role": tensor.role,
        "layout": _without(placed, storage="buffer", split=0, pattern="row", fold=1, row_texels=0),
        "fill": tensor.fill,
    }
    return _without(document, fill=0.0)


def _kernel_document(kernel: Kernel, sources: bool) -> Document:
    document: Document = {
        "name": kernel.name,
        "sha256": kernel.digest,
        "access": list(kernel.access),
        "kind": kernel.kind,
        "flops": kernel.flops,
        "nbytes": kernel.nbytes,
        "reference": kernel.reference,
        "checks": kernel.checks,
        "in_place": [list(pair) for pair in kernel.in_place],
    }
    if sources:
        document["source"] = kernel.source
    return _without(document, flops=0, nbytes=0, reference="", checks=False, in_place=[])


def _launch_document(launch: Launch) -> Document:
    document: Document = {
        "kernel": launch.kernel,
        "tensors": list(launch.tensors),
        "global_size": list(launch.global_size),
        "local_size": None if launch.local_size is None else list(launch.local_size),
        "scope": launch.scope,
    }
    return _without(document, local_size=None, scope="")


def _arena_document(arena: Arena) -> Document:
    return {
        "nbytes": arena.nbytes,
        "live_bytes": arena.live_bytes,
        "offsets": [[tensor, offset] for tensor, offset in arena.offset.items()],
        "slots": [list(slot) for slot in arena.slots],
        "slot_of": [[tensor, slot] for tensor, slot in arena.slot.items()],
    }
