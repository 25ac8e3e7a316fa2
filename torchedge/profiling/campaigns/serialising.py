"""A module as plain data: the nodes of `torchedge.profiling.topologies`, read off a torch.fx trace.

Layers stay layers (a ReLU(inplace=True) is rebuilt as one), functions and methods keep their arguments, and
the order is that of execution, so that the rebuilt network runs the same operators on the same shapes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from torchedge.errors import InputError, first_line
from torchedge.graphs import ForwardGraph
from torchedge.profiling.topologies import FUNCTIONS, LAYERS, METHODS, build_topology, names_read
from torchedge.tracing.capturing import capture
from torchedge.tracing.copies import isolated
from torchedge.tracing.recorder import TracedTensor

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
    raise _refusal(label, f"an argument is a {type(value).__name__}")


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
            to_hold.setdefault(notes.node_of(until), []).append(name)
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

    END = ""

    def __init__(self) -> None:
        self.values_of: dict[str, tuple[int, ...]] = {}
        self.ends: list[tuple[str, int]] = []

    def take(self, name: str, result: Any) -> None:  # noqa: ANN401 - whatever a node gives
        """Record the values of a node during capture."""
        traced = [leaf for leaf in tree_leaves(result) if isinstance(leaf, TracedTensor)]
        if traced:
            self.values_of[name] = tuple(leaf.token.index for leaf in traced)
            self.ends.append((name, len(traced[0].recorder.ops)))

    def node_of(self, op: int) -> str:
        """Return the node that runs an operator; `END` where it runs behind the last one."""
        return next((name for name, end in self.ends if op < end), self.END)


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
