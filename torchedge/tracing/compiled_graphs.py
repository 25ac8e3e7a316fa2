"""Graphs that `torch.compile` passes to a backend: traced with their backward, split into segments."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchedge.errors import InputError
from torchedge.storage.locks import PROCESS
from torchedge.tracing.decompositions import FUSED_LAYERS, base_name, decompositions
from torchedge.tracing.joint_graphs import plain_kernels, tracing
from torchedge.tracing.random_numbers import RANDOM


@dataclass(frozen=True)
class Segment:
    """Operators of a graph that all run on the device, or all in PyTorch, as a graph of their own.

    inputs, outputs: names of the whole graph's nodes, in the order of the segment's placeholders and results.
    lowered: True to run on the device, False to run in PyTorch.
    """

    module: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lowered: bool


@dataclass(frozen=True)
class Results:
    """Names of a graph's placeholders, and of the tensors that it returns (None: no tensor).

    forms: of each returned tensor, a fake one of its shape and strides.
    """

    placeholders: tuple[str, ...]
    returned: tuple[str | None, ...]
    forms: Mapping[str, torch.Tensor]


def results_of(module: GraphModule) -> Results:
    """Return the placeholders and the returned tensors of a graph."""
    nodes = [node if isinstance(node, Node) and _is_tensor(node) else None for node in _returned(module)]
    return Results(
        tuple([node.name for node in module.graph.find_nodes(op="placeholder")]),
        tuple([None if node is None else node.name for node in nodes]),
        {node.name: node.meta["val"] for node in nodes if node is not None},
    )


def seconds_in_pytorch(module: GraphModule, inputs: Sequence[torch.Tensor]) -> float | None:
    """Return the least time of three runs of a graph in PyTorch; None for one that writes to its inputs."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    if any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets):
        return None
    times = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for _ in range(3):
            begun = perf_counter()
            module(*inputs)
            times.append(perf_counter() - begun)
    return min(times)


def split_graph(module: GraphModule, runs_in_pytorch: Callable[[Node], bool]) -> list[Segment]:
    """Return the segments of a graph in the order in which they run, as few as its dependencies allow.

    runs_in_pytorch: a predicate of operators. Each segment computes the constants that it reads again.
    """
    level: dict[Node, int] = {}
    constant = _constants(module)
    for node in module.graph.nodes:
        if node.op == "call_function" and node not in constant:
            before = [level[n] for n in node.all_input_nodes if n in level]
            place = max(before, default=0)
            if node.target is not operator.getitem:
                place += (place % 2) != runs_in_pytorch(node)
            level[node] = place
    if not level:
        level = dict.fromkeys(constant, 0)
    wanted = {r for r in _returned(module) if isinstance(r, Node)}
    segments: list[Segment] = []
    for place in sorted(set(level.values())):
        members = [n for n in level if level[n] == place]
        read = {n for n in members if any(level.get(user, place) != place for user in n.users)}
        results = wanted & {*members, *([] if segments else constant)}
        segments.append(_segment(module, members, constant, read | results, place % 2 == 0))
    return segments


def single_operators(module: GraphModule) -> Iterator[tuple[Node, Segment]]:
    """Yield each operator of a graph with a segment of that operator alone."""
    constant = _constants(module)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and node not in constant:
            parts = [user for user in node.users if user.target is operator.getitem]
            yield node, _segment(module, [node, *parts], constant, {*(parts or [node])}, True)


def operator_name(node: Node) -> str:
    """Return an operator's name as users know it, such as "aten.topk"."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).replace("::", ".")
    return str(getattr(target, "__name__", target))


def _returned(module: GraphModule) -> Sequence[Any]:
    returned: Any = next(iter(module.graph.find_nodes(op="output"))).args[0]
    return returned if isinstance(returned, (tuple, list)) else [returned]


def _constants(module: GraphModule) -> dict[Node, None]:
    """Return the nodes that depend on constants alone and draw no numbers."""
    constant: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and _is_constant(node, constant)):
            constant[node] = None
    return constant


def _is_constant(node: Node, constant: Collection[Node]) -> bool:
    target = node.target
    if target is not operator.getitem:
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return False
        kind = base_name(target)
        if kind in RANDOM or torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            return False
    return all(source in constant for source in node.all_input_nodes)


def _segment(
    module: GraphModule,
    members: Sequence[Node],
    constant: Collection[Node],
    wanted: Collection[Node],
    lowered: bool,
) -> Segment:
    """Return the graph of some nodes; the values that they read become placeholders, constants are copied."""
    graph, inside = Graph(), set(members)
    copies: dict[Node, Node] = {}
    outside = dict.fromkeys(s for n in members for s in n.all_input_nodes if s not in inside)
    inputs = [n for n in outside if n not in constant]
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta

    def copied(node: Node) -> Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in members:
        copied(node)
    outputs = [n for n in module.graph.nodes if n in wanted and _is_tensor(n)]
    graph.output(tuple([copied(n) for n in outputs]))
    return Segment(
        GraphModule(module, graph), tuple([n.name for n in inputs]), tuple([n.name for n in outputs]), lowered
    )


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view of a tensor: size, strides, and offset behind the tensor's own."""


def _without_tokens(module: GraphModule) -> GraphModule:
    """Return a copy of a graph that calls operators with effects without the tokens that order them."""
    from torch._higher_order_ops.effects import with_effects

    graph, copies = Graph(), dict[Node, Any]()
    for node in module.graph.nodes:
        if node.target is with_effects:
            _, target, *args = node.args
            args, kwargs = map_arg((tuple(args), node.kwargs), copies.__getitem__)
            copies[node] = graph.call_function(target, args, kwargs)
            results = tuple(node.meta["val"][1:])  # behind the token; a tuple of several, or the only one
            value = results if len(results) > 1 else next(iter(results), None)
            copies[node].meta = {**node.meta, "val": value}
        elif node.target is operator.getitem and node.args[0].target is with_effects:
            call, place = node.args
            several = isinstance(copies[call].meta["val"], tuple)
            if place == 0:
                copies[node] = None
            elif several:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].args = (copies[call], place - 1)
            else:
                copies[node] = copies[call]
        elif node.op == "output":
            graph.output(map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(module, graph)


def _returning_storages(module: GraphModule, returned: int) -> list[View | None]:
    """Let a graph return the tensors that its first results are views of; return the views.

    That holds for results that share a storage, as they do in eager PyTorch, and for those of which several
    elements lie in one place (expanded ones): their storages are copied from the device once.
    """
    output = next(iter(module.graph.find_nodes(op="output")))
    leaves = [n if isinstance(n, Node) and _is_tensor(n) else None for n in _returned(module)]
    owners: dict[object, Node] = {}
    for node in module.graph.nodes:
        if _is_tensor(node):
            owners.setdefault(_storage(node), node)
    sharing = Counter([_storage(n) for n in dict.fromkeys(leaves[:returned]) if n is not None])
    views: list[View | None] = [None] * len(leaves)
    for place, node in enumerate(leaves[:returned]):
        if node is None or not (sharing[_storage(node)] > 1 or _overlaps(node.meta["val"])):
            continue
        view, owner = node.meta["val"], owners[_storage(node)]
        offset = view.storage_offset() - owner.meta["val"].storage_offset()
        views[place], leaves[place] = (tuple(view.shape), view.stride(), offset), owner
    if any(views):
        output.args = (
            tuple([old if new is None else new for old, new in zip(_returned(module), leaves, strict=True)]),
        )
        for node in reversed(module.graph.nodes):
            view = _is_tensor(node) and owners[_storage(node)] is not node
            if view and node.op == "call_function" and not node.users:
                module.graph.erase_node(node)
    return views


def _storage(node: Node) -> object:
    """Return what is equal for tensors of one storage that read its bytes alike."""
    tensor = node.meta["val"]
    if tensor.layout is not torch.strided:
        return node
    # The storage itself is not hashable, and its number stays its own while the tensor lives.
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(not step and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


Part = Literal["forward", "backward", "inference"]
Run = Callable[[list[Any]], list[Any]]
"""Runs a traced graph: from the values of its placeholders, a list that it empties, to its results."""


@dataclass(frozen=True)
class TracedGraph:
    """One graph to run: functional operators of concrete shapes, as in `meta["val"]` of its nodes.

    returned: the number of its results that the model returns. The other results of a forward are saved for
    the backward, which receives them unchanged. views: for each result what to return of it, None: all.
    """

    module: GraphModule
    part: Part
    returned: int
    views: Sequence[View | None]


def compile_with_backward(
    module: GraphModule,
    examples: Sequence[Any],
    make: Callable[[TracedGraph], Run],
    keep: Collection[str] = (),
) -> Callable[..., Any]:
    """Trace a graph of Dynamo, and its backward if a gradient is required; `make` turns each into a function.

    examples: the module's arguments, real or fake. keep: ATen base names of operators not to decompose.
    Returns a function of the module's arguments that takes part in autograd.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for example in examples:
        if isinstance(example, torch.Tensor) and example.device.type != "cpu":
            raise InputError(
                f"the model or its input is on {example.device}; the torchedge backend takes tensors in main "
                "memory and keeps its own copies on the OpenCL device: call .cpu() on both"
            )
    returned: list[int] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        returned.append(num_fwd_outputs)
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def compiler(part: Part) -> Callable[[GraphModule, Sequence[Any]], Run]:
        def compiled(traced: GraphModule, inputs: Sequence[Any]) -> Run:
            module = _without_tokens(traced)
            results = returned[-1] if part == "forward" else len(_returned(module))
            run = make(TracedGraph(module, part, results, _returning_storages(module, results)))

            def boxed(args: list[Any]) -> list[Any]:
                return run(args)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiled

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions={**decompositions(keep), **FUSED_LAYERS},
    )
    with PROCESS, plain_kernels(), _kept_for_every_backward(), tracing(seen=False):
        runner: Callable[..., Any] = backend(module, examples)
    return runner


def allow_recurrent_modules() -> None:
    """Let Dynamo capture nn.RNN, nn.LSTM and nn.GRU, which run in eager PyTorch by default.

    Dynamo has no setting for one backend or one compilation: this one is valid for the thread and every
    backend.
    """
    import torch._dynamo

    if hasattr(torch._dynamo.config, "allow_rnn"):
        torch._dynamo.config.allow_rnn = True


def is_symbolic(examples: Sequence[Any]) -> bool:
    """Return whether an argument is a symbol or a tensor with a symbolic size or stride."""
    return any(
        isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool))
        or (
            isinstance(example, torch.Tensor)
            and any(not isinstance(size, int) for size in (*example.shape, *example.stride()))
        )
        for example in examples
    )


@contextmanager
def fresh_tracing(examples: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield fake tensors of the arguments' shapes, for a new trace outside of any compilation."""
    from torch import _guards
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_guards.tracing(_guards.TracingContext(mode)))
        yield [
            mode.from_tensor(e, static_shapes=True) if isinstance(e, torch.Tensor) else e for e in examples
        ]


@contextmanager
def _kept_for_every_backward() -> Iterator[None]:
    """Disable buffer donation, so that `backward(retain_graph=True)` can run again."""
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        yield
