"""Lets torchvision, timm and transformers be imported on a CPU-only torch."""

from torchedge.tracing.vision import prepare_torchvision

prepare_torchvision()
