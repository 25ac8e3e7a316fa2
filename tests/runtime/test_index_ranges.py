"""Class labels and indices out of range raise, as they do in PyTorch, and nothing has moved."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge.errors import IndexRangeError

pytest.importorskip("pyopencl")


class Words(nn.Module):
    """Embeddings of tokens, looked up, normalised and classified; a gather at places of the user's."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, tokens, places):
        rows = self.norm(self.table(tokens.view(-1))).reshape(*tokens.shape, 4)
        return self.head(rows).gather(1, places.unsqueeze(-1).expand(-1, -1, 5)).mean(1)


def batch(token=3, place=1, label=2):
    tokens, places = torch.tensor([[0, 6, token], [1, 2, 5]]), torch.tensor([[0, place], [2, 0]])
    return (tokens, places), torch.tensor([label, 4])


def state_of(trainer, model):
    trainer.sync()
    return copy.deepcopy(model.state_dict())


WRONG = [{"token": 7}, {"token": -1}, {"place": 3}, {"place": -1}, {"label": 5}, {"label": -1}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_pytorch_refuses_the_trainer_refuses_before_anything_moves(wrong):
    torch.manual_seed(0)
    model = Words()
    trainer = torchedge.Trainer(
        model, *batch(), loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    before = state_of(trainer, model)
    inputs, labels = batch(**wrong)
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(model(*inputs), labels)
    model.load_state_dict(before)
    with pytest.raises(IndexRangeError, match=r"holds -?\d+ at \[.*expected classes or indices from 0 to \d"):
        trainer.step(inputs, labels)
    after = state_of(trainer, model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.step(*batch())
    trainer.close()


def test_ignored_labels_pass():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, labels = torch.randn(3, 3), torch.tensor([1, -100, 3])
    with torchedge.Trainer(model, x, labels, loss=F.cross_entropy, optimizer=optimizer) as trainer:
        assert trainer.step(x, labels) == pytest.approx(F.cross_entropy(model(x), labels).item(), rel=1e-4)
        with pytest.raises(IndexRangeError, match=r"from 0 to 3, or -100 \(ignored\)"):
            trainer.step(x, torch.tensor([1, -99, 3]))
        with pytest.raises(IndexError):
            trainer.evaluate(x, torch.tensor([1, 4, 3]))


def test_indices_from_the_end_are_those_of_pytorch():
    class Rows(nn.Module):
        def forward(self, x, places):
            return x[places] * 2

    x, places = torch.randn(4, 3), torch.tensor([-4, 3, -1])
    compiled = torch.compile(Rows(), backend="torchedge", dynamic=False)
    torch.testing.assert_close(compiled(x, places), x[places] * 2)
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            compiled(x, torch.tensor([0, 0, wrong]))


def test_bundles_keep_the_ranges(tmp_path):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))
    tokens = torch.tensor([[0, 6, 3]])
    torchedge.export(model, tokens, device="local-cpu", out=tmp_path / "bundle", onnx=False)
    bundle = torchedge.load_bundle(tmp_path / "bundle")
    (scores,) = bundle.run(tokens.numpy())
    np.testing.assert_allclose(scores, model(tokens).detach().numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        IndexRangeError, match=r"holds 7 at \[0, 1\]; expected classes or indices from 0 to 6"
    ):
        bundle.run(np.array([[0, 7, 3]]))
