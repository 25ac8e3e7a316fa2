"""Training steps of single operators, from the samples of PyTorch's own tests (`op_db`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from oracles.eager_memory import run_training
from oracles.profiled_memory import profiled_peak
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture


def differentiable_operators(names: list[str] | None = None) -> Iterator[Any]:
    """Yield the operators of op_db that PyTorch can differentiate, all or those with these names."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if info.supports_autograd and torch.float32 in info.dtypes and (names is None or info.name in names):
            yield info


def samples_of(info: Any, size: int) -> Iterator[Any]:
    """Yield samples on meta tensors whose sides are `size` where PyTorch's are small."""
    from torch.testing._internal import common_methods_invocations as module

    before = {name: getattr(module, name) for name in ("S", "M", "L")}
    for name in before:
        setattr(module, name, size)
    info_samples = info.sample_inputs_func
    try:
        torch.manual_seed(0)
        yield from info_samples(info, torch.device("cpu"), torch.float32, True)
    finally:
        for name, number in before.items():
            setattr(module, name, number)


def largest(samples: Iterator[Any], count: int) -> list[Any]:
    """Return the samples with the most elements among the first forty."""

    def elements(sample: Any) -> int:
        leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    return sorted(islice(samples, 40), key=elements, reverse=True)[:count]


class OneOperator(torch.nn.Module):
    """An operator after a copy of the inputs that learn: their gradients are not parameters' gradients."""

    def __init__(self, operator: Any, leaves: list[Any], structure: Any) -> None:
        super().__init__()
        self.operator, self.leaves, self.structure = operator, leaves, structure
        self.scale = torch.nn.Parameter(torch.ones((), device="meta"))

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the operator's floating results."""
        learns = [leaf.requires_grad for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        given = iter([t * self.scale if own else t for t, own in zip(tensors, learns, strict=True)])
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        del given
        args, kwargs = tree_unflatten(filled, self.structure)
        del filled
        result = self.operator(*args, **kwargs)
        results = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        return [torch.view_as_real(t) if t.is_complex() else t for t in results]


def criterion(outputs: Any) -> torch.Tensor:
    """Return the sum of all results, doubled: their gradients fill their memory, as those of a network do."""
    total = (2 * outputs[0]).sum()
    for tensor in outputs[1:]:
        total = total + (2 * tensor).sum()
    return total


@dataclass(frozen=True)
class Comparison:
    """The peak bytes of a step: simulated, by a dispatch mode on meta tensors, and by the CPU's allocator.

    Under a dispatch mode, some of PyTorch's formulas avoid operators in place. The CPU's kernels have
    workspaces, and copies, that other kernels have not.
    """

    simulated: int
    counted: int
    allocated: int | None

    @property
    def error(self) -> float:
        """The relative error against the closer of both; 0 within eight blocks of 512 bytes."""
        counts = [count for count in (self.counted, self.allocated) if count is not None]
        off = [0.0 if abs(self.simulated - n) <= 8 * 512 else self.simulated / n - 1 for n in counts]
        return min(off, key=abs)


def allocated_bytes(model: torch.nn.Module, tensors: list[torch.Tensor]) -> int | None:
    """Return the peak of a step that really runs on the CPU, with its inputs; None where it does not run."""

    def step() -> None:
        criterion(model(*tensors)).backward()

    try:
        model.scale = torch.nn.Parameter(torch.ones(()))
        return profiled_peak(step) + sum(t.untyped_storage().nbytes() for t in tensors)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None


def compare(info: Any, sample: Any) -> Comparison | None:
    """Return the peaks of one step; None where there is nothing to train."""
    leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(t.requires_grad for t in tensors) or any(t.is_complex() for t in tensors):
        return None
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    model = OneOperator(info.op, leaves, structure)
    count = run_training(model, lambda: (tuple(metas), {}), criterion, None).peak
    batch = next((int(t.shape[0]) for t in metas if t.dim()), 1)
    graph = capture(model, tuple(metas), method="trace", loss=criterion, batch_size=batch)
    settings = StepSettings(optimizer="none", backend="cpu", attention="math")
    simulated = int(write_tape(graph, settings).peak_bytes(np.array([batch]))[0])
    tensors = [t.detach() for t in tensors]
    return Comparison(simulated, count, allocated_bytes(OneOperator(info.op, leaves, structure), tensors))
