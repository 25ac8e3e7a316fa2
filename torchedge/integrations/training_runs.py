"""A training run, checked before its first step and compared with its prediction at its end.

Nothing here raises because of a model that cannot be predicted: training goes on, with a warning.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from torchedge import api
from torchedge.devices import Device
from torchedge.errors import LimitError, TorchedgeError, TorchedgeWarning, check_choice
from torchedge.prediction.advice import Advice
from torchedge.prediction.results import CONFIDENCE, Prediction
from torchedge.texts import number, span

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
    `torchedge.predict`. limit_mib: by default the device's memory. misfit: raise LimitError or warn if the
    run will not fit. advise: then also look for settings that would (some seconds). report: gets the
    comparison at the end of the run as text.
    """

    example: Any = None
    device: str | Path | Device | None = None
    limit_mib: float | None = None
    confidence: float = CONFIDENCE
    misfit: Misfit = "warn"
    advise: bool = True
    report: Callable[[str], object] = print
    prediction: Prediction | None = field(default=None, init=False)
    advice: Advice | None = field(default=None, init=False)
    _accumulation: int = field(default=1, init=False)
    _updates: int = field(default=0, init=False)
    _times: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def __post_init__(self) -> None:
        """Check the choice; raises InputError for an unknown one."""
        check_choice("misfit", self.misfit, ("raise", "warn"))

    def batch(self, loader: Any, batch_size: int | None = None) -> tuple[Any, int] | None:
        """Return an example batch and its number of samples; None, with a warning, where none is found.

        loader: a DataLoader. batch_size: by default the loader's.
        """
        try:
            size = batch_size_of(loader) if batch_size is None else batch_size
            if self.example is not None:
                return self.example, size
            return largest_batch(loader.dataset, loader.collate_fn, size), size
        except TorchedgeError as error:
            _warn(f"torchedge does not predict this run: {error}")
            return None

    def check(
        self,
        model: torch.nn.Module,
        example: Any,
        batch_size: int,
        *,
        optimizer: str | torch.optim.Optimizer = "adamw",
        amp: str | None = None,
        accumulation: int = 1,
        loss: Callable[[Any], Any] | Literal["default"] = "default",
    ) -> Prediction | None:
        """Predict the run, and warn or raise LimitError if it will not fit; None where it is not predicted.

        batch_size: samples of a micro-batch. The other arguments are those of `torchedge.predict`.
        """
        self._accumulation, self._updates = accumulation, 0
        options: dict[str, Any] = {"optimizer": optimizer, "amp": amp, "loss": loss, "example": example}
        try:
            device = self.device if isinstance(self.device, Device) else api.choose_device(self.device)
            self.prediction = api.predict(
                model, batch_size, device=device, accumulation=accumulation, **options
            )
            fits = self.prediction.fits(self.limit_mib, confidence=self.confidence)
        except TorchedgeError as error:
            _warn(f"torchedge does not predict this run: {error}")
            return None
        if fits:
            return self.prediction
        if self.advise:
            try:
                self.advice = api.advise(
                    model,
                    batch_size * accumulation,
                    device=device,
                    limit_mib=self.limit_mib,
                    confidence=self.confidence,
                    **options,
                )
            except TorchedgeError as error:
                _warn(f"torchedge finds no other settings: {error}")
        message = self._message(self.prediction)
        if self.misfit == "raise":
            raise LimitError(message)
        _warn(message)
        return self.prediction

    def _message(self, prediction: Prediction) -> str:
        limit = self.limit_mib if self.limit_mib is not None else prediction.device_memory_mib
        text = (
            f"{prediction.model} at batch {prediction.batch_size} will not fit on {prediction.device}: it "
            f"needs up to {number(prediction.required_mib(self.confidence))} of {number(limit or 0.0)} MiB "
            f"at {self.confidence:.0%} confidence"
        )
        if self.advice is None:
            return text
        ways = [
            f"{', '.join(way.changes) or 'no change'} ({way.accumulation} x {way.batch_size}: "
            f"{number(way.required_mib)} MiB, {number(way.update_ms)} ms an update)"
            for way in self.advice.settings
            if way.fits
        ]
        return f"{text}; would fit: {'; '.join(ways)}" if ways else f"{text}; nothing that was tried fits"

    def updated(self) -> None:
        """Count one update of the weights."""
        now = time.perf_counter()
        self._updates += 1
        first, _ = self._times
        self._times = (now if self._updates <= _WARM_UP else first, now)

    def finish(self) -> None:
        """Report the prediction beside what the run took."""
        if self.prediction is not None:
            self.report(self.comparison())

    def comparison(self) -> str:
        """Return the prediction beside what was measured, as a table; "-" where nothing was."""
        assert self.prediction is not None
        p, measured = self.prediction, self.measured()
        by = self._accumulation
        latency = replace(
            p.latency, value=p.latency.value * by, low=p.latency.low * by, high=p.latency.high * by
        )
        rows = [("allocated", p.allocated), ("reserved", p.reserved), ("an update", latency)]
        lines = [f"{p.model}, batch {by} x {p.batch_size} on {p.device}: predicted (90 % interval), measured"]
        for name, e in rows:
            taken = measured.get(name)
            seen = "-" if taken is None else f"{number(taken)} {e.unit}"
            interval = f"({span(e.low, e.high)})"
            lines.append(f"  {name:<10} {number(e.value):>8} {e.unit:<4}{interval:<18}{seen:>12}")
        return "\n".join(lines)

    def measured(self) -> dict[str, float]:
        """Return what the run took: MiB of PyTorch's allocator on CUDA, and the mean ms of an update.

        Times are from the fourth update on, with the loading of data.
        """
        figures = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            figures["allocated"] = torch.cuda.max_memory_allocated() / 2**20
            figures["reserved"] = torch.cuda.max_memory_reserved() / 2**20
        if self._updates > _WARM_UP:
            first, last = self._times
            figures["an update"] = 1e3 * (last - first) / (self._updates - _WARM_UP)
        return figures


def largest_batch(dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int) -> Any:
    """Return a batch on the CPU of the largest of a dataset's first samples; random generators stay.

    Padded sequences are as long as the longest of a batch: so is the example.

    Raises:
        TorchedgeError: the dataset has no indices, as streams have not: pass an example.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TorchedgeError(
            f"the dataset is a {type(dataset).__name__} without indices; expected one, or an example batch: "
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
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(batch_size, int):
        raise TorchedgeError(
            "the data loader has no batch size; expected DataLoader(batch_size=...), or one loader"
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


def _warn(text: str) -> None:
    warnings.warn(text, TorchedgeWarning, stacklevel=3)
