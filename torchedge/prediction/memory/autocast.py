"""Automatic mixed precision as a pure graph pass.

The casts that `torch.autocast` runs, inserted as operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torchedge.graphs import FLOATING, ITEM_SIZES, ForwardGraph, Op, Value
from torchedge.ops import OpSpec, registry
from torchedge.prediction.memory.rewriting import Rewriter, releases_of
from torchedge.prediction.memory.settings import StepSettings

_LOW = frozenset(("bfloat16", "float16"))
_CASTABLE = frozenset(("float32", "bfloat16", "float16"))
_WIDEST = ("widest", "join", "join_on_cuda")


def lower_precision(graph: ForwardGraph, settings: StepSettings) -> ForwardGraph:
    """Return the graph as it runs under `torch.autocast(dtype=settings.amp)`, unchanged where amp is off.

    Casts of parameters are made once and kept until autocast ends, after the loss; casts of activations last
    as long as autograd keeps them. Where the model enters autocast itself, that decides. GradScaler's few
    scalars are not modelled.
    """
    if settings.amp is None:
        return graph
    return _AutocastPass(graph, settings).run()


class _AutocastPass:
    def __init__(self, graph: ForwardGraph, settings: StepSettings) -> None:
        assert settings.amp is not None
        self.out, self.graph = Rewriter(graph), graph
        self.low, self.on_cpu = settings.amp, settings.backend == "cpu"
        self.releases = releases_of(graph)
        self.cached: dict[tuple[int, str], int] = {}
        self.weak: set[int] = set()
        self.exact: dict[int, int] = {}
        self.readers = Counter(index for op in graph.ops for index in op.inputs)

    def run(self) -> ForwardGraph:
        known = registry()
        for position, original in enumerate(self.graph.ops):
            op = self._reading_exact(original)
            spec = known.get(op.kind)
            wanted = self._precision(op, spec)
            asked = spec is not None and (spec.widens or spec.casts_inside)
            widens = asked and not self.on_cpu and op.autocast != "off"
            inputs, casts = self._casts(op, None if widens else wanted)
            if (not op.inputs and "dtype" in op.attrs) or (op.inputs and self.weak.issuperset(op.inputs)):
                self.weak.update(op.outputs)
            self._retype(op, spec, wanted)
            self.out.emit(self._widened(original, replace(op, inputs=inputs), spec))
            released = self.releases[position]
            self.out.release(*casts, *released, *[self.exact[i] for i in released if i in self.exact])
            # A result whose dtype the model asks for; which of several operators read the cast is unknown.
            for index in op.outputs:
                value = self.out.values[index]
                if value.exact and value.dtype in _LOW and self.readers[index] == 1:
                    self.exact[index] = self.out.add("to_copy", (index,), value.shape, "float32", op)
        self.out.release(*self.cached.values())
        return self.out.finish()

    def _reading_exact(self, op: Op) -> Op:
        """Return the operator reading the casts that the model asks for in place of their sources."""
        for index in op.outputs:
            value = self.out.values[index]
            if value.alias in self.exact:
                self.out.values[index] = replace(value, alias=self.exact[value.alias])
        return replace(op, inputs=tuple([self.exact.get(i, i) if i is not None else None for i in op.inputs]))

    def _precision(self, op: Op, spec: OpSpec | None) -> str | None:
        """Return the dtype an operator's inputs are cast to, None where autocast does not cast them."""
        if spec is None or op.inplace or op.autocast == "off":
            return None
        if spec.autocast == "lower":
            return op.autocast or self.low
        if spec.autocast == "float32" or (spec.autocast == "float32_on_cuda" and not self.on_cpu):
            return "float32"
        if spec.autocast == "join" or (spec.autocast == "join_on_cuda" and not self.on_cpu):
            kinds = {self.out.values[i].dtype for i in op.inputs if i is not None}
            return "float32" if "float32" in kinds and kinds & _LOW else None
        return None

    def _widened(self, original: Op, op: Op, spec: OpSpec | None) -> Op:
        """Return an operator that now mixes precisions with its memory: a footprint is of one precision.

        PyTorch computes in the widest one. It casts the gradients of narrower inputs behind the call, unless
        the kernel itself reads and writes them.
        """
        footprint, kind = op.footprint, "widest" if spec is None else spec.autocast
        reads = spec is not None and spec.widens
        if op.kind == "custom_function" and footprint is not None and op.inputs[0] is not None:
            now, before = [values[op.inputs[0]].item_size for values in (self.out.values, self.graph.values)]
            return replace(op, footprint=footprint.narrowed(before, now)) if now < before else op
        if footprint is not None and spec is not None and spec.casts_inside:
            kept, given = [v[op.inputs[0] or 0].dtype for v in (self.out.values, self.graph.values)]
            return op if kept == given or kept not in _LOW else replace(op, footprint=footprint.cast_inside())
        if (
            footprint is None
            or not (reads or kind in _WIDEST)
            or len(self._precisions(self.graph.values, original)) > 1
        ):
            return op
        present = [index for index in (*op.inputs, *op.outputs) if index is not None]
        kinds = self._precisions(self.out.values, op)
        if len(kinds) < 2:
            return op
        widest = max(ITEM_SIZES[kind] for kind in kinds)
        narrow = {
            place
            for place, index in enumerate(present)
            if (value := self.out.values[index]).dtype in kinds and value.item_size < widest
        }
        return replace(op, footprint=footprint.widened(widest, narrow, casts=not reads))

    @staticmethod
    def _precisions(values: Sequence[Value], op: Op) -> set[str]:
        """Return the floating dtypes of an operator's inputs and outputs; single numbers do not promote."""
        inputs = [values[index] for index in op.inputs if index is not None]
        if any(value.shape for value in inputs):
            inputs = [value for value in inputs if value.shape]
        return {value.dtype for value in (*inputs, *[values[index] for index in op.outputs])} & _CASTABLE

    def _casts(self, op: Op, wanted: str | None) -> tuple[tuple[int | None, ...], list[int]]:
        """Return the inputs an operator reads, and the casts made for it alone."""
        if wanted is None:
            return op.inputs, []
        inputs: list[int | None] = []
        casts: list[int] = []
        for index in op.inputs:
            if (
                index is None
                or (value := self.out.values[index]).dtype == wanted
                or value.dtype not in _CASTABLE
            ):
                inputs.append(index)
                continue
            key = (index, wanted)
            cast = self.cached.get(key)
            if cast is None:
                attrs = None if self.on_cpu else {"implicit": True}
                cast = self.out.add("to_copy", (index,), value.shape, wanted, op, attrs)
                if value.role == "parameter" and value.trainable and wanted == self.low:
                    self.cached[key] = cast
                else:
                    casts.append(cast)
            inputs.append(cast)
        return tuple(inputs), casts

    def _retype(self, op: Op, spec: OpSpec | None, wanted: str | None) -> None:
        """Give the outputs the dtype they have under autocast."""
        values = self.out.values
        for index in op.outputs:
            value = values[index]
            if value.dtype not in FLOATING:
                continue
            if op.kind == "to_copy" or not op.inputs:
                continue
            dtype = wanted or self._promoted(op, spec, value)
            if op.kind == "custom_function" and value.alias is not None:  # as its body ran
                dtype = values[value.alias].dtype
            if dtype != value.dtype and dtype in _CASTABLE:
                values[index] = replace(value, dtype=dtype)

    def _promoted(self, op: Op, spec: OpSpec | None, value: Value) -> str:
        """The widest floating input; views, in-place calls and normalisations follow input 0.

        Factories with a dtype have that of another value (`dtype=x.dtype`), so they do not promote.
        """
        kinds = [self.out.values[i].dtype for i in op.inputs if i is not None and i not in self.weak]
        if (
            op.inplace
            or value.alias is not None
            or (spec is not None and spec.autocast in ("keep", "float32", "float32_on_cuda"))
        ):
            return kinds[0] if kinds and kinds[0] in _CASTABLE else value.dtype
        castable = [k for k in kinds if k in _CASTABLE]
        if not castable:
            return value.dtype
        return "float32" if "float32" in castable and not self._scalars_only(op) else castable[0]

    def _scalars_only(self, op: Op) -> bool:
        """Whether every float32 input is a zero-dimensional tensor, which does not promote."""
        wide = [
            self.out.values[i] for i in op.inputs if i is not None and self.out.values[i].dtype == "float32"
        ]
        return all(not v.shape for v in wide) and len(wide) < sum(i is not None for i in op.inputs)
