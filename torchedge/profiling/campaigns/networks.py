"""Networks of torchvision and timm from the recipes of job lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchedge.errors import InputError, MissingExtraError, did_you_mean, first_line
from torchedge.profiling.topologies import build_topology
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.vision import find_timm, import_torchvision


def recipe_of(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a network that a plan names: torchvision's name, or timm's behind "timm:"."""
    library = "timm" if name.startswith("timm:") else "torchvision"
    return {"library": library, "name": name.removeprefix("timm:"), "kwargs": dict(kwargs)}


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """Raise InputError for a network that is not in its library, MissingExtraError without the library."""
    name = recipe["name"]
    if recipe["library"] == "timm":
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
    name, kwargs = recipe["name"], recipe.get("kwargs", {})
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
