"""Graphs of ATen operators that PyTorch traced, as values and operators of a Step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from torchedge.errors import CaptureError, described
from torchedge.graphs.graph import Op, Role
from torchedge.graphs.steps import GraphBuilder, Ref, Step
from torchedge.tracing.decompositions import base_name
from torchedge.tracing.plain_tensors import content_of
from torchedge.tracing.random_numbers import RANDOM, Randomness
from torchedge.tracing.recorder import DTYPE_NAMES

Attributes = dict[str, Any]
_Rule = Callable[[Attributes, tuple[int, ...], tuple[int, ...]], Attributes]


def canonical(kind: str, attrs: Attributes, source: tuple[int, ...], result: tuple[int, ...]) -> Attributes:
    """Return the attributes with sizes of the result, dimensions from 0 on, and bounds within the source.

    source: shape of the argument `input` (of the first tensor, for `cat`). result: shape of the result.
    """
    rule = _RULES.get(kind)
    return attrs if rule is None else {**attrs, **rule(attrs, source, result)}


def _dim(attrs: Attributes, source: tuple[int, ...], result: tuple[int, ...]) -> Attributes:
    return {"dim": attrs.get("dim", 0) % max(len(source), 1)}


def _squeeze(attrs: Attributes, source: tuple[int, ...], result: tuple[int, ...]) -> Attributes:
    dim = attrs.get("dim", tuple(range(len(source))))
    dims = dim if isinstance(dim, tuple) else (dim,)
    return {"dim": tuple(sorted({d % len(source) for d in dims if source[d] == 1})) if source else ()}


def _reduction(attrs: Attributes, source: tuple[int, ...], result: tuple[int, ...]) -> Attributes:
    dim = attrs.get("dim")
    dims = dim if isinstance(dim, tuple) else () if dim is None else (dim,)
    everything = tuple(range(len(source)))
    return {"dim": tuple(sorted(d % len(source) for d in dims)) if dims and source else everything}


def _slice(attrs: Attributes, source: tuple[int, ...], result: tuple[int, ...]) -> Attributes:
    dim = int(attrs.get("dim", 0)) % len(source)
    step = int(attrs.get("step", 1))
    start, end, _ = slice(attrs.get("start"), attrs.get("end"), step).indices(source[dim])
    return {"dim": dim, "start": start, "end": max(start, end), "step": step}


def _select(attrs: Attributes, source: tuple[int, ...], result: tuple[int, ...]) -> Attributes:
    dim = attrs["dim"] % len(source)
    return {"dim": dim, "index": attrs["index"] % source[dim]}


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("view", "expand"), lambda attrs, source, result: {"size": result}),
    "permute": lambda attrs, source, result: {"dims": tuple([d % len(source) for d in attrs["dims"]])},
    "unsqueeze": lambda attrs, source, result: {"dim": attrs["dim"] % len(result)}, "squeeze": _squeeze,
    "slice": _slice, "slice_scatter": _slice, "select": _select, "select_scatter": _select, "cat": _dim,
    "_softmax": _dim, "_log_softmax": _dim, "_safe_softmax": _dim, "index_select": _dim, "gather": _dim,
    "scatter": _dim, "scatter_add": _dim, "sum": _reduction, "mean": _reduction, "amax": _reduction,
    "amin": _reduction, "var": _reduction, "var_mean": _reduction,
}  # fmt: skip


_SAME = frozenset(("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"))
"""Operators whose result equals their input in a functional graph."""
_SHAPING = frozenset(("expand", "squeeze", "unsqueeze", "view"))
_RENAMED = {"_unsafe_view": "view", "reshape": "view"}
_PLACES = frozenset(("memory_format", "device", "layout", "pin_memory", "non_blocking"))
_CHECKS = frozenset(
    ("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range_for_size")
)
_LIKE = frozenset(
    (
        "empty", "empty_like", "empty_permuted", "empty_strided", "full_like", "new_empty", "new_full",
        "new_ones", "new_zeros", "ones_like", "zeros_like",
    )
)  # fmt: skip
"""Operators that read at most the shape and dtype of their input; an empty tensor holds zeros."""
_LARGEST_CONSTANT = 1 << 20
"""A node that depends on constants alone is computed during capture up to this number of elements."""


def step_of(
    module: GraphModule, inputs: Sequence[tuple[str, Role]], *, name: str = "graph"
) -> tuple[Step, dict[str, torch.Tensor]]:
    """Return the Step that a GraphModule of functional ATen operators computes, and its constants by name.

    module: its nodes carry fake tensors of concrete shapes in `meta["val"]`, as AOTAutograd leaves them.
    inputs: name and role of each placeholder, in order; those of role "input" are the step's inputs. The
    step's outputs are the tensors that the module returns, in order, without None.
    Raises CaptureError if a node cannot become part of a Step.
    """
    builder, constants = GraphBuilder(), dict[str, torch.Tensor]()
    randomness = Randomness(builder, 0)
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    bound = {
        node: builder.add(title, *form_of(node), role=role)
        for node, (title, role) in zip(holders, inputs, strict=True)
    }
    returned = add_nodes(builder, module, bound, constants, randomness)
    step = builder.finish(
        [i for i in bound.values() if builder.values[i].role == "input"],
        [i for i in returned if i is not None],
        updates=randomness.updates(),
        initial=randomness.initial,
        name=name,
    )
    names = {value.name for value in step.values}
    return step, {key: tensor for key, tensor in constants.items() if key in names}


def add_nodes(
    builder: GraphBuilder,
    module: GraphModule,
    bound: Mapping[Node, int | torch.Tensor],
    constants: dict[str, torch.Tensor],
    randomness: Randomness,
) -> list[int | None]:
    """Add a module's operators to a graph; returns the values of its results, None for None.

    bound: the value of each placeholder, or the constant it stands for. constants: receives the tensors of
    the graph's values of role "constant", by their names.
    """
    conversion = _Conversion(builder, module, constants, randomness)
    returned: list[int | None] = conversion.run(initial_env=dict(bound), enable_io_processing=False)
    return returned


def scope_of(node: Node) -> str:
    """Return the path of the module that a node was traced in, "" if its metadata names none.

    AOTAutograd of a step leaves the path in `custom`, also at nodes of the backward; torch.export and Dynamo
    leave a stack of modules.
    """
    custom = node.meta.get("custom") or {}
    if "scope" in custom:
        return str(custom["scope"])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and isinstance(entry[0], str)]
    return paths[-1] if paths else ""


def form_of(node: Node, tensor: Any = None) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of a node's tensor; raises CaptureError unless a Graph allows both."""
    tensor = node.meta.get("val") if tensor is None else tensor
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPE_NAMES:
        raise CaptureError(
            f"{node.target} makes a {getattr(tensor, 'dtype', type(tensor).__name__)}; "
            "expected a tensor of a dtype that a graph may hold"
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{node.target} makes a tensor of layout {tensor.layout}; expected dense tensors "
            "(an embedding with sparse=True: set it to False)"
        )
    if any(not isinstance(size, int) for size in tensor.shape):
        raise CaptureError(
            f"{node.target} makes a tensor of the symbolic shape {tuple(tensor.shape)}; "
            "capture for one fixed input shape (dynamic=False)"
        )
    return tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]


class _Conversion(Interpreter):
    """Converts the nodes of a module to values and operators of a graph.

    env: for each node its value in the graph, a list of values for several results, or the tensors of a node
    that depends on constants alone. Such a tensor becomes a value when an operator on other values reads it.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        module: GraphModule,
        constants: dict[str, torch.Tensor],
        randomness: Randomness,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.builder, self.constants, self.randomness = builder, constants, randomness
        self.stored: dict[Node, int] = {}
        self.alike: dict[tuple[Any, ...], int] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            returned = n.args[0] if isinstance(n.args[0], (tuple, list)) else [n.args[0]]
            return [self._value(item) if isinstance(item, Node) else None for item in returned]
        if n.op == "get_attr":
            return self._attribute(n)
        if n.op == "placeholder":  # not bound, and not read
            return None
        if n.target is operator.getitem:
            source, place = n.args
            return self.env[source][place]  # type: ignore[index]
        constant = self._computed(n)
        return self._operator(n, _overload(n)) if constant is None else constant

    def _attribute(self, node: Node) -> torch.Tensor:
        tensor: Any = operator.attrgetter(str(node.target))(self.module)
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"the traced graph holds {node.target}, a {type(tensor).__name__}: control flow that depends "
                "on values cannot be captured; make it a torch.where or an argument"
            )
        return tensor.detach()

    def _computed(self, node: Node) -> Any:
        """Return the tensors of a node that depends on constants alone, None for another or a large one."""
        target, traced = _overload(node), node.meta.get("val")
        kind = base_name(target)
        tensors = traced if isinstance(traced, (tuple, list)) else [traced]
        if kind in _LIKE and isinstance(traced, torch.Tensor):
            fill: Any = node.args[-1] if "full" in kind else int("ones" in kind)
            return torch.full((), fill, dtype=traced.dtype).expand(form_of(node)[0])
        if (
            not all(isinstance(self.env[n], torch.Tensor) for n in node.all_input_nodes)
            or kind in RANDOM
            or not all(isinstance(t, torch.Tensor) and t.numel() <= _LARGEST_CONSTANT for t in tensors)
        ):
            return None
        if kind == "native_dropout" or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        as_read = _as_traced if kind.startswith("as_strided") else lambda n, known: known
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: as_read(n, self.env[n]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes(), torch.no_grad():
            return target(*args, **kwargs)

    def _operator(self, node: Node, target: torch._ops.OpOverload) -> Any:
        kind = base_name(target)
        if kind in _CHECKS:
            return None
        attrs = self._attributes(node, target)
        traced: Any = node.meta.get("val")
        if kind == "native_dropout":
            return self.randomness.add_dropout(attrs, form_of(node, traced[0]), scope_of(node))
        if not isinstance(traced, torch.Tensor):
            if not isinstance(traced, (tuple, list)):
                raise CaptureError(
                    f"the traced graph's {kind} returns {described(traced)}; expected tensors of concrete "
                    "shapes (dynamic=False)"
                )
            mask = attrs.get("output_mask", (True,) * len(traced))
            present = [i for i, (t, on) in enumerate(zip(traced, mask, strict=True)) if on and t is not None]
            forms = [form_of(node, traced[i]) for i in present]
            outputs = dict(
                zip(present, self.builder.call(kind, attrs, forms, scope=scope_of(node)), strict=True)
            )
            return [outputs.get(i) for i in range(len(traced))]
        form = form_of(node)
        if kind in RANDOM:
            return self.randomness.add(kind, attrs, form, scope_of(node))
        return self._one(node, _RENAMED.get(kind, kind), attrs, form)

    def _one(self, node: Node, kind: str, attrs: dict[str, Any], form: tuple[tuple[int, ...], str]) -> int:
        """Add an operator of one result, unless it changes nothing."""
        if kind in ("as_strided", "as_strided_scatter"):
            kind, attrs = _without_strides(node, kind, attrs)
        first = attrs.get("input", next(iter(attrs.get("tensors", ())), None))
        shape: tuple[Any, ...] = self.builder.values[first.value].shape if isinstance(first, Ref) else ()
        attrs = canonical(kind, attrs, shape, form[0])
        if kind in ("view", "permute"):
            attrs = self._past_views(kind, attrs)
        source = attrs.get("input")
        if isinstance(source, Ref):
            value = self.builder.values[source.value]
            shaping = kind in _SHAPING | {"_to_copy"} or (
                kind == "permute" and attrs["dims"] == tuple(range(len(form[0])))
            )
            if kind in _SAME or (shaping and (value.shape, value.dtype) == form):
                return source.value
        return self.builder.call(kind, attrs, [form], scope=scope_of(node))[0]

    def _past_views(self, kind: str, attrs: dict[str, Any]) -> dict[str, Any]:
        """Merge a view of a view into one view, and a permutation of a permutation into one permutation."""
        maker = self.builder.maker(attrs["input"].value)
        while kind == "view" and maker is not None and maker.kind in ("view", "squeeze", "unsqueeze"):
            attrs = {**attrs, "input": Ref(_read(maker))}
            maker = self.builder.maker(_read(maker))
        if kind == "permute" and maker is not None and maker.kind == "permute":
            inner = maker.attrs["dims"]
            return {"input": Ref(_read(maker)), "dims": tuple([inner[d] for d in attrs["dims"]])}
        return attrs

    def _attributes(self, node: Node, target: torch._ops.OpOverload) -> dict[str, Any]:
        names = [a.name for a in target._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return {
            "input" if name == "self" else name: self._plain(node, item)
            for name, item in arguments.items()
            if item is not None and name not in _PLACES
        }

    def _plain(self, node: Node, item: Any) -> Any:
        if isinstance(item, Node):
            value = self._value(item)
            if isinstance(value, int):
                return Ref(value)
            raise CaptureError(
                f"{node.target} reads {item.target}, which makes no tensor of a concrete shape; "
                "capture for one fixed input shape"
            )
        if isinstance(item, (tuple, list)):
            return tuple([self._plain(node, entry) for entry in item])
        if isinstance(item, torch.dtype):
            return DTYPE_NAMES[item]
        if item is None or isinstance(item, (bool, int, float, complex, str)):
            return item
        raise CaptureError(
            f"{node.target} takes a {type(item).__name__} as argument; expected tensors, numbers and their "
            "lists, of concrete shapes (dynamic=False)"
        )

    def _value(self, node: Node) -> Any:
        """Return the value of a node; a known tensor becomes a `full` or a constant now."""
        item = self.env[node]
        if not isinstance(item, torch.Tensor):
            return item
        if node not in self.stored:
            self.stored[node] = self._constant(f"constant.{node.name}", item, *form_of(node, item))
        return self.stored[node]

    def _constant(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> int:
        """Add a known tensor: as a `full`, an `arange` or a constant, expanded along equal slices.

        Tensors of the same content are one constant.
        """
        core = _without_repeats(tensor)
        if core.numel() <= 1:
            number = core.item() if core.numel() else 0
            attrs = {"size": shape, "fill_value": number, "dtype": dtype}
            return self.builder.call("full", attrs, [(shape, dtype)])[0]
        steps = _steps_of(core)
        if steps is not None:
            form = (tuple(core.shape), dtype)
            index = self.builder.call("arange", {**steps, "dtype": dtype}, [form])[0]
        else:
            index = self._stored(name, core, dtype)
        if core.shape == tensor.shape:
            return index
        return self.builder.call("expand", {"input": Ref(index), "size": shape}, [(shape, dtype)])[0]

    def _stored(self, name: str, core: torch.Tensor, dtype: str) -> int:
        content = content_of(core)
        index = self.alike.get(content)
        if index is None:
            index = self.alike[content] = self.builder.add(name, tuple(core.shape), dtype, "constant")
            self.constants[self.builder.values[index].name] = core.contiguous()
        return index


def _read(op: Op) -> int:
    index = op.inputs[0]
    assert index is not None
    return index


def _as_traced(node: Node, tensor: torch.Tensor) -> torch.Tensor:
    """Return a known tensor with the strides that it had in the trace."""
    traced = node.meta.get("val", tensor)
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype).copy_(tensor)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with size 1 along each dimension in which all its slices are equal."""
    for dim, size in enumerate(tensor.shape):
        if size > 1 and bool((tensor == tensor.narrow(dim, 0, 1)).all()):
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _steps_of(tensor: torch.Tensor) -> dict[str, int] | None:
    """Return start, end and step of whole numbers that are equally far apart; None: of other tensors."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return None
    start, second = tensor[:2].tolist()
    step = second - start
    if max(abs(start), abs(start + step * len(tensor))) >= 1 << 31:
        return None
    if not bool((tensor == torch.arange(len(tensor), device=tensor.device) * step + start).all()):
        return None
    return {"start": start, "end": start + step * len(tensor), "step": step}


def _overload(node: Node) -> torch._ops.OpOverload:
    """Return the ATen operator that a node calls; raises CaptureError for another target."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise CaptureError(
            f"the traced graph calls {getattr(target, '__name__', target)}, which is no ATen operator; "
            "expected a functional graph of ATen operators with concrete shapes (dynamic=False)"
        )
    if target._schema.is_mutable:
        raise CaptureError(
            f"the traced graph calls {target}, which writes to its input; expected a functional graph"
        )
    return target


def _without_strides(node: Node, kind: str, attrs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return `as_strided` as a view if it only reshapes a dense tensor; else raise CaptureError."""
    source, size = node.args[0], attrs["size"]
    tensor = source.meta["val"] if isinstance(source, Node) else None
    dense = torch.empty(size, device="meta").stride()
    whole = (
        isinstance(tensor, torch.Tensor)
        and tensor.is_contiguous()
        and tensor.numel() == torch.Size(size).numel()
    )
    relevant = [(a, b) for a, b, n in zip(attrs["stride"], dense, size, strict=True) if n != 1]
    if not whole or attrs.get("storage_offset") or any(a != b for a, b in relevant):
        raise CaptureError(
            f"the model reads a tensor through strides ({kind} of size {size}, strides {attrs['stride']}); "
            "expected views, slices and unfold"
        )
    return "view", {"input": attrs["input"] if kind == "as_strided" else attrs["src"]}
