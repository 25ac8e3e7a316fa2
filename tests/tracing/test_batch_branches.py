"""Branches on the batch size are taken as at the batch size that was asked for."""

import math

import pytest
import torch
from torch import nn

import torchedge

X = torch.zeros(4, 64)


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
