"""Networks as plain data (layers and functions, or a library's by name), and the modules they describe.

The format is that of the public Jetson TX2 dataset's `topologies.jsonl` and of campaigns' job lines. A
network is a list of nodes in the order they run, each a table with

- `name`: unique text, by which other nodes refer to it;
- `op`: "input" (the images), "module", "function", "method" or "output" (the last node);
- `type` of a module: a key of `LAYERS`; its `kwargs` are the constructor's, a list standing for a tuple;
- `target` of a function: a key of `FUNCTIONS`; of a method: one of `METHODS`, called on the first argument;
- `args`, and for functions and methods `kwargs` (both optional, default none).

An argument is null, true, false, a number, text, a list, `{"node": n}` (the result of node n) or
`{"slice": [a, b, c]}`, whose parts are arguments. A result is freed while the last node that reads it
runs, as in code that overwrites its variables. Nothing in a file is executed: every layer, function and
method has to be in the tables of the probe (hooks/training_probe.py), which builds networks on devices too.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import nn

from torchedge.errors import InputError, MissingExtraError, ProfileError, did_you_mean, first_line, needed
from torchedge.storage import data_folder
from torchedge.storage.codecs import Codec, OneOf, OptionalText
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.vision import find_timm, import_torchvision, prepare_torchvision


def _load_probe() -> Any:  # noqa: ANN401 - a module without types
    """Return the probe that campaigns push to devices: what is predicted is built as what is measured."""
    path = data_folder("hooks") / "training_probe.py"
    spec = importlib.util.spec_from_file_location("torchedge.training_probe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROBE = _load_probe()
LAYERS: Mapping[str, Callable[..., nn.Module]] = {
    name: getattr(nn, name, PROBE.stochastic_depth) for name in PROBE.LAYERS
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in PROBE.TORCH_FUNCTIONS},
    **{name: getattr(nn.functional, name) for name in PROBE.FUNCTIONS},
    **{name: getattr(operator, name) for name in PROBE.OPERATORS},
}
METHODS = frozenset(PROBE.METHODS)
names_read: Callable[[object], list[Any]] = PROBE.names_read
"""Returns the names of the nodes that an argument reads."""

_MOST_NODES = 20_000
_LARGEST_NUMBER = 1 << 24


@dataclass(frozen=True, slots=True)
class TopologyNode:
    """One node of a topology; the module's docstring describes its entries."""

    op: Literal["input", "module", "function", "method", "output"]
    name: OptionalText = ""
    type: Annotated[str, OneOf(tuple(LAYERS))] | None = None
    target: Annotated[str, OneOf((*FUNCTIONS, *sorted(METHODS - FUNCTIONS.keys())))] | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Topology:
    nodes: Annotated[tuple[TopologyNode, ...], Meta(min_length=1, max_length=_MOST_NODES)]


def _check_nodes(topology: _Topology) -> None:
    tables: Mapping[str, tuple[str, Container[str]]] = {
        "module": ("type", LAYERS), "function": ("target", FUNCTIONS), "method": ("target", METHODS),
    }  # fmt: skip
    names = [node.name for node in topology.nodes if node.op != "output"]
    if len(set(names)) != len(names):
        raise InputError("two nodes have the same name; expected each name once")
    computed: set[str] = set()
    for place, node in enumerate(topology.nodes):
        key, known = tables.get(node.op, ("", ()))
        if key and getattr(node, key) not in known:
            word = getattr(node, key)
            raise InputError(f"nodes[{place}].{key} is {word!r}; expected the name of a known {node.op}")
        if node.op in ("output", "method") and not node.args:
            raise InputError(f"nodes[{place}] has no args; expected one or more for op {node.op!r}")
        settings = node.kwargs.values() if node.op == "module" else ()
        numbers = [n for v in settings for n in (v if isinstance(v, list) else (v,))]
        if any(isinstance(n, (int, float)) and abs(n) > _LARGEST_NUMBER for n in numbers):
            raise InputError(f"nodes[{place}] has a size above {_LARGEST_NUMBER}; correct the file")
        for name in names_read([*node.args, dict(node.kwargs)]):
            if not isinstance(name, str) or name not in computed:
                raise InputError(f"nodes[{place}] reads node {str(name)[:80]!r} before it is computed")
        computed.add(node.name)
    if all(node.op != "output" for node in topology.nodes):
        raise InputError("there is no output node; expected one at the end")


_TOPOLOGIES = Codec(_Topology, "Topology", verify=_check_nodes, error=ProfileError)


def build_topology(nodes: object, label: str, note: Callable[[str, Any], None] | None = None) -> nn.Module:
    """Return the module that runs the nodes of one topology in order on x (N, C, H, W).

    label: named in errors. note: called with each node's name and its result.

    Raises:
        ProfileError: a node is not of the format, or a layer cannot be built.
    """
    _TOPOLOGIES.parse(label, {"nodes": nodes})
    assert isinstance(nodes, list)
    try:
        module: nn.Module = PROBE.topology([{"name": "", **node} for node in nodes], note)
    except ValueError as error:
        raise ProfileError(f"{label}: {error}") from error
    return module


# networks from recipes --------------------------------------------------------------------------------------


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
