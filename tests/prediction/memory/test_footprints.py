"""What operators keep and allocate, replayed from PyTorch: against real steps on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles.operator_memory import compare, differentiable_operators, largest, samples_of
from oracles.profiled_memory import OnParameter, profiled_peak
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchedge.graphs.sizes import Affine
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing import footprints
from torchedge.tracing.capturing import capture

ROWS, COLUMNS = 256, 1024
SETTINGS = StepSettings(optimizer="none", backend="cpu", attention="math")
FUNCTIONS = {
    "abs": lambda w, x: w.abs(),
    "div": lambda w, x: w / (x + 1),
    "cumsum": lambda w, x: w.cumsum(1),
    "logsumexp": lambda w, x: w.logsumexp(1),
    "l1": lambda w, x: F.l1_loss(w, x),
    "bce": lambda w, x: F.binary_cross_entropy_with_logits(w, x),
    "norm": lambda w, x: w.norm(),
    "normalize": lambda w, x: F.normalize(w),
    "charbonnier": lambda w, x: ((w - x) ** 2 + 1e-3).sqrt(),
    "sine": lambda w, x: torch.sin(30 * w),
    "clamp": lambda w, x: w.clamp(0.2, 0.8),
    "cosine": lambda w, x: F.cosine_similarity(w, x),
    "std": lambda w, x: w.std(1),
    "erf": lambda w, x: w.erf(),
    "max": lambda w, x: w.max(1).values,
    "spiral": lambda w, x: torch.exp(1j * w - w).real,
    "huber": lambda w, x: F.huber_loss(w, x),
}


def scalar(result):
    return result if result.dim() == 0 else result.sum()


def peak_of(graph, batch):
    return int(write_tape(graph, SETTINGS).peak_bytes(np.array([batch]))[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_takes_what_the_profiler_sees(name):
    torch.manual_seed(0)
    model, x = OnParameter(FUNCTIONS[name], ROWS, COLUMNS), 0.1 + 0.8 * torch.rand(ROWS, COLUMNS)

    def step():
        result = model(x)
        loss = scalar(result)
        del result
        loss.backward()

    graph = capture(model, x, loss=scalar, batch_size=ROWS)
    peak = profiled_peak(step) + 2 * ROWS * COLUMNS * 4
    assert peak_of(graph, ROWS) == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["atan2", "addcdiv", "logaddexp", "nn.functional.softplus", "hypot", "lerp", "std"]
)
def test_a_step_takes_what_a_count_of_storages_sees(name):
    (info, *_) = differentiable_operators([name])
    for sample in largest(samples_of(info, 64), 2):
        assert abs(compare(info, sample).error) <= 0.02


class Normalized(nn.Module):
    """A layer whose output is normalized, in a checkpoint or not."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.layer, self.checkpointed = nn.Linear(512, 512), checkpointed

    def body(self, x):
        return F.normalize(self.layer(x).abs() + 1.0)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def test_footprints_follow_the_batch_size():
    graph = capture(Normalized(), torch.zeros(2, 512))
    footprints = [op.footprint for op in graph.ops if op.footprint is not None]
    assert len(footprints) >= 3
    assert any(isinstance(d, Affine) for value in graph.values for d in value.shape)
    for batch in (3, 64):
        assert peak_of(graph, batch) == peak_of(
            capture(Normalized(), torch.zeros(2, 512), batch_size=batch), batch
        )


@pytest.mark.parametrize("width", [16, 48])
def test_calls_that_differ_in_sizes_share_a_replay(width):
    def operators(own):
        model = nn.Sequential(
            nn.Linear(32, own), nn.LayerNorm(own), nn.GELU(), nn.Linear(own, 32), nn.Softmax(1)
        )
        return [op.footprint for op in capture(model, torch.zeros(2, 32)).ops]

    footprints._cache.clear()
    alone = operators(width)
    footprints._cache.clear()
    operators(64)
    assert operators(width) == alone


def test_checkpoints_hold_no_tensors_of_a_replay():
    plain, again = (capture(Normalized(flag), torch.zeros(2, 512)) for flag in (False, True))
    operators = [op for op in again.ops if op.kind != "empty"]  # PyTorch before 2.13 creates a tensor
    assert [op.footprint for op in operators] == [op.footprint for op in plain.ops]
    without = replace(again, ops=tuple(replace(op, footprint=None) for op in again.ops))
    assert peak_of(again, 4096) > peak_of(without, 4096)


def test_nothing_is_kept_of_frozen_inputs():
    graph = capture(OnParameter(lambda w, x: w + x.abs(), 4, 8), torch.zeros(4, 8), loss=scalar)
    (absolute,) = [op for op in graph.ops if op.kind == "abs"]
    assert absolute.footprint.forward and not absolute.footprint.saved + absolute.footprint.backward


class CheckpointedNorm(nn.Module):
    """A root mean square norm between linear layers, run again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        body = checkpoint(self.norm, self.first(x), use_reentrant=False)
        return self.last(body)


def test_operators_that_a_checkpoint_runs_again_take_storages_of_their_own():
    tape = write_tape(capture(CheckpointedNorm(), torch.zeros(2, 8, 64)), StepSettings())
    alive = set(np.flatnonzero(tape.persistent))
    for event in tape.events.tolist():
        storage = abs(event) - 1
        assert (storage in alive) == (event < 0)  # allocated once, freed once
        (alive.discard if event < 0 else alive.add)(storage)


class Speech(nn.Module):
    """A layer and CTC, whose kernels run on no meta tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 29)

    def forward(self, x):
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        targets, lengths = (torch.ones(len(x), n, dtype=torch.long) for n in (50, 1))
        return F.ctc_loss(scores, targets, 100 * lengths[:, 0], 50 * lengths[:, 0])


def test_ctc_takes_what_the_profiler_sees():
    torch.manual_seed(0)
    model, x = Speech(), torch.randn(64, 100, 40)
    peak = profiled_peak(lambda: model(x).backward()) + x.nbytes + sum(p.nbytes for p in model.parameters())
    assert peak_of(capture(model, x, loss=lambda loss: loss), 64) == pytest.approx(peak, rel=0.02)
