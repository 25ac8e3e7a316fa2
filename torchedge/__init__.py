"""torchedge: know what training a PyTorch model takes on an edge device before running it.

The names below load on first use (PEP 562): `import torchedge` imports neither torch nor anything optional.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchedge.api import (
        Predictor,
        advise,
        capture,
        capture_lengths,
        export,
        features,
        plan,
        plan_lm,
        predict,
        report,
        search,
        simulate,
    )
    from torchedge.bundles.bundle import Bundle, load_bundle
    from torchedge.devices import Device, find_device, list_devices
    from torchedge.errors import (
        CaptureError,
        DeviceError,
        DeviceMemoryError,
        InputError,
        KernelBuildError,
        LimitError,
        LoweringError,
        MissingExtraError,
        OpenCLError,
        PlanError,
        ProfileError,
        TorchedgeError,
    )
    from torchedge.graphs import ForwardGraph
    from torchedge.graphs.training_steps import TrainingStep
    from torchedge.integrations.scripts import watch
    from torchedge.prediction import Estimate, Prediction
    from torchedge.prediction.advice import Advice
    from torchedge.profiling.hosts import measure_operator_us
    from torchedge.runtime.backends import program_reports
    from torchedge.runtime.model_plans import ModelPlan
    from torchedge.runtime.trainers import Trainer
    from torchedge.searching.driver import Search
    from torchedge.searching.ofa_resnet50 import OFAResNet50Space
    from torchedge.searching.pruning_space import PruningSpace
    from torchedge.searching.spaces import SearchSpace
    from torchedge.streaming.planning import StreamingPlan
    from torchedge.tracing.gguf_files import load_gguf
    from torchedge.tracing.quantizing import quantize

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Bundle",
    "CaptureError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "Estimate",
    "ForwardGraph",
    "InputError",
    "KernelBuildError",
    "LimitError",
    "LoweringError",
    "MissingExtraError",
    "ModelPlan",
    "OFAResNet50Space",
    "OpenCLError",
    "PlanError",
    "Prediction",
    "Predictor",
    "ProfileError",
    "PruningSpace",
    "Search",
    "SearchSpace",
    "StreamingPlan",
    "TorchedgeError",
    "Trainer",
    "TrainingStep",
    "__version__",
    "advise",
    "capture",
    "capture_lengths",
    "export",
    "export_lm",
    "features",
    "find_device",
    "fit",
    "list_devices",
    "load_bundle",
    "load_gguf",
    "measure_operator_us",
    "plan",
    "plan_lm",
    "predict",
    "program_reports",
    "quantize",
    "report",
    "search",
    "simulate",
    "watch",
]

_HOMES = {
    "torchedge.api": (
        "Predictor",
        "advise",
        "capture",
        "capture_lengths",
        "export",
        "export_lm",
        "features",
        "plan",
        "plan_lm",
        "predict",
        "report",
        "search",
        "simulate",
    ),
    "torchedge.bundles.bundle": ("Bundle", "load_bundle"),
    "torchedge.devices": ("Device", "find_device", "list_devices"),
    "torchedge.errors": (
        "CaptureError",
        "DeviceError",
        "DeviceMemoryError",
        "InputError",
        "KernelBuildError",
        "LimitError",
        "LoweringError",
        "MissingExtraError",
        "OpenCLError",
        "PlanError",
        "ProfileError",
        "TorchedgeError",
    ),
    "torchedge.graphs": ("ForwardGraph",),
    "torchedge.graphs.training_steps": ("TrainingStep",),
    "torchedge.integrations.scripts": ("watch",),
    "torchedge.prediction": ("Estimate", "Prediction"),
    "torchedge.prediction.advice": ("Advice",),
    "torchedge.profiling.device_fits": ("fit",),
    "torchedge.profiling.hosts": ("measure_operator_us",),
    "torchedge.runtime.backends": ("program_reports",),
    "torchedge.runtime.model_plans": ("ModelPlan",),
    "torchedge.runtime.trainers": ("Trainer",),
    "torchedge.searching.ofa_resnet50": ("OFAResNet50Space",),
    "torchedge.searching.pruning_space": ("PruningSpace",),
    "torchedge.searching.driver": ("Search",),
    "torchedge.searching.spaces": ("SearchSpace",),
    "torchedge.streaming.planning": ("StreamingPlan",),
    "torchedge.tracing.gguf_files": ("load_gguf",),
    "torchedge.tracing.quantizing": ("quantize",),
}
_LAZY = {name: module for module, names in _HOMES.items() for name in names}
"""Public name -> module that defines it: the one table to extend."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 (PEP 562: whatever the name stands for)
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(
            f"module 'torchedge' has no attribute {name!r}; it offers: {', '.join(sorted(_LAZY))}"
        )
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
