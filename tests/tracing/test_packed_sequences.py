"""Models that pack their sequences: captured as dense ones of one length."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchedge.tracing.capturing import capture


class Packing(nn.Module):
    """A bidirectional layer over packed sequences."""

    def __init__(self, kind=nn.LSTM, batch_first=True, total_length=None, last=False):
        super().__init__()
        self.layer = kind(8, 16, 2, bidirectional=True, batch_first=batch_first)
        self.head, self.last = nn.Linear(32, 5), last
        self.batch_first, self.total_length = batch_first, total_length

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=False)
        output, state = self.layer(packed)
        if self.last:
            hidden = state[0] if isinstance(state, tuple) else state
            return self.head(torch.cat((hidden[-2], hidden[-1]), 1))
        output, _ = pad_packed_sequence(output, self.batch_first, total_length=self.total_length)
        return self.head(output)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": nn.GRU},
        {"kind": nn.RNN, "total_length": 12},
        {"last": True},
        {"kind": nn.GRU, "last": True},
    ],
)
def test_packed_sequences_follow_the_batch_size(options):
    model, lengths = Packing(**options), torch.full((4,), 10)
    graph = capture(model, {"x": torch.rand(4, 10, 8), "lengths": lengths})
    with torch.no_grad():
        expected = model(torch.rand(6, 10, 8), torch.full((6,), 10)).shape
    assert graph.values[graph.outputs[0]].at(6) == tuple(expected)
    assert graph.fixed_batch is None
    assert any("packed" in note for note in graph.notes)


def test_time_first_sequences_are_packed():
    model, x = Packing(batch_first=False), torch.rand(10, 4, 8)
    graph = capture(model, {"x": x, "lengths": torch.full((4,), 10)}, batch_dim=1)
    assert graph.values[graph.outputs[0]].at(4) == (10, 4, 5)


def test_a_packed_layer_is_the_dense_one():
    dense, packing = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), Packing()
    graphs = (
        capture(dense, torch.rand(4, 10, 8)),
        capture(packing, {"x": torch.rand(4, 10, 8), "lengths": torch.full((4,), 10)}),
    )
    shapes = []
    for graph in graphs:
        op = next(op for op in graph.ops if op.kind == "lstm")
        shapes.append([sorted(graph.values[i].at(4)) for i in (*op.inputs, *op.outputs)])
    assert shapes[0] == shapes[1]
