"""What steps of one bundle keep and share: written buffers become states, one tensor has one name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, count

from torchedge.graphs import RESIDENT_ROLES
from torchedge.tracing.plain_tensors import content_of
from torchedge.tracing.steps import CapturedStep


def with_states(inferences: Sequence[CapturedStep]) -> list[CapturedStep]:
    """Return inferences in which parameters and buffers that any of them writes to are states.

    A state stays on the device from run to run and is neither folded nor streamed.
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
        changed.append(replace(captured, step=replace(captured.step, values=values)))
    return changed


def with_names(steps: Sequence[CapturedStep]) -> list[CapturedStep]:
    """Return steps in which a tensor that several of them hold has the name that the first of those gives.

    Two tensors have two names. Constants are one tensor where they hold the same. A state that begins with
    zeros has no data: it takes no room in a file.
    """
    named: dict[object, str] = {}
    taken: set[str] = set()
    changed = []
    for captured in steps:
        names, seen = dict[str, str](), Counter[object]()
        for value in captured.step.values:
            if value.role in RESIDENT_ROLES:
                find = _content if value.role == "constant" else _identity
                content = find(captured, value.name)
                key = content, seen[content]  # within a step, constants may hold the same
                seen[content] += 1
                name = named.get(key)
                if name is None:
                    name = named[key] = _free(value.name, taken)
                    taken.add(name)
                names[value.name] = name
        others = [value.name for value in captured.step.values if value.role not in RESIDENT_ROLES]
        given = {*names.values()}
        used = given.union(others)
        for name in others:  # an input of one step may have the name of another step's weight
            names[name] = _free(name, used) if name in given else name
        values = tuple([replace(value, name=names[value.name]) for value in captured.step.values])
        states = {value.name for value in captured.step.values if value.role == "state"}
        tensors = {
            names.get(name, name): tensor
            for name, tensor in captured.tensors.items()
            if name not in states or tensor.is_meta or bool(tensor.any())
        }
        changed.append(replace(captured, step=replace(captured.step, values=values), tensors=tensors))
    return changed


def _free(name: str, taken: Collection[str]) -> str:
    return next(n for n in chain([name], (f"{name}.{k}" for k in count(1))) if n not in taken)


def _content(captured: CapturedStep, name: str) -> object:
    """Return what is the same for two constants exactly if they hold the same."""
    tensor = captured.tensors[name]
    return name if tensor.is_meta else content_of(tensor)


def _identity(captured: CapturedStep, name: str) -> object:
    """Return what is the same for two values, of two steps perhaps, exactly if they are one tensor."""
    tensor = captured.tensors.get(name)
    if tensor is None:  # a state that begins with a number
        return name
    place = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    return place, tensor.dtype, tensor.shape, tensor.stride()
