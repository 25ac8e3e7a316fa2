"""Optimizers as people use them: state and temporaries against the real optimizer, storage by storage."""

import copy

import numpy as np
import pytest
import torch
from oracles.eager_memory import run_training
from oracles.profiled_memory import profiled_peak
from torch import nn

import torchedge
from torchedge.errors import InputError
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture
from torchedge.tracing.optimizer_replays import OptimizerReplay, replay_of

KINDS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adafactor",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
)
OPTIONS = {
    "centered": ("RMSprop", {"centered": True, "momentum": 0.9, "foreach": True}),
    "amsgrad": ("Adam", {"amsgrad": True, "foreach": True}),
    "maximize": ("AdamW", {"maximize": True, "foreach": False}),
    "momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    **{f"{kind}-foreach": (kind, {"foreach": True}) for kind in KINDS},
    **{f"{kind}-loop": (kind, {"foreach": False}) for kind in KINDS if kind != "ASGD"},  # it reads a value
}


def network():
    """Layers whose parameters, not their activations, make the peak; a frozen one among them."""
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 300))
    model[2].weight.requires_grad_(False)
    return model


def feed():
    return (torch.empty(2, 300, device="meta"),), {}


def peak(model, optimizer, foreach=True, **settings):
    graph = capture(model, feed()[0], loss=torch.sum)
    chosen = StepSettings(optimizer=optimizer, backend="cpu", foreach=foreach, **settings)
    return int(write_tape(graph, chosen).peak_bytes(np.array([2]))[0])


def counted(model, make):
    return run_training(model, feed, torch.sum, make).peak


def live_peak(events, sizes):
    """The most bytes that events allocate at once."""
    live = most = 0
    for event in events:
        live += np.sign(event) * sizes[abs(event) - 1]
        most = max(most, live)
    return most


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_takes_what_the_real_optimizer_takes(name):
    """State and temporaries of steps that really run on the CPU, by the profiler's allocations."""
    kind, options = OPTIONS[name]
    model = network()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    graph = capture(model, feed()[0], loss=torch.sum)
    footprint, updated = replay_of(optimizer, model).update(graph, foreach=False)
    assert len(updated) == 5
    for p in model.parameters():
        p.grad = torch.rand_like(p) if p.requires_grad else None
    for _ in range(7):
        optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    kept = [footprint.sizes[k][0] for k in footprint.states]
    assert sum(kept) == pytest.approx(sum(t.nbytes for t in states if t.dim()), abs=5 * 4 * 4)
    assert live_peak(footprint.later, [size for size, _, _ in footprint.sizes]) == pytest.approx(
        profiled_peak(optimizer.step), rel=0.02, abs=4096
    )


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
def test_a_training_step_takes_what_is_counted(kind):
    model = network().to("meta")
    make = lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.1, foreach=True)  # noqa: E731
    replay = replay_of(make(model.parameters()), model)
    assert peak(model, replay) == pytest.approx(counted(model, make), abs=1024)


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "adamw"])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_name_stands_for_its_optimizer(name, foreach):
    model = network()
    kind = {"sgd": "SGD", "sgd-momentum": "SGD", "adam": "Adam", "adamw": "AdamW"}[name]
    options = {"momentum": 0.9} if name == "sgd-momentum" else {}
    replay = replay_of(getattr(torch.optim, kind)(model.parameters(), **options), model)
    assert str(replay) == name
    assert peak(model, replay, foreach) == peak(model, name, foreach)


def state_bytes(model, optimizer):
    profile = torchedge.simulate(model, 2, optimizer=optimizer, input_size=(300,))
    return round(profile.breakdown["optimizer_state"] * 2**20)


def rounded(*elements, item=4):
    return sum(-(-n * item // 512) * 512 for n in elements)


def test_a_part_of_the_parameters_has_state_for_these_only():
    model = network()
    head = rounded(400 * 300, 300)
    assert state_bytes(model, torch.optim.AdamW(model[4].parameters())) == 2 * head
    assert state_bytes(model, torch.optim.AdamW(model[4].parameters(), amsgrad=True)) == 3 * head
    groups = [{"params": model[4].weight, "amsgrad": True}, {"params": model[4].bias}]
    assert state_bytes(model, torch.optim.Adam(groups)) == 2 * head + rounded(400 * 300)


def test_gradients_that_the_optimizer_does_not_free_stay():
    model = network().to("meta")
    only = lambda parameters: torch.optim.SGD(model[4].parameters(), 0.1, foreach=True)  # noqa: E731
    assert peak(model, replay_of(only(None), model)) == pytest.approx(counted(model, only), abs=512)


def test_fused_kernels_take_no_temporaries_but_counters_on_the_device():
    model = network()
    plain, fused = (
        torch.optim.AdamW(model.parameters(), **options) for options in ({"foreach": True}, {"fused": True})
    )
    weights = rounded(*(p.numel() for p in model.parameters() if p.requires_grad))
    assert state_bytes(model, fused) == 2 * weights + 5 * 512
    tape = torchedge.simulate(model, 2, optimizer=fused, input_size=(300,)).tape
    assert not any(label == "optimizer temporary" for label in tape.labels)
    tape = torchedge.simulate(model, 2, optimizer=plain, input_size=(300,)).tape
    assert any(label == "optimizer temporary" for label in tape.labels)


def test_options_of_a_named_optimizer_are_those_of_its_object():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300, bias=False))
    graph = capture(model, torch.zeros(2, 300))
    named, plain = (OptimizerReplay("adamw", options) for options in ((("fused", True),), ()))
    fused = replay_of(torch.optim.AdamW(model.parameters(), fused=True), model)
    assert named.update(graph, True) == fused.update(graph, True) != plain.update(graph, True)


def test_another_models_optimizer_is_refused():
    model, other = network(), nn.Linear(7, 7)
    with pytest.raises(InputError, match="not the model's"):
        torchedge.predict(model, 2, optimizer=torch.optim.AdamW(other.parameters()), input_size=(300,))
    graph = torchedge.capture(model, input_size=(300,))
    with pytest.raises(InputError, match=r"of shape \(7, 7\)"):
        torchedge.predict(graph, 2, optimizer=torch.optim.AdamW(other.parameters()))
    twin = torch.optim.AdamW(copy.deepcopy(model).parameters())
    assert torchedge.predict(graph, 2, optimizer=twin).memory.value > 0


def test_an_optimizer_and_its_state_stay_as_they_are():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append(1))
    model(torch.zeros(2, 300)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in model.parameters()]
    torchedge.predict(model, 2, optimizer=optimizer, input_size=(300,))
    after = optimizer.state_dict()
    assert str(after["param_groups"]) == str(before[0]["param_groups"])
    for key, states in before[0]["state"].items():
        assert all(torch.equal(states[name], after["state"][key][name]) for name in states)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[1], strict=True))
    assert len(calls) == 1 and schedule.last_epoch == 0


class Lion(torch.optim.Optimizer):
    """One state, a temporary, and a value read of a tensor."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                if p.grad.norm().item() > 0:
                    p.sub_(mean.lerp(p.grad, 0.1).sign_(), alpha=1e-3)
                mean.lerp_(p.grad, 0.1)


def test_an_optimizer_of_the_users_own():
    model = network()
    weights = rounded(*(p.numel() for p in model.parameters() if p.requires_grad))
    assert state_bytes(model, Lion(model.parameters())) == weights


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer and shares its groups."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_in_another_stays_as_it_is():
    model = network()
    inner = torch.optim.Adam(model.parameters())
    weights = rounded(*(p.numel() for p in model.parameters() if p.requires_grad))
    assert state_bytes(model, Lookahead(inner)) == 2 * weights
    assert not inner.state


def test_optimizers_that_cannot_be_replayed_are_refused():
    model = network()
    with pytest.raises(InputError, match="lbfgs does not run"):
        state_bytes(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(InputError, match="rmsprop"):
        torchedge.predict(model, 2, optimizer="rmspro", input_size=(300,))


def test_eight_bit_states():
    model = network()
    large, small = (300 * 200, 400 * 300), (200, 400, 300)
    blocks = [-(-n // 256) for n in large]
    expected = 2 * (rounded(*large, item=1) + rounded(*blocks) + rounded(*small))
    assert state_bytes(model, "adamw-8bit") == expected


def test_factored_states():
    model = nn.Linear(300, 200)
    assert state_bytes(model, "adafactor") == rounded(300, 200, 200)


def test_equal_optimizers_share_a_tape():
    model = network()
    one, two = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    assert (
        replay_of(one, model)
        == replay_of(two, model)
        != replay_of(torch.optim.Adam(model.parameters()), model)
    )
    assert OptimizerReplay("rmsprop") == OptimizerReplay("rmsprop")


class TwoHeads(nn.Module):
    """One of two equal heads is used, and a buffer that nothing reads."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(300, 200), nn.Linear(200, 300), nn.Linear(200, 300)
        self.register_buffer("table", torch.zeros(1000, 10))

    def forward(self, x):
        return self.second(self.body(x).relu())


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("method", ["trace", "export"])
def test_parameters_that_forward_does_not_read_are_weights_alone(kind, method):
    model = TwoHeads().to("meta")
    make = lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.1, foreach=True)  # noqa: E731
    graph = capture(model, feed()[0], loss=torch.sum, method=method)
    assert any("does not read" in note and "first.weight, first.bias" in note for note in graph.notes)
    for replay in (replay_of(make(model.parameters()), model), replay_of(make(model.parameters()))):
        tape = write_tape(graph, StepSettings(optimizer=replay, backend="cpu"))
        assert int(tape.peak_bytes(np.array([2]))[0]) == pytest.approx(counted(model, make), abs=1024)
    alone = replay_of(make(model.first.parameters()), model)
    assert not alone.update(graph, foreach=True)[1]


def test_inference_holds_what_it_does_not_read():
    model = TwoHeads()
    tape = write_tape(capture(model, feed()[0], mode="infer"), StepSettings(backend="cpu"))
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert int(tape.bytes_at(np.array([2]))[tape.persistent, 0].sum()) == pytest.approx(weights, rel=0.01)
