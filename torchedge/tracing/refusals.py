"""Models that no graph can stand for, each refused with the reason and what to capture instead."""

from __future__ import annotations

import torch

from torchedge.errors import CaptureError

_DETECTORS = frozenset(
    ("GeneralizedRCNN", "FasterRCNN", "MaskRCNN", "KeypointRCNN", "RetinaNet", "FCOS", "SSD")
)


def refuse_unsuitable(model: torch.nn.Module) -> None:
    """Raise CaptureError for whole detectors, scripted modules and layers that have no weights yet."""
    name = type(model).__name__
    if type(model).__module__.startswith("torchvision.models.detection") and name in _DETECTORS:
        raise CaptureError(
            f"{name} chooses boxes by their scores, so its shapes depend on the data; capture its backbone "
            "instead: capture(model.backbone, input_size=(3, 800, 800))"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{name} is compiled by TorchScript, which hides its operators; pass the original nn.Module"
        )
    lazy = next(
        (p for p, v in model.named_parameters() if isinstance(v, torch.nn.UninitializedParameter)), None
    )
    if lazy is not None:
        raise CaptureError(
            f"{name} has a lazy layer without weights ({lazy}); run the model once on an example first"
        )
