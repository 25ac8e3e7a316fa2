"""Values, operators, and the forward graph they make up: immutable, free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from torchedge.errors import CaptureError, InputError
from torchedge.graphs.footprints import Footprint
from torchedge.graphs.partitions import Partition
from torchedge.graphs.sizes import Affine, NotAffineError, Poly, Shape, format_shape, shape_at
from torchedge.storage.locks import cached_property

_Key = TypeVar("_Key")
Role = Literal["input", "parameter", "buffer", "state", "constant", "activation"]
SHARED_ROLES = frozenset({"parameter", "buffer", "state"})
"""Roles of what all programs of a model share by name."""
WEIGHT_ROLES = frozenset({"parameter", "buffer", "constant"})
"""Roles of what an inference reads and never writes."""
RESIDENT_ROLES = SHARED_ROLES | WEIGHT_ROLES
"""Roles of what stays on the device from step to step."""
Mode = Literal["train", "infer"]
"""The run that is predicted or captured: a training step or an inference."""

COMPILED = "torch.compile"
"""Among unsupported operators: the step is compiled into unknown graphs; its memory is eager PyTorch's."""

ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
        "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16, "complex32": 4,
    }
)  # fmt: skip
"""Bytes of one element of each dtype a graph may hold."""

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32"})
"""Dtypes through which a gradient can flow."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: its name, shape (dimensions may be affine in the batch size N), dtype and role.

    `alias` is the index of the value whose storage it shares (a view, or the result of an in-place operator),
    else None. `trainable` says of a parameter that it receives a gradient, `exact` that the model asks for
    the dtype (`.float()`), which autocast leaves alone.
    """

    name: str
    shape: Shape
    dtype: str
    role: Role = "activation"
    alias: int | None = None
    trainable: bool = False
    exact: bool = False

    @property
    def numel(self) -> Poly:
        """Number of elements as a polynomial of the batch size."""
        return self._times_elements(1)

    def _times_elements(self, scale: int) -> Poly:
        """Multiply a number by the number of elements."""
        const, slope, square = 1, 0, 0
        for size in self.shape:
            if type(size) is Affine:
                const, slope, square = _times(const, slope, square, size)
            else:  # a number, or the Size of a family of graphs
                scale *= size  # type: ignore[operator]
        return (const * scale, slope * scale, square * scale)

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> Poly:
        """Bytes as a polynomial of the batch size."""
        return self._times_elements(ITEM_SIZES[self.dtype])

    def at(self, batch_size: int) -> tuple[int, ...]:
        """Return the concrete shape at one batch size."""
        return shape_at(self.shape, batch_size)


def _times(const: int, slope: int, square: int, size: Affine) -> Poly:
    """Multiply a polynomial of degree one at most by an affine dimension."""
    if square:
        raise NotAffineError(
            "a tensor grows with the third power of the batch size; "
            "capture the model for one fixed batch size"
        )
    return (const * size.const, slope * size.const + const * size.slope, slope * size.slope)


BACKWARD, UPDATE, FREE_GRADIENTS = "step.backward", "step.update", "step.free_gradients"
STEP_EVENTS = frozenset((BACKWARD, UPDATE, FREE_GRADIENTS))
"""Kinds of operators without results that stand between those of a whole step: a backward pass over the loss
that is its input ("retain": autograd keeps its records), an update ("optimizer": the optimizer's number), and
the end of the gradients of parameters ("names")."""

FUNCTION_REGION = 1 << 20
"""The least number of a region that is a custom autograd function."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call: ATen base name, indices of the values it reads (None: an absent one) and makes.

    `scope` is the path of the module that called it; `inplace` that output 0 overwrites input 0; `grad` that
    autograd was recording; `region` numbers the activation-checkpoint region it runs in (0: none, below 0:
    one with reentrant autograd; from `FUNCTION_REGION` on: the forward of a custom autograd function, whose
    memory is that of the "custom_function" behind it), `outer` the regions around that one, the outermost
    first; `stored` that a selective checkpoint stores its outputs; `known` that `torchedge.ops` knows it.
    `footprint`: its memory as PyTorch runs it, if no rule there says
    so. `autocast`: the autocast that the model entered itself, "off" or a dtype, whatever autocast is around
    the model; empty outside of one.
    """

    kind: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""
    inplace: bool = False
    grad: bool = True
    region: int = 0
    known: bool = True
    stored: bool = False
    footprint: Footprint | None = None
    autocast: str = ""
    outer: tuple[int, ...] = ()


def moved(op: Op, place: Mapping[int, int]) -> Op:
    """Return an operator whose values have other places."""
    inputs = tuple([None if index is None else place[index] for index in op.inputs])
    return replace(op, inputs=inputs, outputs=tuple([place[index] for index in op.outputs]))


def last_uses(uses: Sequence[Iterable[_Key]], stays: Collection[_Key] = ()) -> tuple[tuple[_Key, ...], ...]:
    """Return for each position what is used there and at no later one, without what `stays`."""
    last = {item: position for position, items in enumerate(uses) for item in items}
    ends: list[list[_Key]] = [[] for _ in uses]
    for item, position in last.items():
        if item not in stays:
            ends[position].append(item)
    return tuple(map(tuple, ends))


def in_order(after: Sequence[Collection[int]]) -> list[int]:
    """Return numbers in an order in which each follows all that it has to, the least one where several can.

    after: the numbers that have to follow each one. Raises AssertionError where they follow each other.
    """
    waits = Counter(later for followers in after for later in followers)
    ready = [number for number in range(len(after)) if not waits[number]]
    order: list[int] = []
    while ready:
        order.append(heappop(ready))
        for later in after[order[-1]]:
            waits[later] -= 1
            if not waits[later]:
                heappush(ready, later)
    if len(order) != len(after):
        raise AssertionError("what has to follow what is a cycle")
    return order


def parameters_of(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return the parameters among values, each once."""
    return tuple(v for v in values if v.role == "parameter")


@dataclass(frozen=True, eq=False)
class ForwardGraph:
    """A captured forward pass (and loss) for prediction, streaming and search: operators in execution order.

    `inputs` are the values the user feeds, `outputs` those the model returns, `loss` the scalar that a
    training step differentiates (None: inference). `releases[k]` lists the values whose last Python reference
    went away between operator k and k + 1: with it, memory is freed in the simulation where eager PyTorch
    frees it; None where capture cannot know. `training` is the mode the model ran in, `fixed_batch` the one
    batch size the graph is valid for (None: every). channels_last: the weights of convolutions lie
    in that memory format, which has other kernels. unread: parameters and buffers of the model that no
    operator reads, which occupy the device all the same. captured_for: the device that the
    graph holds for, as the forward pass asks for its device; None: every. reads_batch: it computes with
    or compares the batch size, so that a branch may be taken as for large batches. compiled: the model
    runs under torch.compile, which runs other kernels than these operators. partition: its two graphs there,
    where PyTorch traces the model as one graph.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    loss: int | None = None
    training: bool = True
    releases: tuple[tuple[int, ...], ...] | None = None
    fixed_batch: int | None = None
    name: str = "model"
    captured_by: str = "trace"
    notes: tuple[str, ...] = ()
    channels_last: bool = False
    unread: tuple[Value, ...] = ()
    captured_for: str | None = None
    reads_batch: bool = False
    compiled: bool = False
    partition: Partition | None = None

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        """The parameters the graph reads, each once."""
        return parameters_of(self.values)

    def check_batch_sizes(self, batch_sizes: Iterable[int]) -> None:
        """Raise InputError for a batch size that the graph is not valid for."""
        for size in batch_sizes:
            if self.fixed_batch not in (None, size):
                raise InputError(
                    f"batch_size is {size}, but {self.name} was captured for {self.fixed_batch} only; "
                    "capture it again for another one"
                )

    @cached_property
    def is_whole_step(self) -> bool:
        """Whether the operators include the backward passes and updates of a whole step (`STEP_EVENTS`)."""
        return any(op.kind in STEP_EVENTS for op in self.ops)

    @cached_property
    def unsupported(self) -> tuple[str, ...]:
        """Kinds of operators that `torchedge.ops` does not know, each once, in order; and `COMPILED`."""
        kinds = dict.fromkeys(op.kind for op in self.ops if not op.known)
        return (*kinds, *([COMPILED] if self.compiled and self.partition is None else []))

    def __str__(self) -> str:
        count = sum(v.numel[0] for v in self.parameters)
        mode = "train" if self.training else "eval"
        lines = [f"graph {self.name} ({mode}, {len(self.ops)} ops, {count:,} parameters)"]
        lines += [f"  {_label(self.values[i])} = input" for i in self.inputs]
        lines += [f"  {_line(self.values, op)}" for op in self.ops]
        lines.append("  return " + ", ".join(f"%{self.values[i].name}" for i in self.outputs))
        if self.loss is not None:
            lines.append(f"  loss %{self.values[self.loss].name}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<ForwardGraph {self.name}: {len(self.ops)} operators, {len(self.parameters)} parameters>"


def canonical_text(item: Any) -> str:  # noqa: ANN401 - attributes are any plain data
    """Return plain data as text that is the same in every process and on every platform."""
    if isinstance(item, Affine):
        return str(item)
    if isinstance(item, Mapping):
        return "{" + ",".join(f"{k}:{canonical_text(item[k])}" for k in sorted(item)) + "}"
    if isinstance(item, (tuple, list)):
        return "(" + ",".join(map(canonical_text, item)) + ")"
    if isinstance(item, slice):
        return f"slice({canonical_text(item.start)},{canonical_text(item.stop)},{canonical_text(item.step)})"
    return repr(item)


# verification -----------------------------------------------------------------------------------------------


def verify_operators(name: str, values: Sequence[Value], ops: Sequence[Op], ends: Iterable[int]) -> None:
    """Check unique names, reads after writes and sound aliases; raises CaptureError.

    ends: values that must exist: those fed, returned, differentiated.
    """
    _require(len({value.name for value in values}) == len(values), name, "two values share a name")
    for value in values:
        sizes_fit = all(d.slope > 0 if isinstance(d, Affine) else d >= 0 for d in value.shape)
        _require(sizes_fit, name, f"value {value.name} has a negative dimension: {value.shape}")
    exist = {i for i, value in enumerate(values) if value.role != "activation"}
    for position, op in enumerate(ops):
        where = f"operator {position} ({op.kind})"
        for index in op.inputs:
            _require(index is None or index in exist, name, f"{where} reads value {index} before it is made")
        for index in op.outputs:
            _require(0 <= index < len(values), name, f"{where} makes value {index}, which does not exist")
            _require(index not in exist, name, f"{where} makes value {index} a second time")
            alias = values[index].alias
            sound = alias is None or alias in exist
            _require(sound, name, f"{where}: output {index} shares the storage of a later value")
            exist.add(index)
        _require(not op.inplace or op.inputs[:1] != (None,), name, f"{where} is in-place on nothing")
    for index in ends:
        _require(index in exist, name, f"value {index} is returned or fed but never made")


def _require(holds: bool, name: str, fault: str) -> None:
    if not holds:
        raise CaptureError(
            f"graph {name} is not well formed: {fault}; this is a defect of the capture, please report it"
        )


# text -------------------------------------------------------------------------------------------------------


def _label(value: Value) -> str:
    return f"%{value.name}: {value.dtype}[{format_shape(value.shape)}]"


def _line(values: Sequence[Value], op: Op) -> str:
    outputs = ", ".join(_label(values[i]) for i in op.outputs)
    inputs = ", ".join("None" if i is None else f"%{values[i].name}" for i in op.inputs)
    mark = "!" if op.inplace else ""
    attributes = " {" + ", ".join(f"{k}={v}" for k, v in op.attrs.items()) + "}" if op.attrs else ""
    scope = f"  # {op.scope}" if op.scope else ""
    unknown = "" if op.known else "  # unknown to torchedge.ops"
    return f"{outputs} = {op.kind}{mark}({inputs}){attributes}{scope}{unknown}"
