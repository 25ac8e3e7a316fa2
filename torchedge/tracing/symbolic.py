"""The fast path of capture: run the forward pass once on stand-in tensors and write down every operator.

As in torch.fx, nothing is computed; unlike there, every stand-in knows its shape, so that code which looks at shapes runs as
it is, and one run gives operators, shapes, Python lifetimes, checkpoint regions and module paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from torchedge.errors import CaptureError
from torchedge.graphs import Graph
from torchedge.graphs.dims import BATCH_PRIME
from torchedge.tracing.interception import Interceptor
from torchedge.tracing.patches import patched
from torchedge.tracing.recorder import Recorder, TracedTensor

LossFunction = Callable[[Any], Any]


def trace(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: LossFunction | None = None,
    training: bool = False,
    fixed_batch: int | None = None,
    name: str = "model",
    notes: tuple[str, ...] = (),
) -> Graph:
    """Trace `model(*args, **kwargs)` (and `loss(outputs)`) into a Graph; raises CaptureError where that is impossible.

    Tensors among the arguments serve for their shape and dtype only. Dimension 0 of each tensor that agrees with that of the
    first tensor is the batch.
    """
    recorder = Recorder(model, fixed_batch)
    batch = batch_of((args, kwargs))
    count = 0

    def feed(leaf: Any) -> Any:  # noqa: ANN401
        nonlocal count
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = tuple(leaf.shape)
        if sizes and sizes[0] == batch:
            sizes = (fixed_batch or BATCH_PRIME, *sizes[1:])
        count += 1
        return recorder.feed("x" if count == 1 else f"x{count}", sizes, leaf.dtype)

    fed_args, fed_kwargs = tree_map(feed, (args, kwargs))
    inputs = [i for i, v in enumerate(recorder.values) if v.role == "input"]
    with patched(model, recorder), Interceptor(recorder):
        outputs = model(*fed_args, **fed_kwargs)
        returned = [recorder.index_of(t) for t in _tensors(outputs)]
        recorder.scopes.append("loss")
        value = loss(outputs) if loss is not None else None
        if loss is not None:
            del outputs  # as in `loss = criterion(model(x), y)`: only what autograd keeps of them stays
    if not returned:
        raise CaptureError(f"{name} returns no tensor; expected tensors in tuples, lists or dicts")
    last = recorder.index_of(value) if isinstance(value, TracedTensor) else None
    return recorder.finish(inputs, returned, last, training, name, notes)


def batch_of(tree: Any) -> int | None:  # noqa: ANN401
    """Return the batch size of an example: dimension 0 of its first tensor, None where there is none."""
    first = next((t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.dim()), None)
    return None if first is None else int(first.shape[0])


def _tensors(outputs: Any) -> list[TracedTensor]:  # noqa: ANN401
    """All traced tensors of a model's result: pytrees, dataclass-like outputs and objects with `to_tuple`."""
    leaves = tree_flatten(outputs)[0]
    found = [leaf for leaf in leaves if isinstance(leaf, TracedTensor)]
    if not found and hasattr(outputs, "to_tuple"):
        found = [leaf for leaf in tree_flatten(outputs.to_tuple())[0] if isinstance(leaf, TracedTensor)]
    return found
