"""Branches on the batch size are taken as at the batch size that was asked for."""

import math
from math import log

import numpy as np
import pytest
import torch
from torch import nn

import torchedge

X = torch.zeros(4, 64)


def levels(size):
    return math.log2(size)


class Branching(nn.Module):
    def __init__(self, decide):
        super().__init__()
        self.small, self.large, self.decide = nn.Linear(64, 64), nn.Linear(64, 4096), decide

    def forward(self, x):
        return self.large(x) if self.decide(x) else self.small(x)


DECISIONS = {
    "shape": lambda x: x.shape[0] > 8,
    "size": lambda x: x.size(0) >= 9,
    "len": lambda x: len(x) > 8,
    "int": lambda x: int(x.shape[0]) > 8,
    "half": lambda x: x.shape[0] // 2 > 4,
    "ceil": lambda x: math.ceil(x.shape[0] / 3) > 3,
    "product": lambda x: x.shape[0] * 2 > 16,
    "reversed": lambda x: x.size()[0] > 8,
    "log2": lambda x: math.log2(x.shape[0]) > 3,
    "imported log": lambda x: log(x.shape[0], 2) > 3,
    "helper": lambda x: levels(x.shape[0]) > 3,
    "root": lambda x: math.isqrt(x.shape[0]) > 3,
    "numel": lambda x: x.numel() > 8 * 64,
    "large numel": lambda x: x.numel() * 2**20 > 2**29,
    "nelement": lambda x: x.nelement() // 64 > 8,
    "numel of a shape": lambda x: x.shape.numel() > 8 * 64,
    "numpy": lambda x: np.log2(x.shape[0]) > 3,
    "list": lambda x: ([False] * 9 + [True] * 8)[x.shape[0]],
    "dict": lambda x: {16: True}.get(x.shape[0], False),
    "key of a shape": lambda x: tuple(x.shape) in {(16, 64)},
}


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("batch_size", [4, 16])
def test_the_branch_at_the_batch_size_is_taken(name, batch_size):
    options = {"example": X, "device": "nvidia-h200", "loss": lambda out: out.sum()}
    seen = torchedge.predict(Branching(DECISIONS[name]), batch_size, **options)
    right = torchedge.predict(Branching(lambda x: batch_size > 8), batch_size, **options)
    assert seen.allocated.value == right.allocated.value
    assert seen.latency.value == right.latency.value


def test_models_that_only_pass_the_batch_on_have_one_graph():
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            batch, width = x.shape
            assert batch > 0 and batch == x.size(0)
            return self.linear(x.view(batch * 4, width // 4)).reshape(batch, -1).expand(batch, width)

    graph = torchedge.capture(Passing(), X)
    assert graph.fixed_batch is None and not graph.reads_batch


def test_many_batch_sizes_say_that_a_branch_was_taken():
    table = torchedge.Predictor("nvidia-h200").predict_many(
        [Branching(DECISIONS["shape"])], [4, 16], example=X, loss=lambda out: out.sum()
    )
    assert any("as for large batches" in note for note in table.notes[0])


def test_a_graph_for_every_batch_size_says_that_a_branch_was_taken():
    graph = torchedge.capture(Branching(DECISIONS["shape"]), X)
    assert graph.reads_batch and any("as for large batches" in note for note in graph.notes)


def test_features_are_those_of_each_batch_size():
    model = Branching(DECISIONS["shape"])
    table = torchedge.features(model, [4, 16, 4], input_size=(64,))
    for row, batch_size in zip(table.values, (4, 16, 4), strict=True):
        decided = Branching(lambda x, batch_size=batch_size: batch_size > 8)
        alone = torchedge.features(decided, batch_size, input_size=(64,))
        assert (row == alone.values).all()
