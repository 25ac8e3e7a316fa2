"""Copies of a model that share its tensors: with another data type, with checkpoints, with frozen parts."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchedge.errors import InputError
from torchedge.graphs.training_steps import CUDA_GRAPHS, TrainingStep
from torchedge.tracing.capturing import CaptureRequest, checked_model, is_wholly_compiled, records_graphs

_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
"""Names of the switch of transformers' models, the newest release's first."""


def checkpointing_switch(model: torch.nn.Module) -> str | None:
    """Return the name of a model's switch of activation checkpointing if it has one that is off."""
    switch = next((name for name in _SWITCHES if hasattr(model, f"{name}_enable")), None)
    return None if switch is None or getattr(model, f"is_{switch}", False) else switch


def varied(
    model: torch.nn.Module,
    *,
    dtype: str | None = None,
    checkpointing: str | None = None,
    trained: Collection[int] | None = None,
) -> torch.nn.Module:
    """Return a copy of a model with changes; parameters of another data type lie on the meta device.

    checkpointing: the switch to put on. trained: ids of the parameters that learn alone.
    """
    kind = None if dtype is None else getattr(torch, dtype)

    def cast(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
        if kind is None or not tensor.is_floating_point():
            return tensor.detach()
        return tensor.detach().to(device=device, dtype=kind)

    memo: dict[int, Any] = {id(buffer): cast(buffer) for buffer in model.buffers()}
    for p in model.parameters():
        learns = p.requires_grad and (trained is None or id(p) in trained)
        memo[id(p)] = torch.nn.Parameter(cast(p, "meta"), requires_grad=learns)
    changed = copy.deepcopy(model, memo)
    if checkpointing is not None:
        getattr(changed, f"{checkpointing}_enable")()
    return changed


def request_of(request: CaptureRequest, step: TrainingStep) -> CaptureRequest:
    """Return a request for a step: its loss, and the model in its data type and with its checkpoints.

    Raises InputError where a setting cannot be put on the model.
    """
    request = replace(
        request,
        loss=step.loss,
        targets=step.targets,
        compiled=bool(step.compile) or request.compiled or is_wholly_compiled(request.model),
        recorded=step.compile == CUDA_GRAPHS or request.recorded or records_graphs(request.model),
        amp=step.amp,
    )
    if step.dtype is None and not step.checkpointing:
        return request
    request = request.loaded()
    names = [name for name in ("dtype", "checkpointing") if getattr(step, name)]
    if not isinstance(request.model, torch.nn.Module):
        raise InputError(
            f"{names[0]} is {getattr(step, names[0])!r}, and the model is a {type(request.model).__name__}, "
            "captured already; expected an nn.Module or its name: pass that"
        )
    if not isinstance(step.optimizer, str) and step.dtype is not None:
        raise InputError(
            f"dtype is {step.dtype!r}, and the optimizer holds parameters of another data type; convert the "
            f"model before its optimizer is built: model.to(torch.{step.dtype})"
        )
    model = checked_model(request.model)
    switch = checkpointing_switch(model) if step.checkpointing else None
    if step.checkpointing and switch is None and not any(getattr(model, f"is_{s}", False) for s in _SWITCHES):
        raise InputError(
            f"checkpointing is True, and {type(model).__name__} has no switch for it, as models of "
            "transformers have (gradient_checkpointing_enable); wrap its blocks in "
            "torch.utils.checkpoint.checkpoint, and leave checkpointing out"
        )
    kind = None if step.dtype is None else getattr(torch, step.dtype)

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(kind) if floating and kind is not None else leaf

    example = request.example
    if example is None and request.input_size is None:
        example = getattr(model, "example_inputs", None)
    return replace(
        request,
        model=varied(model, dtype=step.dtype, checkpointing=switch),
        example=tree_map(cast, example),
        name=request.name or type(model).__name__,
    )
