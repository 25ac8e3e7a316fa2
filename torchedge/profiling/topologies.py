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
import inspect
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from torchedge.errors import (
    InputError,
    MissingExtraError,
    ProfileError,
    described,
    did_you_mean,
    first_line,
    needed,
)
from torchedge.graphs import ForwardGraph
from torchedge.profiling.campaigns.drawn import DRAWN, drawn_network
from torchedge.storage import data_folder
from torchedge.storage.codecs import Codec, OneOf, OptionalText
from torchedge.storage.locks import warnings_ignored
from torchedge.tracing.capturing import capture
from torchedge.tracing.copies import isolated
from torchedge.tracing.recorder import TracedTensor
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
    Raises ProfileError: a node is not of the format, or a layer cannot be built.
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
    """Return the recipe of a network that a plan names: torchvision's, timm's ("timm:NAME"), a drawn one."""
    if name.startswith(DRAWN):
        return {"nodes": drawn_network(int(name.removeprefix(DRAWN)))}
    library = "timm" if name.startswith("timm:") else "torchvision"
    return {"library": library, "name": name.removeprefix("timm:"), "kwargs": dict(kwargs)}


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """Raise InputError for a network that is not in its library, MissingExtraError without the library."""
    if "nodes" in recipe:
        return
    name = recipe["name"]
    if recipe["library"] == "transformers":
        prepare_torchvision()
        with needed("transformers", purpose="building networks of transformers"):
            import transformers
        known = dir(transformers)
    elif recipe["library"] == "timm":
        timm = find_timm()
        if timm is None:
            raise MissingExtraError.of("timm", purpose="building networks of timm")
        known = timm.list_models()
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
    try:
        with warnings_ignored():
            try:
                with torch.device("meta"):
                    model: nn.Module = PROBE.build(recipe)
            except NotImplementedError:  # a builder that computes with tensors
                model = PROBE.build(recipe).to("meta")
    except Exception as error:
        settings = dict(recipe.get("config", recipe.get("kwargs", {})))
        raise InputError(f"{recipe['name']} cannot be built with {settings}: {first_line(error)}") from error
    return model


def set_up(module: nn.Module, job: Mapping[str, Any]) -> nn.Module:
    """Return a network as the probe sets it up: dtype, layout, checkpoints, frozen parameters."""
    if "dtype" not in job["build"]:
        module = module.to(getattr(torch, job.get("dtype", "float32")))
    if job.get("channels_last"):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if any(job.get(name) for name in ("checkpointing", "frozen", "inputs_require_grads")):
        PROBE.arrange(module, job)
    return module


def example_inputs(job: Mapping[str, Any], batch_size: int) -> Any:  # noqa: ANN401 - tensors by name
    """Return inputs of a job's network on the meta device."""
    example = {}
    for name, form in job["inputs"].items():
        shape = [batch_size if side == "batch" else side for side in form["shape"]]
        weights = job.get("dtype", job["build"].get("dtype", "float32"))
        dtype = torch.int64 if "below" in form else getattr(torch, weights)
        example[name] = torch.zeros(shape, dtype=dtype, device="meta")
    return example


# read off a module ------------------------------------------------------------------------------------------
#
# From a torch.fx trace: layers stay layers (a ReLU(inplace=True) is rebuilt as one), functions and methods
# keep their arguments, and the order is that of execution, so that the rebuilt network runs the same
# operators on the same shapes.

Nodes = list[dict[str, Any]]

_CLASSES: dict[Any, str] = {kind: name for name, kind in LAYERS.items()}
_TARGETS: Mapping[Callable[..., Any], str] = {
    **{function: name for name, function in FUNCTIONS.items()},
    torch.add: "add",
    torch.mul: "mul",
    torch.sub: "sub",
    torch.relu: "relu",
}


def serialise(
    model: nn.Module, label: str = "the model", *, input_size: Sequence[int] | None = None
) -> Nodes:
    """Return the nodes of a module with one image as input; `build_topology(nodes, label)` does the same.

    Weights are not part of it. Nodes called hold_N keep results alive as long as the module's own code does:
    both give equal graphs, features and simulated memory. input_size: (C, H, W) to run it on; default: the
    model's own. Raises InputError for a module that torch.fx cannot trace or that uses a layer, function or
    method outside the format, naming it, and CaptureError for one that does not run.
    """
    with isolated(model, True) as twin:
        nodes = _traced(twin, label)
    with isolated(model, False) as twin:
        if _traced(twin, label) != nodes:
            raise _refusal(label, "its code looks at whether it trains")
    if sum(node["op"] == "input" for node in nodes) != 1:
        raise InputError(f"{label} takes several inputs; expected a network of one image")
    return _hold_results(model, nodes, input_size, label)


def _traced(model: nn.Module, label: str) -> Nodes:
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise _refusal(label, f"torch.fx cannot trace it ({reason})") from error
    modules = dict(model.named_modules())
    return [_node(node, modules, label) for node in graph.nodes]


class _Proxy(fx.Proxy):
    """Records `x += y` as an in-place addition; torch.fx's own proxy records an addition."""

    def __iadd__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:  # noqa: ANN401
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})


class _Tracer(fx.Tracer):
    """Stops at the layers of the format; looks into everything else."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _kind(m) is not None


def _kind(module: nn.Module) -> str | None:
    """Return the format's name of a layer: its class, or the one whose forward it inherits."""
    if type(module).__name__ == "StochasticDepth" and {"p", "mode"} <= vars(module).keys():
        return "StochasticDepth"
    layer: Any = next((base for base in type(module).__mro__ if base in _CLASSES), None)
    return _CLASSES[layer] if layer and type(module).forward is layer.forward else None


def _node(node: fx.Node, modules: Mapping[str, nn.Module], label: str) -> dict[str, Any]:
    if node.op == "placeholder":
        return {"name": node.name, "op": "input"}
    args = [_argument(a, label) for a in node.args]
    kwargs = {name: _argument(value, label) for name, value in node.kwargs.items()}
    if node.op == "output":
        return {"name": node.name, "op": "output", "args": args}
    if node.op == "call_module":
        module = modules[str(node.target)]
        kind = _kind(module)
        assert kind is not None
        return {
            "name": node.name,
            "op": "module",
            "type": kind,
            "kwargs": _settings(module, kind),
            "args": args,
        }
    if node.op == "call_method" and node.target in METHODS:
        return {"name": node.name, "op": "method", "target": node.target, "args": args, "kwargs": kwargs}
    if node.op == "call_function" and not isinstance(node.target, str):
        if node.target is getattr and node.args[1:] == ("shape",):
            return {"name": node.name, "op": "method", "target": "size", "args": args[:1], "kwargs": {}}
        target = _TARGETS.get(node.target)
        if target is not None:
            return {"name": node.name, "op": "function", "target": target, "args": args, "kwargs": kwargs}
    name = getattr(node.target, "__name__", node.target)
    raise _refusal(label, f"it uses {name!r} ({node.op}), which the format does not hold")


def _refusal(label: str, why: str) -> InputError:
    return InputError(
        f"{label} cannot be written as a list of layers: {why}; measure it unpruned, by its library's name"
    )


def _argument(value: Any, label: str) -> Any:  # noqa: ANN401 - what torch.fx records
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, slice):
        return {"slice": [_argument(v, label) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, (list, tuple)):
        return [_argument(v, label) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _refusal(label, f"an argument is {described(value)}")


def _settings(module: nn.Module, kind: str) -> dict[str, Any]:
    """Return the constructor's arguments that differ from their defaults."""
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(LAYERS[kind]).parameters.items():
        if name in ("device", "dtype") or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            continue
        value = getattr(module, name, parameter.default)
        if name == "bias":
            value = value is not None
        if value != parameter.default and value is not parameter.empty:
            settings[name] = list(value) if isinstance(value, tuple) else value
    return settings


# lifetimes --------------------------------------------------------------------------------------------------
# A list of nodes frees a result at its last use. The code of a module holds some longer: the frame that
# called a block keeps the block's input until the block returns, which the peak memory of inference shows.


def _hold_results(model: nn.Module, nodes: Nodes, input_size: Sequence[int] | None, label: str) -> Nodes:
    """Return the nodes with others between them that only read results which `model` still holds there.

    Such a node takes element 0 of a list [0, results...]. Raises CaptureError where the module cannot be
    captured, and InputError where the nodes do not run the module's operators.
    """
    size, notes = None if input_size is None else tuple(input_size), _Notes()
    with torch.device("meta"):
        watched = build_topology(nodes, label, notes.take)
    theirs = capture(model, input_size=size, method="trace")
    ours = capture(watched, input_size=size, method="trace")
    if [(op.kind, op.inplace) for op in theirs.ops] != [(op.kind, op.inplace) for op in ours.ops]:
        raise InputError(f"{label} cannot be written as a list of layers: rebuilt, it runs other operators")
    theirs_end, ours_end = _releases(theirs), _releases(ours)
    to_hold: dict[str, list[str]] = {}
    for name, values in notes.values_of.items():
        read = any(name in names_read([node.get("args", []), node.get("kwargs", {})]) for node in nodes)
        until = max((theirs_end.get(v, -1) for v in values), default=-1)
        if read and until > max((ours_end.get(v, len(ours.ops)) for v in values), default=until):
            holder = next((node for node, end in notes.ends if until < end), notes.END)
            to_hold.setdefault(holder, []).append(name)
    out: Nodes = []
    for node in nodes:
        if node["op"] == "output" and notes.END in to_hold:
            out.append(_hold(len(out), to_hold[notes.END]))
        out.append(node)
        if node["name"] in to_hold:
            out.append(_hold(len(out), to_hold[node["name"]]))
    return out


class _Notes:
    """The values of the graph that each node computes, and the number of operators run after it."""

    END = ""  # stands for the node behind the last one

    def __init__(self) -> None:
        self.values_of: dict[str, tuple[int, ...]] = {}
        self.ends: list[tuple[str, int]] = []

    def take(self, name: str, result: Any) -> None:  # noqa: ANN401 - whatever a node gives
        """Record the values of a node during capture."""
        traced = [leaf for leaf in tree_leaves(result) if isinstance(leaf, TracedTensor)]
        if traced:
            self.values_of[name] = tuple(leaf.token.index for leaf in traced)
            self.ends.append((name, len(traced[0].recorder.ops)))


def _releases(graph: ForwardGraph) -> dict[int, int]:
    """Return the operator after which each value is freed for the last time."""
    return {value: op for op, values in enumerate(graph.releases or ()) for value in values}


def _hold(number: int, names: list[str]) -> dict[str, Any]:
    results: list[Any] = [{"node": name} for name in names]
    return {
        "name": f"hold_{number}",
        "op": "function",
        "target": "getitem",
        "args": [[0, *results], 0],
        "kwargs": {},
    }
