"""Memory and time of language models on a device before anything is exported: generation, or a LoRA step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import Any, Literal

import torch

from torchedge.bundles.exporting import Lowering, Request, check_memory, lower_request, within_limit
from torchedge.bundles.generation import DECODE, ENCODE, PREFILL, shortest
from torchedge.bundles.manifests import TRAIN
from torchedge.devices import Device, Provenance, weakest
from torchedge.errors import DeviceError, InputError, LimitError, check_whole
from torchedge.graphs import WEIGHT_ROLES
from torchedge.lowering.limits import profile_limits
from torchedge.lowering.recomputing import Recomputation
from torchedge.lowering.targets import Precision, Tuner
from torchedge.prediction.results import Estimate
from torchedge.storage.amounts import Amount, bytes_of
from torchedge.storage.locks import collection_paused
from torchedge.streaming.program_costs import ProgramPrediction, predict_program
from torchedge.streaming.schedules import StreamingSchedule
from torchedge.texts import number
from torchedge.tracing.language_models import language_model, methods_of, with_adapters
from torchedge.tracing.quantizing import WeightFormat

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LanguageSettings:
    """How a language model runs; the names are those of `torchedge.export_lm`.

    lora: rank of the adapters that a training step of `batch` texts of `max_length` tokens trains by AdamW;
    None: it generates. prompt, new_tokens: of the text whose time is predicted; 0: 64, or half of max_length
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
        elif self.prompt + self.new_tokens - 1 > self.max_length and self.encoder_length is None:
            raise InputError(
                f"prompt is {self.prompt} and new_tokens is {self.new_tokens}, and max_length is "
                f"{self.max_length}; expected no more together: pass a larger max_length"
            )

    def __str__(self) -> str:
        work = "generate" if self.lora is None else f"train adapters of rank {self.lora}"
        limit = (
            "" if self.memory_limit is None else f" within {number(bytes_of(self.memory_limit) / _MIB)} MiB"
        )
        return f"{work}, weights in {self.quantize or self.precision}, {self.max_length} tokens{limit}"


@dataclass(frozen=True, slots=True)
class LanguagePlan:
    """What generation, or a training step, of a language model takes from a device.

    Memory is what its bundle allocates there, in bytes: weights (constants included), states (caches; of
    training the optimizer's), inputs and outputs, the arena, and staging of streamed weights. runs: the
    prediction of each program by the name of its method, "train" of a step. streamed_bytes: read in one run
    of the program that reads most. recomputed: what a training step computes again, if anything.
    """

    model: str
    device: str
    settings: LanguageSettings
    weights_bytes: int
    states_bytes: int
    ports_bytes: int
    arena_bytes: int
    staging_bytes: int
    streamed_bytes: int
    runs: Mapping[str, ProgramPrediction]
    recomputed: Recomputation | None = None

    @property
    def total_bytes(self) -> int:
        """All that is allocated on the device."""
        resident = self.weights_bytes + self.states_bytes + self.ports_bytes
        return resident + self.arena_bytes + self.staging_bytes

    @property
    def step(self) -> Estimate | None:
        """The time of a training step, ms."""
        return self.runs[TRAIN].latency if TRAIN in self.runs else None

    @property
    def first_token(self) -> Estimate | None:
        """The time until the first token of a prompt, ms: all its chunks, and an encoder before them."""
        if PREFILL not in self.runs:
            return None
        first = self.runs[PREFILL].latency
        if ENCODE in self.runs:
            return _sum([(first, 1), (self.runs[ENCODE].latency, 1)])
        length, prompt = self.settings.max_length, self.settings.prompt
        chunk = min(self.settings.chunk, length)
        ends = [min(begin + chunk, length) for begin in range(0, prompt, chunk)]
        often = Counter(shortest(PREFILL, self.runs, end) for end in ends)
        return _sum([(self.runs[method].latency, times) for method, times in often.items()])

    @property
    def token(self) -> Estimate | None:
        """The time of each later token, ms, of all texts of a batch together: the mean of a reply's."""
        if DECODE not in self.runs:
            return None
        first, count = self.settings.prompt, max(self.settings.new_tokens - 1, 1)
        places = range(first, first + count)
        often = Counter(shortest(DECODE, self.runs, place + 1) for place in places)
        if len(often) == 1:
            return self.runs[next(iter(often))].latency
        whole = _sum([(self.runs[method].latency, times) for method, times in often.items()])
        return replace(whole, value=whole.value / count, low=whole.low / count, high=whole.high / count)

    @property
    def reply(self) -> Estimate | None:
        """The time of all new tokens of a prompt, ms."""
        first, token = self.first_token, self.token
        if first is None or token is None:
            return None
        return _sum([(first, 1), (token, self.settings.new_tokens - 1)])

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first one; of training, tokens of the texts that a step learns."""
        texts = self.settings.batch
        if self.step is not None:
            return 1e3 * texts * self.settings.max_length / self.step.value
        return None if self.token is None else 1e3 * texts / self.token.value

    @property
    def provenance(self) -> Provenance:
        """The weakest source of the times."""
        return weakest([run.provenance for run in self.runs.values()])

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, or lies outside what was measured."""
        return tuple(dict.fromkeys([note for run in self.runs.values() for note in run.notes]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: bytes, ms."""
        sizes = ("weights", "states", "ports", "arena", "staging", "total", "streamed")
        times = {name: getattr(self, name) for name in ("first_token", "token", "reply", "step")}
        return {
            "model": self.model,
            "device": self.device,
            "settings": self.settings,
            **{f"{name}_bytes": getattr(self, f"{name}_bytes") for name in sizes},
            **{f"{name}_ms": estimate for name, estimate in times.items() if estimate is not None},
            "tokens_per_s": self.tokens_per_s,
            **({"recomputed": again.to_dict()} if (again := self.recomputed) else {}),
            "provenance": str(self.provenance),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        states = "the optimizer's state" if self.step else "caches"
        parts = {
            "weights": self.weights_bytes, states: self.states_bytes, "arena": self.arena_bytes,
            "staging": self.staging_bytes, "inputs and outputs": self.ports_bytes,
        }  # fmt: skip
        described = ", ".join(f"{name} {nbytes / _MIB:,.1f}" for name, nbytes in parts.items() if nbytes)
        lines = [f"{self.model} on {self.device} ({self.provenance}): {self.settings}"]
        lines.append(f"  memory       {self.total_bytes / _MIB:,.1f} MiB: {described}")
        if self.recomputed:
            lines.append(f"  recomputed   {self.recomputed}")
        if self.streamed_bytes:
            lines.append(f"  streamed     {self.streamed_bytes / _MIB:,.1f} MiB in each run")
        if self.step is not None:
            lines.append(f"  step         {self.step}")
        else:
            lines.append(f"  first token  {self.first_token} after a prompt of {self.settings.prompt}")
            lines.append(f"  token        {self.token}, {number(self.tokens_per_s or 0)} a second")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class LanguageRow:
    """One setting of a table: its plan, or the reason why there is none."""

    settings: LanguageSettings
    plan: LanguagePlan | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return (
            {"settings": self.settings, "reason": self.reason} if self.plan is None else self.plan.to_dict()
        )


_Lowerings = dict[LanguageSettings, tuple[str, Request, Lowering]]
"""A model's class, what is asked for and its programs, by settings without a memory limit."""


@collection_paused()
def plan_language_model(
    model: object, device: Device, settings: LanguageSettings, known: _Lowerings | None = None
) -> LanguagePlan:
    """Plan generation, or a training step, of a language model; see `torchedge.plan_lm`.

    known: the last lowering, which settings that differ in the memory limit alone share.
    """
    known = {} if known is None else known
    unlimited = replace(settings, memory_limit=None)
    if unlimited not in known:
        known.clear()
        built = language_model(model, settings.quantize, shapes=True)
        asked = _training(built, unlimited) if settings.lora else _generation(built, unlimited)
        known[unlimited] = type(built).__name__, asked, lower_request(asked, device, [])
    title, asked, whole = known[unlimited]
    request = replace(asked, memory_limit=settings.memory_limit)
    lowering = within_limit(whole, request, device)
    check_memory(lowering, profile_limits(device))
    names = [TRAIN] if request.train else [call.method for call in request.calls]
    runs = {
        name: predict_program(program, device, plan)
        for name, program, plan in zip_longest(names, lowering.programs, lowering.plans)
    }
    memory = lowering.memory
    weights, states = (_resident(lowering, roles) for roles in (WEIGHT_ROLES, ("state",)))
    return LanguagePlan(
        title,
        device.name,
        settings,
        weights,
        states,
        memory.resident_bytes - weights - states,
        memory.arena_bytes,
        memory.staging_bytes,
        max([_streamed(plan.schedule) for plan in lowering.plans], default=0),
        runs,
        lowering.recomputed,
    )


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
        try:
            rows.append(LanguageRow(own, plan_language_model(model, device, own, known)))
        except (LimitError, DeviceError) as error:
            rows.append(LanguageRow(own, None, str(error)))
    return tuple(rows)


def _generation(model: torch.nn.Module, settings: LanguageSettings) -> Request:
    methods = methods_of(
        model,
        settings.max_length,
        settings.chunk,
        settings.batch,
        settings.cache_dtype,
        settings.encoder_length,
    )
    return Request(methods, name=type(model).__name__, precision=settings.precision, tuner=settings.tuner)


def _training(model: torch.nn.Module, settings: LanguageSettings) -> Request:
    """Return the training step of adapters in all linear layers but the head."""
    assert settings.lora is not None
    adapted, example, step = with_adapters(model, settings.lora, settings.max_length, settings.batch)
    return Request(
        adapted,
        example,
        mode="train",
        step=step,
        name=type(model).__name__,
        precision=settings.precision,
        tuner=settings.tuner,
    )


def _resident(lowering: Lowering, roles: Iterable[str]) -> int:
    """Return the bytes of tensors of some roles that stay on the device, which programs share by name."""
    kept: dict[str, int] = {}
    for program in [plan.schedule.program for plan in lowering.plans] or lowering.programs:
        for index, tensor in enumerate(program.tensors):
            if tensor.role in roles and not program.arena.holds(index):
                kept[tensor.name] = tensor.nbytes
    return sum(kept.values())


def _streamed(schedule: StreamingSchedule) -> int:
    return sum(schedule.program.tensors[index].nbytes for index in schedule.streamed)


def _sum(parts: Sequence[tuple[Estimate, int]]) -> Estimate:
    """Return the sum of estimates, each so many times; their errors are taken to go together."""
    value, low, high = (
        sum(getattr(estimate, end) * times for estimate, times in parts) for end in ("value", "low", "high")
    )
    return Estimate(value, low, high, parts[0][0].unit)
