"""Runs an ATen graph of torch.export on stand-ins, so that it comes out as a Graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchedge.errors import CaptureError
from torchedge.tracing.recorder import Recorder

_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def replay(module: GraphModule, inputs: list[Any], recorder: Recorder, prefix: str = "") -> Any:
    """Run the nodes of a graph in order inside the tracer; returns what its output node holds.

    `prefix` is cut off the module paths, which become the operators' scopes.
    """
    values: dict[Node, Any] = {}
    fed = iter(inputs)
    last = _last_uses(module)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(fed)
        elif node.op == "get_attr":
            values[node] = _attribute(module, str(node.target))
        elif node.op == "output":
            return map_arg(node.args[0], values.__getitem__)
        else:
            args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            with _scope(recorder, node, prefix):
                values[node] = _call(node.target, args, kwargs, recorder, prefix)
            del args, kwargs
        for spent in last.get(node, ()):
            del values[spent]
    raise CaptureError("the exported graph has no output")


def _call(target: Any, args: Any, kwargs: Any, recorder: Recorder, prefix: str) -> Any:
    if not isinstance(target, torch._ops.HigherOrderOperator):
        function: Callable[..., Any] = target
        return function(*args, **kwargs)
    name = target.name()
    if name == _SET_GRAD:
        enabled, module, *rest = args
        with torch.set_grad_enabled(enabled):
            return replay(module, rest, recorder, prefix)
    if name == _AUTOCAST:
        device, dtype, enabled, cache, module, *rest = args
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
            return replay(module, rest, recorder, prefix)
    raise CaptureError(
        f"the exported graph holds {name}: control flow that depends on values cannot be captured"
    )


def _last_uses(module: GraphModule) -> dict[Node, list[Node]]:
    """Return for each node the nodes read by it and by no later one."""
    last: dict[Node, Node] = {}
    for node in module.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    spent: dict[Node, list[Node]] = {}
    for used, node in last.items():
        spent.setdefault(node, []).append(used)
    return spent


def _attribute(module: GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def _scope(recorder: Recorder, node: Node, prefix: str) -> Iterator[None]:
    """Keep the path of the module a node comes from on the recorder's stack."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and isinstance(entry[0], str)]
    path = paths[-1] if paths else ""
    if path.startswith("_empty_nn_module_stack"):
        path = ""
    recorder.scopes.append("loss" if prefix and not path else path.removeprefix(prefix).lstrip("."))
    try:
        yield
    finally:
        recorder.scopes.pop()
