"""The split of a compiled training step into forward and backward by PyTorch's own partitioner.

AOTAutograd traces the joint graph of a model on fake tensors with Inductor's decompositions, Inductor's
passes over the joint graph run, and `min_cut_rematerialization_partition` decides which tensors the forward
pass saves. No kernel is generated. Fake tensors lie on the CPU, so that a build of PyTorch without CUDA
traces them: a mode gives attention and autocast the choices of CUDA.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from torchedge.errors import CaptureError
from torchedge.graphs.partitions import Buffer, PartGraph, Partition, PartOp, PartRole
from torchedge.ops import registry
from torchedge.storage.locks import PROCESS
from torchedge.tracing.copies import isolated
from torchedge.tracing.decompositions import base_name
from torchedge.tracing.joint_graphs import additive_mask, faked, tracing
from torchedge.tracing.objectives import Objective
from torchedge.tracing.torch_calls import words

_ALIGNMENT = 512
"""PyTorch's CUDA allocator rounds sizes up to a multiple of this."""


_VIEWS = words(
    """
    alias as_strided detach diagonal expand permute reshape select slice split split_with_sizes squeeze t
    transpose unbind unfold unsqueeze view _reshape_alias _unsafe_view
    """
)
_REDUCTIONS = words("all amax amin any argmax argmin logsumexp mean prod sum var var_mean")
_KERNELS = words(
    """
    addmm baddbmm bmm mm convolution convolution_backward cumsum index_put scatter scatter_add scatter_reduce
    sort topk inductor_seeds
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    """
)
_OUTSIDE = words("_cudnn_rnn lstm gru mkldnn_rnn_layer nonzero _embedding_bag")
"""Operators whose memory this model does not know."""


def partition(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_size: int,
    amp: str | None,
    *,
    own_loss: bool,
) -> Partition:
    """Return the forward and backward graph of a call of a model in training mode.

    args, kwargs: tensors on any device; only their shapes and dtypes count. own_loss: a loss that the model
    returns is the step's, so that it is compiled as well.

    Raises:
        CaptureError: PyTorch cannot trace the model as one graph, or an operator's memory is unknown.
    """
    with PROCESS, isolated(model, True) as twin:
        objective = Objective(twin, args, dict(kwargs))
        try:
            return _partition(objective, batch_size, amp, own_loss)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"the model is not traced as one graph: {type(error).__name__}") from error


def _partition(objective: Objective, batch_size: int, amp: str | None, own_loss: bool) -> Partition:
    import torch._inductor.lowering
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    trained = {id(p) for p in objective.parameters() if p.requires_grad}
    with ExitStack() as stack:
        mode, fakes = stack.enter_context(faked(objective, trained, objective.tensors()))
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(tracing(seen=True))
        stack.enter_context(torch.enable_grad())
        with _CudaChoices(), torch.autocast("cpu", getattr(torch, amp)) if amp is not None else nullcontext():
            joint = aot_export_joint_with_descriptors(
                stack, _EachOnce(objective), tuple(fakes), decompositions=select_decomp_table()
            )
        with V.set_fake_mode(mode), torch.no_grad():
            forward, backward, count = _split(joint)
            channels_last = _is_channels_last(forward)
    own_loss = own_loss and "loss" in objective.output_names
    return _described(forward, backward, count, batch_size, amp, own_loss, channels_last)


def _is_channels_last(forward: GraphModule) -> bool:
    """Return whether Inductor lays out images in channels_last on CUDA."""
    from torch._inductor.graph import GraphLowering

    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # with it, it always would on a CPU
    try:
        return bool(GraphLowering.decide_layout_opt(forward, is_inference=False))
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _split(joint: Any) -> tuple[GraphModule, GraphModule, int]:
    """Run Inductor's passes and PyTorch's partitioner; return both graphs and the number of outputs."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    passes: Any = joint_graph_passes
    device = (
        {"input_device": torch.device("cpu")}
        if "input_device" in inspect.signature(passes).parameters
        else {}
    )
    with inductor_config.patch(pattern_matcher=False):  # its patterns would select attention as on a CPU
        graph = passes(joint.graph_module, **device)
    facts = joint._aot_state.fw_metadata
    count = facts.num_mutated_inp_runtime_indices + facts.num_outputs + facts.num_intermediate_bases
    examples = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    static = [*range(len(facts.static_input_indices))]
    parts = min_cut_rematerialization_partition(
        graph, examples, num_fwd_outputs=count, static_lifetime_input_indices=static
    )
    return *parts, count


class _EachOnce(torch.nn.Module):
    """A module whose tied parameters are one each, as Dynamo passes them to the graph."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self._inner = [inner]  # not a submodule, whose parameters would be listed again
        self._names = [name for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
        for place, (_, parameter) in enumerate(inner.named_parameters()):
            self.register_parameter(f"p{place}", parameter)
        for place, (_, buffer) in enumerate(inner.named_buffers()):
            self.register_buffer(f"b{place}", buffer)

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Run the inner module with this one's parameters and buffers."""
        own = [*self._parameters.values(), *self._buffers.values()]
        named: Any = dict(zip(self._names, own, strict=True))
        with stateless._reparametrize_module(self._inner[0], named, tie_weights=True):
            return self._inner[0](*tensors)


# CUDA's choices --------------------------------------------------------------------------------------------

_ATTENTION = frozenset((F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention))
_LOW = (torch.bfloat16, torch.float16)


class _CudaChoices(TorchFunctionMode):
    """Select the kernels of attention, and the precision of functions under autocast, as on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if func in _ATTENTION:
            options = dict(zip(named, _cast([*named.values()], cast), strict=True))
            with torch.autocast("cpu", enabled=False):
                return _attention(*_cast(args, cast), **options)
        if cast is not None and _widens(getattr(func, "__name__", "")):
            args = tuple(_cast(args, torch.float32))
        return func(*args, **named)


def _cast(items: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    def cast(item: Any) -> Any:
        floating = isinstance(item, torch.Tensor) and item.dtype in (torch.float32, *_LOW)
        return item.to(dtype) if floating and dtype is not None else item

    return [cast(item) for item in items]


def _widens(name: str) -> bool:
    """Whether autocast runs a function in float32 on CUDA."""
    spec = registry().get(name.strip("_"))
    return name == "cross_entropy" or (spec is not None and spec.autocast in ("float32", "float32_on_cuda"))


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
    """Compute scaled_dot_product_attention by the kernel that PyTorch selects on CUDA.

    A mask excludes flash attention; one whose last dimension is not dense excludes the memory-efficient
    kernel. Keys of fewer heads, which meet those of queries by broadcasting, exclude both.
    """
    aten = torch.ops.aten
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    dense = all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors)
    flash = attn_mask is None and query.dtype in _LOW and query.shape[-1] <= 256
    attn_mask = additive_mask(attn_mask, query.dtype)
    few_heads = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    grouped, broadcast = few_heads and enable_gqa, few_heads and not enable_gqa
    result: torch.Tensor
    narrow = query.shape[-1] % 8 or query.shape[-1] != value.shape[-1]
    if not dense or narrow or broadcast or (grouped and not flash):
        result = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    elif flash:
        result = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    else:
        if attn_mask is not None:
            length = attn_mask.shape[-1]
            if length % 8:
                attn_mask = F.pad(attn_mask, (0, 8 - length % 8))[..., :length]
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    return result


# description ------------------------------------------------------------------------------------------------


def _described(
    forward: GraphModule,
    backward: GraphModule,
    count: int,
    batch_size: int,
    amp: str | None,
    own_loss: bool,
    channels_last: bool,
) -> Partition:
    ahead, behind = _Reader(forward, channels_last), _Reader(backward, channels_last)
    names = {node.name: node for node in forward.graph.nodes}
    last: Any = next(iter(forward.graph.find_nodes(op="output"))).args[0]
    returned = {ahead.buffers[node] for node in last[:count] if isinstance(node, Node)}
    saved, tangents = list[tuple[Buffer, Buffer]](), list[tuple[Buffer, int]]()
    for node in backward.graph.find_nodes(op="placeholder"):
        place = behind.places[node]
        source = names.get(node.name)
        if source is None:
            tangents.append(((place, 0), sum(behind.ops[place].sizes)))
        elif isinstance(source.meta.get("val"), torch.Tensor):
            buffer = ahead.buffers[source]
            if ahead.ops[buffer[0]].role != "input":
                saved.append(((place, 0), buffer))
    outside = 0 if own_loss else 2 * sum(size for _, size in tangents)
    lent = {node for node, _ in tangents} | {node for node, buffer in saved if buffer in returned}
    return Partition(
        batch_size,
        amp,
        ahead.graph(),
        behind.graph(),
        tuple(saved),
        tuple(tangents),
        frozenset(lent),
        outside,
        channels_last,
    )


class _Reader:
    """Reads a graph of ATen operators; places: the position of each node, buffers: where its tensor lies."""

    def __init__(self, module: GraphModule, channels_last: bool) -> None:
        self.channels_last = channels_last
        self.places: dict[Node, int] = {}
        self.buffers: dict[Node, Buffer] = {}
        self.ops: list[PartOp] = []
        self._results: tuple[Buffer, ...] = ()
        for node in module.graph.nodes:
            if node.op == "output":
                self._results = tuple([self.buffers[source] for source in node.all_input_nodes])
                break
            self.places[node] = len(self.ops)
            self.ops.append(self._read(node))

    def graph(self) -> PartGraph:
        """Return the graph."""
        return PartGraph(tuple(self.ops), self._results)

    def _read(self, node: Node) -> PartOp:
        sources, place = node.all_input_nodes, len(self.ops)
        name = _name(node)
        if node.op == "call_function" and (name in _VIEWS or node.target is operator.getitem) and sources:
            inner = self.buffers[sources[0]]
            of_view = node.target is not operator.getitem or _name(sources[0]) in _VIEWS
            number = inner[1] if of_view else node.args[1]
            assert isinstance(number, int)
            self.buffers[node] = (inner[0], number)
            return PartOp("view")
        self.buffers[node] = (place, 0)
        if name in _OUTSIDE:
            raise CaptureError(f"the memory of {name} in a compiled step is unknown")
        role: PartRole = "input"
        if node.op == "call_function":
            role = "kernel" if name in _KERNELS else "reduction" if name in _REDUCTIONS else "pointwise"
            if name == "scatter" and _name(sources[0]) == "full":  # Inductor compares places instead
                role = "pointwise"
        value = node.meta.get("val")
        listed = value if isinstance(value, (tuple, list)) else [value]
        results, read = _tensors(node), [t for source in sources for t in _tensors(source)[:1]]
        reduces = role == "reduction"
        elements = max([t.numel() for t in (read if reduces else results)], default=1)
        rows = results[0].numel() if results else 1
        dense = 1 if self.channels_last and reduces and read[0].dim() == 4 else -1
        return PartOp(
            role,
            tuple(dict.fromkeys(self.buffers[source] for source in sources)),
            tuple([_bytes(t) if isinstance(t, torch.Tensor) else 0 for t in listed]),
            elements,
            rows,
            not reduces or _reduces(node, read[0].dim(), -1),
            reduces and _is_split(elements, rows, _reduces(node, read[0].dim(), dense)),
        )


def _name(node: Node) -> str:
    target = node.target
    return (
        base_name(target)
        if isinstance(target, torch._ops.OpOverload)
        else str(getattr(target, "__name__", target))
    )


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in value if isinstance(t, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    return -(-(last + 1) * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _reduces(node: Node, rank: int, dim: int) -> bool:
    """Whether a reduction runs over a dimension of its input."""
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, (int, tuple, list)):
        return True
    listed = [dims] if isinstance(dims, int) else dims
    return rank == 0 or any(isinstance(d, int) and d % rank == dim % rank for d in listed)


_SPLIT_ROWS, _SPLIT_LENGTH = (8448, 264), (32, 8192)
"""Inductor splits a reduction to fewer results of more elements each: over an outer and over the densest
dimension, on a GPU of 132 multiprocessors."""


def _is_split(elements: int, rows: int, dense: bool) -> bool:
    """Whether Inductor computes a reduction in two kernels; dense: it runs over the densest dimension."""
    return rows < _SPLIT_ROWS[dense] and elements > _SPLIT_LENGTH[dense] * rows
