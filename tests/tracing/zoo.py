"""The networks of the coverage table: how to build each and what to feed it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchedge.tracing.vision import prepare_torchvision

_MODES = ("train", "infer")
_DETECTOR_SIDES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}
_FLOW_SIDES = (128, 128)


@dataclass(frozen=True)
class Entry:
    """One network: its table, its name, how to build it, and an example where its metadata does not tell."""

    table: str
    name: str
    build: Callable[[], torch.nn.Module]
    options: Callable[[], dict[str, Any]] = dict
    modes: tuple[str, ...] = _MODES


def _meta(make: Callable[[], Any]) -> torch.nn.Module:
    """Build on the meta device, where weights cost nothing; where that fails, on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                return make()
        except Exception:
            return make()


def _two_images() -> dict[str, Any]:
    return {"example": tuple(torch.empty(1, 3, *_FLOW_SIDES, device="meta") for _ in range(2))}


def torchvision_entries() -> Iterator[Entry]:
    """Classification, segmentation, video and optical flow networks whole; detectors by their backbones."""
    prepare_torchvision()
    from torchvision import models

    kinds = (
        ("torchvision classification", models), ("torchvision segmentation", models.segmentation),
        ("torchvision video", models.video), ("torchvision optical flow", models.optical_flow),
    )  # fmt: skip
    for table, module in kinds:
        for name in models.list_models(module=module):
            options = _two_images if table.endswith("flow") else dict
            yield Entry(table, name, lambda n=name: _meta(lambda: _vision_model(n)), options)
    for name in models.list_models(module=models.detection):
        side = _DETECTOR_SIDES.get(name, 800)
        yield Entry(
            "torchvision detection backbones", name, lambda n=name: _meta(lambda: _vision_model(n).backbone),
            lambda s=side: {"input_size": (3, s, s)},
        )  # fmt: skip


def _vision_model(name: str) -> torch.nn.Module:
    import inspect

    from torchvision import models

    accepted = inspect.signature(models.get_model_builder(name)).parameters
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in accepted:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    return models.get_model(name, **options)


def timm_entries() -> Iterator[Entry]:
    """The first architecture of each family (module) of timm."""
    prepare_torchvision()
    import timm

    for family in timm.list_modules():
        names = timm.list_models(module=family)
        if names:
            yield Entry(
                "timm", names[0], lambda n=names[0]: _meta(lambda: timm.create_model(n, pretrained=False))
            )


def transformers_entries() -> Iterator[Entry]:
    """Models built from a configuration, without any download."""
    prepare_torchvision()
    import transformers as t

    def ids(length: int = 64) -> torch.Tensor:
        return torch.zeros(1, length, dtype=torch.int64, device="meta")

    def sounds() -> dict[str, Any]:
        return {
            "example": {
                "input_features": torch.empty(1, 80, 3000, device="meta"),
                "decoder_input_ids": ids(8),
            }
        }

    def texts() -> dict[str, Any]:
        return {"example": {"input_ids": ids(), "decoder_input_ids": ids(8)}}

    def pairs() -> dict[str, Any]:
        return {"example": {"input_ids": ids(), "pixel_values": torch.empty(1, 3, 224, 224, device="meta")}}

    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    rows: list[tuple[str, Any, Any, Callable[[], dict[str, Any]]]] = [
        ("BertForSequenceClassification", t.BertForSequenceClassification, t.BertConfig, dict),
        ("DistilBertModel", t.DistilBertModel, t.DistilBertConfig, dict),
        ("RobertaForMaskedLM", t.RobertaForMaskedLM, t.RobertaConfig, dict),
        ("GPT2LMHeadModel", t.GPT2LMHeadModel, t.GPT2Config, dict),
        ("ViTForImageClassification", t.ViTForImageClassification, t.ViTConfig, dict),
        ("SwinForImageClassification", t.SwinForImageClassification, t.SwinConfig, dict),
        ("ConvNextForImageClassification", t.ConvNextForImageClassification, t.ConvNextConfig, dict),
        (
            "WhisperForConditionalGeneration (tiny)",
            t.WhisperForConditionalGeneration,
            t.WhisperConfig,
            sounds,
        ),
        ("T5ForConditionalGeneration (small)", t.T5ForConditionalGeneration, t.T5Config, texts),
        ("BartForConditionalGeneration", t.BartForConditionalGeneration, t.BartConfig, texts),
        ("CLIPModel", t.CLIPModel, t.CLIPConfig, pairs),
        ("LlamaForCausalLM (4 layers)", t.LlamaForCausalLM, lambda: t.LlamaConfig(**small), dict),
    ]
    for name, kind, config, options in rows:
        yield Entry("transformers", name, lambda k=kind, c=config: _meta(lambda: k(c())), options)


def entries() -> list[Entry]:
    """Every network of the table."""
    return [*torchvision_entries(), *timm_entries(), *transformers_entries()]
