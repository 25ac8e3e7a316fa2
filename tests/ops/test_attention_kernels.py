"""Which kernel PyTorch's attention takes, and what a step with it takes, against PyTorch on the CPU."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles.profiled_memory import profiled_peak
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchedge.graphs import Op, Value
from torchedge.ops import Call
from torchedge.ops.products import writes_scores
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture


def call_of(q, k, v, mask=None, backend="cuda", **attrs):
    shapes = [(s, d) for s, d in (q, k, v)]
    values = [Value(f"x{i}", tuple(s), d) for i, (s, d) in enumerate(shapes)]
    if mask is not None:
        values.append(Value("mask", tuple(mask[0]), mask[1]))
    op = Op("scaled_dot_product_attention", tuple(range(len(values))), (), attrs)
    return Call(values, op, backend=backend)


CASES = [
    *itertools.product((4,), (4, 2), (8, 6), (0.0, 0.1), (False, True), ("float32", "bfloat16", "float64")),
    *itertools.product((3,), (4,), (8,), (0.0,), (False,), ("float32",)),
]


@pytest.mark.parametrize(("rank", "groups", "head", "dropout", "masked", "dtype"), CASES)
def test_the_kernel_of_the_cpu_is_the_one_that_pytorch_takes(rank, groups, head, dropout, masked, dtype):
    shape = lambda heads: (2, heads, 5, head)[4 - rank :]  # noqa: E731
    q, k = (torch.zeros(shape(h), dtype=getattr(torch, dtype)) for h in (4, groups))
    mask = torch.zeros(5, 5, dtype=q.dtype) if masked else None
    chosen = torch._fused_sdp_choice(q, k, k, mask, dropout, False, enable_gqa=groups != 4)
    call = call_of(
        *[(tuple(t.shape), dtype) for t in (q, k, k)],
        mask=((5, 5), dtype) if masked else None,
        backend="cpu",
        dropout_p=dropout,
    )
    assert writes_scores(call) == (chosen == SDPBackend.MATH.value)


@pytest.mark.parametrize(
    ("dtype", "groups", "head", "masked", "expected"),
    [
        ("float32", 4, 64, False, False),
        ("float32", 4, 64, True, False),
        ("float32", 1, 64, False, True),  # Llama and Qwen2: the math kernel, which keeps the scores
        ("float32", 4, 66, False, True),
        ("bfloat16", 1, 64, False, False),
        ("bfloat16", 4, 66, False, False),  # padded to 72
        ("bfloat16", 4, 66, True, True),
        ("bfloat16", 4, 64, True, False),
        ("float64", 4, 64, False, True),
        ("float16", 4, 320, False, False),  # too large for flash attention, not for the memory-efficient one
    ],
)
def test_the_kernel_of_cuda(dtype, groups, head, masked, expected):
    shapes = [((2, h, 16, head), dtype) for h in (4, groups, groups)]
    assert writes_scores(call_of(*shapes, mask=((16, 16), dtype) if masked else None)) == expected


class Attention(nn.Module):
    """Attention of two projections, keys and values in groups."""

    def __init__(self, groups, causal, masked):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 256, 64))
        self.groups, self.causal, self.masked = groups, causal, masked

    def forward(self, x):
        q = x * self.scale
        k = q[:, : self.groups].contiguous()
        mask = torch.ones(256, 256, dtype=torch.bool) if self.masked else None
        return F.scaled_dot_product_attention(
            q, k, k, attn_mask=mask, is_causal=self.causal, enable_gqa=self.groups != 4
        ).sum()


@pytest.mark.parametrize(
    ("groups", "causal", "masked"), [(4, True, False), (1, True, False), (1, False, True), (4, False, False)]
)
def test_the_kernel_of_products_takes_what_the_profiler_sees(groups, causal, masked):
    """In float64, which CUDA runs so, and the CPU where its own kernel is switched off."""
    model, x = Attention(groups, causal, masked).double(), torch.rand(2, 4, 256, 64, dtype=torch.float64)
    graph = capture(model, x, loss=lambda out: out)

    def step():
        with sdpa_kernel(SDPBackend.MATH):
            model(x).backward()

    tape = write_tape(graph, StepSettings(optimizer="none"))
    peak = profiled_peak(step) + x.nbytes + model.scale.nbytes
    assert int(tape.peak_bytes(np.array([2]))[0]) == pytest.approx(peak, rel=0.02)
