"""The memory of an optimizer's step: the optimizer's own code on meta tensors, storage by storage.

It serves every optimizer whose `step()` reads no values: those of torch.optim, of bitsandbytes, a user's own.
Which parameters have state, how large it is and which temporaries a step takes follow from that code alone.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import repeat
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph, Value
from torchedge.graphs.footprints import FootprintEvent, UpdateCalls, UpdateFootprint
from torchedge.tracing.footprints import StorageLog
from torchedge.tracing.optimizers import check_parameters

_EARLY, _LATE = 2.0, 1000.0
"""Read as the value of every 0-d tensor, step counters among them: in the first step and in a later one."""
_ON_DEVICE = "counts on the device"
"""Marks groups whose step counters lie on the GPU: fused and capturable ones."""
_COUNTER_BYTES = 4
_LEAST_PAGED = 100_000
"""Elements from which on bitsandbytes pages a state."""
_PLAIN_KINDS = (bool, int, float, str, tuple)
"""Attributes of an optimizer beside its groups' options that tell two of one class apart."""
_STAND_IN, _FIXED_BYTES = 3 * _LEAST_PAGED + 1, 8
"""The first size of stand-ins for parameters: none is a multiple of 3, so that the number of elements tells
them apart; and the largest storage whose size follows from no parameter's."""


@dataclass(frozen=True)
class OptimizerReplay:
    """An optimizer whose first and later steps are replayed.

    name: in lower case, as settings name optimizers. options: of each parameter group, for comparisons;
    without a template pairs of an option and its value, beside the defaults.
    parameters: shape, dtype, group, and whether it learns, of each one that may have state, in the order of
    the optimizer; None: those of a graph that learn. names: of these in their model, None: not known.
    """

    name: str
    options: tuple[Any, ...] = ()
    parameters: tuple[tuple[tuple[int, ...], torch.dtype, int, bool], ...] | None = None
    names: tuple[str, ...] | None = None
    template: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def fused(self) -> bool:
        """Whether its options ask for the fused implementation."""
        groups = (self.options, *[group for group in self.options if isinstance(group, tuple)])
        return any(option in group for group in groups for option in (("fused", True), ("fused", "True")))

    def update(self, graph: ForwardGraph, foreach: bool) -> tuple[UpdateFootprint, frozenset[int]]:
        """Return the optimizer's steps for a graph, whose values own storages, and which of these it updates.

        foreach: the framework's default on the device. Raises InputError for the optimizer of another model,
        and for one that cannot run on meta tensors.
        """
        learning = {index: value for index, value in enumerate(graph.values) if value.trainable}
        if self.parameters is None:
            places = dict(enumerate(learning))
            footprint = self._of_named(list(learning.values()), foreach)
        else:
            without = [value for value in graph.values if not value.trainable] + list(graph.unread)
            places = self._places(learning, without)
            footprint = _replayed(self, tuple(places), foreach)
        owners = tuple([places.get(owner, -1) for owner in footprint.owners])
        return replace(footprint, owners=owners), frozenset(places.values())

    def calls(self, foreach: bool) -> UpdateCalls:
        """Return the calls of a step; of a named optimizer over a few matrices and vectors.

        foreach, and the errors raised: as in `update`.
        """
        if self.parameters is not None:
            return _replayed(self, tuple(range(len(self.parameters))), foreach).calls
        parameters = [((side,) * rank, torch.float32, 0, True) for rank in (1, 2) for side in (256,) * 4]
        return _replayed(replace(self, parameters=tuple(parameters)), tuple(range(8)), foreach).calls

    def _of_named(self, values: Sequence[Value], foreach: bool) -> UpdateFootprint:
        """Return the steps over values: once for all sizes if storages are as large as their parameters."""

        def replayed(shapes: Sequence[tuple[int, ...]]) -> UpdateFootprint:
            parameters = zip(shapes, dtypes, repeat(0), repeat(True), strict=False)
            return _replayed(replace(self, parameters=tuple(parameters)), tuple(range(len(values))), foreach)

        if not values:
            return UpdateFootprint((), (), (), (), {}, UpdateCalls(0.0, 0.0, 0.0))
        dtypes = [getattr(torch, value.dtype) for value in values]
        ranks = [len(value.shape) for value in values]
        stand_ins = [(_STAND_IN + k + k // 2, *[3] * (rank - 1))[:rank] for k, rank in enumerate(ranks)]
        footprint = replayed(stand_ins)
        own = [prod(shape) * dtype.itemsize for shape, dtype in zip(stand_ins, dtypes, strict=True)]
        storages = [(size[0], owner) for size, owner in zip(footprint.sizes, footprint.owners, strict=True)]
        if all(size <= _FIXED_BYTES or (owner >= 0 and size == own[owner]) for size, owner in storages):
            sizes = [(size, 0, 0) if size <= _FIXED_BYTES else values[k].nbytes for size, k in storages]
            return replace(footprint, sizes=tuple(sizes))
        return replayed([value.at(1) for value in values])

    def _places(self, learning: dict[int, Value], without: Sequence[Value]) -> dict[int, int]:
        """Return the value of each parameter: by its name, else the first one left with its shape.

        without: values that get no gradient, frozen or not read by the forward pass.
        """
        assert self.parameters is not None
        left = dict(learning)
        names = {value.name for value in without}
        shapes = Counter([tuple(value.shape) for value in without if value.trainable])
        by_name = {value.name: index for index, value in learning.items()}
        places: dict[int, int] = {}
        for place, name in enumerate(self.names or ()):
            if name in by_name:
                places[place] = by_name[name]
                del left[by_name[name]]
        for place, (shape, _, _, learns) in enumerate(self.parameters):
            if place in places or not learns or (self.names is not None and self.names[place] in names):
                continue
            index = next((i for i, value in left.items() if tuple(value.shape) == shape), None)
            if index is None and shapes[shape]:
                shapes[shape] -= 1
                continue
            if index is None:
                raise InputError(
                    f"the optimizer has a parameter of shape {shape} that the model has not; expected an "
                    "optimizer built from this model's parameters()"
                )
            places[place] = index
            del left[index]
        return dict(sorted(places.items()))


def replay_of(optimizer: torch.optim.Optimizer, model: object = None) -> OptimizerReplay:
    """Return the replay of an optimizer, which stays as it is; model: of what it trains the parameters.

    Raises InputError if one of the parameters is not the model's.
    """
    names = None
    stateful = [
        (p, number)
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad or p in optimizer.state
    ]
    if isinstance(model, torch.nn.Module):
        check_parameters(optimizer, model.parameters())
        known = {id(p): name for name, p in model.named_parameters()}
        names = tuple([known[id(p)] for p, _ in stateful])
    options = tuple(
        [
            tuple(sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "lr", "initial_lr")))
            for group in optimizer.param_groups
        ]
    )
    plain = tuple(sorted((k, repr(v)) for k, v in vars(optimizer).items() if isinstance(v, _PLAIN_KINDS)))
    parameters = tuple([(tuple(p.shape), p.dtype, number, p.requires_grad) for p, number in stateful])
    memo = {id(p): torch.nn.Parameter(torch.empty_like(p, device="meta")) for p, _ in stateful}
    return OptimizerReplay(
        _name(optimizer), (type(optimizer), plain, *options), parameters, names, _emptied(optimizer, memo)
    )


def _name(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__.lower()
    momentum = name == "sgd" and any(group.get("momentum") for group in optimizer.param_groups)
    return "sgd-momentum" if momentum else name


def _emptied(optimizer: torch.optim.Optimizer, memo: dict[int, torch.nn.Parameter]) -> Any:
    """Return a copy over other parameters, which shares nothing that a step changes.

    memo: the new parameter of each old one's id. States have no values. Methods replaced on the object, as
    schedulers do, and hooks are left out.
    """
    copied = object.__new__(type(optimizer))
    for name, item in vars(optimizer).items():
        if name.endswith("_hooks"):
            item = OrderedDict()
        elif isinstance(item, torch.optim.Optimizer):  # of a wrapper
            item = _emptied(item, memo)
        elif callable(item) and hasattr(type(optimizer), name):
            continue
        elif isinstance(item, (dict, list, set)):
            item = copy.copy(item)
        copied.__dict__[name] = item
    copied.__dict__["param_groups"] = [
        {**group, "params": [memo[id(p)] for p in group["params"] if id(p) in memo]}
        for group in optimizer.param_groups
    ]
    state = copied.__dict__["state"] = defaultdict(dict)
    for p, states in optimizer.state.items():
        if id(p) in memo:
            state[memo[id(p)]] = tree_map(_without_values, states)
    return copied


def _without_values(item: Any) -> Any:
    """Return a state, a tensor on the meta device: 0-d ones are counters, which lie on the CPU."""
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_like(item, device="meta") if item.dim() else torch.zeros((), dtype=item.dtype)


@lru_cache(maxsize=32)
def _replayed(replay: OptimizerReplay, places: tuple[int, ...], foreach: bool) -> UpdateFootprint:
    """Run both steps; places: of the parameters that have a gradient."""
    assert replay.parameters is not None
    parameters = [
        torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), learns)
        for shape, dtype, _, learns in replay.parameters
    ]
    if replay.template is None:
        optimizer = _CLASSES[replay.name](parameters)
        for group in optimizer.param_groups:
            group.update(replay.options)
    else:
        old = [p for group in replay.template.param_groups for p in group["params"]]
        optimizer = _emptied(replay.template, {id(p): new for p, new in zip(old, parameters, strict=True)})
    fused = _configure(optimizer, foreach)
    for place in places:
        shape, dtype, _, _ = replay.parameters[place]
        parameters[place].grad = torch.empty(shape, dtype=dtype, device="meta")
    run = _UpdateRun()
    try:
        with _disable_current_modes(), run:
            for parameter in parameters:
                run.follow(parameter)
                if parameter.grad is not None:
                    run.follow(parameter.grad)
            begin = len(run.events)
            for state in tree_leaves(list(optimizer.state.values())):
                if isinstance(state, torch.Tensor) and state.is_meta:
                    run.follow(state)
            optimizer.step()
            middle, states = len(run.events), [k for k in run.alive.values() if k >= begin]
            run.value = _LATE
            optimizer.step()
            run.events += [(FootprintEvent.DROP, k, 0, 0) for k in run.alive.values() if k >= begin]
    except Exception as error:
        raise InputError(
            f"the optimizer {replay.name} does not run on tensors without values ({type(error).__name__}: "
            f"{error}); pass the name of the optimizer whose state is as large, such as 'adam'"
        ) from None
    names = run.names_of_states(optimizer, parameters)
    alike: dict[tuple[int, int], list[int]] = {}
    for place, parameter in enumerate(parameters):
        alike.setdefault((parameter.numel(), parameter.element_size()), []).append(place)
    sizes = [numel * dtype.itemsize for numel, dtype in run.sizes]
    owners = [(*alike.get((numel, dtype.itemsize), ()), -1, -1) for numel, dtype in run.sizes]
    only = [place if second < 0 else -1 for place, second, *_ in owners]
    for k, (place, _) in names.items():
        only[k] = place
    stays = {k: names[k][1] if k in names else "" for k in states}
    first, later = run.signed(begin, middle, stays), run.signed(middle, len(run.events), stays)
    if fused:
        first, later = [k + 1 for k in states], []
    for optimizer_group in optimizer.param_groups:
        for parameter in optimizer_group["params"] if optimizer_group.get(_ON_DEVICE) else ():
            if parameter.grad is not None:
                first.append(len(sizes) + 1)
                stays[len(sizes)] = "step"
                sizes.append(_COUNTER_BYTES)
                only.append(-1)
    used = {number: k for k, number in enumerate(sorted({abs(event) - 1 for event in (*first, *later)}))}
    first, later = ([(used[abs(e) - 1] + 1) * (1 if e > 0 else -1) for e in part] for part in (first, later))
    return UpdateFootprint(
        tuple([(sizes[number], 0, 0) for number in used]),
        tuple([only[number] for number in used]),
        tuple(first),
        tuple(later),
        {used[number]: name for number, name in stays.items()},
        run.calls([parameters[place] for place in places], len(states) if fused else None),
    )


def _configure(optimizer: Any, foreach: bool) -> bool:
    """Set the implementation that PyTorch takes on the device; return whether it is a fused one.

    Fused kernels update in place: another implementation runs instead, whose temporaries do not count.
    """
    classes = [c for c in type(optimizer).__mro__ if c is not torch.optim.Optimizer]
    chooses = any(hasattr(sys.modules[c.__module__], "_default_to_fused_or_foreach") for c in classes)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"] = 1e-3
        if "foreach" in group and group["foreach"] is None and chooses:
            group["foreach"] = foreach and not group.get("differentiable")
        for option in ("fused", "capturable"):
            if group.get(option):
                group[option], group[_ON_DEVICE] = False, True
    if hasattr(optimizer, "init_state") and hasattr(optimizer, "update_step"):  # bitsandbytes
        optimizer.update_step = lambda *_: None  # its kernel updates in place
        if getattr(optimizer, "is_paged", False):
            optimizer.get_state_buffer = _paged
    return fused


def _paged(p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A paged state: large ones lie outside of PyTorch's allocator."""
    return torch.empty(0) if p.numel() >= _LEAST_PAGED else torch.zeros_like(p, dtype=dtype)


_ALIKE = frozenset(
    [torch.ops.aten.clone.default, torch.ops.aten._foreach_sqrt.default, torch.ops.aten.zeros_like.default]
)
"""Operators whose results are as their only operand, or as each of its tensors."""
_FUSED_CALLS = 2.0
"""Calls on lists in a fused step: its kernel, and the one that counts steps."""
_PLAIN = {"pin_memory": False, "memory_format": torch.preserve_format}


class _UpdateRun(StorageLog):
    """Follows an optimizer's storages. Operators in place are skipped: they allocate nothing."""

    value = _EARLY

    def __init__(self) -> None:
        super().__init__()
        self.single = self.listed = self.accessed = self.reads = 0

    def calls(self, parameters: Sequence[torch.Tensor], states: int | None) -> UpdateCalls:
        """Return the calls of the later step by updated parameter.

        states: of a fused step, how many it keeps: its kernel, for which another implementation has run,
        reads and writes each of them and the parameter once, and reads the gradient. Every step calls a
        kernel: a library's own is not seen here.
        """
        count, elements = max(len(parameters), 1), max(sum(p.numel() for p in parameters), 1)
        if states is not None:
            return UpdateCalls(0.0, _FUSED_CALLS, 3.0 + 2.0 * states / count)
        single, listed = self.single / count, self.listed / count
        single, accesses = single if single + listed > 1 else 1.0, max(self.accessed / elements, 4.0)
        return UpdateCalls(single, listed, accesses, self.reads / count)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._call(func, types, args, kwargs)
        if self.value == _LATE and func is not torch.ops.aten._local_scalar_dense.default:
            lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
            self.listed += len(lists[0]) if lists else 0
            self.single += not lists
            written = args[0] if result is None else result
            leaves = tree_leaves([args, kwargs, written])
            self.accessed += sum(item.numel() for item in leaves if isinstance(item, torch.Tensor))
        return result

    def _call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += self.value == _LATE and args[0].is_meta
            return self.value
        if func._schema.is_mutable:
            return (kwargs or {}).get("out", args[0]) if func._schema.returns else None
        if func in _ALIKE:  # PyTorch's own meta kernels of these are in Python
            like = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            plain = (kwargs or {}).items() <= _PLAIN.items()
            if plain and all(t.is_meta and t.is_contiguous() for t in like):
                made = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in like]
                for tensor in made:
                    self.follow(tensor)
                return made if like is args[0] else made[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def names_of_states(self, optimizer: Any, parameters: Sequence[Any]) -> dict[int, tuple[int, str]]:
        """Return the parameter and the name of each state that lies under one of `optimizer.state`."""
        return {
            self.alive[item.untyped_storage()._cdata]: (place, str(name))
            for place, parameter in enumerate(parameters)
            for name, item in optimizer.state.get(parameter, {}).items()
            if isinstance(item, torch.Tensor) and item.is_meta
        }

    def signed(self, begin: int, end: int, stays: Collection[int]) -> list[int]:
        """Return events as k + 1 (allocated) and -k - 1 (freed); states are not freed."""
        events = [(event is FootprintEvent.NEW, k) for event, k, _, _ in self.events[begin:end]]
        return [k + 1 if new else -k - 1 for new, k in events if new or k not in stays]


class _EightBit(torch.optim.Optimizer):
    """Adam's states as bitsandbytes stores them.

    A byte an element and a float for each 256 of them; below 4,096 elements float32 (its documentation,
    "8-bit optimizers").
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Make the states that are missing."""
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            if not self.state[p]:
                small = p.numel() < 4096
                for name in ("state1", "state2"):
                    self.state[p][name] = torch.zeros_like(p, dtype=torch.float32 if small else torch.uint8)
                    if not small:
                        self.state[p][f"absmax_{name}"] = p.new_zeros(
                            -(-p.numel() // 256), dtype=torch.float32
                        )


_CLASSES: dict[str, Any] = {
    **{name.lower(): item for name, item in vars(torch.optim).items() if isinstance(item, type)},
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw-8bit": _EightBit,
}
