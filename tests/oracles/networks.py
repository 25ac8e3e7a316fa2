"""Networks that the memory tests and benchmarks run on.

How to build each on the meta device, and what to feed it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Feed = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Network:
    """A network: `build()` makes it on the current device, `feed(batch)` its arguments on meta."""

    name: str
    build: Callable[[], torch.nn.Module]
    feed: Callable[[int], Feed]


def _images(*size: int) -> Callable[[int], Feed]:
    return lambda batch: ((torch.empty(batch, *size, device="meta"),), {})


def _tokens(length: int) -> Callable[[int], Feed]:
    return lambda batch: ((), {"input_ids": torch.empty(batch, length, dtype=torch.int64, device="meta")})


def _masked_tokens(length: int) -> Callable[[int], Feed]:
    def feed(batch: int) -> Feed:
        tokens = _tokens(length)(batch)[1]
        return (), {**tokens, "attention_mask": torch.empty(batch, length, dtype=torch.int64, device="meta")}

    return feed


def _vision(name: str, *size: int, **options: Any) -> Network:
    def build() -> torch.nn.Module:
        from torchedge.tracing.vision import import_torchvision

        return import_torchvision().models.get_model(name, weights=None, **options)

    return Network(name, build, _images(*(size or (3, 224, 224))))


def _real(network: Network) -> Network:
    """A network whose constructor reads values, so that it is built on the CPU and moved."""

    def build() -> torch.nn.Module:
        with torch.device("cpu"):
            return network.build().to("meta")

    return Network(network.name, build, network.feed)


def _segmentation(name: str) -> Network:
    return _vision(name, 3, 224, 224, weights_backbone=None, aux_loss=True)


def _timm(name: str, *size: int) -> Network:
    def build() -> torch.nn.Module:
        from torchedge.tracing.vision import prepare_torchvision

        prepare_torchvision()
        import timm

        return timm.create_model(name)

    return Network(name, build, _images(*(size or (3, 224, 224))))


def _bert() -> torch.nn.Module:
    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    )


def _gpt2() -> torch.nn.Module:
    from torchedge.tracing.vision import prepare_torchvision

    prepare_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager"))


NETWORKS: dict[str, Network] = {
    n.name: n
    for n in (
        _vision("resnet18"),
        _vision("resnet50"),
        _vision("resnext50_32x4d"),
        _vision("wide_resnet50_2"),
        _vision("densenet121"),
        _vision("efficientnet_b0"),
        _vision("efficientnet_v2_s"),
        _vision("mobilenet_v2"),
        _vision("mobilenet_v3_large"),
        _vision("mnasnet1_0"),
        _vision("shufflenet_v2_x1_0"),
        _vision("squeezenet1_1"),
        _vision("googlenet", init_weights=False),
        _vision("inception_v3", 3, 299, 299, init_weights=False),
        _vision("vgg11_bn"),
        _vision("alexnet"),
        _real(_vision("regnet_y_400mf")),
        _vision("convnext_tiny"),
        _vision("vit_b_16"),
        _vision("swin_t"),
        _vision("swin_v2_t"),
        _vision("maxvit_t"),
        _segmentation("deeplabv3_resnet50"),
        _segmentation("fcn_resnet50"),
        _vision("r3d_18", 3, 8, 112, 112),
        _timm("deit_tiny_patch16_224"),
        _timm("mixer_b16_224"),
        _timm("resnetv2_50x1_bit"),
        _timm("levit_128s"),
        _timm("mobilevit_s", 3, 256, 256),
        _timm("poolformer_s12"),
        _timm("ghostnet_100"),
        Network("bert-tiny", _bert, _tokens(128)),
        Network("gpt2-small", _gpt2, _masked_tokens(128)),
    )
}

FAST = (
    "resnet18",
    "mobilenet_v2",
    "squeezenet1_1",
    "shufflenet_v2_x1_0",
    "googlenet",
    "alexnet",
    "vit_b_16",
    "bert-tiny",
)


def criterion(outputs: Any) -> torch.Tensor:
    """Cross entropy on every tensor of the model's result, classes in dimension 1 (tokens: in the last)."""
    if (
        hasattr(outputs, "logits")
        and not isinstance(outputs.logits, tuple)
        and not isinstance(outputs, tuple)
    ):
        scores = [outputs.logits]
    elif isinstance(outputs, torch.Tensor):
        scores = [outputs]
    elif hasattr(outputs, "values") and callable(outputs.values):
        scores = list(outputs.values())
    else:
        scores = [t for t in outputs if t is not None]
    losses = []
    for tensor in scores:
        if tensor.dim() == 3:
            tensor = tensor.flatten(0, 1)
        shape = (tensor.shape[0], *tensor.shape[2:])
        losses.append(
            functional.cross_entropy(tensor, torch.zeros(shape, dtype=torch.int64, device=tensor.device))
        )
    return sum(losses[1:], losses[0])
