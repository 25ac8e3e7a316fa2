"""Predictions in the Trainer of transformers: `Trainer(..., callbacks=[PredictionCallback()])`."""

from __future__ import annotations

from typing import Any

from torchedge.errors import needed
from torchedge.integrations.training_runs import TrainingRun
from torchedge.tracing.vision import import_torchvision

with needed("transformers", purpose="its Trainer's callbacks"):
    import_torchvision()  # which transformers imports, and mismatched builds of which fail
    from transformers import TrainerCallback


class PredictionCallback(TrainerCallback):
    """Predicts a run before its first step, warns or raises if it will not fit, and compares at the end.

    Batch size, accumulation, autocast, optimizer and checkpointing are those of the Trainer. The arguments
    are those of `TrainingRun`. Nothing runs on the GPU.
    """

    def __init__(self, **run: Any) -> None:
        self.run = TrainingRun(**run)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Predict the run; raises LimitError with misfit="raise"."""
        batch = self.run.batch(parts["train_dataloader"], args.per_device_train_batch_size)
        if batch is None:
            return
        example, batch_size = batch
        optimizer = parts["optimizer"]
        self.run.check(
            parts["model"],
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
