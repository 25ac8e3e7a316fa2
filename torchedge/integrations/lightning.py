"""Predictions in Lightning: one callback checks a run, another finds the batch size without trials."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchedge import api
from torchedge.devices import Device
from torchedge.errors import InputError, needed
from torchedge.integrations.training_runs import TrainingRun, batch_size_of, largest_batch
from torchedge.prediction.results import CONFIDENCE
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.vision import import_torchvision

with needed("pytorch-lightning", purpose="Lightning's callbacks"):
    import_torchvision()  # which Lightning's metrics import, and mismatched builds of which fail
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

_AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


class PredictionCallback(pl.Callback):  # type: ignore[misc]
    """Predicts a run before its first step, warns or raises if it will not fit, and compares at the end.

    The step is `training_step` with the first optimizer. The arguments are those of `TrainingRun`.
    """

    def __init__(self, **run: Any) -> None:
        self.run = TrainingRun(**run)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Predict the run; raises LimitError with misfit="raise"."""
        batch = self.run.batch(trainer.train_dataloader)
        if batch is None:
            return
        example, batch_size = batch
        self.run.check(
            _step_of(pl_module),
            (example,),
            batch_size,
            optimizer=trainer.optimizers[0],
            amp=_AUTOCAST.get(str(trainer.precision)),
            accumulation=trainer.accumulate_grad_batches,
            loss=_loss_of,
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an update, where the batch completed one."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.run.updated()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the prediction beside what the run took."""
        if trainer.is_global_zero:
            self.run.finish()


class PredictedBatchSize(pl.Callback):  # type: ignore[misc]
    """Sets `batch_size` of the data module, or of the model, to the largest that is predicted to fit.

    Lightning's own finder tries batch sizes until one fails; this one runs nothing. example: a batch, by
    default of the first samples. largest: the most that is set. optimizer: as in `torchedge.predict`.
    """

    def __init__(
        self,
        *,
        device: str | Device | None = None,
        limit_mib: float | None = None,
        confidence: float = CONFIDENCE,
        optimizer: str = "adamw",
        largest: int = 8192,
        example: Any = None,
    ) -> None:
        self._device, self._limit, self._confidence = device, limit_mib, confidence
        self._optimizer, self._largest, self._example = optimizer, largest, example

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the batch size before the data loaders are made; raises InputError where nothing fits."""
        if stage != "fit":
            return
        owner = trainer.datamodule if hasattr(trainer.datamodule, "batch_size") else pl_module
        if not hasattr(owner, "batch_size"):
            raise InputError(
                "neither the data module nor the model has batch_size; expected an attribute of that name, "
                "which train_dataloader uses"
            )
        loader = (trainer.datamodule or pl_module).train_dataloader()
        example = self._example
        if example is None:
            example = largest_batch(loader.dataset, loader.collate_fn, batch_size_of(loader))
        prediction = api.predict(
            _step_of(pl_module),
            1,
            device=self._device,
            example=(example,),
            optimizer=self._optimizer,
            amp=_AUTOCAST.get(str(trainer.precision)),
            accumulation=trainer.accumulate_grad_batches,
            loss=_loss_of,
        )
        batch_size = prediction.max_batch_size(
            self._limit, confidence=self._confidence, largest=min(self._largest, len(loader.dataset))
        )
        if not batch_size:
            raise InputError(
                f"{prediction.model} does not fit at batch size 1 on {prediction.device}: it needs up to "
                f"{prediction.required_mib(self._confidence):.0f} MiB; take a smaller model or another device"
            )
        owner.batch_size = batch_size


class _TrainingStep(torch.nn.Module):
    """`training_step` of a module as a forward pass; the module's logger is left out."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = copy.copy(module)
        self.module.__dict__ = {**module.__dict__, "_trainer": None}

    def forward(self, batch: Any) -> Any:
        with warnings_ignored(Warning):  # self.log has no trainer
            return self.module.training_step(batch, 0)


def _step_of(module: Any) -> torch.nn.Module:
    """Return the step of a module, under the module's name."""
    step: torch.nn.Module = type(type(module).__name__, (_TrainingStep,), {})(module)
    return step


def _loss_of(output: Any) -> Any:
    return output["loss"] if isinstance(output, dict) else output
