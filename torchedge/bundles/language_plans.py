"""Memory and time of language models on a device before anything is exported: generation, and a LoRA step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch

from torchedge.bundles.bundle_plans import BundlePlan, sum_of
from torchedge.bundles.exporting import Lowering, Request, lower_request
from torchedge.bundles.generation import DECODE, ENCODE, PREFILL, shortest
from torchedge.bundles.manifests import MAX_ENDS, TRAIN
from torchedge.devices import Device
from torchedge.errors import DeviceError, InputError, LimitError, check_whole
from torchedge.lowering.targets import Precision, Tuner
from torchedge.prediction.results import Estimate
from torchedge.storage.amounts import Amount, bytes_of
from torchedge.storage.locks import collection_paused
from torchedge.texts import number
from torchedge.tracing.language_models import ends_of, language_model, methods_of, with_adapters
from torchedge.tracing.quantizing import WeightFormat

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LanguageSettings:
    """How a language model runs; the names are those of `torchedge.export_lm`.

    lora: rank of the adapters that a further method trains by AdamW, a step of which takes `batch` texts of
    `max_length` tokens. prompt, new_tokens: of the text whose time is predicted; 0: 64, or half of max_length
    and the rest of it.
    """

    max_length: int
    chunk: int = 64
    batch: int = 1
    encoder_length: int | None = None
    cache_dtype: Literal["float32", "float16"] = "float32"
    quantize: WeightFormat | None = None
    lora: int | None = None
    memory_limit: Amount | None = None
    precision: Precision = "float32"
    tuner: Tuner | None = None
    prompt: int = 0
    new_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("batch", 1), ("prompt", 0), ("new_tokens", 0)):
            check_whole(name, getattr(self, name), least)
        prompt = self.prompt or min(64, self.max_length // 2)
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "new_tokens", self.new_tokens or max(1, min(64, self.max_length - prompt)))
        if self.lora is not None:
            check_whole("lora", self.lora)
        if self.prompt + self.new_tokens - 1 > self.max_length and self.encoder_length is None:
            raise InputError(
                f"prompt is {self.prompt} and new_tokens is {self.new_tokens}, and max_length is "
                f"{self.max_length}; expected no more together: pass a larger max_length"
            )

    def __str__(self) -> str:
        work = "generate" if self.lora is None else f"generate and train adapters of rank {self.lora}"
        limit = (
            "" if self.memory_limit is None else f" within {number(bytes_of(self.memory_limit) / _MIB)} MiB"
        )
        return f"{work}, weights in {self.quantize or self.precision}, {self.max_length} tokens{limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguagePlan(BundlePlan):
    """What generation, and a training step, of a language model take from a device; states hold caches."""

    settings: LanguageSettings

    @property
    def first_token(self) -> Estimate:
        """The time until the first token of a prompt, ms: all its chunks, and an encoder before them."""
        first = self.runs[PREFILL].latency
        if ENCODE in self.runs:
            return sum_of([(first, 1), (self.runs[ENCODE].latency, 1)])
        length, prompt = self.settings.max_length, self.settings.prompt
        chunk = min(self.settings.chunk, length)
        ends = [min(begin + chunk, length) for begin in range(0, prompt, chunk)]
        often = Counter(shortest(PREFILL, self.runs, end) for end in ends)
        return sum_of([(self.runs[method].latency, times) for method, times in often.items()])

    @property
    def token(self) -> Estimate:
        """The time of each later token, ms, of all texts of a batch together: the mean of a reply's."""
        first, count = self.settings.prompt, max(self.settings.new_tokens - 1, 1)
        places = range(first, first + count)
        often = Counter(shortest(DECODE, self.runs, place + 1) for place in places)
        if len(often) == 1:
            return self.runs[next(iter(often))].latency
        whole = sum_of([(self.runs[method].latency, times) for method, times in often.items()])
        return replace(whole, value=whole.value / count, low=whole.low / count, high=whole.high / count)

    @property
    def reply(self) -> Estimate:
        """The time of all new tokens of a prompt, ms."""
        return sum_of([(self.first_token, 1), (self.token, self.settings.new_tokens - 1)])

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first one."""
        return 1e3 * self.settings.batch / self.token.value

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: bytes, ms."""
        times = {name: getattr(self, name) for name in ("first_token", "token", "reply")}
        return {
            **BundlePlan.to_dict(self),
            "settings": self.settings,
            **{f"{name}_ms": estimate for name, estimate in times.items()},
            "tokens_per_s": self.tokens_per_s,
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.model} on {self.device} ({self.provenance}): {self.settings}",
                *self.lines(),
                f"  first token  {self.first_token} after a prompt of {self.settings.prompt}",
                f"  token        {self.token}, {number(self.tokens_per_s)} a second",
            ]
        )


@dataclass(frozen=True, slots=True)
class LanguageRow:
    """One setting of a table: its plan, or the reason why there is none.

    plan: a LanguagePlan; that of a training step alone is a BundlePlan.
    """

    settings: LanguageSettings
    plan: BundlePlan | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        planned = {"reason": self.reason} if self.plan is None else self.plan.to_dict()
        return {**planned, "settings": self.settings}


_Lowerings = dict[LanguageSettings, tuple[Request, Lowering]]
"""What is asked for and its programs, by settings without a memory limit."""


@collection_paused()
def plan_language_model(
    model: object, device: Device, settings: LanguageSettings, known: _Lowerings | None = None
) -> LanguagePlan:
    """Plan generation, and a training step, of a language model; see `torchedge.plan_lm`.

    known: the last lowering, which settings that differ in the memory limit alone share.
    """
    known = {} if known is None else known
    unlimited = replace(settings, memory_limit=None)
    if unlimited not in known:
        known.clear()
        built = language_model(model, settings.quantize, shapes=True)
        asked = language_request(built, unlimited)
        known[unlimited] = asked, lower_request(asked, device)
    asked, whole = known[unlimited]
    request = replace(asked, memory_limit=settings.memory_limit)
    return LanguagePlan.of(request, whole, device, settings=settings)


def plan_table(
    model: object,
    device: Device,
    settings: LanguageSettings,
    choices: Mapping[str, Iterable[Any]],
    progress: Callable[[LanguageSettings], object],
) -> tuple[LanguageRow, ...]:
    """Plan each combination of settings; one that does not fit is a row with the reason.

    choices: values of settings, by name, in place of those in `settings`.
    """
    rows, known = [], _Lowerings()
    for values in product(*choices.values()):
        own = replace(settings, **dict(zip(choices, values, strict=True)))
        progress(own)
        rows.append(row_of(own, lambda row: plan_language_model(model, device, row, known)))
    return tuple(rows)


def row_of(settings: LanguageSettings, planned: Callable[[LanguageSettings], BundlePlan]) -> LanguageRow:
    """Return a row of what is planned, or of the reason why there is no plan within the device's limits."""
    try:
        return LanguageRow(settings, planned(settings))
    except (LimitError, DeviceError) as error:
        return LanguageRow(settings, None, str(error))


def language_request(model: torch.nn.Module, settings: LanguageSettings) -> Request:
    """Return what is asked for: the methods of generation, and of settings with adapters their step."""
    name, trained = type(model).__name__, {}
    if settings.lora is not None:
        adapted, example, step = with_adapters(model, settings.lora, settings.max_length, settings.batch)
        model, trained = adapted.get_base_model(), {TRAIN: (adapted, example, step)}
    methods = methods_of(
        model,
        settings.max_length,
        settings.chunk,
        settings.batch,
        settings.cache_dtype,
        settings.encoder_length,
    )
    return Request(
        methods | trained,
        ends=ends_of(model)[:MAX_ENDS],
        name=name,
        memory_limit=settings.memory_limit,
        onnx=False,
        precision=settings.precision,
        tuner=settings.tuner,
    )
