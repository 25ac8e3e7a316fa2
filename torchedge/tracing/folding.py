"""Constant folding: values that depend on the weights alone are computed once, at capture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchedge.graphs import WEIGHT_ROLES
from torchedge.graphs.graph import Op
from torchedge.graphs.steps import GraphBuilder, Input, Ref, Step, Term
from torchedge.tracing.recorder import DTYPE_NAMES
from torchedge.tracing.steps import CapturedStep

SMALL_BYTES = 4096
"""Constants of at most this size are folded even if memory grows by them, unless they unpack integers."""

_VIEWS = frozenset(("_to_copy", "expand", "permute", "squeeze", "unsqueeze", "view"))
"""Operators whose result a kernel reads from their input: storing it would only take memory."""
_PARTS = frozenset(("select", "slice"))
"""Views of a part of their input."""
_BATCH_NORM = "_native_batch_norm_legit_no_training"


def fold_constants(captured: CapturedStep) -> CapturedStep:
    """Return an inference in which values that depend on weights alone are constants of the step.

    Weights are parameters, buffers and constants that the step does not update. PyTorch computes the values,
    by the operators of the step; from weights on the meta device they have shapes alone. Batch norm becomes
    one scale and one shift of each channel, as PyTorch's own kernel computes it. Not folded: views and
    copies, and values that take more memory than the weights that they replace.
    """
    step, _ = _copied(captured.step, plain=True)
    folding = _Folding(step, captured.tensors)
    chosen = folding.choose()
    folded, names = _copied(step, chosen)
    constants = {name: folding.tensor(index) for index, name in names.items()}
    used = {value.name for value in folded.values if value.role != "activation"}
    tensors = {name: t for name, t in {**captured.tensors, **constants}.items() if name in used}
    return replace(captured, step=folded, tensors=tensors)


# which values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a known value comes from: the weights below it, and whether all operators there are views."""

    weights: frozenset[int]
    moved: bool


class _Folding:
    """The values of a step that depend on weights alone (`known`, by index) and the operators below them."""

    def __init__(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self.step, self.tensors = step, tensors
        self.known: dict[int, _Origin] = {}
        self.maker: dict[int, Op] = {}
        self.place = {id(op): place for place, op in enumerate(step.ops)}

    def choose(self) -> list[int]:
        """Return the values to fold."""
        refused: set[int] = set()
        while True:
            updated = {before for before, _ in self.step.updates}
            self.maker = {}
            self.known = {
                index: _Origin(frozenset([index]), True)
                for index, value in enumerate(self.step.values)
                if value.role in WEIGHT_ROLES and index not in updated
            }
            for op in self.step.ops:
                inputs = [i for i in op.inputs if i is not None]
                if all(i in self.known for i in inputs) and not any(i in refused for i in op.outputs):
                    below = [self.known[i] for i in inputs]
                    moved = op.kind in _VIEWS | _PARTS and all(o.moved for o in below)
                    origin = _Origin(frozenset[int]().union(*[o.weights for o in below]), moved)
                    self.known.update(dict.fromkeys(op.outputs, origin))
                    self.maker.update(dict.fromkeys(op.outputs, op))
            candidates = self._candidates()
            unfit = self._unfit(candidates)
            if not unfit:
                return candidates
            refused |= unfit

    def tensor(self, index: int) -> torch.Tensor:
        """Return the tensor of a known value, on the meta device if a weight below it is there."""
        names = [self.step.values[i].name for i in self.known[index].weights]
        result = self._evaluated(index, meta=any(self.tensors[name].is_meta for name in names))
        assert result is not None
        return result.contiguous()

    def _candidates(self) -> list[int]:
        """Return the known values that other operators read, past views, if an operator makes them."""
        ends = [self._past_views(end) for end in self._ends()]
        return [i for i in dict.fromkeys(ends) if i in self.maker and self.known[i].weights]

    def _ends(self) -> list[int]:
        """Return the known values that operators on other values read, and those that the step returns."""
        unknown = [op for op in self.step.ops if any(i not in self.known for i in op.outputs)]
        ends = [i for op in unknown for i in op.inputs]
        ends += [*self.step.outputs, *[after for _, after in self.step.updates]]
        return [i for i in dict.fromkeys(ends) if i is not None and i in self.known]

    def _past_views(self, index: int) -> int:
        while index in self.maker and self.maker[index].kind in _VIEWS:
            source = self.maker[index].inputs[0]
            assert source is not None
            index = source
        return index

    def _unfit(self, candidates: Sequence[int]) -> set[int]:
        """Return the candidates that grow memory, else those that PyTorch does not compute as traced."""
        unfit: set[int] = set()
        stored = self._still_read(candidates)
        for group in self._sharing(candidates, stored):
            if not self._saves(group, stored):
                others = {i: self.known[i].weights for i in group}
                unfit |= {
                    i
                    for i in group
                    if not self._saves([i], stored.union(*[w for o, w in others.items() if o != i]))
                }
        return unfit or {i for i in candidates if self._evaluated(i, meta=True) is None}

    def _still_read(self, candidates: Sequence[int]) -> frozenset[int]:
        """Return the weights that the step reads although the candidates are folded."""
        stack, seen = self._ends(), set(candidates)
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                if index in self.maker:
                    stack += [i for i in self.maker[index].inputs if i is not None]
        return frozenset(i for i in seen if i not in self.maker)

    def _sharing(self, candidates: Sequence[int], stored: frozenset[int]) -> list[list[int]]:
        """Return the candidates in groups: those that replace the same weights are together."""
        group_of: dict[int, list[int]] = {}
        for index in candidates:
            weights = self.known[index].weights - stored
            merged = [index]
            for group in {id(g): g for w in weights if (g := group_of.get(w)) is not None}.values():
                merged = group + merged
            linked = weights.union(*[self.known[i].weights - stored for i in merged])
            group_of.update(dict.fromkeys(linked or {-1 - index}, merged))
        return list({id(group): group for group in group_of.values()}.values())

    def _saves(self, group: Sequence[int], stored: Collection[int]) -> bool:
        """Return whether folding a group takes no more memory; parts alone have to take half as much."""
        sizes = [self.step.values[i].nbytes[0] for i in group]
        replaced = frozenset[int]().union(*[self.known[i].weights for i in group]) - frozenset(stored)
        freed = sum(self.step.values[i].nbytes[0] for i in replaced)
        if all(self.known[i].moved for i in group):
            return 2 * sum(sizes) <= freed
        packed = any(self.step.values[i].dtype in ("int8", "uint8") for i in replaced)
        return sum(sizes) <= freed or (max(sizes) <= SMALL_BYTES and not packed)

    def _evaluated(self, index: int, meta: bool) -> torch.Tensor | None:
        """Return the tensor of a known value; None if PyTorch makes none of the traced shape and dtype."""
        tensors: dict[int, torch.Tensor] = {}
        for i in self.known[index].weights:
            value = self.step.values[i]
            shape = torch.empty(value.at(1), dtype=getattr(torch, value.dtype), device="meta")
            tensors[i] = shape if meta else self.tensors[value.name].detach().cpu()
        for op in self._operators_below(index):
            results = _called(op, [None if i is None else tensors[i] for i in op.inputs])
            for i, result in zip(op.outputs, results, strict=False):
                tensors[i] = result.to("meta") if meta else result
            values = [self.step.values[i] for i in op.outputs]
            if [(v.shape, v.dtype) for v in values] != [
                (tuple(r.shape), DTYPE_NAMES.get(r.dtype)) for r in results
            ]:
                return None
        return tensors[index]

    def _operators_below(self, index: int) -> list[Op]:
        ops: dict[int, Op] = {}
        stack = [index]
        while stack:
            op = self.maker.get(stack.pop())
            if op is not None and id(op) not in ops:
                ops[id(op)] = op
                stack += [i for i in op.inputs if i is not None]
        return sorted(ops.values(), key=lambda op: self.place[id(op)])


def _called(op: Op, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Call an ATen operator; returns its results, nothing if no overload takes the arguments."""
    arguments = {name: _plain(name, item, inputs) for name, item in op.attrs.items()}
    with torch.no_grad():
        if op.kind == "view":
            return [arguments["input"].reshape(arguments["size"])]
        for overload in _overloads(op.kind):
            named = {"input" if a.name == "self" else a.name: a for a in overload._schema.arguments}
            if not arguments.keys() <= named.keys():
                continue
            absent = [a for name, a in named.items() if name not in arguments and not a.has_default_value()]
            call = {named[name].name: item for name, item in arguments.items()}
            try:
                results = overload(**call, **{a.name: None for a in absent})
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                continue
            several = list(results) if isinstance(results, (tuple, list)) else [results]
            mask = arguments.get("output_mask", (True,) * len(several))
            return [result for result, wanted in zip(several, mask, strict=True) if wanted]
    return []


def _overloads(kind: str) -> Iterator[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, kind, None)
    for name in [] if packet is None else packet.overloads():
        overload = getattr(packet, name)
        if not overload._schema.is_mutable:
            yield overload


def _plain(name: str, item: Any, inputs: Sequence[torch.Tensor | None]) -> Any:
    if isinstance(item, Input):
        return inputs[item.position]
    if isinstance(item, tuple):
        return [_plain(name, entry, inputs) for entry in item]
    return getattr(torch, item) if name.endswith("dtype") and isinstance(item, str) else item


# the step without them --------------------------------------------------------------------------------------


def _copied(step: Step, constants: Sequence[int] = (), plain: bool = False) -> tuple[Step, dict[int, str]]:
    """Return a step with some of its values as constants, and the names of those.

    plain: replace batch norms by a multiplication and an addition.
    """
    builder, place = GraphBuilder(), dict[int, int]()
    for index, value in enumerate(step.values):
        if value.role != "activation":
            place[index] = builder.add(value.name, value.shape, value.dtype, value.role, value.trainable)
    for index in constants:
        value = step.values[index]
        place[index] = builder.add(value.name, value.shape, value.dtype, "constant")
    read = {*step.outputs, *[i for op in step.ops for i in op.inputs], *[i for _, i in step.updates]}
    for op in step.ops:
        attrs = {name: _referring(item, op, place) for name, item in op.attrs.items()}
        forms = [(step.values[i].shape, step.values[i].dtype) for i in op.outputs]
        if plain and op.kind == _BATCH_NORM and read.isdisjoint(op.outputs[1:]):
            place[op.outputs[0]] = _scaled_and_shifted(builder, attrs, op.scope)
            continue
        for index, new in zip(op.outputs, builder.call(op.kind, attrs, forms, scope=op.scope), strict=True):
            place.setdefault(index, new)
    copy = builder.finish(
        [place[i] for i in step.inputs],
        [place[i] for i in step.outputs],
        updates=[(place[before], place[after]) for before, after in step.updates],
        hyperparameters={name: place[i] for name, i in step.hyperparameters.items()},
        initial={place[i]: number for i, number in step.initial.items()},
        name=step.name,
    )
    return copy, {index: builder.values[place[index]].name for index in constants}


def _referring(item: Any, op: Op, place: Mapping[int, int]) -> Any:
    if isinstance(item, Input):
        index = op.inputs[item.position]
        return None if index is None else Ref(place[index])
    return tuple([_referring(entry, op, place) for entry in item]) if isinstance(item, tuple) else item


def _scaled_and_shifted(builder: GraphBuilder, attrs: Mapping[str, Any], scope: str) -> int:
    """Add an evaluated batch norm as x · scale + shift with a scale and a shift of each channel."""
    x = builder.values[attrs["input"].value]
    compute = "float64" if x.dtype == "float64" else "float32"
    spread = (x.shape[1], *[1] * (len(x.shape) - 2))

    def of(name: str) -> Term:
        return Term(builder, attrs[name].value, scope).cast(compute)

    def of_channels(term: Term, name: str) -> Term:
        builder.rename(term.value, f"{scope}.{name}")
        attributes = {"input": Ref(term.value), "size": spread}
        return replace(term, value=builder.call("view", attributes, [(spread, compute)], scope=scope)[0])

    weight, bias = [of(name) if attrs.get(name) else None for name in ("weight", "bias")]
    scale = (of("running_var") + attrs["eps"]).apply("rsqrt")
    scale = scale if weight is None else scale * weight
    shift = -(scale * of("running_mean"))
    shift = shift if bias is None else shift + bias
    return (of("input") * of_channels(scale, "scale") + of_channels(shift, "shift")).cast(x.dtype).value
