"""Imports torchvision, even if its compiled operators do not match the installed torch."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

from torchedge.errors import TorchedgeWarning, needed

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
        _warn_of_pair()
        for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _OPERATORS:
            library.define(schema)
        _declared.append(library)


def _warn_of_pair() -> None:
    """Warn that torchvision and torch are not a pair: what works here fails in the user's own code."""
    warnings.warn(
        TorchedgeWarning(
            f"torchvision {version('torchvision')} is of another build than PyTorch {torch.__version__}: "
            "torchedge loads its models all the same, but `import torchvision` fails elsewhere, and in parts "
            "of transformers with it; `torchedge doctor` prints the command that installs the matching one"
        ),
        stacklevel=4,
    )


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
