"""Predictions in the Trainer of transformers: `Trainer(..., callbacks=[PredictionCallback()])`."""

from __future__ import annotations

import warnings
from typing import Any

from torchedge.errors import TorchedgeError, TorchedgeWarning, needed
from torchedge.integrations.training_runs import TrainingRun, largest_batch
from torchedge.tracing.vision import import_torchvision

with needed("transformers", purpose="its Trainer's callbacks"):
    import_torchvision()  # which transformers imports, and mismatched builds of which fail
    from transformers import TrainerCallback


class PredictionCallback(TrainerCallback):
    """Predicts a run before its first step, warns or raises if it will not fit, and compares at the end.

    Batch size, accumulation, autocast, optimizer and checkpointing are those of the Trainer. example: a
    batch; by default the largest samples of the dataset's first ones. The other arguments are those of
    `TrainingRun`. Nothing runs on the GPU.
    """

    def __init__(self, *, example: Any = None, **run: Any) -> None:
        self.run, self._example = TrainingRun(**run), example

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Predict the run; raises LimitError with misfit="raise"."""
        batch_size = args.per_device_train_batch_size
        loader, optimizer = parts["train_dataloader"], parts["optimizer"]
        try:
            example = self._example
            if example is None:
                example = largest_batch(loader.dataset, loader.collate_fn, batch_size)
        except TorchedgeError as error:
            warnings.warn(f"torchedge does not predict this run: {error}", TorchedgeWarning, stacklevel=2)
            return
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
