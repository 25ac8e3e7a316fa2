"""Forward and backward of a module as one ATen graph, by AOTAutograd on fake tensors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
import torch.fx.traceback
from torch._decomp import decompositions as rules
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import TorchFunctionMetadataMode
from torch.nn import _reduction
from torch.nn import functional as F
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from torchedge.errors import CaptureError
from torchedge.storage.locks import PROCESS
from torchedge.tracing.copies import is_library, where
from torchedge.tracing.decompositions import Table, base_name
from torchedge.tracing.grid_sampling import grid_sample, grid_sampler
from torchedge.tracing.quantizing import DEQUANTIZED, dequantized, whole_weights
from torchedge.tracing.torch_calls import called_function, for_users_alone, imported, patches

LOSS_SCOPE = "loss"


@dataclass(frozen=True)
class JointGraph:
    """The graph that AOTAutograd traced from a module, and the meaning of its placeholders and results.

    parameters, buffers: name by placeholder. inputs: placeholders of the arguments, None where an argument
    has none. tangents: placeholders of the gradients at results, each with the position of the output that it
    belongs to, None for a parameter that the module writes. outputs: positions of the outputs among the
    graph's results. mutated: position of the new value, by the placeholder that it replaces. gradients:
    position by the parameter's name.
    """

    module: GraphModule
    parameters: Mapping[Node, str]
    buffers: Mapping[Node, str]
    inputs: tuple[Node | None, ...]
    tangents: Mapping[Node, int | None]
    outputs: tuple[int, ...]
    mutated: Mapping[Node, int]
    gradients: Mapping[str, int]


def trace_joint(
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    table: Table,
    *,
    gradients: bool,
    traced: Callable[[], None] = lambda: None,
) -> JointGraph:
    """Trace `module(*tensors)`, and its backward if asked for; nothing is computed.

    tensors: fake ones. The module's parameters and buffers are fake too (`faked`). traced: is called at the
    end, while the module is still as it was during the trace.
    """
    try:
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    except ImportError as error:
        raise CaptureError(
            f"torch {torch.__version__} cannot export joint graphs; a training step needs torch 2.9 or newer"
        ) from error
    with ExitStack() as stack:
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(_scopes(module))
        stack.enter_context(plain_kernels())
        stack.enter_context(tracing(seen=True))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(whole_weights())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(tensors), decompositions=table)
        traced()
    _expand_weights(joint.graph_module, table)
    return _described(joint.graph_module, len(tensors))


class _Weight(torch.nn.Module):
    """A quantised weight by its parts. form: what follows its tensors among the arguments."""

    def __init__(self, form: Sequence[Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the matrix."""
        packed, scale, *zero = tensors
        return dequantized(packed, scale, zero[0] if zero else None, *self.form)


_expansions: dict[Any, Graph] = {}
"""Graphs of the parts of weights, by their forms and the decompositions; at most `_MOST_EXPANSIONS`."""
_MOST_EXPANSIONS = 256


def _expand_weights(module: GraphModule, table: Table) -> None:
    """Replace each node of a quantised weight by those of its parts."""
    decomposed = frozenset(table)
    found = module.graph.find_nodes(op="call_function", target=DEQUANTIZED)
    for node in found:
        tensors = [item for item in node.args[:3] if item is not None]
        forms = [(tuple(t.meta["val"].shape), t.meta["val"].dtype) for t in tensors]
        key = repr((forms, node.args[3:])), decomposed
        if key not in _expansions:
            if len(_expansions) == _MOST_EXPANSIONS:
                _expansions.clear()
            with FakeTensorMode():
                fakes = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
            _expansions[key] = trace_joint(_Weight(node.args[3:]), fakes, table, gradients=False).module.graph
        env: dict[Node, Node] = {}
        waiting = iter(tensors)
        for part in _expansions[key].nodes:
            if part.op == "placeholder":
                env[part] = next(waiting)
            elif part.op == "output":
                node.replace_all_uses_with(env[part.args[0][0]])
            else:
                with module.graph.inserting_before(node):
                    env[part] = module.graph.node_copy(part, env.__getitem__)
                env[part].meta = {**node.meta, "val": part.meta["val"]}
        module.graph.erase_node(node)
    if found:  # constants are named after nodes, as in a trace of the parts
        names = Counter[str]()
        for node in module.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                name = base_name(node.target)
                node.name = f"{name}_{names[name]}" if names[name] else name
                names[name] += 1


@contextmanager
def faked(
    module: torch.nn.Module, trained: Collection[int], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[FakeTensorMode, list[torch.Tensor]]]:
    """Replace a module's parameters and buffers, on any device, by fake CPU tensors.

    trained: the ids of the parameters that require a gradient. Yields the mode, and fakes of more tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                stand_in = torch.nn.Parameter(stand_in, requires_grad=id(tensor) in trained)
            fakes[id(tensor)] = stand_in
        return fakes[id(tensor)]

    # Every place of a tensor, but a module that stands in several places only once: each place is put back.
    places = [
        (f"{prefix}.{name}".removeprefix("."), tensor)
        for prefix, inner in module.named_modules()
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None
    ]
    with mode:
        stand_ins = {name: fake(tensor) for name, tensor in places}
        fed = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors]
    with stateless._reparametrize_module(module, stand_ins):
        yield mode, fed


@contextmanager
def _scopes(module: torch.nn.Module) -> Iterator[None]:
    """Record at each node the path of the running module; AOTAutograd copies it to the backward."""
    path: list[str] = []

    def note() -> None:
        torch.fx.traceback.current_meta["custom"] = {"scope": path[-1] if path else LOSS_SCOPE}

    def enter(name: str, *args: Any) -> None:
        path.append(name)
        note()

    def leave(*args: Any) -> None:
        path.pop()
        note()

    with ExitStack() as hooks:
        for name, inner in module.named_modules():
            if name:
                begin = partial(enter, name.partition(".")[2])
                hooks.enter_context(inner.register_forward_pre_hook(begin, prepend=True))
                hooks.enter_context(inner.register_forward_hook(leave, always_call=True))
        yield


_FLAGS = [name for name in ("is_compiling", "is_exporting") if hasattr(torch.compiler, name)]
_tracing: list[int] = []
"""Threads that trace and see PyTorch compile and export, 0 for one that does not see it."""
_replaced: list[tuple[Any, str, Any]] = []
"""What traces replace for their time, and what was there."""


@contextmanager
def tracing(*, seen: bool) -> Iterator[None]:
    """Let other threads call compiled functions while this one traces.

    PyTorch's flags are those of the whole process. Under the one that FX traces, compiled functions of all
    threads are refused, unless PyTorch compiles: whoever asks about that flag hears that it does. seen: this
    thread sees that PyTorch compiles and exports; libraries then skip checks that read values.
    """
    thread = get_ident() if seen else 0
    with PROCESS:
        if not _tracing:
            for name in _FLAGS:
                _replace(torch.compiler, name, _answer(getattr(torch.compiler, name)))
            mode = TorchFunctionMetadataMode
            _replace(mode, "__torch_function__", _of_called(mode.__torch_function__))
            # PyTorch looks for the hint in the mask, which is added all the same.
            _replace(
                torch.nn.modules.transformer,
                "_detect_is_causal_mask",
                lambda mask, is_causal=None, size=None: is_causal is True,
            )
            for home, name, patch in patches():
                _replace(home, name, for_users_alone(patch, imported(home, name)))
                if home is torch.Tensor and name in vars(FunctionalTensor):  # it converts by itself
                    own = vars(FunctionalTensor)[name]
                    _replace(FunctionalTensor, name, for_users_alone(patch, own))
            call = torch.nn.Module.__call__
            if call.__globals__ is not vars(torch.fx._symbolic_trace):  # the wrapper of another trace
                _replace(torch.fx._symbolic_trace, "_orig_module_call", call)
        _tracing.append(thread)
    try:
        yield
    finally:
        with PROCESS:
            _tracing.remove(thread)
            while _replaced and not _tracing:
                setattr(*_replaced.pop())


def _replace(home: Any, name: str, item: Any) -> None:
    _replaced.append((home, name, vars(home)[name]))
    setattr(home, name, item)


def _answer(function: Callable[[], bool]) -> Callable[[], bool]:
    asking = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", None)

    @wraps(function)
    def answer() -> bool:
        by_fx = asking is not None and sys._getframe(1).f_code is asking.__code__
        return by_fx or get_ident() in _tracing or function()

    return answer


def _of_called(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the dispatch of a mode of PyTorch that calls what was called, not what is found by its name."""

    @wraps(original)
    def dispatch(
        self: TorchFunctionMode, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return original(self, called_function(func, sys._getframe(1)), types, args, kwargs)

    return dispatch


def plain_kernels() -> TorchFunctionMode:
    """Select implementations of attention, encoders and recurrent layers that use plain ATen operators.

    Resampling stays one operator: PyTorch would decompose it into reads at lists of places, whose gradients
    scatter. All in this thread alone: PyTorch's own switches are those of the whole process.
    """
    return _PlainKernels()


_RESAMPLING = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip
_PACKETS = [getattr(torch.ops.aten, name) for name in _RESAMPLING]
_RESAMPLING_CALLS = frozenset(
    [
        *[getattr(F, name) for name in ("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")],
        *[getattr(torch._C._nn, name) for name in _RESAMPLING],
        *_PACKETS,
        *[getattr(packet, overload) for packet in _PACKETS for overload in packet.overloads()],
    ]
)


def additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask of attention as scores to add: -inf where a bool is false, which operators add as 0."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), float("-inf"))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention by products, whatever fused kernels the device has."""
    attn_mask = additive_mask(attn_mask, query.dtype)
    if query.shape[-2] < key.shape[-2]:  # keys of a cache: the operator would write a scaled copy of them all
        query, scale = query * (query.shape[-1] ** -0.5 if scale is None else scale), 1.0
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


# PyTorch suspends a mode in the body of a Python function of its own: this copy calls the attention above.
_multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "scaled_dot_product_attention": _attention},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _lstm(
    source: torch.Tensor, states: Any, weights: Any, has_biases: bool, num_layers: int, *options: Any
) -> Any:
    """Compute torch.lstm of a batch by the operators of its steps, without oneDNN's fused layer."""
    weights = rules.gather_params(weights, has_biases, states[0].size(2) != states[1].size(2))
    layered: Any = rules._rnn_helper
    pairs = list(zip(*states, strict=True))
    output, last = layered(source, pairs, weights, has_biases, num_layers, *options, rules.one_layer_lstm)
    return output, *[torch.stack(parts, 0) for parts in zip(*last, strict=True)]


def _multilabel_margin(scores: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """Compute multilabel_margin_loss of (C) or (N, C); PyTorch's rule takes the padding of -1 for a class."""
    classes = scores.shape[-1]
    counted = (target < 0).long().cumsum(-1) == 0
    chosen = torch.where(counted, target, 0)
    margins = (1 - scores.gather(-1, chosen).unsqueeze(-1) + scores.unsqueeze(-2)).clamp_min(0)
    named = chosen.unsqueeze(-1) == torch.arange(classes, device=scores.device)
    others = (named & counted.unsqueeze(-1)).any(-2).logical_not()
    wanted = counted.unsqueeze(-1) & others.unsqueeze(-2)
    loss = torch.where(wanted, margins, torch.zeros_like(margins)).sum((-2, -1)) / classes
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _multilabel_margin_loss(
    scores: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return _multilabel_margin(scores, target, _reduction.get_enum(reduction))


def _rrelu(
    input: torch.Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """Compute `F.rrelu` by a draw for each slope."""
    slope: Any = (lower + upper) / 2
    if training:
        slope = torch.rand_like(input) * (upper - lower) + lower
    result = torch.where(input <= 0, input * slope, input)
    return input.copy_(result) if inplace else result


def _embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Compute `F.embedding_bag` by rows and their sums; bags of offsets have no maximum here."""
    if max_norm is not None or scale_grad_by_freq or sparse or (offsets is not None and mode == "max"):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
            per_sample_weights, include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts = torch.ones_like(input, dtype=rows.dtype).unsqueeze(-1)
    if padding_idx is not None:
        counts = (input != padding_idx % weight.shape[0]).to(rows.dtype).unsqueeze(-1)
    if mode == "max":
        least = rows.masked_fill(counts == 0, -torch.inf).max(1).values
        return torch.where(counts.sum(1) > 0, least, 0.0)
    if padding_idx is not None:
        rows = torch.where(counts > 0, rows, 0.0)
    if offsets is None:
        sums, counts = rows.sum(1), counts.sum(1)
    else:
        bags = offsets.shape[0] - include_last_offset
        places = torch.arange(input.shape[0], device=input.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:bags].contiguous(), places, right=True) - 1
        sums = rows.new_zeros((bags, rows.shape[1])).index_add(0, bag, rows)
        counts = rows.new_zeros((bags, 1)).index_add(0, bag, counts)
    return sums / counts.clamp(min=1) if mode == "mean" else sums


_PLAIN: dict[Any, Callable[..., Any]] = {
    F.rrelu: _rrelu,
    F.embedding_bag: _embedding_bag,
    F.grid_sample: grid_sample,
    torch.grid_sampler: grid_sampler,
    torch.ops.aten.grid_sampler: grid_sampler,
    torch.ops.aten.grid_sampler.default: grid_sampler,
    F.multilabel_margin_loss: _multilabel_margin_loss,
    torch._C._nn.multilabel_margin_loss: _multilabel_margin,
    F.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
}
_GET_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
_LSTMS = frozenset((torch.lstm, torch.ops.aten.lstm, torch.ops.aten.lstm.input))


class _PlainKernels(TorchFunctionMode):
    """Replace fused functions, in this thread alone.

    PyTorch's Python dispatcher would decompose resampling before autograd records an operator: it is off
    during the call. PyTorch's encoders take no fast path while a mode is active.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = called_function(func, sys._getframe(1))
        if func == _GET_GRADIENT and not is_library(sys._getframe(1)):
            raise CaptureError(
                f"the forward pass reads .grad{where()}: a captured step has no gradients of earlier steps; "
                "keep what it needs of them in a buffer"
            )
        if func in _LSTMS and len(args) == 9 and not isinstance(args[1], torch.Tensor):  # no packed sequence
            return _lstm(*args)
        with no_python_dispatcher() if func in _RESAMPLING_CALLS else nullcontext():
            return _PLAIN.get(func, func)(*args, **(kwargs or {}))


def _described(module: GraphModule, count: int) -> JointGraph:
    """Read the descriptors that AOTAutograd leaves at the placeholders and at the output node."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._higher_order_ops.effects import with_effects

    parameters: dict[Node, str] = {}
    buffers: dict[Node, str] = {}
    inputs: list[Node | None] = [None] * count
    tangents: dict[Node, int | None] = {}
    by_description: dict[Any, Node] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        desc = node.meta.get("desc")
        by_description[desc] = node
        if isinstance(desc, d.ParamAOTInput):
            parameters[node] = desc.target
        elif isinstance(desc, d.BufferAOTInput):
            buffers[node] = desc.target
        elif isinstance(desc, d.PlainAOTInput):
            inputs[desc.idx] = node
        elif isinstance(desc, d.TangentAOTInput):
            tangents[node] = desc.output.idx if isinstance(desc.output, d.PlainAOTOutput) else None
        elif effects := sorted({str(n.args[1]) for n in module.graph.nodes if n.target is with_effects}):
            raise CaptureError(
                f"{', '.join(effects)} prints or raises by values of tensors, which no captured step does; "
                'leave it out, or use torch.compile(model, backend="torchedge"), which runs it in PyTorch'
            )
        else:
            raise CaptureError(
                f"AOTAutograd added the input {desc}; expected parameters, buffers and arguments"
            )
    outputs: dict[int, int] = {}
    mutated: dict[Node, int] = {}
    gradients: dict[str, int] = {}
    for place, desc in enumerate(next(iter(module.graph.find_nodes(op="output"))).meta["desc"]):
        if isinstance(desc, d.PlainAOTOutput):
            outputs[desc.idx] = place
        elif isinstance(desc, d.InputMutationAOTOutput):
            mutated[by_description[desc.mutated_input]] = place
        elif isinstance(desc, d.GradAOTOutput):
            if isinstance(desc.grad_of, d.ParamAOTInput):
                gradients[desc.grad_of.target] = place
        elif desc is not None:  # None stands where an input needs no gradient
            raise CaptureError(f"AOTAutograd added the output {desc}; expected outputs and gradients")
    ordered = tuple([outputs[i] for i in sorted(outputs)])
    return JointGraph(module, parameters, buffers, tuple(inputs), tangents, ordered, mutated, gradients)
