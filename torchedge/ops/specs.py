"""The entry of an operator, and the table of entries by ATen name.

Each file of this folder lists entries (`OpSpec`) in `OPS`: the only place to add one. Rules see a `Call`,
whose shapes are plain integers: during capture the batch size is a large prime, in analyses a number whose
powers act as digits (`torchedge.graphs.sizes`), so that a rule written for integers serves every batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from torchedge.graphs import ITEM_SIZES, ForwardGraph, Op, Value
from torchedge.graphs.footprints import Footprint
from torchedge.graphs.graph import COMPILED
from torchedge.graphs.sizes import Poly, poly, symbolic
from torchedge.ops.strides import Sizes, StrideRule

_FILES = ("convolution", "products", "recurrent", "rows", "pooling", "elementwise", "movement")


class LoadClass(Enum):
    """How well weight loading hides behind an operator (FlashMem, Table 2 and section 3.1); FREE: no cost."""

    FREE = "free"
    ELEMENTAL = "elemental"
    REUSABLE = "reusable"
    HIERARCHICAL = "hierarchical"


class Work(Enum):
    """The kind of work that the latency model counts an operator as (`prediction.latency.workload`)."""

    NONE = "none"
    CONVOLUTION = "convolution"
    TRANSPOSED_CONVOLUTION = "transposed convolution"
    PRODUCT = "product"
    ADDED_PRODUCT = "product added to input 0"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NORMALIZATION = "normalization"
    SOFTMAX = "softmax"
    ACTIVATION = "activation"
    DROPOUT = "dropout"
    ARITHMETIC = "arithmetic"
    SUM = "sum"
    COPY = "copy"
    JOIN = "join"
    POOLING = "pooling"
    REDUCTION = "reduction"
    LOSS = "loss"

    @property
    def multiplies_matrices(self) -> bool:
        """Whether a BLAS library runs it."""
        return self in (Work.PRODUCT, Work.ADDED_PRODUCT, Work.ATTENTION)


Autocast = Literal["lower", "float32", "float32_on_cuda", "widest", "join", "join_on_cuda", "keep"]
Composite = Literal["", "attention", "recurrent"]


class Call:
    """One operator call as the rules see it: integer shapes (computed on first use), dtypes, attributes.

    `needs[i]` says that input i needs a gradient; `backend` ("cuda" or "cpu") which library runs it, where
    that changes what autograd keeps; `training` the mode the model ran in; `workspace` the tile of the
    Winograd algorithm whose workspace the convolution library takes (0: none).
    """

    __slots__ = (
        "_ins",
        "_op",
        "_outs",
        "_values",
        "attrs",
        "backend",
        "inplace",
        "needs",
        "training",
        "workspace",
    )

    def __init__(
        self,
        values: Sequence[Value],
        op: Op,
        needs: Sequence[bool] = (),
        backend: str = "cuda",
        training: bool = True,
        workspace: int = 0,
    ) -> None:
        self.workspace = workspace
        self._values, self._op = values, op
        self._ins: list[Sizes | None] | None = None
        self._outs: list[Sizes] | None = None
        self.attrs, self.inplace, self.needs, self.backend, self.training = (
            op.attrs,
            op.inplace,
            needs,
            backend,
            training,
        )

    @property
    def ins(self) -> list[Sizes | None]:
        """Shape of each input, None for an absent one."""
        if self._ins is None:
            self._ins = [None if i is None else symbolic(self._values[i].shape) for i in self._op.inputs]
        return self._ins

    @property
    def outs(self) -> list[Sizes]:
        """Shape of each output."""
        if self._outs is None:
            self._outs = [symbolic(self._values[i].shape) for i in self._op.outputs]
        return self._outs

    def shared(self, output: int) -> int | None:
        """Return the input whose storage an output shares, None where it has its own."""
        alias = self._values[self._op.outputs[output]].alias
        return self._op.inputs.index(alias) if alias is not None and alias in self._op.inputs else None

    def takes_gradient(self, slot: int) -> bool:
        """Return whether an input may get a gradient."""
        return spec_of(self._op.kind).differentiates(slot)

    def need(self, index: int) -> bool:
        """Return whether input `index` exists and needs a gradient."""
        return index < len(self.needs) and self.needs[index]

    def in_dtype(self, index: int) -> str:
        """Dtype of one input."""
        value = self._op.inputs[index]
        return "float32" if value is None else self._values[value].dtype

    def in_bytes(self, index: int) -> int:
        """Bytes of one input."""
        shape = self.ins[index]
        return 0 if shape is None else prod(shape) * ITEM_SIZES[self.in_dtype(index)]

    def out_bytes(self, index: int = 0) -> int:
        """Bytes of one output."""
        return prod(self.outs[index]) * self.out_item_size(index)

    def out_item_size(self, index: int = 0) -> int:
        """Bytes of an element of one output."""
        return ITEM_SIZES[self._values[self._op.outputs[index]].dtype]


InferRule = Callable[[list[Sizes | None], Mapping[str, Any]], Sizes | None]
InferManyRule = Callable[[list[Sizes | None], Mapping[str, Any]], tuple[Sizes, ...]]


def output_elements(call: Call) -> int:
    """One FLOP for each output element: the default of element-wise operators."""
    return prod(call.outs[0]) if call.outs else 0


def no_flops(call: Call) -> int:
    """No arithmetic: views and data movement."""
    return 0


EVERY = range(1 << 20)
"""All inputs of an operator."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """All facts about the forward call of one operator.

    kind: canonical ATen base name; params: names of its parameters in order (tensor parameters become inputs,
    the others attributes); targets: further ATen names with the same entry.
    load: how well weights load behind it. work: its kind for the latency model.
    infer: shape of its one output from input shapes, None where the framework's own meta kernel decides.
    infer_many: the same for an operator with several outputs, all of input 0's dtype.
    first_dtype: `infer` holds whatever the dtypes of the inputs; the output has input 0's.
    flops: FLOPs of the forward call (a multiply-add counts as two).
    memory: what a library's kernel keeps and takes, where that is not what PyTorch's own forward and backward
    call on meta tensors say (`Op.footprint`); None where it is.
    stops: inputs that get no gradient (`EVERY`: the operator has none).
    autocast: "lower" (runs in the low precision), "float32", "float32_on_cuda" (the CPU leaves it in the
    precision of its inputs), "widest" (its output has the widest input dtype), "join" (casts half-precision
    inputs to float32 where one input is float32), "join_on_cuda" (the same; "widest" on the CPU) or "keep".
    widens: CUDA's kernel reads half precision and writes float32, so that float32 needs no cast of its input.
    casts_inside: asked for float32, PyTorch casts its input for the kernel alone; its backward call runs in
    the precision of the input.
    view: its output shares the storage of input 0.
    strides: strides of the output from those of input 0 (None: the output is contiguous).
    composite: "attention" is taken apart where no fused kernel runs it; "recurrent" layers copy sequences.
    hides: whether, for these shapes of inputs, the result is a view of a tensor that the operator makes.
    gathers: reads only those elements of input 0 that it puts out (an embedding its rows).
    """

    kind: str
    params: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    load: LoadClass = LoadClass.ELEMENTAL
    work: Work = Work.ARITHMETIC
    infer: InferRule | None = None
    infer_many: InferManyRule | None = None
    first_dtype: bool = False
    flops: Callable[[Call], int] = output_elements
    memory: Callable[[Call], Footprint | None] | None = None
    stops: Container[int] = ()
    autocast: Autocast = "widest"
    widens: bool = False
    casts_inside: bool = False
    view: bool = False
    strides: StrideRule | None = None
    composite: Composite = ""
    gathers: bool = False
    hides: Callable[[Sequence[Sizes | None]], bool] | None = None

    def bytes_moved(self, call: Call) -> int:
        """Bytes a forward call reads and writes at least: each input and output once, nothing for views."""
        if self.load is LoadClass.FREE:
            return 0
        written = sum(call.out_bytes(i) for i in range(len(call.outs)))
        read = [call.in_bytes(i) for i in range(len(call.ins))]
        if self.gathers and read:
            read[0] = min(read[0], written)
        return sum(read) + written

    def differentiates(self, slot: int) -> bool:
        """Whether a gradient reaches an input."""
        return slot not in self.stops


def spec(kind: str, params: str = "", targets: str = "", **facts: Any) -> OpSpec:  # noqa: ANN401 - OpSpec's fields
    """Return an `OpSpec`; `params` and `targets` are separated by blanks, `facts` are its other fields."""
    return OpSpec(kind, tuple(params.split()), tuple(targets.split()), **facts)


UNKNOWN = spec("unknown")
"""Stands for an operator without an entry: element-wise work, and autograd keeps every input."""


COMPILED_PACE = 0.81
"""The time of a step under torch.compile over that of the same step in eager PyTorch.

The median of 28 steps of 14 networks, as `python benchmarks/accuracy/compiled.py` prints it."""


def unsupported_remark(kind: str) -> str:
    """Return how figures count what is in a graph's `unsupported`."""
    if kind == COMPILED:
        return (
            f"{kind}: its graphs are not known (predict, predict_many, advise and report trace those of a "
            "training step on a GPU, without seq_len); memory is that of the same step in eager PyTorch, "
            f"time {COMPILED_PACE} of its time; intervals are as wide as steps were measured around eager "
            "ones (0.71 to 1.45 times the memory, 0.35 to 1.27 times the time)"
        )
    return f"{kind}: unknown operator, counted as element-wise; training keeps its inputs"


@cache
def registry() -> Mapping[str, OpSpec]:
    """Return every known operator by each of its ATen names."""
    table: dict[str, OpSpec] = {}
    for file in _FILES:
        for entry in import_module(f"torchedge.ops.{file}").OPS:
            for name in (entry.kind, *entry.targets):
                if name in table:
                    raise AssertionError(f"operator {name} is registered twice")
                table[name] = entry
    return MappingProxyType(table)


def spec_of(kind: str) -> OpSpec:
    """Return the entry of an operator, `UNKNOWN` where there is none."""
    return registry().get(kind, UNKNOWN)


def call_of(graph: ForwardGraph, op: Op) -> Call:
    """Return the call of an operator of a graph with shapes as `torchedge.graphs.sizes.symbolic` integers."""
    return Call(graph.values, op, training=graph.training)


def forward_flops(graph: ForwardGraph) -> Poly:
    """Return the FLOPs of one forward pass (a multiply-add is two); unknown operators count nothing."""
    total: Poly = (0, 0, 0)
    for op in graph.ops:
        entry = registry().get(op.kind)
        if entry is not None:
            c0, c1, c2 = poly(entry.flops(call_of(graph, op)))
            total = (total[0] + c0, total[1] + c1, total[2] + c2)
    return total
