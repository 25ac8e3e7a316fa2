"""Predictions in Lightning: one callback checks a run, another finds the batch size without trials."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchedge import api
from torchedge.devices import Device
from torchedge.errors import InputError, TorchedgeError, needed
from torchedge.integrations.training_runs import TrainingRun, harmless, named_as
from torchedge.prediction.results import CONFIDENCE, Prediction
from torchedge.storage.amounts import Amount
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.vision import import_torchvision

with needed("pytorch-lightning", purpose="Lightning's callbacks"):
    import_torchvision()  # which Lightning's metrics import, and mismatched builds of which fail
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

_AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
_WEIGHTS = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""By the word of a Trainer: the data type of autocast, and that of weights and batches."""


class PredictionCallback(pl.Callback):  # type: ignore[misc]
    """Predicts a run before its first step, warns or raises if it will not fit, and compares at the end.

    The step is `training_step` with the first optimizer. The arguments are those of `TrainingRun`.
    """

    def __init__(self, **run: Any) -> None:
        self.run = TrainingRun(**run)

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Predict the run; raises LimitError with misfit="raise"."""
        example, batch_size = self.run.batch(trainer.train_dataloader)
        options = _options(trainer, pl_module, example)
        self.run.check(
            options.pop("model"), batch_size=batch_size, optimizer=trainer.optimizers[0], **options
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
        memory_limit: Amount | None = None,
        confidence: float = CONFIDENCE,
        optimizer: str = "adamw",
        largest: int = 8192,
        example: Any = None,
    ) -> None:
        self._device, self._limit, self._confidence = device, memory_limit, confidence
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
        source = getattr(getattr(trainer, "fit_loop", None), "_data_source", None)
        if isinstance(getattr(source, "instance", None), torch.utils.data.DataLoader):
            raise InputError(
                "fit got train_dataloaders, whose batch size is fixed; expected a train_dataloader method "
                "that reads batch_size"
            )
        prediction = self._predicted(trainer, pl_module)
        if prediction is None:
            return
        batch_size = prediction.max_batch_size(
            self._limit, confidence=self._confidence, largest=self._largest
        )
        if not batch_size:
            raise InputError(
                f"{prediction.model} does not fit at batch size 1 on {prediction.device}: it needs up to "
                f"{prediction.needed_mib(self._confidence):.0f} MiB; take a smaller model or another device"
            )
        owner.batch_size = batch_size

    @harmless
    def _predicted(self, trainer: Any, pl_module: Any) -> Prediction:
        loader = (trainer.datamodule or pl_module).train_dataloader()
        example, _ = TrainingRun(example=self._example).batch(loader)
        self._largest = min(self._largest, len(loader.dataset))
        options = _options(trainer, pl_module, example)
        return api.predict(batch_size=1, device=self._device, optimizer=self._optimizer, **options)


class _TrainingStep(torch.nn.Module):
    """`training_step` of a module as a forward pass, which logs nothing."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = copy.copy(module)
        silent: dict[str, Any] = dict.fromkeys(("log", "log_dict", "print"), _nothing)
        silent |= {"logger": None, "loggers": []}
        silent["trainer"] = module.trainer  # which copies of a module lose
        self.module.__class__ = type(type(module).__name__, (type(module),), silent)

    def forward(self, batch: Any) -> Any:
        with warnings_ignored(Warning):
            return self.module.training_step(batch, 0)


def _nothing(*args: Any, **options: Any) -> None:
    """Stand for a method that logs."""


def _options(trainer: Any, pl_module: Any, example: Any) -> dict[str, Any]:
    """Return the model, its example and the settings of a run, as `torchedge.predict` takes them."""
    if not pl_module.automatic_optimization or len(trainer.optimizers) > 1:
        raise TorchedgeError(
            "it calls its optimizers itself (manual optimization), or has several; predict the step of each "
            "network by torchedge.predict"
        )
    precision = str(trainer.precision)
    dtype = _WEIGHTS.get(precision)
    if dtype is not None:  # Lightning converts the batches, too
        example = tree_map(
            lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, example
        )
    return {
        "model": named_as(pl_module, _TrainingStep(pl_module)),
        "example": (example,),
        "amp": _AUTOCAST.get(precision),
        "accumulation": trainer.accumulate_grad_batches,
        "loss": _loss_of,
    }


def _loss_of(output: Any) -> Any:
    return output["loss"] if isinstance(output, dict) else output
