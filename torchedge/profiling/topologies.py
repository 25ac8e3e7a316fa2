"""Networks as plain data (layers and functions with their arguments), and the modules they describe.

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
method has to be in the tables below.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import nn

from torchedge.errors import InputError, ProfileError
from torchedge.graphs.graph import last_uses
from torchedge.storage.codecs import Codec, OneOf, OptionalText


class StochasticDepth(nn.Module):
    """Drops whole samples ("row") or the whole batch ("batch") with probability p while training."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        if not 0 <= p <= 1 or mode not in ("row", "batch"):
            raise ValueError(f"p is {p} and mode {mode!r}; expected 0 to 1 and row or batch")
        self.p, self.mode = p, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the kept samples, so that the expectation does not change."""
        if not self.training or self.p == 0:
            return x
        size = [x.shape[0] if self.mode == "row" else 1] + [1] * (x.dim() - 1)
        noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        if self.p < 1:
            noise.div_(1 - self.p)
        return x * noise


_TORCH_LAYERS = (
    "AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "ChannelShuffle",
    "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d", "Dropout", "Dropout2d", "ELU", "Flatten", "GELU",
    "GroupNorm", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LayerNorm", "LeakyReLU", "Linear",
    "LocalResponseNorm", "MaxPool2d", "Mish", "PReLU", "PixelShuffle", "ReLU", "ReLU6", "SiLU", "Sigmoid",
    "Softmax", "Softplus", "Tanh", "Upsample", "ZeroPad2d",
)  # fmt: skip
LAYERS: Mapping[str, type[nn.Module]] = {
    **{name: getattr(nn, name) for name in _TORCH_LAYERS},
    "StochasticDepth": StochasticDepth,
}
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "getitem", "iadd", "isub", "imul", "neg",
)  # fmt: skip
_TORCH_FUNCTIONS = (
    "cat", "flatten", "unsqueeze", "squeeze", "mean", "sigmoid", "tanh", "chunk", "split", "transpose",
)  # fmt: skip
_NN_FUNCTIONS = (
    "relu", "relu6", "gelu", "silu", "hardswish", "hardsigmoid", "leaky_relu", "softmax", "dropout",
    "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d", "pad", "interpolate", "layer_norm",
)  # fmt: skip
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(nn.functional, name) for name in _NN_FUNCTIONS},
    **{name: getattr(torch, name) for name in _TORCH_FUNCTIONS},
    **{name: getattr(operator, name) for name in _OPERATORS},
}
METHODS = frozenset((
    "size", "view", "squeeze", "mean", "flatten", "reshape", "permute", "transpose", "contiguous",
    "unsqueeze", "chunk", "split", "add", "add_", "mul", "mul_", "sigmoid", "expand", "sum",
))  # fmt: skip
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
    for place, node in enumerate(topology.nodes):
        key, known = tables.get(node.op, ("", ()))
        if key and getattr(node, key) not in known:
            word = getattr(node, key)
            raise InputError(f"nodes[{place}].{key} is {word!r}; expected the name of a known {node.op}")
        if node.op in ("output", "method") and not node.args:
            raise InputError(f"nodes[{place}] has no args; expected one or more for op {node.op!r}")


_TOPOLOGIES = Codec(_Topology, "Topology", verify=_check_nodes, error=ProfileError)


class TopologyModule(nn.Module):
    """Runs the nodes of one topology in order; `label` is named in errors.

    Raises:
        ProfileError: a node is not of the format, or a layer cannot be built.
    """

    def __init__(self, nodes: object, label: str) -> None:
        super().__init__()
        self.nodes = _TOPOLOGIES.parse(label, {"nodes": nodes}).nodes
        self.spent = last_uses([_names([*node.args, node.kwargs]) for node in self.nodes])
        self.layers = nn.ModuleDict()
        for node in self.nodes:
            if node.op == "module":
                self.layers[_key(node.name)] = _layer(node, label)

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - whatever the last node gives
        """Run the network on x (N, C, H, W)."""
        results: dict[str, Any] = {}
        for node, names in zip(self.nodes, self.spent, strict=True):
            if node.op == "input":
                results[node.name] = x
                continue
            args = [_resolve(item, results) for item in node.args]
            if node.op == "output":
                return args[0]
            kwargs = _resolve(node.kwargs, results) if node.op != "module" else {}
            for name in names:
                results.pop(name, None)  # as in Python code whose variables are overwritten
            results[node.name] = self._run(node, args, kwargs)
            del args
        raise ProfileError("the topology has no output node; expected one at its end")

    def _run(self, node: TopologyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if node.op == "module":
            return self.layers[_key(node.name)](*args)
        target = str(node.target)
        if node.op == "function":
            if target == "getitem" and isinstance(args[1], list):
                args[1] = tuple(args[1])
            return FUNCTIONS[target](*args, **kwargs)
        return getattr(args[0], target)(*args[1:], **kwargs)


def _key(name: str) -> str:
    return name.replace(".", "_")


def _layer(node: TopologyNode, label: str) -> nn.Module:
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in node.kwargs.items()}
    flat = [n for v in settings.values() for n in (v if isinstance(v, tuple) else (v,))]
    if any(isinstance(n, (int, float)) and abs(n) > _LARGEST_NUMBER for n in flat):
        raise ProfileError(
            f"{label}: node {node.name!r} has a size above {_LARGEST_NUMBER}; correct the file"
        )
    try:
        return LAYERS[str(node.type)](**settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProfileError(f"{label}: node {node.name!r} ({node.type}) is not valid: {error}") from error


def _names(item: Any) -> list[str]:  # noqa: ANN401
    if isinstance(item, Mapping):
        if "node" not in item:
            return [n for v in item.values() for n in _names(v)]
        if not isinstance(item["node"], str):
            raise ProfileError(f"a topology reads node {str(item['node'])[:80]}; expected a node's name")
        return [item["node"]]
    return [n for v in item for n in _names(v)] if isinstance(item, list) else []


def _resolve(item: Any, results: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if isinstance(item, Mapping):
        if "node" in item:
            if item["node"] not in results:
                raise ProfileError(f"a topology reads node {item['node']!r} before it is computed")
            return results[item["node"]]
        if "slice" in item:
            return slice(*[_resolve(i, results) for i in item["slice"]])
        return {k: _resolve(v, results) for k, v in item.items()}
    return [_resolve(i, results) for i in item] if isinstance(item, list) else item
