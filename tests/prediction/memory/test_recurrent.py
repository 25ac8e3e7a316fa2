"""Recurrent layers: on the CPU against steps that really run, on CUDA against what an H200 measured."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.profiled_memory import profiled_peak
from recurrent_memory import predicted as predicted_on_cuda
from torch import nn

from torchedge.prediction.latency.workload import LAUNCHES, count_work
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture

BATCH, STEPS, FEATURES, HIDDEN = 16, 40, 48, 64
ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


class Tagger(nn.Module):
    """A recurrent layer and a classifier of every step."""

    def __init__(self, kind, transposed=False, **options):
        super().__init__()
        self.transposed, width = transposed, options.get("proj_size", HIDDEN)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layer = kind(FEATURES, HIDDEN, batch_first=not transposed, **options)
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x):
        x = self.first(x)
        y = self.layer(x.transpose(0, 1) if self.transposed else x)[0]
        return self.head(y.transpose(0, 1) if self.transposed else y)


def resident(model, x):
    return sum(p.nbytes for p in model.parameters()) + x.nbytes


def predicted(model, x, **settings):
    graph = capture(model, x, mode="train" if model.training else "infer")
    return int(write_tape(graph, StepSettings(backend="cpu", **settings)).peak_bytes([len(x)])[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GRU, {}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}),
        (nn.LSTM, {"num_layers": 2, "proj_size": 24}),
        pytest.param(nn.LSTM, {}, marks=ONEDNN),
        pytest.param(nn.LSTM, {"num_layers": 2, "bidirectional": True}, marks=ONEDNN),
        pytest.param(nn.LSTM, {"bias": False}, marks=ONEDNN),
    ],
)
def test_a_training_step(kind, options, transposed):
    model, x = Tagger(kind, transposed, **options), torch.rand(BATCH, STEPS, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    # oneDNN pads more for some processors
    tolerance = 0.1 if kind is nn.LSTM and "proj_size" not in options else 0.04
    measured = profiled_peak(step) + resident(model, x)
    assert predicted(model, x, optimizer="sgd") == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, pytest.param(nn.LSTM, marks=ONEDNN)])
def test_an_inference(kind):
    model, x = Tagger(kind, num_layers=2, bidirectional=True).eval(), torch.rand(BATCH, STEPS, FEATURES)
    with torch.no_grad():
        model(x)
        measured = profiled_peak(lambda: model(x)) + resident(model, x)
    assert predicted(model, x) == pytest.approx(measured, rel=0.1)


def test_frozen_weights_take_no_gradients():
    model, x = Tagger(nn.GRU), torch.rand(BATCH, STEPS, FEATURES)
    whole = predicted(model, x)
    model.layer.requires_grad_(False)
    assert predicted(model, x) < whole


def test_a_sequence_without_a_batch_is_captured():
    model = nn.GRU(FEATURES, HIDDEN)
    graph = capture(model, torch.rand(STEPS, FEATURES), batch_size=STEPS)
    assert [op.kind for op in graph.ops if op.kind == "gru"] == ["gru"]


def test_cudnn_takes_what_was_measured():
    path = Path(__file__).parents[3] / "profiles" / "nvidia-h200" / "campaign" / "recurrent.jsonl.gz"
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file if not line.startswith("#")]
    plain = [r for r in rows if r["kind"] != "RNN" and r["dtype"] == "float32"]
    errors = [
        [predicted_on_cuda(row)[k] / row[k] - 1 for k in ("kept", "forward", "backward")]
        for row in plain[::15]
    ]
    assert np.abs(errors).mean(0) == pytest.approx(0, abs=0.04)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_steps_of_a_layer_run_one_after_the_other(kind):
    short, long = (
        count_work(capture(kind(8, 8, batch_first=True), torch.rand(2, steps, 8))).launches
        for steps in (10, 110)
    )
    forward, backward = LAUNCHES.index("product_fwd"), LAUNCHES.index("product_bwd")
    assert long[forward] - short[forward] == pytest.approx(40)
    assert long[backward] - short[backward] == pytest.approx(40)
