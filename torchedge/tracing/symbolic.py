"""The fast path of capture: run the forward pass once on stand-in tensors and write down every operator.

As in torch.fx, nothing is computed; unlike there, every stand-in knows its shape, so that code which looks
at shapes runs as it is, and one run gives operators, shapes, Python lifetimes, checkpoint regions and module
paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import SequenceKey, tree_flatten, tree_flatten_with_path, tree_map

from torchedge.errors import CaptureError
from torchedge.graphs import ForwardGraph
from torchedge.graphs.garbage import collection_paused
from torchedge.tracing.copies import forget_cached, isolated, scoped
from torchedge.tracing.interception import Interceptor
from torchedge.tracing.recorder import Recorder, TracedTensor, leaves_of

LossFunction = Callable[[Any], Any]


@dataclass(frozen=True)
class ForwardCall:
    """A forward pass to capture: `model(*args, **kwargs)`, then `loss(outputs)` where there is a loss.

    Tensors among the arguments serve for their shape and dtype only. Dimension 0 of each tensor that agrees
    with that of the first tensor is the batch. fixed_batch: the one batch size to capture for, None: every.
    name, notes: of the ForwardGraph.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    training: bool = False
    fixed_batch: int | None = None
    name: str = "model"
    notes: tuple[str, ...] = ()


def trace(call: ForwardCall) -> ForwardGraph:
    """Run a forward pass on stand-ins and return it as a ForwardGraph; raises CaptureError if impossible."""
    recorder = Recorder(leaves_of(call.model), call.fixed_batch)
    fed_args, fed_kwargs = feed((call.args, call.kwargs), recorder)
    inputs = [i for i, v in enumerate(recorder.values) if v.role == "input"]
    with (
        collection_paused(),
        isolated(call.model, call.training) as model,
        scoped(model, recorder.scopes),
        recorder.active(),
        Interceptor(recorder),
    ):
        outputs = model(*fed_args, **fed_kwargs)
        returned = [recorder.index_of(t) for t in tensors_in(outputs)]
        recorder.scopes.append("loss")
        value = call.loss(outputs) if call.loss is not None else None
        if call.loss is not None:
            outputs = None  # as in `loss = criterion(model(x), y)`: only what autograd keeps of them stays
    if not returned:
        raise CaptureError(f"{call.name} returns no tensor; expected tensors in tuples, lists or dicts")
    last = loss_index(recorder, value) if call.loss is not None else None
    graph = recorder.finish(inputs, returned, last, call.training, call.name, call.notes)
    outputs = value = fed_args = fed_kwargs = None
    if recorder.leaked():
        forget_cached((TracedTensor,))
    return graph


def feed(tree: Any, recorder: Recorder) -> Any:
    """Replace every tensor of an example by an input of the graph under construction."""
    batch = batch_of(tree)
    count = 0

    def stand_in(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = tuple(leaf.shape)
        if sizes and sizes[0] == batch:
            sizes = (recorder.batch, *sizes[1:])
        count += 1
        return recorder.feed("x" if count == 1 else f"x{count}", sizes, leaf.dtype)

    return tree_map(stand_in, tree)


def loss_index(recorder: Recorder, value: Any) -> int:
    """Return the value to differentiate; raises CaptureError where the loss is no scalar of the graph."""
    if not isinstance(value, TracedTensor):
        raise CaptureError(
            f"the loss is a {type(value).__name__}; expected a scalar tensor made from the model's outputs"
        )
    if tuple(value.sizes):
        raise CaptureError(
            f"the loss has shape {tuple(value.sizes)}; expected a scalar, for example its mean"
        )
    return recorder.index_of(value)


def batch_of(tree: Any) -> int | None:
    """Return the batch size of an example: dimension 0 of its first tensor, None where there is none."""
    first = next((t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.dim()), None)
    return None if first is None else int(first.shape[0])


def output_names(outputs: Any, kind: type) -> list[str]:
    """Return a name for each tensor of a model's result, after the keys and places that lead to it."""
    paths = [path for path, leaf in tree_flatten_with_path(outputs)[0] if isinstance(leaf, kind)]
    if not paths:
        paths = [(SequenceKey(place),) for place in range(len(tensors_in(outputs, kind)))]
    names = []
    for path in paths:
        steps = [
            str(getattr(step, "key", getattr(step, "name", getattr(step, "idx", step)))) for step in path
        ]
        keyed = bool(path) and not isinstance(path[0], SequenceKey)
        names.append("_".join(steps if keyed else ["output", *(steps if len(paths) > 1 else [])]))
    usable = len(set(names)) == len(names) and all(name and name.isprintable() for name in names)
    return names if usable else [f"output_{place}" for place in range(len(names))]


def tensors_in(outputs: Any, kind: type = TracedTensor) -> list[Any]:
    """Return all tensors of a model's result: pytrees, dataclass-like outputs and objects with `to_tuple`."""
    found = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, kind)]
    if not found and hasattr(outputs, "to_tuple"):
        found = [leaf for leaf in tree_flatten(outputs.to_tuple())[0] if isinstance(leaf, kind)]
    return found
