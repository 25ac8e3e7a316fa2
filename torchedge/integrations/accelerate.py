"""Predictions for scripts that use accelerate."""

from __future__ import annotations

from typing import Any

import torch

from torchedge.graphs.training_steps import Loss
from torchedge.integrations.training_runs import TrainingRun

_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def check_run(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Any,
    batch_size: int,
    *,
    loss: Loss = "default",
    **run: Any,
) -> TrainingRun:
    """Check a run with an Accelerator's precision and accumulation before its first step.

    example: a batch, as the model is called with it. Call `updated` of the result after each update and
    `finish` at the end to compare the prediction with what the run took. The other arguments are those of
    `TrainingRun`; raises LimitError with misfit="raise".
    """
    checked = TrainingRun(**run)
    checked.check(
        accelerator.unwrap_model(model),
        example,
        batch_size,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        amp=_AUTOCAST.get(accelerator.mixed_precision),
        accumulation=accelerator.gradient_accumulation_steps,
        loss=loss,
    )
    return checked
