"""The models that FlashMem was evaluated on, from their configurations: random weights, on the meta device.

Nothing is downloaded. Attention is built of its parts (two products and a softmax), as a phone runs it, and
decoders keep no cache. The attribute `example_inputs` of a model is its input, which `capture` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from torchedge.errors import InputError, needed
from torchedge.tracing.vision import import_torchvision, prepare_torchvision

Example = Mapping[str, Any] | tuple[torch.Tensor, ...]
Builder = Callable[[], tuple[torch.nn.Module, Example]]

SEQUENCE = 128
"""Tokens that the language models read: with it GPT-Neo takes the MACs of FlashMem's Table 6."""
_EAGER = "eager"


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def _tokens(count: int) -> torch.Tensor:
    return _zeros(1, count, dtype=torch.int64)


def _library(name: str, package: str | None = None) -> Any:
    prepare_torchvision()
    with needed(package or name, purpose="building this model of FlashMem's"):
        return import_module(name)


def _gpt_neo(width: int, depth: int, heads: int) -> tuple[torch.nn.Module, Example]:
    """EleutherAI's GPT-Neo: global and local attention in turn, the output head tied to the embedding."""
    library = _library("transformers")
    config = library.GPTNeoConfig(
        hidden_size=width,
        num_layers=depth,
        num_heads=heads,
        attention_types=[[["global", "local"], depth // 2]],
        use_cache=False,
        attn_implementation=_EAGER,
    )
    return library.GPTNeoForCausalLM(config), {"input_ids": _tokens(SEQUENCE)}


def _llama(width: int, depth: int, heads: int, key_heads: int, inner: int) -> tuple[torch.nn.Module, Example]:
    """Meta's Llama 2; a model of 70 billion parameters shares keys and values between heads."""
    library = _library("transformers")
    config = library.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=4096,
        use_cache=False,
        attn_implementation=_EAGER,
    )
    return library.LlamaForCausalLM(config), {"input_ids": _tokens(SEQUENCE)}


def _resnet50() -> tuple[torch.nn.Module, Example]:
    return import_torchvision().models.resnet50(weights=None), (_zeros(1, 3, 224, 224),)


def _sam2() -> tuple[torch.nn.Module, Example]:
    """SAM 2's image encoder, Hiera-L with its feature pyramid, at 512 pixels."""
    library = _library("transformers")
    backbone = library.Sam2HieraDetConfig(
        hidden_size=144,
        num_attention_heads=2,
        image_size=[512, 512],
        blocks_per_stage=[2, 6, 36, 4],
        embed_dim_per_stage=[144, 288, 576, 1152],
        num_attention_heads_per_stage=[2, 4, 8, 16],
        window_size_per_stage=[8, 4, 16, 8],
        global_attention_blocks=[23, 33, 43],
        attn_implementation=_EAGER,
    )
    config = library.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[1152, 576, 288, 144],
        backbone_feature_sizes=[[128, 128], [64, 64], [32, 32]],
        attn_implementation=_EAGER,
    )
    return library.Sam2VisionModel(config), {"pixel_values": _zeros(1, 3, 512, 512)}


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


def _whisper_medium() -> tuple[torch.nn.Module, Example]:
    """OpenAI's Whisper, encoder and decoder, on 3 s of audio and one token: the MACs of Table 6."""
    library = _library("transformers")
    config = library.WhisperConfig(
        d_model=1024,
        encoder_layers=24,
        decoder_layers=24,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
        vocab_size=51865,
        max_source_positions=150,
        use_cache=False,
        attn_implementation=_EAGER,
    )
    example = {"input_features": _zeros(1, 80, 300), "decoder_input_ids": _tokens(1)}
    return library.WhisperForConditionalGeneration(config), example


def _depth_anything(
    width: int, depth: int, heads: int, stages: list[int], necks: list[int], fusion: int
) -> tuple[torch.nn.Module, Example]:
    """Depth Anything: DINOv2 and a dense prediction head, at 294 pixels."""
    library = _library("transformers")
    backbone = library.Dinov2Config(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=518,
        patch_size=14,
        out_indices=stages,
        apply_layernorm=True,
        reshape_hidden_states=False,
        attn_implementation=_EAGER,
    )
    config = library.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=width,
        neck_hidden_sizes=necks,
        fusion_hidden_size=fusion,
        attn_implementation=_EAGER,
    )
    return library.DepthAnythingForDepthEstimation(config), {"pixel_values": _zeros(1, 3, 294, 294)}


def _vit_8b() -> tuple[torch.nn.Module, Example]:
    """A ViT of 8 billion parameters; the paper gives no sizes: 40 layers of width 4096, patches of 16."""
    library = _library("transformers")
    config = library.ViTConfig(
        hidden_size=4096,
        num_hidden_layers=40,
        num_attention_heads=32,
        intermediate_size=16384,
        attn_implementation=_EAGER,
    )
    return library.ViTModel(config, add_pooling_layer=False), {"pixel_values": _zeros(1, 3, 224, 224)}


PAPER_MODELS: Mapping[str, Builder] = MappingProxyType(
    {
        "gpt-neo-small": partial(_gpt_neo, 768, 12, 12),
        "gpt-neo-1.3b": partial(_gpt_neo, 2048, 24, 16),
        "gpt-neo-2.7b": partial(_gpt_neo, 2560, 32, 20),
        "resnet-50": _resnet50,
        "sam-2": _sam2,
        "vit": partial(_vit_pytorch, "ViT", 12),
        "deepvit": partial(_vit_pytorch, "DeepViT", 24),
        "sd-unet": _sd_unet,
        "whisper-medium": _whisper_medium,
        "depth-anything-small": partial(_depth_anything, 384, 12, 6, [3, 6, 9, 12], [48, 96, 192, 384], 64),
        "depth-anything-large": partial(
            _depth_anything, 1024, 24, 16, [5, 12, 18, 24], [256, 512, 1024, 1024], 256
        ),
        "vit-8b": _vit_8b,
        "llama-2-13b": partial(_llama, 5120, 40, 40, 40, 13824),
        "llama-2-70b": partial(_llama, 8192, 80, 64, 8, 28672),
    }
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
