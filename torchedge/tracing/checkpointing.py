"""Activation checkpoints in a capture: the region of each operator, and what selective ones store.

While tracing, the hooks and frames of torch.utils.checkpoint show the region that runs, however the function
was called. torch.export runs other code in their place, so an export annotates the nodes of each region.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from torchedge.graphs import FUNCTION_REGION

Policy = Callable[..., Any]
"""Decides for an ATen operator whether selective checkpointing stores its result."""
Note = Callable[[str], None]


class AutogradState:
    """The gradient mode of the model's operators, and the checkpointed region that contains them.

    In a custom autograd function and a reentrant checkpoint, PyTorch disables gradients below Python.
    Operators there count as recorded, and run again in the backward pass.
    """

    def __init__(self) -> None:
        self._switched_on = torch.is_grad_enabled()
        self._regions = 0
        self._annotated: CheckpointRegion | None = None
        self._function: tuple[int, ...] = ()  # the regions of the custom function that runs
        self._within: list[tuple[int, bool]] = []  # `torch.no_grad` and the like in a reentrant checkpoint

    def switch(self, on: bool) -> None:
        """Follow `torch.set_grad_enabled`, called before it takes effect."""
        if _reentrant_frame(sys._getframe(1)) is None:
            self._within.clear()
            if not (self._switched_on and self._is_inside_function()):
                self._switched_on = on
            return
        manager, enters = _grad_manager(sys._getframe(1))
        if enters:
            self._within.append((manager, on))
        else:
            self._within = [entry for entry in self._within if entry[0] != manager]

    def now(self, note: Note) -> tuple[bool, tuple[int, ...]]:
        """Return whether gradients are recorded, and the regions as in `Op.outer` and, last, `Op.region`."""
        if self._function:
            return True, self._function
        if self._switched_on and (self._within or self._is_inside_function()):
            return self._in_frames(note)
        if torch.is_grad_enabled():
            self._switched_on = True
        if self._annotated is not None:
            return self._switched_on, (*self._annotated.outer, self._annotated.number)
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook"):
            if hooks is not None and self._switched_on:
                note(_HOOKED)
            return self._switched_on and not torch.is_inference_mode_enabled(), (0,)
        return self._switched_on, self._path(hooks[0], note)

    @contextmanager
    def function(self, note: Note) -> Iterator[int]:
        """Take operators as part of a custom autograd function; yields its region, 0 where it is none.

        It is none where no gradients are recorded, and inside of another one.
        """
        on, path = self.now(note)
        if not on or self._function:
            yield 0
            return
        self._regions += 1
        region = FUNCTION_REGION + self._regions
        self._function = (*[number for number in path if number], region)
        try:
            yield region
        finally:
            self._function = ()

    @contextmanager
    def inside(self, region: CheckpointRegion | None) -> Iterator[None]:
        """Take operators as part of a region that an export annotated."""
        outer, self._annotated = self._annotated, region
        try:
            yield
        finally:
            self._annotated = outer

    def policy(self) -> Policy | None:
        """Return the policy of the selective checkpoint that runs, if any."""
        if self._annotated is not None:
            return self._annotated.policy
        if not torch._C._len_torch_dispatch_stack():
            return None
        policies = map(_policy_of, reversed(_get_current_dispatch_mode_stack()))
        return next((policy for policy in policies if policy is not None), None)

    @staticmethod
    def _is_inside_function() -> bool:
        return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())

    def _path(self, pack: Any, note: Note) -> tuple[int, ...]:
        """Return the numbers of the checkpoints that run, to the one that a hook belongs to."""
        if not hasattr(pack, _REGION):
            own = inspect.getclosurevars(pack).nonlocals["frame"]
            enclosing = _checkpoint_frames()
            path = enclosing[: enclosing.index(own) + 1] if own in enclosing else [own]
            if len(path) > 1 and self.policy() is not None:
                note(_MIXED)
            setattr(pack, _REGION, tuple([self._number(frame) for frame in path]))
        numbers: tuple[int, ...] = getattr(pack, _REGION)
        return numbers

    def _number(self, owner: Any) -> int:
        """Return the number of a region, an attribute of the object that PyTorch creates for it."""
        if not hasattr(owner, _REGION):
            self._regions += 1
            setattr(owner, _REGION, self._regions)
        number: int = getattr(owner, _REGION)
        return number

    def _in_frames(self, note: Note) -> tuple[bool, tuple[int, ...]]:
        """Return the region of the innermost reentrant checkpoint, else of the one whose hooks are set."""
        frame = _reentrant_frame(sys._getframe(1))
        if frame is not None:
            trains, path = self._in_reentrant(frame, note)
            return trains and (not self._within or self._within[-1][1]), path
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook"):
            return True, self._path(hooks[0], note)
        return True, (0,)

    def _in_reentrant(self, frame: FrameType, note: Note) -> tuple[bool, tuple[int, ...]]:
        while (outer := _reentrant_frame(frame.f_back)) is not None:  # what is inside belongs to it
            frame = outer
        owner = frame.f_locals["ctx"]
        if not hasattr(owner, _REGION):
            tensors = [a for a in frame.f_locals["args"] if isinstance(a, torch.Tensor)]
            owner.torchedge_trains = any(t.requires_grad for t in tensors)
            if tensors and not owner.torchedge_trains:
                note(
                    "a reentrant checkpoint gets no tensor that needs a gradient: as in PyTorch, nothing "
                    "inside it is trained (use_reentrant=False trains it)"
                )
        if len(_checkpoint_frames()) > 1:
            note(_MIXED)
        number = self._number(owner)
        return (True, (-number,)) if owner.torchedge_trains else (False, (0,))


def _reentrant_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the innermost reentrant checkpoint that runs, from a frame on."""
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame


def _grad_manager(frame: FrameType | None) -> tuple[int, bool]:
    """Return the context that calls `torch.set_grad_enabled` (0: none), and whether it is entered."""
    for _ in range(_FRAMES_OF_A_SWITCH):
        if frame is None:
            break
        if frame.f_code in _ENTERS or frame.f_code in _EXITS:
            caller = frame.f_back
            own = caller is not None and caller.f_code is CheckpointFunction.forward.__code__
            return id(frame.f_locals["self"]), frame.f_code in _ENTERS and not own
        frame = frame.f_back
    return 0, False


def _checkpoint_frames() -> list[Any]:
    """Return what PyTorch keeps of each checkpoint that runs, the outermost first; None: a reentrant one."""
    frame: FrameType | None = sys._getframe(1)
    frames: list[Any] = []
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and frame.f_globals is vars(checkpoints):
            generator = frame.f_locals.get("gen")
            inside = None if generator is None else generator.gi_frame
            frames.append(None if inside is None else inside.f_locals.get("new_frame"))
        frame = frame.f_back
    return frames[::-1]


_HOOKED = (
    "hooks on saved tensors (save_on_cpu) are not followed: what autograd keeps counts as on the device, so "
    "that memory is too high where they move it away"
)
_MIXED = (
    "a reentrant or selective checkpoint runs inside of another one or around it: memory may be off by up "
    "to a third"
)
KEEPS_INPUTS: Any = getattr(checkpoints, "_NoopSaveInputs", None)
"""The autograd function by which checkpoints of PyTorch before 2.13 keep their inputs."""
_REGION = "_torchedge_region"
_MANAGERS: tuple[Any, ...] = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_ENTERS = frozenset([manager.__enter__.__code__ for manager in _MANAGERS])
_EXITS = frozenset([manager.__exit__.__code__ for manager in _MANAGERS])
_FRAMES_OF_A_SWITCH = 6
"""Frames from `AutogradState.switch` to that of the context: of the interception, and of a call inside."""


def _policy_of(context: Any) -> Policy | None:
    """Return the policy of a forward context of `create_selective_checkpoint_contexts`."""
    if type(context).__name__ != "_CachingTorchDispatchMode":
        return None
    policy: Policy = context.policy_fn
    return policy


# selective checkpoints --------------------------------------------------------------------------------------

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators that CUDA may run for an attention: no meta tensor reaches them."""


def is_stored(policy: Policy, call: Callable[[], Any], is_attention: bool) -> bool:
    """Return whether a policy stores the result of one of the ATen operators that a call runs."""
    listing = _Listing(policy)
    try:
        with listing:
            call()
        for name in _ATTENTION if is_attention else ():
            listing.ask(getattr(torch.ops.aten, name).default)
    except Exception:  # a call that meta tensors cannot run, or a policy that reads their values
        return listing.stored
    return listing.stored


class _Listing(TorchDispatchMode):
    """Asks a policy about every ATen operator that runs."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.stored = policy, False

    def ask(self, func: Any, args: Any = (), kwargs: Any = None) -> None:
        """Take one answer of the policy into account: a CheckpointPolicy, or True to store."""
        context = checkpoints.SelectiveCheckpointContext(is_recompute=False)
        answer = self.policy(context, func, *args, **(kwargs or {}))
        storing = (checkpoints.CheckpointPolicy.MUST_SAVE, checkpoints.CheckpointPolicy.PREFER_SAVE)
        self.stored = self.stored or answer is True or answer in storing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ask(func, args, kwargs)
        return func(*args, **(kwargs or {}))


# torch.export -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointRegion:
    """A checkpoint that an export ran: numbers as in `Op.region` and `Op.outer`, its policy if selective."""

    number: int
    policy: Policy | None = None
    outer: tuple[int, ...] = ()


_MARK = "torchedge_region"


@contextmanager
def annotated_checkpoints() -> Iterator[list[CheckpointRegion]]:
    """Make this thread's checkpoints run as plain calls whose nodes carry their region; yields the regions.

    `region_of` reads them. The caller has the lock of torch.export.
    """
    owner, regions, running = threading.get_ident(), list[CheckpointRegion](), list[int]()
    plain_generator = checkpoints._checkpoint_without_reentrant_generator
    plain_function = checkpoints.CheckpointFunction
    annotate: Any = getattr(fx_traceback, "annotate", lambda mark: nullcontext())

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != owner:
            yield from plain_generator(*args, **kwargs)
            return
        contexts = args[2]() if len(args) > 2 else (None,)
        number = len(regions) + 1
        regions.append(CheckpointRegion(number, _policy_of(contexts[0]), tuple(running)))
        running.append(number)
        try:
            with annotate({_MARK: number}):
                yield
        finally:
            running.pop()

    class Function(CheckpointFunction):
        @classmethod
        def apply(cls, function: Any, preserve_rng_state: Any, *args: Any) -> Any:
            if threading.get_ident() != owner:
                return plain_function.apply(function, preserve_rng_state, *args)
            regions.append(CheckpointRegion(-len(regions) - 1))
            with annotate({_MARK: regions[-1].number}):
                return function(*args)

    checkpoints._checkpoint_without_reentrant_generator = generator
    checkpoints.CheckpointFunction = Function  # type: ignore[misc]
    try:
        with fx_traceback.preserve_node_meta():
            yield regions
    finally:
        checkpoints._checkpoint_without_reentrant_generator = plain_generator
        checkpoints.CheckpointFunction = plain_function  # type: ignore[misc]


def region_of(node: Node, regions: list[CheckpointRegion]) -> CheckpointRegion | None:
    """Return the region that a node of an export ran in."""
    number = (node.meta.get("custom") or {}).get(_MARK, 0)
    return regions[abs(number) - 1] if number else None
