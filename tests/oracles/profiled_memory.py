"""The peak of a step that really runs on the CPU, by the allocations that PyTorch's profiler records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def profiled_peak(step: Callable[[], Any]) -> int:
    """Return the most bytes that a step has allocated at once, beside what exists before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    alive = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


class OnParameter(torch.nn.Module):
    """A function of a parameter and an input, both (rows, columns) between 0.1 and 0.9."""

    def __init__(self, function: Callable[..., torch.Tensor], rows: int, columns: int) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(0.1 + 0.8 * torch.rand(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, x)
