"""Models by name: torchvision, timm, transformers' configurations, Python factories, ONNX and .pt2 files."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchedge.errors import (
    NAMED_FILE,
    InputError,
    MissingExtraError,
    TorchedgeError,
    check_path,
    described,
    did_you_mean,
    first_line,
)
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.hub_configs import build_from_config, split_config
from torchedge.tracing.paper_models import PAPER_MODELS, build_paper_model
from torchedge.tracing.vision import find_timm, prepare_torchvision

_FORMS = "a torchvision or timm name, file.py:factory, hf:CONFIG.json, or an .onnx or .pt2 file"


def load_model(text: str, *, weights: bool = False) -> tuple[torch.nn.Module, str]:
    """Return the model with a name or path, and a label for it.

    text: a torchvision name, a timm name (`timm:NAME`, or bare where torchvision has none), a model that
    FlashMem was evaluated on (one of `PAPER_MODELS`, as gpt-neo-2.7b), `file.py:factory` (a function without
    arguments, or a module), `hf:CONFIG.json` or `hf:CONFIG.json:ARCHITECTURE` (a configuration of
    transformers, or a folder with one, see `build_from_config`), or the path of an `.onnx` or `.pt2` file.
    Weights are random, on the meta device if the model can be built there; with `weights` on the default
    device, as the model's own code draws or loads them. A factory is the user's code, and it runs.
    Raises InputError if the model cannot be found or built, and MissingExtraError if a package is not
    installed.
    """
    if not text.strip():
        raise InputError(f"no model is named; expected {_FORMS}")
    if text.startswith("hf:"):
        config, architecture = split_config(text)
        model = _built(lambda: build_from_config(config, architecture, weights=weights), text, weights)
        return model, type(model).__name__
    path, _, factory = text.rpartition(":")
    if path.endswith(".py") and factory:
        return _from_python(Path(path), factory, weights), f"{Path(path).stem}:{factory}"
    suffix = Path(text).suffix.lower()
    if suffix in (".onnx", ".pt2") and weights:
        raise InputError(
            f"{text}: the weights of such a file are not read; expected a name or file.py:factory"
        )
    if suffix in (".onnx", ".pt2"):
        return _from_file(Path(text), suffix), Path(text).name
    if suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".gguf"):
        if not check_path("the model", text).is_file():
            raise InputError(f"{text}: there is no such file; expected {_FORMS}")
        raise InputError(f"{text} holds weights, not a model (a pickled one is not read); expected {_FORMS}")
    if suffix in (".py", ".py:"):
        raise InputError(
            f"{text} names no factory; expected {text.rstrip(':')}:NAME, a function in it that returns the "
            "model"
        )
    return _from_name(text, weights), text.removeprefix("timm:")


def _from_file(path: Path, suffix: str) -> torch.nn.Module:
    if not check_path("the model", path).is_file():
        raise InputError(f"{path}: there is no such file; check the path")
    if suffix == ".onnx":
        from torchedge.tracing.onnx_files import load_onnx

        return load_onnx(path)
    from torchedge.tracing.pt2_files import load_pt2

    return load_pt2(path)


def python_attribute(path: Path, name: str) -> Any:
    """Run a Python file and return its attribute `name`; raises InputError if it defines none."""
    if not check_path("the file", path).is_file():
        raise InputError(f"{path}: there is no such file; check the path")
    label = f"{NAMED_FILE}{path.stem}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: is no Python file; expected one that defines {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"{path}: raised {type(error).__name__} on import: {first_line(error)}; correct the file"
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    attribute = getattr(module, name, None)
    if attribute is None:
        callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(
            f"{path}: defines no {name!r}; {did_you_mean(name, callables, 'correct the name', 3)}"
        )
    return attribute


def _from_python(path: Path, factory: str, weights: bool) -> torch.nn.Module:
    attribute = python_attribute(path, factory)
    if isinstance(attribute, torch.nn.Module):
        return attribute
    if not callable(attribute):
        raise InputError(
            f"{path}: {factory} is {described(attribute)}; expected a function that returns a model"
        )
    needed = [
        p.name
        for p in _parameters(attribute)
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        raise InputError(
            f"{path}: {factory} needs arguments ({', '.join(needed)}); expected a function that takes none: "
            "give them defaults"
        )
    return _built(attribute, f"{path}:{factory}", weights)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _from_name(text: str, weights: bool) -> torch.nn.Module:
    timm_only = text.startswith("timm:")
    name = text.removeprefix("timm:")
    if not name:
        raise InputError("timm: names no model; expected timm:NAME, such as timm:convnext_tiny")
    if not timm_only and name in PAPER_MODELS:
        return _built(lambda: build_paper_model(name), name, weights)
    vision = [] if timm_only else _torchvision_names()
    if name in vision:
        from torchvision.models import get_model, get_model_builder

        options: dict[str, Any] = {"weights": None}
        accepted = inspect.signature(get_model_builder(name)).parameters
        if "weights_backbone" in accepted:
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = weights
        return _built(lambda: get_model(name, **options), name, weights)
    timm = find_timm()
    if timm is not None and timm.is_model(name):
        return _built(lambda: timm.create_model(name, pretrained=False), name, weights)
    if timm is None and timm_only:
        raise MissingExtraError.of("timm", purpose=f"building the timm model {name}")
    known = list(dict.fromkeys([*vision, *(timm.list_models() if timm is not None else [])]))
    if not known:
        raise MissingExtraError.of(
            "torchvision", extra="vision", purpose=f"building the model {name} by name"
        )
    of_the_hub = (
        "correct the name, or for one of the Hugging Face Hub name hf:FOLDER, which "
        "AutoConfig.from_pretrained(NAME).save_pretrained(FOLDER) writes"
    )
    hint = did_you_mean(name, [*PAPER_MODELS, *known], of_the_hub, most=3)
    if name.endswith(".json"):
        hint = f"did you mean hf:{name}?"
    elif name.endswith(".ipynb"):
        hint = "in the notebook itself run `with torchedge.watch() as step:` around a training step"
    elif check_path("the model", name).is_dir():
        hint = f"it is a folder: did you mean hf:{name}, a model's of transformers, or a file in it?"
    elif check_path("the model", name).is_file():
        hint = "it is a file of another kind: correct the name"
    raise InputError(f"no model is called {name!r}, expected {_FORMS}; {hint}")


def _torchvision_names() -> list[str]:
    prepare_torchvision()
    try:
        from torchvision.models import list_models
    except ImportError:
        return []
    names: list[str] = list_models()
    return names


def _built(make: Callable[[], Any], label: str, weights: bool) -> torch.nn.Module:
    """Build a model on the meta device, without memory; with weights, or if that fails, on the default."""
    try:
        with warnings_ignored():
            try:
                with contextlib.nullcontext() if weights else torch.device("meta"):
                    model = make()
            except TorchedgeError:
                raise
            except Exception:
                if weights:
                    raise
                with torch.random.fork_rng(devices=[]):
                    model = make()
    except TorchedgeError:
        raise
    except Exception as error:
        raise InputError(
            f"{label} cannot be built: {type(error).__name__}: {first_line(error)}; correct the function "
            "that builds it"
        ) from error
    if inspect.iscoroutine(model):
        model.close()
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{label} returns {described(model)}; expected a torch.nn.Module: return the model")
    return model
