"""Updates of captured steps against PyTorch's optimizers: settings, groups, states, accumulation."""

import copy
import sys

import pytest
import torch
from oracles.eager_steps import TOLERANCE, classes, double, feed_classes, follow, held_equals, images, train
from oracles.step_interpreter import Interpreter
from oracles.step_networks import SmallCNN
from torch.nn import functional as F

from torchedge.graphs.steps import GraphBuilder, Term
from torchedge.tracing.optimizers import _average_length
from torchedge.tracing.steps import capture_step

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_decay": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "dampened": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_maximize": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.5, maximize=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam_all": lambda ps: torch.optim.Adam(
        ps, lr=0.01, betas=(0.3, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True, maximize=True
    ),
    "adam_betas_0": lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.0, 0.0)),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, weight_decay=0.1),
    "rmsprop_all": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True, maximize=True),
    "adagrad": lambda ps: torch.optim.Adagrad(
        ps, lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2
    ),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5, weight_decay=0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01, weight_decay=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01, weight_decay=0.1),
    "nadam_decoupled": lambda ps: torch.optim.NAdam(
        ps, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01, weight_decay=0.1),
    "radam_early": lambda ps: torch.optim.RAdam(
        ps, lr=0.01, betas=(0.5, 0.8), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam_never": lambda ps: torch.optim.RAdam(ps, lr=0.01, betas=(0.0, 0.6)),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "adamw_amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_pytorch_s(name, monkeypatch):
    monkeypatch.setattr(sys.modules[torch.optim.NAdam.__module__], "_get_scalar_dtype", lambda: torch.float64)
    follow(double(SmallCNN), lambda model: OPTIMIZERS[name](model.parameters()), feed_classes(8))


@pytest.mark.parametrize(
    "name",
    [
        "dampened",
        "adam_all",
        "rmsprop_all",
        "adagrad",
        "adadelta",
        "adamax",
        "nadam",
        "radam",
        pytest.param("adam", marks=pytest.mark.slow),
    ],
)
def test_a_capture_goes_on_where_the_optimizer_stands(name, monkeypatch):
    monkeypatch.setattr(sys.modules[torch.optim.NAdam.__module__], "_get_scalar_dtype", lambda: torch.float64)
    model = double(SmallCNN)
    optimizer = OPTIMIZERS[name](model.parameters())
    feed = feed_classes(8)
    for _ in range(2):
        train(model, optimizer, F.cross_entropy, feed())
    args, targets = feed()
    captured = capture_step(model, args, targets=targets, loss=F.cross_entropy, optimizer=optimizer)
    interpreter = Interpreter(captured.tensors)
    for _ in range(3):
        args, targets = feed()
        interpreter.run(captured.step, *args, *targets)
        train(model, optimizer, F.cross_entropy, (args, targets))
    held_equals(interpreter, model)


@pytest.mark.parametrize("beta", [0.8, 0.999])
def test_the_length_of_radam_s_average_does_not_cancel_in_float32(beta):
    """By steps around those from which on it rectifies, and where its series ends."""
    builder, most = GraphBuilder(), 2 / (1 - beta) - 1
    step = builder.add("step", (), "float32", "input")
    length = _average_length(Term(builder, step), beta, most)
    finished = builder.finish([step], [length.value])
    for count in (*range(1, 12), 499, 501, 100_000):
        (found,) = Interpreter({}).run(finished, torch.tensor(float(count)))
        power = beta**count
        assert float(found) == pytest.approx(most - 2 * count * power / (1 - power), rel=2e-6, abs=2e-6)


def test_float32_steps_stay_close_to_float64_with_adam():
    """The bias corrections do not cancel: 1 - 0.999^step would have four digits in float32."""
    torch.manual_seed(0)
    model = SmallCNN()
    eager = copy.deepcopy(model).double()
    optimizer = torch.optim.Adam(eager.parameters(), lr=0.01)
    x, y = images(4, 3, 8, 8, dtype=torch.float32), classes()
    captured = capture_step(
        model, x, targets=y, loss=F.cross_entropy, optimizer=torch.optim.Adam(model.parameters(), lr=0.01)
    )
    interpreter = Interpreter(captured.tensors)
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    interpreter.run(captured.step, x, y)
    train(eager, optimizer, F.cross_entropy, ((x.double(),), (y,)))
    for name, parameter in eager.named_parameters():
        moved, wanted = interpreter.held[name].double() - before[name], parameter.detach() - before[name]
        assert (moved - wanted).norm() < 2e-5 * wanted.norm() + 1e-6


def test_groups_have_their_own_settings_and_learning_rates():
    def build(model):
        return torch.optim.SGD(
            [
                {"params": model.head.parameters(), "lr": 0.5, "momentum": 0.9},
                {"params": [*model.first.parameters(), *model.norm.parameters()]},
            ],
            lr=0.1,
            weight_decay=0.01,
        )

    model = double(SmallCNN)
    eager = copy.deepcopy(model)
    optimizer, feed = build(eager), feed_classes(8)
    args, targets = feed()
    captured = capture_step(model, args, targets=targets, loss=F.cross_entropy, optimizer=build(model))
    assert list(captured.step.hyperparameters) == ["lr", "lr_1"]
    assert (captured.tensors["lr"].item(), captured.tensors["lr_1"].item()) == (0.5, 0.1)
    interpreter = Interpreter(captured.tensors)
    for rate in (0.1, 0.2):
        args, targets = feed()
        interpreter.held["lr_1"] = torch.tensor(rate, dtype=torch.float64)
        optimizer.param_groups[1]["lr"] = rate
        interpreter.run(captured.step, *args, *targets)
        train(eager, optimizer, F.cross_entropy, (args, targets))
    held_equals(interpreter, eager)
    written = {captured.step.values[old].name for old, _ in captured.step.updates}
    assert not written & {"second.weight", "second.bias"}, "in no group, so not updated"


def test_gradients_accumulate_over_batches():
    model = double(SmallCNN)
    eager = copy.deepcopy(model)
    optimizer, feed = torch.optim.AdamW(eager.parameters(), lr=0.01), feed_classes(8)
    args, targets = feed()
    captured = capture_step(
        model,
        args,
        targets=targets,
        loss=F.cross_entropy,
        accumulation=3,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    assert captured.accumulating is not None
    interpreter = Interpreter(captured.tensors)
    for count in range(1, 7):
        args, targets = feed()
        last = count % 3 == 0
        step = captured.step if last else captured.accumulating
        (found,) = interpreter.run(step, *args, *targets)
        wanted = train(eager, optimizer if last else None, F.cross_entropy, (args, targets), divisor=3)
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    held_equals(interpreter, eager, optimizer)
