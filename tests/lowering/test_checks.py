"""Kernels of a debug build report what they access outside their tensors, images included."""

from dataclasses import replace

import pytest
import torch
from oracles.targets import target_here
from torch import nn

from torchedge.errors import KernelCheckError
from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.runtime.executors import Executor
from torchedge.tracing.steps import capture_step

pytest.importorskip("pyopencl")


@pytest.mark.parametrize("name", ["cpu", "mobile"])
def test_an_access_outside_is_reported_with_its_tensor(name):
    class Attended(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1) @ x

    x = torch.randn(64, 64)
    target = replace(target_here(name), checks=True)
    program = lower(capture_step(Attended(), (x,), keep=frozenset(all_rules())).step, target)
    first = program.kernels[0]
    assert ("write_imagef" in first.source) == (name == "mobile")
    head, check = first.source.rsplit("TE_CHECK(", 1)
    number, rest = check.split(", ", 1)
    broken = replace(first, source=f"{head}TE_CHECK({number}, 1000000 + {rest}")
    program = replace(program, kernels=(broken, *program.kernels[1:]))
    with Executor(program, checks=True) as executor, pytest.raises(KernelCheckError) as caught:
        executor.run(x)
    assert "is accessed at 100" in str(caught.value)
