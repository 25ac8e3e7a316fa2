"""Networks of torchvision, timm and transformers from the recipes of job lines, as a job sets them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchedge.errors import InputError, MissingExtraError, did_you_mean, first_line, needed
from torchedge.profiling.topologies import PROBE, build_topology
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.vision import find_timm, import_torchvision, prepare_torchvision


def recipe_of(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a network that a plan names: torchvision's name, or timm's behind "timm:"."""
    library = "timm" if name.startswith("timm:") else "torchvision"
    return {"library": library, "name": name.removeprefix("timm:"), "kwargs": dict(kwargs)}


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """Raise InputError for a network that is not in its library, MissingExtraError without the library."""
    name = recipe["name"]
    if recipe["library"] == "transformers":
        known = dir(_transformers())
    elif recipe["library"] == "timm":
        known = _timm().list_models()
    else:
        import_torchvision()
        from torchvision.models import list_models

        known = list_models()
    if name not in known:
        hint = did_you_mean(name, known, "correct the plan", most=3)
        raise InputError(f"{recipe['library']} has no network {name!r}; {hint}")


def build_network(recipe: Mapping[str, Any]) -> nn.Module:
    """Return the network of a recipe on the meta device: {"nodes"}, or {"library", "name", "kwargs"}.

    Raises InputError for a network that cannot be built and MissingExtraError where a library is missing.
    """
    if "nodes" in recipe:
        with torch.device("meta"):
            return build_topology(recipe["nodes"], "a job's topology")
    check_recipe(recipe)
    name, kwargs = recipe["name"], recipe.get("config", recipe.get("kwargs", {}))
    try:
        try:
            with torch.device("meta"):
                return _create(recipe["library"], name, kwargs)
        except NotImplementedError:  # a builder that computes with tensors
            return _create(recipe["library"], name, kwargs).to("meta")
    except Exception as error:
        raise InputError(f"{name} cannot be built with {dict(kwargs)}: {first_line(error)}") from error


def _create(library: str, name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    with warnings_ignored():
        if library == "transformers":
            kind = getattr(_transformers(), name)
            configured: nn.Module = kind(kind.config_class(**kwargs))
            return configured
        if library == "timm":
            timm_model: nn.Module = _timm().create_model(name, pretrained=False, **kwargs)
            return timm_model
        from torchvision.models import get_model

        model: nn.Module = get_model(name, weights=None, **kwargs)
        return model


def _timm() -> Any:  # noqa: ANN401 - the module
    timm = find_timm()
    if timm is None:
        raise MissingExtraError.of("timm", purpose="building networks of timm")
    return timm


def _transformers() -> Any:  # noqa: ANN401 - the module
    prepare_torchvision()
    with needed("transformers", purpose="building networks of transformers"):
        import transformers
    return transformers


def set_up(module: nn.Module, job: Mapping[str, Any]) -> nn.Module:
    """Return a network as the probe sets it up: dtype, layout, checkpoints, frozen parameters."""
    module = module.to(getattr(torch, job.get("dtype", "float32")))
    if job.get("channels_last"):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if any(job.get(name) for name in ("checkpointing", "frozen")):
        PROBE.arrange(module, job)
    if job.get("inputs_require_grads"):
        module.enable_input_require_grads()  # type: ignore[operator]
    return module


def example_inputs(job: Mapping[str, Any], batch_size: int) -> Any:  # noqa: ANN401 - tensors by name
    """Return inputs of a job's network on the meta device."""
    example = {}
    for name, form in job["inputs"].items():
        shape = [batch_size if side == "batch" else side for side in form["shape"]]
        dtype = torch.int64 if "below" in form else getattr(torch, job.get("dtype", "float32"))
        example[name] = torch.zeros(shape, dtype=dtype, device="meta")
    return example
