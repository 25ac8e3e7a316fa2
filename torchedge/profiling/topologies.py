"""Networks as plain data (layers and functions with their arguments), and the modules they describe.

The format is that of the public Jetson TX2 dataset's `topologies.jsonl` and of campaigns' job lines. A
network is a list of nodes in the order they run, each a table with

- `name`: unique text, by which other nodes refer to it;
- `op`: "input" (what the network is fed), "module", "function", "method" or "output" (the last node);
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchedge.errors import ProfileError

__all__ = ["FUNCTIONS", "LAYERS", "METHODS", "StochasticDepth", "TopologyModule"]


class StochasticDepth(nn.Module):
    """Drops whole samples ("row") or the whole batch ("batch") with probability p while training."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        if not 0 <= p <= 1 or mode not in ("row", "batch"):
            raise ValueError(f"p is {p} and mode {mode!r}; expected 0 to 1 and row or batch")
        self.p, self.mode = p, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what stays, so that the expectation does not change."""
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


class TopologyModule(nn.Module):
    """Runs the nodes of one topology in order."""

    def __init__(self, nodes: object, label: str) -> None:
        super().__init__()
        if not isinstance(nodes, Sequence) or not 0 < len(nodes) <= _MOST_NODES:
            raise ProfileError(f"{label}: expected a list of 1 to {_MOST_NODES} nodes")
        self.nodes = [_checked(node, label) for node in nodes]
        self.layers = nn.ModuleDict()
        for node in self.nodes:
            if node["op"] == "module":
                self.layers[_key(node["name"])] = _layer(node, label)

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - whatever the last node gives
        """Run the network on x (N, C, H, W)."""
        results: dict[str, Any] = {}
        last: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            for name in _names([node.get("args", []), node.get("kwargs", {})]):
                last[name] = position
        for position, node in enumerate(self.nodes):
            op, name = node["op"], node.get("name", "")
            if op == "input":
                results[name] = x
                continue
            args = _resolve(node.get("args", []), results)
            if op == "output":
                return args[0]
            kwargs = _resolve(node.get("kwargs", {}), results) if op != "module" else {}
            for used in [n for n in results if last.get(n) == position]:
                del results[used]  # as in Python code whose variables are overwritten
            results[name] = self._run(node, args, kwargs)
            del args
        raise ProfileError("the topology has no output node; expected one at its end")

    def _run(self, node: Mapping[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if node["op"] == "module":
            return self.layers[_key(node["name"])](*args)
        target = node["target"]
        if node["op"] == "function":
            if target == "getitem" and isinstance(args[1], list):
                args[1] = tuple(args[1])
            return FUNCTIONS[target](*args, **kwargs)
        return getattr(args[0], target)(*args[1:], **kwargs)


def _key(name: str) -> str:
    return name.replace(".", "_")


def _checked(node: Any, label: str) -> Mapping[str, Any]:  # noqa: ANN401 - read from a file
    if not isinstance(node, Mapping) or not isinstance(node.get("name", ""), str):
        raise ProfileError(f"{label}: a node is {str(node)[:60]!r}; expected a table with name and op")
    op, target, kind = node.get("op"), node.get("target"), node.get("type")
    known = {
        "input": True,
        "output": True,
        "module": kind in LAYERS,
        "function": target in FUNCTIONS,
        "method": target in METHODS,
    }
    if not known.get(str(op), False):
        raise ProfileError(
            f"{label}: node {node.get('name')!r} is {op} {kind or target!r}, which is not known; "
            f"expected one of {', '.join((*LAYERS, *FUNCTIONS, *sorted(METHODS)))}"
        )
    return node


def _layer(node: Mapping[str, Any], label: str) -> nn.Module:
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in node.get("kwargs", {}).items()}
    flat = [n for v in settings.values() for n in (v if isinstance(v, tuple) else (v,))]
    if any(isinstance(n, (int, float)) and abs(n) > _LARGEST_NUMBER for n in flat):
        raise ProfileError(f"{label}: node {node['name']!r} has a size above {_LARGEST_NUMBER}")
    try:
        return LAYERS[node["type"]](**settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProfileError(
            f"{label}: node {node['name']!r} ({node['type']}) is not valid: {error}"
        ) from error


def _names(item: Any) -> list[str]:  # noqa: ANN401
    if isinstance(item, Mapping):
        return [item["node"]] if "node" in item else [n for v in item.values() for n in _names(v)]
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
