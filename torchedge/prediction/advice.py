"""Settings under which a training step fits a device: what to change, and what each change costs in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from torchedge.devices import Device
from torchedge.errors import InputError, check_whole
from torchedge.graphs import ForwardGraph
from torchedge.prediction.latency.rates import figure_of
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import predict_graph
from torchedge.prediction.results import CONFIDENCE, Prediction
from torchedge.storage.documents import plain
from torchedge.texts import number
from torchedge.tracing.capturing import CaptureRequest, capture_request
from torchedge.tracing.model_variants import checkpointing_switch, varied

_CHEAPER = {"adam": ("sgd-momentum", "sgd"), "adamw": ("sgd-momentum", "sgd"), "sgd-momentum": ("sgd",)}
"""Optimizers with less state than another one."""
_CHECKPOINTING, _HEAD_ONLY = "checkpointing", "head only"
_TRITON = 7.0
"""The least compute capability that Triton, and so torch.compile, has kernels for."""
_HEAD_SHARE = 0.2
"""A last layer with at most this share of the parameters counts as a head that can be trained alone."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the asked training step.

    changes: names of what differs from the request, none for the request itself. batch_size: samples of a
    micro-batch, of which `accumulation` make one update. needed_mib: memory that the run stays below with
    the confidence asked for. update_ms: time of one update: its micro-batches, and the optimizer once.
    prediction: of such an update.
    """

    changes: tuple[str, ...]
    batch_size: int
    accumulation: int
    optimizer: str
    amp: str | None
    checkpointing: bool
    head_only: bool
    compile: bool
    fits: bool
    needed_mib: float
    update_ms: float
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings of a training step within a memory limit, those with the fewest changes first.

    Without one that fits, `settings` holds the one that needs least. A setting is left out where another one
    fits with a part of its changes in no more time. notes: variants that were not tried, and why.
    """

    model: str
    device: str
    batch_size: int
    memory_limit_mib: float
    confidence: float
    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any of the settings fits."""
        return any(setting.fits for setting in self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data, ready for JSON."""
        data: dict[str, Any] = plain(self)
        return {**data, "fits": self.fits}

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the body of a table: one line a setting."""
        head = ["changes", "batch", "optimizer", "needs MiB", "ms an update", "fits"]
        body = [
            [
                ", ".join(setting.changes) or "none",
                f"{setting.accumulation} x {setting.batch_size}",
                setting.optimizer,
                number(setting.needed_mib),
                number(setting.update_ms),
                "yes" if setting.fits else "no",
            ]
            for setting in self.settings
        ]
        return head, body


class _Variant(NamedTuple):
    """A graph of the model with changes that need a capture of their own.

    request: of a graph under torch.compile, which holds for its batch size and autocast alone.
    """

    graph: ForwardGraph
    checkpointing: bool = False
    head_only: bool = False
    compiled: bool = False
    request: CaptureRequest | None = None


def advise_settings(
    request: CaptureRequest,
    device: Device,
    settings: StepSettings,
    *,
    limit_mib: float | None = None,
    confidence: float = CONFIDENCE,
    progress: Callable[[str], object] = lambda stage: None,
) -> Advice:
    """Return the settings under which updates of `request.batch_size` samples fit within a limit.

    Tried together: gradient accumulation, autocast where the device has matrix units for it, optimizers with
    less state, activation checkpointing where the model has a switch for it, training the last layer alone,
    and torch.compile where Triton has the device and PyTorch traces the step as one graph. limit_mib: by
    default the device's memory. progress: called with each variant before its capture.

    Raises:
        InputError: the batch size is missing, or no limit is known. CaptureError: the model itself cannot be
            captured.
    """
    batch_size = check_whole("batch_size", request.batch_size)
    request = request.loaded()
    amps = _amps(device, settings.amp)
    variants, notes = _variants(request, progress)
    if request.compiled or _has_triton(device):
        compiled, untried = _compiled(request, amps, progress)
        own = variants[:1] if not (request.compiled and compiled) else []
        variants, notes = [*own, *compiled, *variants[1:]], [*notes, *untried]
    candidates: list[Setting] = []
    for variant, amp, optimizer in product(
        variants, amps, (settings.optimizer, *_CHEAPER.get(str(settings.optimizer), ()))
    ):
        if variant.request is not None and variant.request.amp != amp:
            continue
        changed = replace(settings, amp=amp, optimizer=optimizer)
        candidates += _split(variant, device, changed, settings, batch_size, limit_mib, confidence)
    fitting = [candidate for candidate in candidates if candidate.fits]
    chosen = _undominated(fitting) or [min(candidates, key=lambda candidate: candidate.needed_mib)]
    limit = limit_mib if limit_mib is not None else chosen[0].prediction.device_memory_mib
    assert limit is not None
    return Advice(
        variants[0].graph.name,
        device.name,
        batch_size,
        limit,
        confidence,
        tuple(sorted(chosen, key=lambda setting: (len(setting.changes), setting.update_ms))),
        tuple(dict.fromkeys([*notes, *variants[0].graph.notes])),
    )


def stages_of(model: object, device: Device, amp: str | None = None) -> list[str]:
    """Return what `advise_settings` passes to `progress` for a module."""
    compiled = map(_compilation, _amps(device, amp)) if _has_triton(device) else ()
    return ["the model", *_changes(model), *compiled] if isinstance(model, torch.nn.Module) else ["the model"]


def _compilation(amp: str | None) -> str:
    return f"torch.compile{f' under {amp}' if amp else ''}"


def _has_triton(device: Device) -> bool:
    return figure_of(device, "compute_capability", 0.0) >= _TRITON


def _amps(device: Device, asked: str | None) -> list[str | None]:
    """Return the autocast asked for, then the one that a device has units for; most boards have none."""
    figures = {"bfloat16": "peak_bf16_matrix_gflops", "float16": "peak_fp16_matrix_gflops"}
    own = [dtype for dtype, figure in figures.items() if figure in device.figures][:1]
    return [*dict.fromkeys((asked, *own))]


def _variants(request: CaptureRequest, progress: Callable[[str], object]) -> tuple[list[_Variant], list[str]]:
    """Return the graphs of the model and of its variants, the model's own first; and which failed."""
    progress("the model")
    variants, notes = [_Variant(capture_request(request))], list[str]()
    if not isinstance(request.model, torch.nn.Module):
        return variants, notes
    for name in _changes(request.model):
        progress(name)
        try:
            graph = capture_request(replace(request, model=_changed(request.model, name)))
        except Exception as error:  # a copy of a foreign module may fail in any way
            notes.append(f"{name} was not tried: {type(error).__name__}: {error}")
        else:
            variants.append(_Variant(graph, name == _CHECKPOINTING, name == _HEAD_ONLY))
    return variants, notes


def _compiled(
    request: CaptureRequest, amps: Iterable[str | None], progress: Callable[[str], object]
) -> tuple[list[_Variant], list[str]]:
    """Return the graphs of the model under torch.compile, one for each autocast; and why there are none."""
    if not isinstance(request.model, torch.nn.Module):
        return [], []
    variants = list[_Variant]()
    for amp in amps:
        progress(_compilation(amp))
        asked = replace(request, compiled=True, partitioned=True, amp=amp)
        graph = capture_request(asked)
        if graph.partition is None:
            return [], ["compile was not tried: PyTorch does not trace the step as one graph for this device"]
        variants.append(_Variant(graph, compiled=not request.compiled, request=asked))
    return variants, []


def _changes(model: torch.nn.Module) -> list[str]:
    """Return the changes that make a difference to a model."""
    parts = {_CHECKPOINTING: checkpointing_switch(model), _HEAD_ONLY: _head(model)}
    return [name for name, part in parts.items() if part is not None]


def _changed(model: torch.nn.Module, change: str) -> torch.nn.Module:
    """Return a copy that shares the model's tensors, with a change."""
    head = _head(model) if change == _HEAD_ONLY else None
    trained = None if head is None else {id(p) for p in head.parameters()}
    return varied(
        model,
        checkpointing=checkpointing_switch(model) if change == _CHECKPOINTING else None,
        trained=trained,
    )


def _head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the last linear layer if it is a small part of a model whose parameters all learn."""
    parameters = list(model.parameters())
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    if not linear or not all(p.requires_grad for p in parameters):
        return None
    own = sum(p.numel() for p in linear[-1].parameters())
    return linear[-1] if own <= _HEAD_SHARE * sum(p.numel() for p in parameters) else None


def _split(
    variant: _Variant,
    device: Device,
    settings: StepSettings,
    asked: StepSettings,
    batch_size: int,
    limit_mib: float | None,
    confidence: float,
) -> Iterator[Setting]:
    """Yield the setting with the whole batch, and the one with the largest micro-batches that fit."""
    changes = [
        *(["compile"] if variant.compiled else []),
        *([_CHECKPOINTING] if variant.checkpointing else []),
        *([_HEAD_ONLY] if variant.head_only else []),
        *([settings.amp or "no autocast"] if settings.amp != asked.amp else []),
        *([str(settings.optimizer)] if settings.optimizer != asked.optimizer else []),
    ]

    def setting(size: int, accumulation: int) -> Setting:
        graph = variant.graph
        if variant.request is not None and size != batch_size:
            graph = capture_request(replace(variant.request, batch_size=size))
        prediction = predict_graph(graph, size, device, replace(settings, accumulation=accumulation))
        accumulates = ["accumulation"] if accumulation > asked.accumulation else []
        return Setting(
            (*accumulates, *changes),
            size,
            accumulation,
            str(settings.optimizer),
            settings.amp,
            variant.checkpointing,
            variant.head_only,
            variant.request is not None,
            prediction.fits(limit_mib, confidence=confidence),
            prediction.needed_mib(confidence),
            prediction.latency.value,
            prediction,
        )

    whole = setting(batch_size, asked.accumulation)
    yield whole
    if whole.fits or variant.graph.fixed_batch is not None or batch_size == 1:
        return
    sizes = sorted({-(-batch_size // parts) for parts in range(2, batch_size + 1)})
    demand = predict_graph(variant.graph, 1, device, replace(settings, accumulation=2)).demand
    limit = whole.prediction.device_memory_mib if limit_mib is None else limit_mib
    if demand is None or limit is None:
        raise InputError(f"the memory of {device.name} is not known; expected a limit: pass memory_limit")
    fitting = np.array(sizes)[demand.required(np.array(sizes), confidence) <= limit]
    size = int(fitting[-1]) if len(fitting) else 1
    yield setting(size, asked.accumulation * -(-batch_size // size))


def _undominated(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings of which none fits with a part of the changes in no more time."""
    return [
        setting
        for setting in settings
        if not any(
            set(other.changes) < set(setting.changes) and other.update_ms <= setting.update_ms
            for other in settings
        )
    ]
