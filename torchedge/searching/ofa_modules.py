"""The modules of a sub-network of OFA-ResNet50: plain layers, named as in the published sub-networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One residual block: channels in, in the middle and out, and the stride of its middle convolution.

    `projected` says that the shortcut holds an average pool, a convolution and a batch norm.
    """

    inputs: int
    middle: int
    outputs: int
    stride: int
    projected: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    """One sub-network: channels of the stem, whether its residual layer runs, the blocks, the image."""

    stem_middle: int
    stem_residual: bool
    stem_outputs: int
    blocks: tuple[Bottleneck, ...]
    classes: int
    image_size: int


class OFAResNet50(nn.Module):
    """One sub-network: stem, max pool, bottleneck blocks, global average pool, classifier."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        middle, outputs = architecture.stem_middle, architecture.stem_outputs
        stem: list[nn.Module] = [_convolution(3, middle, 3, stride=2)]
        if architecture.stem_residual:
            stem.append(Residual(_convolution(middle, middle, 3)))
        stem.append(_convolution(middle, outputs, 3))
        self.input_stem = nn.Sequential(*stem)
        self.max_pooling = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(BottleneckBlock(block) for block in architecture.blocks))
        self.global_avg_pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential()
        self.classifier.add_module("linear", nn.Linear(architecture.blocks[-1].outputs, architecture.classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (N, classes) of images (N, 3, H, W)."""
        x = self.max_pooling(self.input_stem(images))
        for block in self.blocks:  # so that no name keeps the pooled images alive
            x = block(x)
        x = self.global_avg_pool(x)
        scores: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return scores


class Residual(nn.Module):
    """A layer with its input added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output plus x."""
        out: torch.Tensor = self.conv(x) + x
        return out


class BottleneckBlock(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut that pools and projects where shapes change."""

    def __init__(self, block: Bottleneck) -> None:
        super().__init__()
        self.conv1 = _convolution(block.inputs, block.middle, 1)
        self.conv2 = _convolution(block.middle, block.middle, 3, stride=block.stride)
        self.conv3 = _convolution(block.middle, block.outputs, 1, activated=False)
        self.downsample: nn.Module = nn.Identity()
        if block.projected:
            self.downsample = nn.Sequential()
            self.downsample.add_module("avg_pool", nn.AvgPool2d(block.stride, block.stride, ceil_mode=True))
            for name, layer in _convolution(block.inputs, block.outputs, 1, activated=False).named_children():
                self.downsample.add_module(name, layer)
        self.final_act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activated sum of both paths."""
        residual = self.downsample(x)
        out: torch.Tensor = self.final_act(self.conv3(self.conv2(self.conv1(x))) + residual)
        return out


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, activated: bool = True
) -> nn.Sequential:
    layers = nn.Sequential()
    layers.add_module("conv", nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False))
    layers.add_module("bn", nn.BatchNorm2d(outputs))
    if activated:
        layers.add_module("act", nn.ReLU(inplace=True))
    return layers
