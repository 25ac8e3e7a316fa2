"""torchedge: know what training a PyTorch model takes on an edge device before running it.

The names below load on first use (PEP 562): `import torchedge` imports neither torch nor anything optional.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchedge.api import Predictor as Predictor
    from torchedge.api import advise as advise
    from torchedge.api import capture as capture
    from torchedge.api import capture_lengths as capture_lengths
    from torchedge.api import export as export
    from torchedge.api import export_lm as export_lm
    from torchedge.api import features as features
    from torchedge.api import plan as plan
    from torchedge.api import plan_lm as plan_lm
    from torchedge.api import predict as predict
    from torchedge.api import report as report
    from torchedge.api import search as search
    from torchedge.api import simulate as simulate
    from torchedge.bundles.bundle import Bundle as Bundle
    from torchedge.bundles.bundle import load_bundle as load_bundle
    from torchedge.devices import Device as Device
    from torchedge.devices import find_device as find_device
    from torchedge.devices import list_devices as list_devices
    from torchedge.errors import CaptureError as CaptureError
    from torchedge.errors import DeviceError as DeviceError
    from torchedge.errors import DeviceMemoryError as DeviceMemoryError
    from torchedge.errors import InputError as InputError
    from torchedge.errors import KernelBuildError as KernelBuildError
    from torchedge.errors import LimitError as LimitError
    from torchedge.errors import LoweringError as LoweringError
    from torchedge.errors import MissingExtraError as MissingExtraError
    from torchedge.errors import OpenCLError as OpenCLError
    from torchedge.errors import PlanError as PlanError
    from torchedge.errors import ProfileError as ProfileError
    from torchedge.errors import TorchedgeError as TorchedgeError
    from torchedge.graphs import ForwardGraph as ForwardGraph
    from torchedge.graphs.training_steps import TrainingStep as TrainingStep
    from torchedge.integrations.scripts import watch as watch
    from torchedge.prediction import Estimate as Estimate
    from torchedge.prediction import Prediction as Prediction
    from torchedge.prediction.advice import Advice as Advice
    from torchedge.profiling.device_fits import fit as fit
    from torchedge.profiling.hosts import measure_operator_us as measure_operator_us
    from torchedge.runtime.backends import program_reports as program_reports
    from torchedge.runtime.model_plans import ModelPlan as ModelPlan
    from torchedge.runtime.trainers import Trainer as Trainer
    from torchedge.searching.driver import Search as Search
    from torchedge.searching.ofa_resnet50 import OFAResNet50Space as OFAResNet50Space
    from torchedge.searching.pruning_space import PruningSpace as PruningSpace
    from torchedge.searching.spaces import SearchSpace as SearchSpace
    from torchedge.streaming.planning import StreamingPlan as StreamingPlan
    from torchedge.tracing.gguf_files import load_gguf as load_gguf
    from torchedge.tracing.quantizing import quantize as quantize

__version__ = "0.1.0"

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
"""Public name -> module that defines it: the one table to extend, beside the imports for type checkers."""
__all__ = ["__version__", *sorted(_LAZY)]


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
