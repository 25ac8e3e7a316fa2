"""Recurrent layers: every step runs the same kernels."""

import pytest
import torch
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.tracing.steps import capture_step


def trained(kind, steps, target):
    """Return the program of a training step on sequences of some length."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(32, 32, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0][:, -1]

    model = Last()
    captured = capture_step(
        model,
        torch.zeros(4, steps, 32),
        loss=lambda y: (y * y).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        keep=frozenset(all_rules()),
    )
    return lower(captured.step, target)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (nn.RNN, "gpu"),
        pytest.param(nn.GRU, "cpu", marks=pytest.mark.slow),
        pytest.param(nn.LSTM, "mobile", marks=pytest.mark.slow),
    ],
)
def test_longer_sequences_need_no_more_kernels(kind, target):
    short, long = trained(kind, 8, target), trained(kind, 12, target)
    assert len(long.kernels) == len(short.kernels)
    assert len(long.launches) > 1.3 * len(short.launches)
