"""Models of many equal layers: a few of them are traced, and the graph is continued for the others.

The layers follow one another, as in transformers. What a trace costs grows with them, while the graph of each
is that of the one before it, with other weights. That this holds is not assumed: the operators of one run of
the whole model, and what each of them reads, are compared with those of the traced layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from torchedge.tracing.interception import tensors_in
from torchedge.tracing.joint_graphs import JointGraph
from torchedge.tracing.plain_tensors import content_of

TRACED = 5
"""Layers that are traced: the first and the last one differ from others by what stands beside them, and of
the two between them one has to equal the next."""
_TEMPLATE, _LAST = TRACED - 2, TRACED - 1
_LEAST = TRACED + 2


class NotRepeatedError(Exception):
    """The layers of a model do not compute the same, or their graphs do not show it."""


@dataclass(frozen=True)
class Layers:
    """A list of modules that have the same structure; path: its name in the model."""

    path: str
    holder: torch.nn.Module
    modules: tuple[torch.nn.Module, ...]

    @contextmanager
    def cut(self, count: int = TRACED) -> Iterator[None]:
        """Leave only the first layers in the model, by default those that are traced."""
        before = len(self.holder._modules)
        self._keep(count)
        try:
            yield
        finally:
            self._keep(before)

    def _keep(self, count: int) -> None:
        self.holder._modules.clear()
        self.holder._modules.update({str(n): module for n, module in enumerate(self.modules[:count])})

    def renamed(self, name: str, layer: int, other: int) -> str:
        """Return the name of a tensor or module of one layer for another layer.

        Outside of the list, such as for a cache, the parts of a name that are the layer's number change.
        """
        inside = f"{self.path}.{layer}"
        if name == inside or name.startswith(f"{inside}."):
            return f"{self.path}.{other}{name[len(inside) :]}"
        return ".".join([str(other) if part == str(layer) else part for part in name.split(".")])

    def layer_of(self, path: str) -> int | None:
        """Return the number of the layer that a module is in, by its path."""
        if not path.startswith(f"{self.path}."):
            return None
        return int(path[len(self.path) + 1 :].partition(".")[0])


def find_layers(model: torch.nn.Module) -> Layers | None:
    """Return the longest list of modules of the same structure; None where none is worth it."""
    found: Layers | None = None
    for path, module in model.named_modules():
        layers = tuple(module._modules.values())
        numbered = [*module._modules] == [str(place) for place in range(len(layers))]
        if type(module) not in (torch.nn.ModuleList, torch.nn.Sequential) or len(layers) < _LEAST:
            continue
        if not numbered or (found is not None and len(layers) <= len(found.modules)):
            continue
        modules = [layer for layer in layers if layer is not None]
        if len({*map(id, modules)}) == len(layers) and all(
            _structure(layer) == _structure(modules[0]) for layer in modules[1:]
        ):
            found = Layers(path, module, tuple(modules))
    return found


def _structure(layer: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the classes of modules, and the forms of weights, by their names in a layer."""
    weights = [*layer.named_parameters(), *layer.named_buffers()]
    return (
        [(name, type(module), module.training, [*vars(module)]) for name, module in layer.named_modules()],
        [(name, t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for name, t in weights],
    )


# what layers compute ----------------------------------------------------------------------------------------


@dataclass
class Record:
    """The operators of a run: those of each layer and those outside of layers, and what it returns.

    backward: what the derivatives call, in order.
    """

    layers: list[list[Any]] = field(default_factory=list)
    outside: list[Any] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)
    backward: list[Any] = field(default_factory=list)

    def repeats(self, short: Record) -> bool:
        """Return whether it is a run of more layers than `short`, each of which computes the same."""
        further = len(self.layers) - TRACED
        return (
            (self.outside, self.returned) == (short.outside, short.returned)
            and self.layers[:TRACED] == short.layers
            and all(layer == self.layers[_TEMPLATE] for layer in self.layers[TRACED:])
            and _is_longer(self.backward, short.backward, further)
        )


def _is_longer(whole: list[Any], short: list[Any], times: int) -> bool:
    """Return whether a list is a shorter one with a part of that repeated so many times more."""
    length, rest = divmod(len(whole) - len(short), times)
    place = next(
        (n for n, pair in enumerate(zip(whole, short, strict=False)) if pair[0] != pair[1]), len(short)
    )
    repeated = short[place - length : place] * times
    return not rest and 0 <= length <= place and whole == short[:place] + repeated + short[place:]


class _Recorder(TorchDispatchMode):
    """Writes the record of a run. A tensor is known by its name, or by the operator that made it.

    Within a layer another layer is named by its distance, outside by its distance from the last one.
    """

    def __init__(self, layers: Layers, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers, self.names = layers, names
        self.record = Record()
        self.layer: int | None = None
        self.backward = False
        self.made: dict[int, tuple[int | None, int, int]] = {}
        self.alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question about a tensor
            return result
        leaves = tree_leaves((args, kwargs or {}))
        if self.backward:
            plain = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
            self.record.backward.append((func, plain))
            return result
        entries = self.record.outside if self.layer is None else self.record.layers[self.layer]
        for number, tensor in enumerate(tensors_in(result, torch.Tensor)):
            self.made.setdefault(id(tensor), (self.layer, len(entries), number))
        entries.append((func, [self.form(leaf) for leaf in leaves]))
        self.alive.append((args, kwargs, result))
        return result

    def form(self, leaf: Any) -> Any:
        """Return what stands for an argument."""
        if not isinstance(leaf, torch.Tensor):
            return (type(leaf), repr(leaf))
        name, shape = self.names.get(id(leaf)), (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if name is not None:
            return (name if self.layer is None else self.layers.renamed(name, self.layer, -1), shape)
        if id(leaf) not in self.made:
            self.alive.append(leaf)
            return (id(leaf) if leaf.is_meta or isinstance(leaf, FakeTensor) else _content(leaf), shape)
        layer, place, number = self.made[id(leaf)]
        if layer is None:
            return ("outside", place, number, shape)
        distance = ("last", len(self.record.layers) - layer) if self.layer is None else self.layer - layer
        return (distance, place, number, shape)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow which layer runs."""

        def enter(number: int, *args: Any) -> None:
            if self.layer is not None or number != len(self.record.layers):
                raise NotRepeatedError(f"layer {number} runs out of turn")
            self.layer = number
            self.record.layers.append([])

        def leave(*args: Any) -> None:
            self.layer = None

        with ExitStack() as hooks:
            for number, module in enumerate(self.layers.holder._modules.values()):
                assert module is not None
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, number), prepend=True))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            yield


def record_run(
    layers: Layers,
    weights: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    run: Callable[[], Sequence[torch.Tensor]],
) -> Record:
    """Return the record of one run, and of its backward where a loss has one.

    weights: by name, as they are during the run.
    """
    named = {id(tensor): name for name, tensor in reversed([*weights.items()])}
    named |= {id(tensor): f"input {number}" for number, tensor in enumerate(inputs)}
    recorder = _Recorder(layers, named)
    with recorder, recorder.hooked():
        results = run()
        recorder.record.returned = [recorder.form(leaf) for leaf in results]
        if torch.is_grad_enabled():
            recorder.backward = True
            trained = [tensor for tensor in weights.values() if tensor.requires_grad]
            torch.autograd.grad(results[0], trained, allow_unused=True)
    return recorder.record


def _content(tensor: torch.Tensor) -> Any:
    with _disable_current_modes():
        return content_of(tensor)


# the graph --------------------------------------------------------------------------------------------------


def continue_graph(joint: JointGraph, layers: Layers, module: torch.nn.Module) -> JointGraph:
    """Return the graph of all layers of a module, from that of the first ones, which is changed.

    Layers 0, 1 and 2 stay; the last traced one becomes the last one of all, and copies of layer 2 stand
    between. Raises NotRepeatedError where the graphs of the traced layers do not follow one another.
    """
    return _Continuation(joint, layers, module).continued()


class _Continuation:
    """The graph of a few layers on the way to one of all.

    parts: by whether they are of the backward, and by layer, the nodes in order; place: where each is.
    holders: the placeholders of weights by name.
    """

    def __init__(self, joint: JointGraph, layers: Layers, module: torch.nn.Module) -> None:
        self.joint, self.layers, self.end = joint, layers, len(layers.modules) - 1
        self.graph = joint.module.graph
        self.parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        self.names = {**joint.parameters, **joint.buffers}
        self.holders = {name: node for node, name in self.names.items()}
        self.parts: dict[tuple[bool, int], list[Node]] = {}
        self.place: dict[Node, tuple[bool, int, int]] = {}
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        ways = [node.meta.get("partitioner_tag") == "is_backward" for node in nodes]
        if ways != sorted(ways):
            raise NotRepeatedError("the backward pass begins before the forward pass ends")
        self._cut(False, nodes[: ways.count(False)])
        if any(ways):
            self._cut(True, nodes[ways.count(False) :])
        self.backward = (True, _TEMPLATE) in self.parts

    def _cut(self, backward: bool, nodes: Sequence[Node]) -> None:
        """Cut a pass where the first node of each layer is; a last layer is as long as the one before."""
        firsts: dict[int | None, int] = {}
        for position, node in enumerate(nodes):
            firsts.setdefault(self.layers.layer_of(_scope(node)), position)
        order = [*range(TRACED)][:: -1 if backward else 1]
        cuts = [firsts.get(layer, -1) for layer in order]
        if cuts[0] < 0 or cuts != sorted(set(cuts)):
            raise NotRepeatedError("the layers do not follow one another")
        cuts.append(len(nodes) if backward else cuts[-1] + cuts[-1] - cuts[-2])
        for layer, start, end in zip(order, cuts, cuts[1:], strict=False):
            part = self.parts[backward, layer] = [*nodes[start:end]]
            self.place.update({node: (backward, layer, offset) for offset, node in enumerate(part)})

    def continued(self) -> JointGraph:
        """Return the graph of all layers."""
        self._check(False, _TEMPLATE, _LAST)
        if self.backward:
            self._check(True, _TEMPLATE - 1, _TEMPLATE)
        self._check_others()
        self._add_holders()
        between = range(_LAST, self.end)
        last = {backward: part for (backward, layer), part in self.parts.items() if layer == _LAST}
        with self.graph.inserting_before(last[False][0]):
            for layer in between:
                self._copy(False, layer)
        if self.backward:
            with self.graph.inserting_before(self.parts[True, _TEMPLATE][0]):
                for layer in reversed(between):
                    self._copy(True, layer)
        outputs, gradients, mutated = self._outputs()
        for backward in last:
            for layer, place in ((_TEMPLATE, _TEMPLATE), (_LAST, self.end)):
                for node in self.parts[backward, layer]:
                    node.args, node.kwargs = self._moved((node.args, node.kwargs), layer, place)
                    self._move_scope(node, layer, place)
        output = next(iter(self.graph.find_nodes(op="output")))
        output.args = (outputs,)
        return replace(
            self.joint,
            parameters={self.holders[name]: name for name in self.parameters},
            buffers={self.holders[name]: name for name in self.buffers},
            gradients=gradients,
            mutated=mutated,
        )

    # what the traced layers show ---------------------------------------------------------------------------

    def _check(self, backward: bool, layer: int, other: int) -> None:
        """Raise NotRepeatedError unless two layers have the same nodes."""
        one, two = self.parts[backward, layer], self.parts[backward, other]
        if [*map(self._text, one)] != [*map(self._text, two)]:
            raise NotRepeatedError(f"layers {layer} and {other} differ")

    def _check_others(self) -> None:
        """Raise NotRepeatedError where nodes outside of layers read one that does not stay beside them."""
        for node in self.graph.nodes:
            if node not in self.place and node.op != "output":
                read = [self.place[n][1] for n in node.all_input_nodes if n in self.place]
                if any(0 < layer < _LAST for layer in read):
                    raise NotRepeatedError(f"{node} reads a layer that is neither the first nor the last one")

    def _text(self, node: Node) -> str:
        """Return a node's text, the same for nodes of two layers that correspond."""
        _, layer, _ = self.place[node]
        target: Any = node.target
        if node.op == "get_attr":
            target = content_of(attrgetter(str(target))(self.joint.module))
        scope, inside = _scope(node), self.layers.layer_of(_scope(node))
        scope = scope if inside is None else f"{inside - layer} {self.layers.renamed(scope, inside, -1)}"
        values = [(v.shape, v.stride(), v.dtype) for v in tensors_in(node.meta.get("val"), torch.Tensor)]
        return f"{node.op} {target} {scope} {values} {self._described((node.args, node.kwargs), layer)}"

    def _described(self, item: Any, layer: int) -> str:
        """Return what nodes of a layer read, by distances."""

        def described(node: Node) -> Any:
            if node in self.names:
                return self.layers.renamed(self.names[node], layer, -1)
            if node not in self.place:
                return (node.name,)
            backward, other, offset = self.place[node]
            return backward, other - layer, offset

        return repr(map_arg(item, described))

    # the further layers ------------------------------------------------------------------------------------

    def _add_holders(self) -> None:
        """Add placeholders of the weights that the trace did not have."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            for name in (*self.parameters, *self.buffers):
                layer = self.layers.layer_of(name)
                if name not in self.holders:
                    if layer is None:
                        raise NotRepeatedError(f"{name} was not traced")
                    holder = self.graph.placeholder(f"further_{len(self.holders)}")
                    holder.meta = dict(self.holders[self.layers.renamed(name, layer, _TEMPLATE)].meta)
                    self.holders[name] = holder
        if self.holders.keys() != {*self.parameters, *self.buffers}:
            raise NotRepeatedError("weights were traced that the model does not have")

    def _copy(self, backward: bool, layer: int) -> None:
        """Add the nodes of a further layer."""
        copies = self.parts[backward, layer + TRACED] = []  # beside those of the trace
        for node in self.parts[backward, _TEMPLATE]:
            args, kwargs = self._moved((node.args, node.kwargs), _TEMPLATE, layer)
            copies.append(self.graph.create_node(node.op, node.target, args, kwargs))
            copies[-1].meta = dict(node.meta)
            self._move_scope(copies[-1], _TEMPLATE, layer)

    def _at(self, backward: bool, layer: int, offset: int) -> Node:
        """Return a node of a layer of the whole model."""
        if layer > self.end:
            raise NotRepeatedError("a layer reads one behind the last one")
        traced = _LAST if layer == self.end else layer if layer < _LAST else layer + TRACED
        return self.parts[backward, traced][offset]

    def _moved(self, item: Any, layer: int, place: int) -> Any:
        """Return arguments of a node of a traced layer, for a layer of the whole model."""

        def moved(node: Node) -> Node:
            if node in self.names:
                return self.holders[self.layers.renamed(self.names[node], layer, place)]
            if node not in self.place:
                return node
            backward, other, offset = self.place[node]
            return self._at(backward, other - layer + place, offset)

        return map_arg(item, moved)

    def _move_scope(self, node: Node, layer: int, place: int) -> None:
        custom = node.meta.get("custom") or {}
        inside = self.layers.layer_of(_scope(node))
        if inside is not None:
            scope = self.layers.renamed(_scope(node), inside, inside - layer + place)
            node.meta["custom"] = {**custom, "scope": scope.partition(".")[2]}

    def _outputs(self) -> tuple[list[Node | None], dict[str, int], dict[Node, int]]:
        """Return what the graph returns, with the gradients and new values of weights of all layers."""
        output = next(iter(self.graph.find_nodes(op="output")))
        returned = [*output.args[0]]
        places, own = list[dict[str, int]](), set[int]()
        for known in (self.joint.gradients, {self.names[n]: p for n, p in self.joint.mutated.items()}):
            found = dict(known)
            for name, place in known.items():
                if self.layers.renamed(name, _TEMPLATE, -1) == name or name not in self.holders:
                    continue
                first, last = (
                    self.layers.renamed(name, _TEMPLATE, layer) for layer in (_TEMPLATE - 1, _LAST)
                )
                if not {first, last} <= known.keys():
                    continue
                texts = [
                    self._described(returned[known[each]], layer)
                    for each, layer in ((first, _TEMPLATE - 1), (name, _TEMPLATE))
                ]
                if texts[0] != texts[1]:
                    raise NotRepeatedError(f"what becomes of {first} and {name} differs")
                found[self.layers.renamed(name, _TEMPLATE, self.end)] = known[last]
                for layer in range(_LAST, self.end):
                    found[self.layers.renamed(name, _TEMPLATE, layer)] = len(returned)
                    returned.append(self._moved(returned[place], _TEMPLATE, layer))
            layers, traced = self.layers, range(TRACED)
            own |= {known[n] for n in known if any(layers.renamed(n, at, -1) != n for at in traced)}
            places.append(found)
        for position, node in enumerate(output.args[0]):
            if position not in own and 0 < self.place.get(node, (False, 0, 0))[1] < _LAST:
                raise NotRepeatedError(f"{node}, which is returned, is of a layer between")
        gradients, written = places
        order = [name for name in (*self.parameters, *self.buffers) if name in written]
        return returned, gradients, {self.holders[name]: written[name] for name in order}


def _scope(node: Node) -> str:
    """Return the path of the module that a node was traced in, in the objective."""
    return f"model.{(node.meta.get('custom') or {}).get('scope', '')}"
