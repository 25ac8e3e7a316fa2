"""From a captured graph to the operations that become kernels, in execution order, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torchedge.errors import InputError
from torchedge.graphs import FLOATING, ForwardGraph, Op, Value
from torchedge.ops import Call, LoadClass, OpSpec, Work, registry, spec_of
from torchedge.streaming.instances import LoadClassName

__all__ = ["InferenceGraph", "Operation", "Precision", "StoredWeight", "lay_out"]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter or buffer that inference reads, with its bytes in the planned precision."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator that becomes a kernel; views, dropout and other free operators are none.

    `kind` is the ATen base name (of a fused one, those of its parts joined by "+"). `flops` counts a
    multiply-add as two; `bytes_moved` is what it reads and writes at least, weights included. `weights` names
    the weights it reads, `inputs` the positions (from 0) of the operations whose results it reads, directly
    or through views. `output_bytes` is the size of its result. `parts` are what a fused operation is made of.
    """

    name: str
    kind: str
    load_class: LoadClassName
    flops: int
    bytes_moved: int
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    output_bytes: int
    parts: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class InferenceGraph:
    """A forward pass at one batch size, in fixed execution order, in one precision.

    `input_bytes` is what the model is fed, `outputs` the positions of operations whose results it returns.
    """

    name: str
    operations: tuple[Operation, ...]
    weights: tuple[StoredWeight, ...]
    input_bytes: int
    outputs: tuple[int, ...]
    precision: str = "float16"
    notes: tuple[str, ...] = ()

    @cached_property
    def uses(self) -> dict[str, tuple[int, int]]:
        """First and last layer (from 1) that reads each weight; tied weights are one weight."""
        found: dict[str, tuple[int, int]] = {}
        for layer, operation in enumerate(self.operations, 1):
            for name in operation.weights:
                found[name] = (found.get(name, (layer, layer))[0], layer)
        return found

    @cached_property
    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes of inputs and intermediate results that are alive while each operation runs."""
        count = len(self.operations)
        last = [place for place in range(count)]
        for place, operation in enumerate(self.operations):
            for source in operation.inputs:
                last[source] = max(last[source], place)
        for place in self.outputs:
            last[place] = count - 1
        change = [0] * (count + 1)
        for place, operation in enumerate(self.operations):
            change[place] += operation.output_bytes
            change[last[place] + 1] -= operation.output_bytes
        alive, total = [], self.input_bytes
        for place in range(count):
            total += change[place]
            alive.append(total)
        return tuple(alive)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(w.nbytes for w in self.weights)


Precision = Literal["float16", "float32", "model"]

_CASTS = frozenset({"to_copy", "_to_copy", "to"})
_COMPLEX = {"float16": "complex32", "float32": "complex64"}


def lay_out(graph: ForwardGraph, *, batch_size: int = 1, precision: Precision = "float16") -> InferenceGraph:
    """Return the operations of a forward pass in execution order, with the weights each of them reads.

    Views, dropout, asserts and casts between floating dtypes are no operations; what is read through them
    counts as read by the operation behind them. A tied weight is one weight. Weights are the parameters,
    and the buffers and constants of several elements, that operations read; of a buffer read through slices
    only those are stored. `precision` is what floating tensors are stored and computed in ("model": as they
    are); integer ones keep their size. Operators that `torchedge.ops` does not know are named in `notes`.
    Raises InputError where the graph was captured in training mode or for another batch size.
    """
    if precision not in get_args(Precision):
        raise InputError(f"precision is {precision!r}; expected one of {', '.join(get_args(Precision))}")
    if graph.training:
        raise InputError(
            f"{graph.name} was captured for training; expected a graph of inference: "
            'torchedge.capture(model, example, mode="infer")'
        )
    if graph.fixed_batch not in (None, batch_size):
        raise InputError(
            f"batch_size is {batch_size}, and {graph.name} was captured for {graph.fixed_batch} only; "
            f"capture it with batch_size={batch_size}"
        )
    return _Layout(graph, batch_size, precision).finish()


class _Layout:
    """Walks the operators once.

    `source[v]` is the operation that made value v, `weight[v]` the weight that it is a view of, `writer[r]`
    the operation that last wrote into the storage of r in place, `path[v]` the views that lead to v, and
    `parts[w]` the bytes of each view through which weight w is read.
    """

    def __init__(self, graph: ForwardGraph, batch_size: int, precision: Precision) -> None:
        self.graph, self.precision = graph, precision
        self.values = tuple(
            Value(v.name, v.at(batch_size), _planned(v.dtype, precision), v.role, v.alias)
            for v in graph.values
        )
        self.operations: list[Operation] = []
        self.names: dict[str, int] = {}
        self.source: dict[int, int] = {}
        self.writer: dict[int, int] = {}
        self.weight: dict[int, int] = {
            index: index for index, value in enumerate(self.values) if _is_weight(value)
        }
        self.parts: dict[int, dict[tuple[object, ...], int]] = {}
        self.path: dict[int, tuple[object, ...]] = {}
        self.unknown: dict[str, str] = {}
        for op in graph.ops:
            if self._vanishes(op):
                self._pass_through(op)
            else:
                self._add(op)

    def finish(self) -> InferenceGraph:
        graph = self.graph
        weights = tuple(StoredWeight(self.values[root].name, self._stored_bytes(root)) for root in self.parts)
        outputs = tuple(dict.fromkeys(self.source[o] for o in graph.outputs if o in self.source))
        notes = tuple(
            f"operator {kind} is not known to torchedge.ops; taken as {load} with one FLOP an output element"
            for kind, load in self.unknown.items()
        )
        fed = sum(_nbytes(self.values[i]) for i in graph.inputs)
        return InferenceGraph(
            graph.name, tuple(self.operations), weights, fed, outputs, self.precision, (*graph.notes, *notes)
        )

    def _vanishes(self, op: Op) -> bool:
        known = registry().get(op.kind)
        if known is not None and known.load is LoadClass.FREE:
            return True
        if not op.outputs or op.kind == "_assert_async":
            return True
        if spec_of(op.kind).work is Work.DROPOUT:
            return not op.attrs.get("train", op.attrs.get("training", False))
        if op.kind in _CASTS and self.precision != "model":
            ends = (self.graph.values[op.inputs[0] or 0].dtype, self.graph.values[op.outputs[0]].dtype)
            return all(dtype in FLOATING for dtype in ends)
        return False

    def _pass_through(self, op: Op) -> None:
        """Let the outputs stand for what the operator reads."""
        read = [i for i in op.inputs if i is not None]
        for place, output in enumerate(op.outputs if read else ()):
            seen = read[place] if len(read) == len(op.outputs) else read[0]
            if seen in self.source:
                self.source[output] = self.source[seen]
            if seen in self.weight:
                self.weight[output] = self.weight[seen]
            step = (op.kind, place, tuple(sorted((k, str(v)) for k, v in op.attrs.items())))
            self.path[output] = (*self.path.get(seen, ()), step)

    def _add(self, op: Op) -> None:
        known = registry().get(op.kind) or self._guess(op)
        call = Call(self.values, op, training=False)
        read = [i for i in op.inputs if i is not None]
        for index in read:
            if index in self.weight:
                self._read(self.weight[index], index)
        weights = dict.fromkeys(self.values[self.weight[i]].name for i in read if i in self.weight)
        sources = [self.source.get(i) for i in read] + [self.writer.get(_root(self.values, i)) for i in read]
        inputs = dict.fromkeys(source for source in sources if source is not None)
        output_bytes = sum(_nbytes(self.values[o]) for o in op.outputs)
        place = len(self.operations)
        self.operations.append(
            Operation(
                name=self._named(op),
                kind=op.kind,
                load_class=known.load.value,  # type: ignore[arg-type]
                flops=known.flops(call),
                bytes_moved=self._bytes_moved(known, op, output_bytes),
                weights=tuple(weights),
                inputs=tuple(inputs),
                output_bytes=output_bytes,
            )
        )
        for output in op.outputs:
            self.source[output] = place
        if op.inplace:
            self.writer[_root(self.values, op.outputs[0])] = place

    def _read(self, root: int, index: int) -> None:
        """Note that an operation reads (this part of) a weight."""
        self.parts.setdefault(root, {})[self.path.get(index, ())] = _nbytes(self.values[index])

    def _stored_bytes(self, root: int) -> int:
        """A parameter is stored whole, of a buffer or constant only the slices that are read."""
        whole = _nbytes(self.values[root])
        return whole if self.values[root].role == "parameter" else min(whole, sum(self.parts[root].values()))

    def _bytes_moved(self, known: OpSpec, op: Op, output_bytes: int) -> int:
        """Each input read once (a broadcast view only its source), each output written once."""
        read = 0
        for place, index in enumerate(op.inputs):
            if index is None:
                continue
            size = min(_nbytes(self.values[index]), _nbytes(self.values[_root(self.values, index)]))
            read += min(size, output_bytes) if known.gathers and place == 0 else size
        return read + output_bytes

    def _guess(self, op: Op) -> OpSpec:
        """Class of an unknown operator: a product where it reads a matrix of weights, else element-wise."""
        matrices = [
            i for i in op.inputs if i is not None and i in self.weight and len(self.values[i].shape) > 1
        ]
        load = LoadClass.REUSABLE if matrices else LoadClass.ELEMENTAL
        self.unknown[op.kind] = load.value
        return OpSpec(op.kind, load=load)

    def _named(self, op: Op) -> str:
        name = f"{op.scope}.{op.kind}" if op.scope else op.kind
        count = self.names[name] = self.names.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"


def _planned(dtype: str, precision: Precision) -> str:
    if precision == "model" or dtype not in FLOATING:
        return dtype
    return _COMPLEX[precision] if dtype.startswith("complex") else precision


def _is_weight(value: Value) -> bool:
    """A single number that is no parameter (a scale, a counter) is part of the kernel instead."""
    least = 1 if value.role == "parameter" else 2
    return (
        value.role in ("parameter", "buffer", "constant") and value.alias is None and value.numel[0] >= least
    )


def _nbytes(value: Value) -> int:
    return value.nbytes[0]  # the shapes are plain numbers here


def _root(values: Sequence[Value], index: int) -> int:
    while (alias := values[index].alias) is not None:
        index = alias
    return index
