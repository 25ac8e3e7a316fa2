"""The entry of an operator, and the table of entries by ATen name.

Each file of this folder lists entries (`OpSpec`) in `OPS`: the only place to add one. Rules see a `Call`,
whose shapes are plain integers: during capture the batch size is a large prime, in analyses a number whose
powers act as digits (`torchedge.graphs.sizes`), so that a rule written for integers serves every batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from torchedge.graphs import ITEM_SIZES, ForwardGraph, Op, Poly, Value
from torchedge.graphs.footprints import Footprint
from torchedge.graphs.graph import COMPILED
from torchedge.graphs.sizes import poly, symbolic
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
Composite = Literal["", "product", "einsum", "attention", "recurrent"]


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


Rule = Callable[[Call], Any]
InferRule = Callable[[list[Sizes | None], Mapping[str, Any]], Sizes | None]
InferManyRule = Callable[[list[Sizes | None], Mapping[str, Any]], tuple[Sizes, ...] | None]


def nothing(call: Call) -> tuple[()]:
    """No tensors: the default of every autograd rule."""
    return ()


setattr(nothing, "constant", ())  # noqa: B010 - mypy knows no attributes of functions


def output_elements(call: Call) -> int:
    """One FLOP for each output element: the default of element-wise operators."""
    return prod(call.outs[0]) if call.outs else 0


def no_flops(call: Call) -> int:
    """No arithmetic: views and data movement."""
    return 0


def keep(*slots: int) -> Rule:
    """Return a rule that always keeps these tensors for backward: i >= 0 is input i, -1 - j is output j."""

    def rule(call: Call) -> tuple[int, ...]:
        return slots

    setattr(rule, "constant", slots)  # noqa: B010 - lets the simulation skip the call
    return rule


def every_input(call: Call) -> tuple[int, ...]:
    """Every input: what autograd keeps at most of an operator without a rule."""
    return tuple(range(len(call.needs)))


def crossed(first: int, second: int) -> Callable[[Call], tuple[int, ...]]:
    """Return a rule: of two factors, each is kept for the gradient of the other."""

    def saves(call: Call) -> tuple[int, ...]:
        pairs = ((first, second), (second, first))
        return tuple(a for a, b in pairs if call.need(b) and a < len(call.ins) and call.ins[a] is not None)

    return saves


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
    saves: tensors that autograd keeps, in `keep`'s coding; in-place calls that keep input 0 keep its clone.
    aux: bytes of hidden outputs that autograd keeps too (batch statistics, pooling indices, dropout masks).
    scratch: bytes of tensors that live only during the forward call; backward_scratch: during the
    backward call.
    grads: for each input how its gradient comes about: "new" (allocated), "pass" (the incoming gradient
    itself where shapes agree), "view" (shares the incoming gradient's storage), "transposed" (new, reached
    through a view; "folded": from three dimensions on), "none". The last entry holds for all further inputs.
    autocast: "lower" (runs in the low precision), "float32", "float32_on_cuda" (the CPU leaves it in the
    precision of its inputs), "widest" (its output has the widest input dtype), "join" (casts half-precision
    inputs to float32 where one input is float32), "join_on_cuda" (the same; "widest" on the CPU) or "keep".
    widens: CUDA's kernel reads half precision and writes float32, so that float32 needs no cast of its input.
    view: its output shares the storage of input 0.
    strides: strides of the output from those of input 0 (None: the output is contiguous).
    composite: the operators that PyTorch runs in its place ("product": copies, then bmm).
    backward_flops: forward FLOPs spent for each input gradient.
    broadcasts: gradients of inputs smaller than the output are made in the output's size first, then summed.
    replayed: PyTorch's own forward and backward call on meta tensors decides what a training step keeps and
    allocates (`Op.footprint`): such an entry needs no rules for that. Where PyTorch cannot run the call so,
    autograd is taken to keep every input.
    fused_on_cuda: the entry's rules hold on CUDA, which has a kernel of its own; elsewhere it is replayed.
    on_cpu: the footprint of a recorded call on the CPU, where the rules hold on CUDA alone.
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
    saves: Rule = nothing
    aux: Rule = nothing
    scratch: Rule = nothing
    backward_scratch: Rule = nothing
    grads: tuple[str, ...] = ("new",)
    autocast: Autocast = "widest"
    widens: bool = False
    view: bool = False
    strides: StrideRule | None = None
    composite: Composite = ""
    backward_flops: float = 1.0
    broadcasts: bool = False
    gathers: bool = False
    replayed: bool = False
    fused_on_cuda: bool = False
    on_cpu: Callable[[Call], Footprint | None] | None = None
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

    def grad_mode(self, index: int) -> str:
        """How the gradient of input `index` comes about."""
        return self.grads[index] if index < len(self.grads) else self.grads[-1]


def spec(kind: str, params: str = "", targets: str = "", **facts: Any) -> OpSpec:  # noqa: ANN401 - OpSpec's fields
    """Return an `OpSpec`; `params` and `targets` are separated by blanks, `facts` are its other fields."""
    if facts.get("replayed"):
        facts.setdefault("saves", every_input)
    return OpSpec(kind, tuple(params.split()), tuple(targets.split()), **facts)


UNKNOWN = spec("unknown", replayed=True)
"""Stands for an operator without an entry: element-wise work, and autograd keeps every input."""


def unsupported_remark(kind: str) -> str:
    """Return how figures count what is in a graph's `unsupported`."""
    if kind == COMPILED:
        return (
            f"{kind}: not modelled; the figures are those of the same step in eager PyTorch, and a compiled "
            "one fuses kernels and keeps other tensors"
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
