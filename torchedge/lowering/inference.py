"""One way from a model to the Program of its inference, which plans, bundles and runs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchedge.devices import Device
from torchedge.lowering.assembly import lower
from torchedge.lowering.limits import Limits
from torchedge.lowering.programs import Program
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS, Precision, Target, device_class
from torchedge.tracing.folding import fold_constants
from torchedge.tracing.steps import CapturedStep, capture_step


def target_of_device(device: Device, limits: Limits, precision: Precision = "float32") -> Target:
    """Return the target of a device's class, with the device's limits of images."""
    target = TARGETS[device_class(device.kind, device.vendor)]
    return replace(
        target,
        image_width=min(limits.image_width or target.image_width, target.image_width),
        image_height=min(limits.image_height or target.image_height, target.image_height),
        pitch=limits.pitch_texels or target.pitch,
        shared_pitch=(limits.pitch_texels or 1) if limits.image_from_buffer else 0,
        half=precision == "float16",
    )


def capture_inference_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    name: str | None = None,
) -> CapturedStep:
    """Capture `model(*args, **kwargs)` in evaluation mode, with what its weights alone decide computed.

    Weights may lie on the meta device. The model does not change. Arguments and errors as in `capture_step`.
    """
    keep = frozenset(all_rules())
    captured = capture_step(model, args, kwargs, training=False, keep=keep, seed=seed, name=name)
    return fold_constants(captured)


def lower_inference(captured: CapturedStep, target: Target) -> Program:
    """Return the Program of a captured inference.

    Raises:
        LoweringError: operators without a rule, or a request that no kernel supports.
    """
    return lower(captured.step, target)
