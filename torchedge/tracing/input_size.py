"""The input of a model: from its metadata, or guessed from its first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchedge.errors import InputError

_SEQUENCE = 128
_SAMPLES = 16_000
_SPATIAL = {1: (1024,), 2: (224, 224), 3: (16, 112, 112)}


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape of one sample (without the batch), its dtype, its keyword, and a note if it was guessed.

    decoder: tokens that the decoder reads, where the model has one beside its encoder.
    """

    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    keyword: str | None = None
    note: str | None = None
    decoder: int | None = None


def infer_input(model: torch.nn.Module) -> InputSpec:
    """Return the input of `model`, from timm's, transformers' or torchvision's metadata or its first layer.

    Raises InputError if none of them is known; pass `input_size=` or `example=` then.
    """
    for source in (_from_timm, _from_transformers, _from_torchvision, _from_first_layer):
        spec = source(model)
        if spec is not None:
            return spec
    raise InputError(
        f"the input size of {type(model).__name__} is unknown; pass input_size=(channels, height, width) "
        "or example=..."
    )


def _from_timm(model: torch.nn.Module) -> InputSpec | None:
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
    if not isinstance(size, (tuple, list)) or not size:
        return None
    spec = InputSpec(tuple(int(s) for s in size))
    patch = getattr(model, "patch_embed", None)
    sides = getattr(patch, "img_size", None)
    if isinstance(sides, tuple) and len(sides) == 2 and len(spec.size) == 3:
        return InputSpec((spec.size[0], int(sides[0]), int(sides[1])))
    return spec


def _from_transformers(model: torch.nn.Module) -> InputSpec | None:
    config = getattr(model, "config", None)
    keyword = getattr(model, "main_input_name", None)
    if config is None or not isinstance(keyword, str) or not hasattr(config, "model_type"):
        return None
    decoder = None
    if getattr(config, "is_encoder_decoder", False):
        decoder = min(_SEQUENCE, getattr(config, "max_target_positions", None) or _SEQUENCE)
    if keyword == "pixel_values":
        side = getattr(config, "image_size", 224) or 224
        sides = (side, side) if isinstance(side, int) else tuple(side)
        frames = getattr(config, "num_frames", None)
        image = (getattr(config, "num_channels", 3), *sides)
        return InputSpec(image if frames is None else (frames, *image), keyword=keyword, decoder=decoder)
    if keyword == "input_ids":
        longest = getattr(config, "max_position_embeddings", None) or _SEQUENCE
        length = min(_SEQUENCE, longest)
        note = f"sequence length assumed to be {length}"
        return InputSpec((length,), torch.int64, keyword, note, decoder and min(decoder, length))
    if keyword == "input_features":
        length = 2 * getattr(config, "max_source_positions", 1500)
        return InputSpec((getattr(config, "num_mel_bins", 80), length), keyword=keyword, decoder=decoder)
    if keyword == "input_values" and hasattr(config, "conv_stride"):
        note = f"input assumed to be {_SAMPLES} samples, one second of audio"
        return InputSpec((_SAMPLES,), keyword=keyword, note=note, decoder=decoder)
    return None


def _from_torchvision(model: torch.nn.Module) -> InputSpec | None:
    """Return the size by the model's module: torchvision stores sizes with weights, not with models."""
    module = type(model).__module__
    if not module.startswith("torchvision.models"):
        return None
    if module.startswith("torchvision.models.video"):
        frames = 16
        side = 112 if module.endswith("resnet") else 224
        return InputSpec((3, frames, side, side), note=f"{frames} frames of {side}×{side} assumed")
    if module.startswith("torchvision.models.segmentation"):
        return InputSpec((3, 520, 520))
    side = {"Inception3": 299}.get(type(model).__name__, 224)
    side = getattr(model, "image_size", side)
    return InputSpec((3, side, side))


def _from_first_layer(model: torch.nn.Module) -> InputSpec | None:
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        kind = type(module).__name__
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            size = (module.in_channels, *_SPATIAL[len(module.kernel_size)])
        elif isinstance(module, torch.nn.Linear):
            size = (module.in_features,)
        elif isinstance(module, torch.nn.Embedding):
            note = (
                f"input assumed to be {_SEQUENCE} token ids, from the first layer {name or 'itself'} ({kind})"
            )
            return InputSpec((_SEQUENCE,), torch.int64, None, note)
        elif isinstance(module, torch.nn.RNNBase):
            size = (_SEQUENCE, module.input_size)
        else:
            continue
        dtype = (
            weight.dtype if isinstance(weight, torch.Tensor) and weight.is_floating_point() else torch.float32
        )
        text = "×".join(map(str, size))
        return InputSpec(
            size, dtype, None, f"input assumed to be {text}, from the first layer {name or 'itself'} ({kind})"
        )
    return None
