"""A training run, checked before its first step and compared with its prediction at its end.

Nothing here ends a training that could run: whatever fails is a warning, apart from misfit="raise".
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from torchedge import api
from torchedge.devices import Device
from torchedge.errors import (
    InputError,
    LimitError,
    TorchedgeError,
    TorchedgeWarning,
    check_choice,
    check_function,
    described,
    first_line,
)
from torchedge.graphs.training_steps import Loss
from torchedge.prediction.advice import Advice
from torchedge.prediction.results import CONFIDENCE, Prediction, checked_confidence
from torchedge.profiling.hosts import measure_operator_us
from torchedge.storage.amounts import Amount, mib_of
from torchedge.texts import number, span
from torchedge.tracing.interception import batch_of

P = ParamSpec("P")
R = TypeVar("R")


def harmless(work: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function with a warning and None in place of its errors, apart from LimitError."""

    @wraps(work)
    def call(*args: P.args, **options: P.kwargs) -> R | None:
        try:
            return work(*args, **options)
        except LimitError:
            raise
        except Exception as error:  # a user's dataset, model or report may raise anything
            kind = "" if isinstance(error, TorchedgeError) else f"{type(error).__name__}: "
            warn(f"torchedge does not predict this run: {kind}{first_line(error)}")
            return None

    return call


def warn(text: str) -> None:
    """Warn the user of a training script."""
    warnings.warn(text, TorchedgeWarning, stacklevel=3)


Misfit = Literal["raise", "warn"]
"""What happens if the run is predicted not to fit."""

_SEEN = 256
"""Samples of a dataset among which the largest ones are taken."""
_WARM_UP = 3
"""Updates before times count."""


@dataclass
class TrainingRun:
    """One training run on this machine: its settings, its prediction, and what it took.

    example: a batch; by default the largest samples among a dataset's first ones. device: as in
    `torchedge.predict`; by default this machine's, in this machine's host, whose launches are timed for some
    10 ms where CUDA is in use. memory_limit: by default the device's memory. misfit: raise LimitError or warn
    if the run will not fit. advise: then also look for settings that would (some seconds). report: gets the
    comparison at the end of the run as text.
    """

    example: Any = None
    device: str | Path | Device | None = None
    memory_limit: Amount | None = None
    confidence: float = CONFIDENCE
    misfit: Misfit = "warn"
    advise: bool = True
    report: Callable[[str], object] = print
    prediction: Prediction | None = field(default=None, init=False)
    advice: Advice | None = field(default=None, init=False)
    _accumulation: int = field(default=1, init=False)
    _times: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Raise InputError for settings that no run can have, before the run starts."""
        check_choice("misfit", self.misfit, ("raise", "warn"))
        checked_confidence(self.confidence)
        check_function("report", self.report)
        if self.memory_limit is not None:
            mib_of(self.memory_limit, "memory_limit")

    def batch(self, loader: Any, batch_size: int | None = None) -> tuple[Any, int]:
        """Return an example batch and its number of samples; raises TorchedgeError where there is none.

        loader: a DataLoader. batch_size: by default the loader's.
        """
        if self.example is not None:
            loaded = getattr(loader, "batch_size", None) if batch_size is None else batch_size
            size = loaded or batch_of(self.example)
            if size is None:
                raise InputError(
                    "the example holds no tensor that has a batch; expected a batch of the training"
                )
            return self.example, size
        size = batch_size_of(loader) if batch_size is None else batch_size
        return largest_batch(loader.dataset, loader.collate_fn, size), size

    @harmless
    def check(
        self,
        model: torch.nn.Module,
        example: Any,
        batch_size: int,
        *,
        optimizer: str | torch.optim.Optimizer = "adamw",
        amp: str | None = None,
        accumulation: int = 1,
        loss: Loss = "default",
    ) -> Prediction | None:
        """Predict the run, and warn or raise LimitError if it will not fit; None where it is not predicted.

        batch_size: samples of a micro-batch. The other arguments are those of `torchedge.predict`.
        """
        self._accumulation, self._times = accumulation, []
        options: dict[str, Any] = {"optimizer": optimizer, "amp": amp, "loss": loss, "example": example}
        device = self.device if isinstance(self.device, Device) else api.choose_device(self.device)
        if self.device is None and torch.cuda.is_initialized():
            with suppress(InputError):  # a profile that does not say how fast its own host was
                device = device.on_host(measure_operator_us())
        self.prediction = prediction = api.predict(
            model, batch_size, device=device, accumulation=accumulation, **options
        )
        if prediction.fits(self.memory_limit, confidence=self.confidence):
            return prediction
        if self.advise:
            try:
                self.advice = api.advise(
                    model,
                    batch_size * accumulation,
                    device=device,
                    memory_limit=self.memory_limit,
                    confidence=self.confidence,
                    runtime=False,
                    **options,
                )
            except Exception as error:  # the verdict stands without it
                warn(f"torchedge finds no other settings: {first_line(error)}")
        message = self._message(prediction)
        if self.misfit == "raise":
            raise LimitError(message)
        warn(message)
        return prediction

    def _message(self, prediction: Prediction) -> str:
        limit = prediction.device_memory_mib if self.memory_limit is None else mib_of(self.memory_limit)
        text = (
            f"{prediction.model} at batch {prediction.batch_size} will not fit on {prediction.device}: it "
            f"needs up to {number(prediction.needed_mib(self.confidence))} of {number(limit or 0.0)} MiB "
            f"at {self.confidence:.0%} confidence"
        )
        if self.advice is None:
            return text
        ways = [
            f"{', '.join(way.changes) or 'no change'} ({way.accumulation} x {way.batch_size}: "
            f"{number(way.needed_mib)} MiB, {number(way.update_ms)} ms an update)"
            for way in self.advice.settings
            if way.fits
        ]
        return f"{text}; would fit: {'; '.join(ways)}" if ways else f"{text}; nothing that was tried fits"

    def updated(self) -> None:
        """Count one update of the weights."""
        self._times.append(time.perf_counter())

    @harmless
    def finish(self) -> None:
        """Report the prediction beside what the run took."""
        if self.prediction is not None:
            self.report(self.comparison())

    def comparison(self) -> str:
        """Return the prediction beside what was measured, as a table; "-" where nothing was."""
        assert self.prediction is not None
        p, measured = self.prediction, self.measured()
        rows = [("allocated", p.allocated), ("reserved", p.reserved), ("an update", p.latency)]
        batch = f"{self._accumulation} x {p.batch_size}"
        lines = [f"{p.model}, batch {batch} on {p.device}: predicted (90 % interval), measured"]
        for name, e in rows:
            taken = measured.get(name)
            seen = "-" if taken is None else f"{number(taken)} {e.unit}"
            interval = f"({span(e.low, e.high)})"
            lines.append(f"  {name:<10} {number(e.value):>8} {e.unit:<4}{interval:<18}{seen:>12}")
        return "\n".join(lines)

    def measured(self) -> dict[str, float]:
        """Return what the run took: MiB of PyTorch's allocator on CUDA, and the median ms of an update.

        Times are from the fourth update on, with the loading of data; evaluations between do not count.
        """
        figures = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            figures["allocated"] = torch.cuda.max_memory_allocated() / 2**20
            figures["reserved"] = torch.cuda.max_memory_reserved() / 2**20
        if len(self._times) > _WARM_UP:
            figures["an update"] = 1e3 * float(np.median(np.diff(self._times[_WARM_UP - 1 :])))
        return figures


def named_as(model: torch.nn.Module, step: torch.nn.Module) -> torch.nn.Module:
    """Return a step of a model under the model's name."""
    step.__class__ = type(type(model).__name__, (type(step),), {})
    return step


def largest_batch(dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int) -> Any:
    """Return a batch on the CPU of the largest of a dataset's first samples; random generators stay.

    Padded sequences are as long as the longest of a batch: so is the example.

    Raises:
        TorchedgeError: the dataset has no indices, as streams have not: pass an example.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TorchedgeError(
            f"the dataset is {described(dataset)} without indices; expected one, or an example batch: "
            "pass example="
        )
    with _same_randomness():
        samples = [dataset[place] for place in range(min(batch_size, len(dataset)))]
        if len({_extent(sample) for sample in samples}) > 1:
            samples += [dataset[place] for place in islice(range(len(dataset)), batch_size, _SEEN)]
            samples = sorted(samples, key=_extent, reverse=True)[:batch_size]
        return collate(samples)


def batch_size_of(loader: Any) -> int:
    """Return the batch size of a DataLoader; raises TorchedgeError where it has none."""
    batch_size = getattr(loader, "batch_size", None)
    batch_size = batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(batch_size, int):
        raise TorchedgeError(
            f"the data loader is {described(loader)} without a batch size; expected "
            "DataLoader(batch_size=...), or a batch: pass example="
        )
    return batch_size


def _extent(sample: Any) -> int:
    """Return the number of values in a sample."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, Mapping):
        return sum(map(_extent, sample.values()))
    if isinstance(sample, Sequence) and not isinstance(sample, str):
        return sum(map(_extent, sample))
    return 1


@contextmanager
def _same_randomness() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
