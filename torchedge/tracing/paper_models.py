"""The models that FlashMem was evaluated on, from their configurations: random weights, on the meta device.

Nothing is downloaded. Attention is built of its parts (two products and a softmax), as a phone runs it, and
decoders keep no cache. The attribute `example_inputs` of a model is its input, which `capture` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from torchedge.errors import InputError, needed
from torchedge.storage.documents import read_toml
from torchedge.tracing.vision import import_torchvision, prepare_torchvision

Example = Mapping[str, Any] | tuple[torch.Tensor, ...]
Builder = Callable[[], tuple[torch.nn.Module, Example]]


def _library(name: str, package: str | None = None) -> Any:
    prepare_torchvision()
    with needed(package or name, purpose="building this model of FlashMem's"):
        return import_module(name)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def _from_config(entry: Mapping[str, Any]) -> tuple[torch.nn.Module, Example]:
    """Return a model of transformers from its entry in paper_models.toml."""
    kind = getattr(_library("transformers"), entry["architecture"])
    config = kind.config_class(**entry["config"], attn_implementation="eager")
    types = {name: torch.int64 if name.endswith("_ids") else torch.float32 for name in entry["inputs"]}
    example = {name: _zeros(*shape, dtype=types[name]) for name, shape in entry["inputs"].items()}
    return kind(config, **entry.get("arguments", {})), example


def _vit_pytorch(kind: str, depth: int) -> tuple[torch.nn.Module, Example]:
    """ViT and DeepViT of the vit-pytorch package, in the sizes of its README."""
    model = getattr(_library(f"vit_pytorch.{kind.lower()}", "vit-pytorch"), kind)(
        image_size=224, patch_size=16, num_classes=1000, dim=1024, depth=depth, heads=16, mlp_dim=2048
    )
    return model, (_zeros(1, 3, 224, 224),)


def _sd_unet() -> tuple[torch.nn.Module, Example]:
    """The UNet of Stable Diffusion 1.5 on latents of 32x32 (images of 256x256), conditioned on 77 tokens."""
    library = _library("diffusers")
    model = library.UNet2DConditionModel(sample_size=32, cross_attention_dim=768, attention_head_dim=8)
    model.set_attn_processor(library.models.attention_processor.AttnProcessor())
    return model, {
        "sample": _zeros(1, 4, 32, 32),
        "timestep": _zeros(1, dtype=torch.int64),
        "encoder_hidden_states": _zeros(1, 77, 768),
        "return_dict": False,
    }


_ORDER = (
    "gpt-neo-small gpt-neo-1.3b gpt-neo-2.7b resnet-50 sam-2 vit deepvit sd-unet whisper-medium "
    "depth-anything-small depth-anything-large vit-8b llama-2-13b llama-2-70b"
)
_ENTRIES: Any = read_toml(Path(__file__).with_suffix(".toml"))
_OWN: Mapping[str, Builder] = {
    "resnet-50": lambda: (import_torchvision().models.resnet50(weights=None), (_zeros(1, 3, 224, 224),)),
    "vit": partial(_vit_pytorch, "ViT", 12),
    "deepvit": partial(_vit_pytorch, "DeepViT", 24),
    "sd-unet": _sd_unet,
}
PAPER_MODELS: Mapping[str, Builder] = MappingProxyType(
    {name: _OWN[name] if name in _OWN else partial(_from_config, _ENTRIES[name]) for name in _ORDER.split()}
)
"""The models of FlashMem's Tables 4 and 6 by name, in the tables' order."""


def build_paper_model(name: str) -> torch.nn.Module:
    """Return one of `PAPER_MODELS` in evaluation mode, with its example as `example_inputs`.

    Raises:
        InputError: there is no such model.
        MissingExtraError: the package that defines its architecture is not installed.
    """
    if name not in PAPER_MODELS:
        raise InputError(f"no model is called {name!r}; expected one of {', '.join(PAPER_MODELS)}")
    with torch.device("meta"):
        model, example = PAPER_MODELS[name]()
    model.example_inputs = example  # type: ignore[assignment]
    return model.eval()
