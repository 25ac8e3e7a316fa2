"""The profile of a step: sums, peak, timeline, text, and its relation to batch size and settings."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

import torchedge
from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.simulation import simulate
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.tape import CATEGORIES
from torchedge.tracing.capturing import capture

MIB = 2**20


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


@pytest.fixture(scope="module")
def graph():
    return capture(small(), input_size=(3, 64, 64))


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("optimizer", ["none", "sgd", "sgd-momentum", "adam", "adamw"])
def test_breakdown_sums_to_the_live_peak(graph, batch, optimizer):
    profile = simulate(graph, batch, StepSettings(optimizer=optimizer))
    assert sum(profile.breakdown.values()) == profile.live_mib
    assert tuple(profile.breakdown) == CATEGORIES
    assert profile.live_mib <= profile.allocated_mib <= profile.reserved_mib
    assert profile.timeline().live_mib.max() == profile.live_mib


def test_categories_of_known_size(graph):
    profile = simulate(graph, 16, StepSettings(optimizer="adam"))
    parameters = [int(np.prod(p.shape)) * 4 for p in small().parameters()]
    rounded = sum(-(-p // 512) * 512 for p in parameters)
    assert profile.breakdown["optimizer_state"] == 2 * rounded / MIB
    buffers = 3 * 512  # running mean and variance; the graph reads no count of batches
    assert rounded / MIB <= profile.breakdown["weights"] <= (rounded + buffers) / MIB
    assert profile.breakdown["inputs"] == (16 * 3 * 64 * 64 * 4 + 512) / MIB  # images and targets


def test_peak_names_the_operator_and_the_largest_tensors(graph):
    profile = simulate(graph, 64)
    assert profile.peak.phase == "backward"
    assert profile.peak.kind and profile.peak.index >= 0
    assert [m for _, m in profile.largest] == sorted([m for _, m in profile.largest], reverse=True)
    text = str(profile)
    assert "allocated" in text and "reserved" in text and profile.largest[0][0] in text


def test_inference_graph_has_a_forward_pass_only():
    graph = capture(small(), input_size=(3, 64, 64), mode="infer")
    profile = simulate(graph, 8)
    assert set(profile.timeline().phase.tolist()) == {0}
    assert profile.breakdown["gradients"] == profile.breakdown["optimizer_state"] == 0


@given(st.lists(st.integers(1, 512), min_size=1, max_size=8))
@examples(max_examples=25)
def test_many_batch_sizes_at_once_equal_one_by_one(batches):
    tape = _TAPES.setdefault("t", write_tape(capture(small(), input_size=(3, 64, 64)), StepSettings()))
    together = tape.peak_bytes(np.array(batches))
    assert together.tolist() == [int(tape.peak_bytes(np.array([b]))[0]) for b in batches]
    order = np.argsort(batches)
    assert np.all(np.diff(together[order]) >= 0)


_TAPES: dict = {}


def test_every_storage_is_freed_once(graph):
    for settings in (
        StepSettings(),
        StepSettings(zero_grad="zero"),
        StepSettings(accumulation=4),
        StepSettings(amp="float16"),
        StepSettings(optimizer="adam", foreach=False, weight_decay=0.1),
    ):
        for first in (False, True):
            tape = write_tape(graph, settings, first=first)
            alive = set(tape.persistent.tolist())
            for event in tape.event_list:
                storage = abs(event) - 1
                assert (storage in alive) == (event < 0)
                (alive.add if event > 0 else alive.discard)(storage)
            assert alive == set(tape.remaining.tolist())


def test_first_step_hands_over_to_the_steady_state(graph):
    settings = StepSettings(zero_grad="zero", foreach=False)
    first, steady = write_tape(graph, settings, first=True), write_tape(graph, settings)
    assert first.sizes[first.remaining].tolist() == steady.sizes[steady.persistent].tolist()
    run = replay(steady, 8, first=first)
    assert run[0].allocated_mib < run[1].allocated_mib


def test_plot_draws_phases_and_peak(graph):
    pytest.importorskip("matplotlib")
    (axes,) = simulate(graph, 8).plot().axes
    assert {t.get_text() for t in axes.get_legend().get_texts()} >= {"forward", "backward"}


def test_amsgrad_keeps_three_states():
    model = torch.nn.Linear(512, 512)
    plain, largest = (
        torchedge.simulate(
            model, 1, input_size=(512,), optimizer=torch.optim.Adam(model.parameters(), amsgrad=flag)
        )
        for flag in (False, True)
    )
    states = (512 * 512 + 512) * 4 / 2**20
    assert largest.allocated_mib - plain.allocated_mib == pytest.approx(states, rel=0.01)


def test_blas_takes_a_workspace_for_each_pass_at_its_first_product():
    graph = capture(nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)), input_size=(8,), mode="train")
    settings = StepSettings(blas_workspace_mib=64)
    first, later = (write_tape(graph, settings, first=start) for start in (True, False))
    workspaces = [s for s, label in enumerate(first.labels) if label.startswith("BLAS")]
    begun = [first.event_list.index(s + 1) for s in workspaces]
    kinds = [first.operators[first.owners[event]][0] for event in begun]
    assert kinds == ["linear", "linear"]
    assert first.phases[begun].tolist() == [0, 1]
    assert set(workspaces) <= set(first.remaining.tolist())
    assert [later.labels[s] for s in later.persistent if later.labels[s].startswith("BLAS")] == [
        "BLAS workspace",
        "BLAS workspace of the backward pass",
    ]
    sizes = [tape.bytes_at(np.array([2]))[:, 0] for tape in (first, later)]
    assert sizes[0][first.remaining].tolist() == sizes[1][later.persistent].tolist()


def test_a_parameter_that_backward_does_not_reach_has_no_state():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x) + 0 * self.unused.weight.detach().sum()

    graph = capture(Unused(), input_size=(8,), mode="train")
    tape = write_tape(graph, StepSettings("adam"))
    states = [tape.labels[s] for s in tape.persistent if "exp_avg" in tape.labels[s]]
    assert states == [f"used.{p}.{s}" for p in ("weight", "bias") for s in ("exp_avg", "exp_avg_sq")]
    kept = write_tape(graph, StepSettings("adam", accumulation=2))
    assert "unused.weight.grad" not in [kept.labels[s] for s in kept.persistent]
    first = write_tape(graph, StepSettings("adam"), first=True)
    assert len(first.remaining) == len(tape.persistent)


def test_a_pass_without_products_takes_no_workspace():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.PReLU())
    model[0].requires_grad_(False)
    tape = write_tape(capture(model, input_size=(8,), mode="train"), StepSettings(blas_workspace_mib=64))
    assert [label for s in tape.persistent if (label := tape.labels[s]).startswith("BLAS")] == [
        "BLAS workspace"
    ]


def test_a_weight_whose_shape_is_read_again_keeps_its_gradient_and_state():
    class Standardised(nn.Linear):  # as the convolutions of timm's ResNetV2
        def forward(self, x):
            weight = nn.functional.batch_norm(self.weight.reshape(1, 8, -1), None, None, training=True)
            return nn.functional.linear(x, weight.reshape_as(self.weight), self.bias)

    graph = capture(Standardised(8, 8), input_size=(8,), mode="train")
    tape = write_tape(graph, StepSettings("adam"))
    assert "weight.exp_avg" in [tape.labels[s] for s in tape.persistent]
    assert tape.labels.count("weight.grad") == 1


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.kl_div])
def test_a_loss_of_swapped_arguments_trains_as_well(loss):
    model, x = nn.Linear(64, 64), torch.zeros(8, 64)

    def peak(of):
        return simulate(capture(model, x, loss=of), 8, StepSettings()).allocated_mib

    assert peak(lambda y: loss(torch.zeros_like(y), y)) >= peak(lambda y: loss(y, torch.zeros_like(y)))
