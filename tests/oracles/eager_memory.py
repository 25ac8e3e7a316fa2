"""An independent oracle: the live bytes of a real eager training loop on meta tensors, storage by storage.

Shares no code with the library. PyTorch runs the loop itself; a dispatch mode sees every tensor that is made,
and weak references to the storages tell when each one goes away.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def rounded(size: int) -> int:
    """Bytes as the caching allocator counts a request."""
    return -(-size // 512) * 512


@dataclass(frozen=True)
class OracleStep:
    """What one steady-state step was seen to hold.

    Peak bytes, bytes at its start, and what was alive at the peak.
    """

    peak: int
    start: int
    alive: tuple[tuple[str, int], ...]


class LiveStorages(TorchDispatchMode):
    """Follows every storage that an operator makes on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[str, int]] = {}
        self.total = self.peak = 0
        self.alive: dict[int, tuple[str, int]] = {}
        self.owned: tuple[int, int] | None = None
        self._refs: dict[int, weakref.ref[Any]] = {}

    def reset_peak(self) -> None:
        self.peak, self.alive = self.total, dict(self.live)

    def follow(self, tensor: torch.Tensor, label: str) -> None:
        """Count a tensor's storage until it dies."""
        if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or not storage.nbytes():
            return
        self.live[key] = (label, rounded(storage.nbytes()))
        self.total += self.live[key][1]
        self._refs[key] = weakref.ref(storage, lambda _: self._gone(key))
        if self.total > self.peak:
            self.peak, self.alive = self.total, dict(self.live)

    def _gone(self, key: int) -> None:
        self.total -= self.live.pop(key)[1]
        del self._refs[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten.add.Tensor
            and _is_engine(sys._getframe(1))
            and _references(args[0]) == self.owned
            and _summed_by_engine(args)
        ):
            return args[0].add_(args[1])
        if func in INTO_ZEROS and len(args) > 3 and _is_engine(sys._getframe(1)):
            func = INTO_ZEROS[func]
        result = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.follow(leaf, f"{func} {tuple(leaf.shape)} {type(node).__name__ if node else ''}")
        if func in CASTING and result.dtype is not args[0].dtype:
            self.follow(args[0].to(result.dtype), f"cast for {func}")
        return result


CASTING = (torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default)
"""Their kernels copy an input of another dtype than the result's (`self.to(...)` in ReduceOps.cpp)."""


INTO_ZEROS = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
"""Derivatives write into the zeros that they make, but for subclasses (`areAnyTensorSubclassLike`)."""


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_engine(frame: FrameType | None) -> bool:
    """Whether the engine itself calls an operator: a checkpoint or a custom function has frames of its own.

    PyTorch wraps the method of a dispatch mode.
    """
    wrappers = ("torch._dynamo.eval_frame", "torch._compile")
    while frame is not None and frame.f_globals.get("__name__") in wrappers:
        frame = frame.f_back
    return frame is not None and frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def _summed_by_engine(args: Any) -> bool:
    """Whether the engine adds here what it would add in place without a dispatch mode.

    The mode's own reference to the first gradient makes the engine believe that it is shared.
    """
    old, new = args[:2]
    return (
        torch._C._current_autograd_node() is not None
        and isinstance(new, torch.Tensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and _dense(old)
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _calibrated(device: str) -> tuple[int, int]:
    """References to a gradient that only the engine holds, as a dispatch mode of this PyTorch sees them."""
    seen = []

    class Probe(LiveStorages):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and torch._C._current_autograd_node() is not None:
                seen.append(_references(args[0]))
            return super().__torch_dispatch__(func, types, args, kwargs)

    x = torch.empty(4, 4, device=device, requires_grad=True)
    with Probe():
        h = x * 1.0
        y = (h * 2 + h * 3).sum()
        del h
        y.backward()
    assert len(seen) == 1
    return seen[0]


def run_training(
    model: torch.nn.Module,
    feed: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    criterion: Callable[[Any], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    *,
    steps: int = 2,
    accumulation: int = 1,
    set_to_none: bool = True,
    amp: torch.dtype | None = None,
) -> OracleStep:
    """Run the canonical loop on the meta device and return what its last step held.

    Autocast leaves meta tensors alone: with `amp`, call under FakeTensorMode with a model and tensors "on the
    CPU".
    """
    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    mode = LiveStorages()
    mode.owned = _calibrated("cpu" if amp else "meta")
    args, kwargs = feed()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        mode.follow(tensor.data, name)
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, torch.Tensor):
            mode.follow(tensor, "input")
    start = 0
    gc.disable()
    try:
        with mode:
            for _ in range(steps):
                mode.reset_peak()
                start = mode.total
                if optimizer is not None:
                    optimizer.zero_grad(set_to_none=set_to_none)
                else:
                    for p in model.parameters():
                        p.grad = None
                for _ in range(accumulation):
                    with torch.autocast("cpu", amp) if amp else nullcontext():
                        loss = criterion(model(*args, **kwargs))
                    loss.backward()
                if optimizer is not None:
                    optimizer.step()
    finally:
        gc.enable()
    alive = sorted(mode.alive.values(), key=lambda entry: -entry[1])
    return OracleStep(mode.peak, start, tuple(alive))
