"""Predictions in the Trainer of transformers: `Trainer(..., callbacks=[PredictionCallback()])`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchedge.errors import TorchedgeError, needed
from torchedge.integrations.training_runs import TrainingRun, harmless, named_as
from torchedge.tracing.capturing import unwrapped
from torchedge.tracing.vision import import_torchvision

with needed("transformers", purpose="its Trainer's callbacks"):
    import_torchvision()  # which transformers imports, and mismatched builds of which fail
    from transformers import TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother


class PredictionCallback(TrainerCallback):
    """Predicts a run before its first step, warns or raises if it will not fit, and compares at the end.

    Batch size, accumulation, autocast, label smoothing, optimizer and checkpointing are those of the Trainer.
    compute_loss: called as compute_loss(model, inputs) for the loss of a batch, for a Trainer with a method
    or a function of its own: ``callback.compute_loss = trainer.compute_loss``. The other arguments are those
    of `TrainingRun`. The model does not run on the GPU.
    """

    def __init__(self, *, compute_loss: Callable[[Any, Any], Any] | None = None, **run: Any) -> None:
        self.run = TrainingRun(**run)
        self.compute_loss = compute_loss

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Predict the run; raises LimitError with misfit="raise"."""
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise TorchedgeError("it shards the model over devices (DeepSpeed or FSDP)")
        replicas = max(1, args.n_gpu)  # of DataParallel
        batch_size = (getattr(state, "train_batch_size", None) or args.train_batch_size) // replicas
        example, batch_size = self.run.batch(parts["train_dataloader"], batch_size)
        model, optimizer = unwrapped(parts["model"]), parts["optimizer"]
        loss = self.compute_loss
        if loss is None and args.label_smoothing_factor and "labels" in example:
            loss = partial(_smoothed, LabelSmoother(args.label_smoothing_factor))
        self.run.check(
            model if loss is None else named_as(model, _Loss(model, loss)),
            dict(example),
            batch_size,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            amp="bfloat16" if args.bf16 else "float16" if args.fp16 else None,
            accumulation=args.gradient_accumulation_steps,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Count an update."""
        self.run.updated()

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Report the prediction beside what the run took."""
        if state.is_world_process_zero:
            self.run.finish()


class _Loss(torch.nn.Module):
    """A model with its loss, called with a batch."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, **inputs: Any) -> Any:
        return {"loss": self._loss(self.model, inputs)}


def _smoothed(smoother: Any, model: Any, inputs: Any) -> Any:
    labels = inputs.pop("labels")
    shift = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return smoother(model(**inputs), labels, shift_labels=shift)
