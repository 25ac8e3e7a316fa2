"""Advice for language models: beside the settings of PyTorch those of torchedge's own runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from torchedge.bundles.bundle_plans import BundlePlan, plan_request
from torchedge.bundles.exporting import Request
from torchedge.bundles.language_plans import LanguageRow, LanguageSettings, plan_language_model, row_of
from torchedge.devices import Device
from torchedge.errors import first_line
from torchedge.prediction.advice import Advice, stages_of
from torchedge.storage.documents import plain
from torchedge.tracing.capturing import CaptureRequest
from torchedge.tracing.language_models import is_language_model, language_model, with_adapters
from torchedge.tracing.quantizing import WeightFormat
from torchedge.tracing.sequence_lengths import LengthFamily

RANK = 16
"""The rank of adapters."""
_FORMS: tuple[WeightFormat | None, ...] = (None, "int8", "int4")
_CHOICES = tuple(product((RANK, None), _FORMS))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageAdvice(Advice):
    """Advice for a language model, with settings of torchedge's own runtime within the same limit.

    runtime: for each format of weights a training step of adapters, on all samples of an update at once, and
    generation of one text without them.
    """

    runtime: tuple[LanguageRow, ...]

    @property
    def fits(self) -> bool:
        """Whether a setting of PyTorch fits, or a training step of adapters."""
        return any(setting.fits for setting in self.settings) or self.trains

    @property
    def trains(self) -> bool:
        """Whether torchedge's own runtime trains adapters within the limit."""
        return any(row.plan is not None and row.settings.lora is not None for row in self.runtime)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data, ready for JSON."""
        data = Advice.to_dict(replace(self, runtime=()))
        return {**data, "runtime": plain([row.to_dict() for row in self.runtime]), "fits": self.fits}


def count_stages(model: object, device: Device, amp: str | None = None, *, runtime: bool = True) -> int:
    """Return how many stages `torchedge.advise` passes to `progress`."""
    own = len(_CHOICES) if runtime and is_language_model(model) else 0
    return len(stages_of(model, device, amp)) + own


def with_runtime(
    advice: Advice, request: CaptureRequest, device: Device, progress: Callable[[str], object]
) -> Advice:
    """Return advice for a language model with settings of torchedge's own runtime.

    Texts are as long as those of the example. progress: called with each setting. What cannot be planned is a
    note.
    """
    rows, untried = list[LanguageRow](), dict[tuple[str, str], list[str]]()
    for lora, form in _CHOICES:
        work, weights = "generation" if lora is None else "a step of adapters", form or "float32"
        progress(f"{work} with weights in {weights}")
        try:
            settings = LanguageSettings(
                LengthFamily(request).length,
                batch=1 if lora is None else advice.batch_size,
                quantize=form,
                lora=lora,
                memory_limit=advice.memory_limit_mib,
            )
            rows.append(row_of(settings, lambda row: _planned(request.model, device, row)))
        except Exception as error:  # a copy of a foreign module may fail in any way
            untried.setdefault((work, f"{type(error).__name__}: {first_line(error)}"), []).append(weights)
    notes = [
        f"{work} with weights in {', '.join(forms)} was not tried: {reason}"
        for (work, reason), forms in untried.items()
    ]
    same = {item.name: getattr(advice, item.name) for item in fields(advice)}
    return LanguageAdvice(**{**same, "notes": (*advice.notes, *notes)}, runtime=tuple(rows))


def _planned(model: object, device: Device, settings: LanguageSettings) -> BundlePlan:
    """Plan generation, or a training step of adapters alone: it takes less than half of the time of both."""
    if settings.lora is None:
        return plan_language_model(model, device, settings)
    built = language_model(model, settings.quantize, shapes=True)
    adapted, example, step = with_adapters(built, settings.lora, settings.max_length, settings.batch)
    name, limit = type(built).__name__, settings.memory_limit
    return plan_request(Request(adapted, example, "train", step, name=name, memory_limit=limit), device)
