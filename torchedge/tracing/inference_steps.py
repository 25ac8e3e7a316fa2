"""Inference of a model that is in training: a Step by the same names, results as the model returns them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchedge.errors import InputError
from torchedge.graphs.steps import Step
from torchedge.tracing.capturing import unwrapped
from torchedge.tracing.copies import isolated
from torchedge.tracing.objectives import Loss, public_name
from torchedge.tracing.training_steps import capture_step

_TENSOR = object()


@dataclass(frozen=True)
class CapturedInference:
    """A captured inference: tensors as in CapturedStep; `rebuild` makes of outputs what the model returns."""

    step: Step
    tensors: Mapping[str, torch.Tensor]
    rebuild: Callable[[Sequence[torch.Tensor]], Any]


def capture_inference(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: tuple[Any, ...] = (),
    *,
    loss: Loss | None = None,
    keep: Collection[str] = frozenset(),
) -> CapturedInference:
    """Capture `model(*args, **kwargs)` in eval mode, or its loss alone.

    The model is left as found. Raises InputError and CaptureError as `capture_step`.
    """
    model = unwrapped(model)
    found: list[tuple[list[Any], Any]] = []
    with isolated(model, False) as twin:
        answering = _Answering(twin, loss, found.append)
        captured = capture_step(
            answering, (args, dict(kwargs), targets), keep=keep, name=type(model).__name__
        )
    kept = ("parameter", "buffer")
    step = captured.step
    values = [replace(v, name=public_name(v.name)) if v.role in kept else v for v in step.values]
    roles = {v.name: v.role for v in step.values}
    tensors = {public_name(n) if roles.get(n) in kept else n: t for n, t in captured.tensors.items()}

    def rebuild(outputs: Sequence[torch.Tensor]) -> Any:
        leaves, structure = found[-1]
        made = iter(outputs)
        return tree_unflatten([next(made) if leaf is _TENSOR else leaf for leaf in leaves], structure)

    return CapturedInference(replace(step, values=tuple(values)), tensors, rebuild)


class _Answering(torch.nn.Module):
    """A model whose result is a tuple of tensors, and which notes what they were part of."""

    def __init__(self, model: torch.nn.Module, loss: Loss | None, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.model, self.loss, self.note = model, loss, note
        self.training = False

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return every tensor of the model's result, or its loss."""
        result = self.model(*args, **kwargs)
        if self.loss == "model":
            result = result["loss"] if isinstance(result, Mapping) else result.loss
        elif self.loss is not None:
            result = self.loss(result, *targets)
        leaves, structure = tree_flatten(result)
        tensors = tuple([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if not tensors:
            raise InputError(
                f"{type(self.model).__name__} returns a {type(result).__name__} without tensors that can be "
                "told apart; expected tensors, or tuples, lists and dicts of them"
            )
        self.note(([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure))
        return tensors
