"""timm's architectures by the names that measurements of past years use, as graphs of training steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from torchedge.errors import CaptureError, MissingExtraError
from torchedge.graphs import ForwardGraph
from torchedge.tracing.capturing import capture
from torchedge.tracing.vision import prepare_torchvision

__all__ = ["TimmModel", "load_timm_model"]

_SAME_SIZE = 0.01
"""Largest relative difference of parameters under which a name is taken to mean the same architecture."""


@dataclass(frozen=True, slots=True)
class TimmModel:
    """A training step of one architecture; `family` is the timm module of its class, such as "resnet"."""

    graph: ForwardGraph
    family: str


def load_timm_model(
    name: str, image_size: int | None = None, parameters_m: float | None = None
) -> TimmModel | str:
    """Build and capture an architecture without memory for its weights, or say why it cannot be.

    name: of today or deprecated (timm maps it to its successor). image_size: by default the architecture's
    own. parameters_m: its parameters in millions as measured: another number means that the name has changed
    its meaning. Raises MissingExtraError without timm.
    """
    timm = _timm()
    if not timm.is_model(name):
        return "unknown to this timm"
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = timm.create_model(name)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"cannot be built ({type(error).__name__})"
    count = sum(p.numel() for p in model.parameters()) / 1e6
    if parameters_m is not None and abs(count / parameters_m - 1) > _SAME_SIZE:
        return "another network under that name today"
    side = image_size if image_size is not None else model.default_cfg.get("input_size", (3, 224, 224))[-1]
    try:
        graph = capture(model, input_size=(3, side, side), mode="train", name=name)
    except CaptureError:
        return f"cannot be captured at {side} x {side}"
    return TimmModel(graph, type(model).__module__.rsplit(".", 1)[-1])


def _timm() -> Any:  # noqa: ANN401 - the module, which may be absent
    prepare_torchvision()
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError.of("timm", extra="dev", purpose="building the measured networks") from error
    return timm
