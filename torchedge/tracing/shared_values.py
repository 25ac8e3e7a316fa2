"""What steps of one bundle keep and share: written buffers become states, one tensor has one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchedge.tracing.steps import CapturedStep


def with_states(inferences: Sequence[CapturedStep]) -> list[CapturedStep]:
    """Return inferences in which parameters and buffers that any of them writes to are states.

    A state stays on the device from run to run and is neither folded nor streamed. One that begins with zeros
    has no data: it takes no room in a file.
    """
    written = {
        _identity(captured, captured.step.values[before].name)
        for captured in inferences
        for before, _ in captured.step.updates
    }
    changed = []
    for captured in inferences:
        names = {name for name in captured.tensors if _identity(captured, name) in written}
        values = tuple([replace(v, role="state") if v.name in names else v for v in captured.step.values])
        kept = {n: t for n, t in captured.tensors.items() if n not in names or t.is_meta or bool(t.any())}
        changed.append(replace(captured, step=replace(captured.step, values=values), tensors=kept))
    return changed


def _identity(captured: CapturedStep, name: str) -> object:
    """Return what is the same for two values, of two steps perhaps, exactly if they are one tensor."""
    tensor = captured.tensors.get(name)
    if tensor is None or not tensor.data_ptr():  # a state that begins with a number; on the meta device
        return name
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
