"""One way from a model to the Program of its inference, which plans, bundles and runs share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import torch

from torchedge.devices import LOCAL_DEVICE, Device
from torchedge.errors import DeviceError, MissingExtraError, check_choice, not_a_module
from torchedge.lowering.assembly import Lowered, lower_step
from torchedge.lowering.limits import profile_limits
from torchedge.lowering.programs import Program
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import (
    TARGETS,
    Limits,
    Precision,
    Target,
    Tuner,
    bounded,
    device_class,
    with_tuner,
)
from torchedge.opencl import choose_device as choose_opencl_device
from torchedge.tracing.capturing import CaptureRequest, arguments_of, unwrapped
from torchedge.tracing.copies import in_float32
from torchedge.tracing.folding import fold_constants
from torchedge.tracing.sequence_lengths import LengthFamily
from torchedge.tracing.shared_values import with_names, with_states
from torchedge.tracing.sources import load_model
from torchedge.tracing.steps import CapturedStep, capture_step


def target_of_device(
    device: Device, limits: Limits | None = None, precision: Precision = "float32", tuner: Tuner | None = None
) -> Target:
    """Return the target of a device's class within its limits, by default those of its profile.

    tuner: as in `with_tuner`. Raises InputError for an unknown precision.
    """
    check_choice("precision", precision, get_args(Precision))
    limits = limits or profile_limits(device)
    if device.kind == "cpu" and not limits.local_bytes:
        limits = replace(limits, local_bytes=_processor_bytes(device))
    target = bounded(TARGETS[device_class(device.kind, device.vendor)], limits)
    return replace(
        with_tuner(target, device, tuner),
        pitch=limits.pitch_texels or target.pitch,
        allocation_bytes=limits.allocation_bytes or 0,
        shared_pitch=(limits.pitch_texels or 1) if limits.image_from_buffer and target.image_width else 0,
        half=precision == "float16",
    )


def _processor_bytes(device: Device) -> int:
    """Return the local memory of a processor whose profile gives none: 256 KiB, which most drivers have.

    On this machine its driver is asked, which may have less (rusticl: 32 KiB), and the default device, which
    runs the program where none is named (NVIDIA's GPUs: 48 KiB).
    """
    most = 256 << 10
    for query in ("cpu", None) if device.name == LOCAL_DEVICE else ():
        with suppress(DeviceError, MissingExtraError):
            most = min(most, choose_opencl_device(query).local_bytes)
    return most


def capture_inference_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> CapturedStep:
    """Capture `model(*args, **kwargs)` in evaluation mode, with what its weights alone decide computed.

    Buffers that the model writes to are states of the step. Weights may lie on the meta device. The model
    does not change. Arguments and errors as in `capture_step`.
    """
    return capture_inferences([(model, args, kwargs or {})], name=name)[0]


def capture_inferences(
    calls: Sequence[tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]],
    trained: Sequence[CapturedStep] = (),
    *,
    seed: int | None = None,
    name: str | None = None,
) -> list[CapturedStep]:
    """Capture calls of models that share weights and states as `capture_inference_step` does.

    A tensor that several of them hold has one name in all, and two tensors have two. trained: training steps
    over the same weights, which follow in the result; what they update is a state of all.
    """
    keep = frozenset(all_rules())
    steps = [
        capture_step(model, args, kwargs, training=False, keep=keep, seed=seed, name=name)
        for model, args, kwargs in calls
    ]
    kept = with_states([*steps, *trained])
    return with_names([*map(fold_constants, kept[: len(steps)]), *kept[len(steps) :]])


def lower_inference(captured: CapturedStep, target: Target, apart: Collection[str] = frozenset()) -> Lowered:
    """Return the Program of a captured inference, and the values that each of its launches fuses.

    A target of half precision stores weights in it, too. apart: values of the step, by name, to compute by
    kernels of their own, as adaptive fusion does (FlashMem, section 4.3).

    Raises:
        InputError: `apart` names no element-wise value.
        LoweringError: operators without a rule, or a request that no kernel supports.
    """
    return lower_step(captured.step, replace(target, half_weights=target.half), apart=apart)


def capture_model(
    model: torch.nn.Module | str,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    *,
    input_size: tuple[int, ...] | None = None,
    seq_len: int | None = None,
    name: str | None = None,
) -> CapturedStep:
    """Capture the inference of a model; weights may lie on the meta device.

    model: a module, or a text that `load_model` understands. example: what it is called with (a tuple:
    positional arguments, a mapping: keywords); input_size: the shape of one sample without the batch, instead
    of `example`. Without both, the shape is that of the model's attribute `example_inputs` or its metadata.
    seq_len: another length of its sequences.

    Raises:
        InputError: the model or the example is none.
        CaptureError: the model cannot be captured.
    """
    if isinstance(model, str):
        model, label = load_model(model)
        model, name = in_float32(model), name or label
    if not isinstance(model, torch.nn.Module):
        raise not_a_module(model, "a torch.nn.Module or a model's name")
    model = unwrapped(model)
    if example is None and input_size is None:
        example = getattr(model, "example_inputs", None)
    if seq_len is not None:
        request = CaptureRequest(model, mode="infer", example=example, input_size=input_size)
        example, input_size = LengthFamily(request).at(seq_len).example, None
    args, kwargs, _ = arguments_of(model, example, input_size)
    return capture_inference_step(model, args, kwargs, name=name)


def lower_model(
    model: torch.nn.Module | str,
    device: Device,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    *,
    input_size: tuple[int, ...] | None = None,
    seq_len: int | None = None,
    precision: Precision = "float32",
    name: str | None = None,
) -> Program:
    """Return the Program of a model's inference on a device. The arguments are those of `capture_model`.

    Raises what `capture_model` raises, and LoweringError for operators without kernels.
    """
    target = target_of_device(device, precision=precision)
    captured = capture_model(model, example, input_size=input_size, seq_len=seq_len, name=name)
    return lower_inference(captured, target).program
