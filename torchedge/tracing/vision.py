"""Imports torchvision, even if its compiled operators do not match the installed torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torchedge.errors import needed

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def prepare_torchvision() -> None:
    """Declare the operators of torchvision's fake kernels if its library did not load.

    Call it before importing torchvision, timm or transformers: on a CPU-only torch (or with mismatched
    wheels) their import otherwise fails with "operator torchvision::nms does not exist".
    """
    if _declared or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except (RuntimeError, AttributeError):
        import sys

        for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _OPERATORS:
            library.define(schema)
        _declared.append(library)


def import_torchvision() -> ModuleType:
    """Return torchvision; raises MissingExtraError if it is not installed."""
    prepare_torchvision()
    with needed("torchvision", extra="vision", purpose="building its models"):
        import torchvision
    module: ModuleType = torchvision
    return module


def find_timm() -> Any:
    """Return timm, None if it is not installed."""
    prepare_torchvision()
    try:
        import timm
    except ImportError:
        return None
    return timm
