"""Composite operators as the operators that they run.

Batched products and attention, taken apart as PyTorch's own C++ code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from torchedge.graphs import ITEM_SIZES, ForwardGraph, Op, Value
from torchedge.graphs.sizes import Shape, symbolic
from torchedge.ops import Call, Work, spec_of
from torchedge.ops.products import writes_scores
from torchedge.ops.strides import (
    Sizes,
    Strided,
    as_input,
    broadcasted,
    channels_last,
    contiguous_strides,
    filled,
    foldable,
    lies_last,
    permuted,
    variadic,
    viewed,
)  # fmt: skip
from torchedge.prediction.memory.rewriting import Rewriter, releases_of
from torchedge.prediction.memory.settings import StepSettings


def decompose(graph: ForwardGraph, settings: StepSettings) -> ForwardGraph:
    """Return the graph with the copies of products and recurrent layers, and attention as its operators.

    A graph without such operators is returned as it is.
    """
    if not any(spec_of(op.kind).composite for op in graph.ops):
        return graph
    return _CompositePass(graph, settings).run()


class _CompositePass:
    def __init__(self, graph: ForwardGraph, settings: StepSettings) -> None:
        self.out = Rewriter(graph)
        self.on_cuda = settings.backend == "cuda"
        self.fused = settings.attention == "fused"
        self.layouts = Layouts(
            self.out.values, graph.ops, self.fused, self.on_cuda, channels_last=graph.channels_last
        )
        self.graph, self.releases = graph, releases_of(graph)

    def run(self) -> ForwardGraph:
        for position, op in enumerate(self.graph.ops):
            composite = spec_of(op.kind).composite
            if composite == "attention" and len(op.outputs) == 1:
                self._attention(op)
            elif composite == "recurrent":
                self._recurrent(op)
            elif op.kind == "clone" and self.fused and self._needs_no_copy(op):
                # Capture recorded a copy of a fused attention's output, which needs none.
                old = self.out.values[op.outputs[0]]
                self.out.values[op.outputs[0]] = replace(old, alias=op.inputs[0])
                self.out.emit(self.out.as_kernel(replace(op, kind="reshape"), passes=True))
            else:
                self.out.emit(op)
            self.out.release(*self.releases[position])
        return self.out.finish()

    def _recurrent(self, op: Op) -> None:
        """A layer copies a sequence that does not lie step by step."""
        source = op.inputs[0]
        if source is not None and len(self.out.values[source].shape) == 3:
            order = (1, 0, 2) if op.attrs.get("batch_first") else (0, 1, 2)
            shape, strides = self.layouts.shape(source), self.layouts.of(source)
            by_step = contiguous_strides([shape[k] for k in order]) == tuple([strides[k] for k in order])
            op = replace(op, attrs={**op.attrs, "copied": not by_step})
        self.out.emit(op)

    def _needs_no_copy(self, op: Op) -> bool:
        source = op.inputs[0]
        if source is None:
            return False
        shape, strides = self.layouts.shape(source), self.layouts.of(source)
        if not variadic(op.attrs, "shape"):  # contiguous()
            return not op.attrs.get("memory_format") and strides == contiguous_strides(shape)
        return viewed(shape, strides, self.layouts.shape(op.outputs[0])) is not None

    def _attention(self, op: Op) -> None:
        """Run a fused kernel, for which a boolean mask becomes one to add, or the kernel of products."""
        call = Call(self.out.values, op, backend="cuda" if self.on_cuda else "cpu")
        mask = op.inputs[3] if len(op.inputs) > 3 else None
        if not self.fused or writes_scores(call) or self._strided(mask):
            self._attention_of_products(op)
            return
        if mask is None or self.out.values[mask].dtype != "bool":
            self.out.emit(op)
            return
        dtype = self.out.values[op.outputs[0]].dtype
        added = self.out.add("zeros", (), self.out.values[mask].shape, dtype, op)
        self.out.emit(replace(op, inputs=(*op.inputs[:3], added, *op.inputs[4:])), (added,))

    def _strided(self, mask: int | None) -> bool:
        """Whether a mask to add has gaps between a row's elements, which no fused kernel of CUDA takes.

        See `check_last_dim_stride_equals_1_dense` in `sdp_utils_cpp.h`; biases of heads often lie so.
        """
        if mask is None or not self.on_cuda or self.out.values[mask].dtype == "bool":
            return False
        return self.layouts.of(mask)[-1:] != (1,)

    def _attention_of_products(self, op: Op) -> None:
        """Scale q and k, add the mask, softmax, dropout, v (`_scaled_dot_product_attention_math`).

        Keys and values of grouped queries are repeated. Where no dispatch mode watches, the mask is added in
        place; rows without a score (`_safe_softmax`) take a boolean matrix for a moment.
        """
        q, k, v = op.inputs[0], op.inputs[1], op.inputs[2]
        assert q is not None and k is not None and v is not None
        values, add = self.out.values, self.out.add
        temporaries: list[int] = []
        result, low = op.outputs[0], values[op.outputs[0]].dtype
        if low in ("bfloat16", "float16"):  # the composite implementation computes in float32
            q, k, v = (add("to_copy", (i,), values[i].shape, "float32", op) for i in (q, k, v))
            temporaries += [q, k, v]
            result = len(values)
            values.append(Value(f"attention.{result}", values[op.outputs[0]].shape, "float32"))
        mask = op.inputs[3] if len(op.inputs) > 3 else None
        query, key = values[q], values[k]
        dtype, batch = query.dtype, query.shape[:-2]
        scores: Shape = (*batch, query.shape[-2], key.shape[-2])
        rank, sources = len(query.shape), list(op.inputs[:3])
        if rank > 3 and query.shape[-3] != key.shape[-3]:
            k, v = (add("expand_copy", (i,), (*batch, *values[i].shape[-2:]), dtype, op) for i in (k, v))
            temporaries += [k, v]
            sources[1:] = k, v
        scaled = [add("mul", (i,), values[i].shape, dtype, op, {"other": 1.0}) for i in (q, k)]
        temporaries += scaled
        folded = []
        for source, new in zip(sources[:2], scaled, strict=True):
            assert source is not None
            if rank > 3 and not foldable(self.layouts.shape(source), self.layouts.of(source)):
                new = add("clone", (new,), values[source].shape, dtype, op, passes=True)
                temporaries.append(new)
            folded.append(new)
        product = add("matmul", tuple(folded), scores, dtype, op, saves=(0, 1))
        products = [product]
        if mask is not None or op.attrs.get("is_causal"):
            extra = values[mask].shape if mask is not None else scores[-2:]
            bias = mask
            if mask is None or values[mask].dtype == "bool":
                bias = add("zeros", (), extra, dtype, op)
                temporaries.append(bias)
            alias = product if self.fused else None
            product = add("add", (product, bias), scores, dtype, op, alias=alias, passes=True)
            if alias is None:
                self.out.release(products.pop())
            products.append(product)
        weights = add("softmax", (product,), scores, dtype, op, {"dim": -1}, saves=(-1,))
        temporaries.append(weights)
        if self.fused:
            products.append(add("eq", (product,), scores, "bool", op))
        self.out.release(*products)
        dropout = op.attrs.get("dropout_p", 0.0)
        if isinstance(dropout, float) and dropout > 0:
            noise = (prod(symbolic(scores)) * ITEM_SIZES[dtype],)
            attrs = {"p": dropout, "train": True}
            weights = add("dropout", (weights,), scores, dtype, op, attrs, hidden=noise)
            temporaries.append(weights)
        assert sources[2] is not None
        if rank > 3 and not foldable(self.layouts.shape(sources[2]), self.layouts.of(sources[2])):
            v = add("clone", (v,), values[v].shape, dtype, op, passes=True)
            temporaries.append(v)
        weighted = replace(op, kind="matmul", inputs=(weights, v), outputs=(result,), attrs={})
        self.out.emit(self.out.as_kernel(weighted, (0, 1)), tuple(temporaries))
        if result != op.outputs[0]:
            copied = replace(op, kind="to_copy", inputs=(result,), attrs={})
            self.out.emit(self.out.as_kernel(copied), (result,))


_MOVED = frozenset(("transpose", "permute"))
"""Operators by which tokens become an image that lies in channels_last."""


def images_last(graph: ForwardGraph, fused_attention: bool = False) -> Callable[[int | None], bool]:
    """Return whether an image lies in channels_last: in such a network, or where tokens are read as one."""
    if graph.channels_last or not any(op.kind in _MOVED for op in graph.ops):
        return lambda image: graph.channels_last
    layouts = Layouts(graph.values, graph.ops, fused_attention)
    return lambda image: image is not None and layouts.last(image)


class Layouts:
    """Strides of the values of a graph, in elements, with `symbolic` batch size."""

    def __init__(
        self,
        values: Sequence[Value],
        ops: Sequence[Op],
        fused_attention: bool = False,
        on_cuda: bool = True,
        *,
        channels_last: bool = False,
    ) -> None:
        self._values, self._channels_last = values, channels_last
        self._fused, self._on_cuda = fused_attention, on_cuda
        self._producers = {index: op for op in ops for index in op.outputs}
        self._strides: dict[int, Sizes] = {}

    def shape(self, index: int) -> Sizes:
        """Return the symbolic shape of a value."""
        return symbolic(self._values[index].shape)

    def of(self, index: int) -> Sizes:
        """Return the strides of a value."""
        chain = []
        while index not in self._strides:
            chain.append(index)
            op = self._producers.get(index)
            if op is None or not op.inputs or op.inputs[0] is None:
                break
            index = op.inputs[0]
        for item in reversed(chain):
            self._strides[item] = self._derive(item)
        return self._strides[chain[0] if chain else index]

    def last(self, index: int) -> bool:
        """Whether a value is an image that lies in channels_last, and not in the default order as well."""
        return lies_last(self.shape(index), self.of(index))

    def _derive(self, index: int) -> Sizes:
        shape, op = self.shape(index), self._producers.get(index)
        source = op.inputs[0] if op is not None and op.inputs else None
        if op is None or source is None:
            return contiguous_strides(shape)
        old_shape = self.shape(source)
        old = self._strides.get(source) or contiguous_strides(old_shape)
        spec, aliased = spec_of(op.kind), self._values[index].alias is not None
        if spec.composite == "attention" and self._fused and len(shape) == 4:
            if self._on_cuda and self._values[source].dtype == "float32":
                # memory-efficient attention writes (N, L, H, E)
                return permuted(contiguous_strides([shape[i] for i in (0, 2, 1, 3)]), (0, 2, 1, 3))
            return filled(shape, old)  # flash attention keeps the query's order of dimensions
        if self._channels_last and spec.work is Work.CONVOLUTION and len(shape) == len(old_shape) == 4:
            return channels_last(shape)
        if aliased and op.inplace:
            return old
        tensors = [i for i in op.inputs if i is not None]
        if len(tensors) > 1 and not aliased and spec.strides is as_input:
            return broadcasted(shape, [(self.shape(i), self.of(i)) for i in tensors])
        if spec.strides is None or spec.view != aliased:
            return contiguous_strides(shape)
        return spec.strides(Strided(old_shape, old, shape, op.attrs)) or contiguous_strides(shape)
