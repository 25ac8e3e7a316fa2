"""`Trainer` against eager PyTorch, on PoCL."""

import copy
import sys

import numpy as np
import pytest
import torch
from oracles.step_networks import SmallCNN, SmallGPT
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge import notices
from torchedge.errors import CaptureError, InputError, LoweringError, OpenCLError
from torchedge.runtime import trainers

pytest.importorskip("pyopencl")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count, size=8):
    return [(torch.randn(size, 6), torch.randint(4, (size,))) for _ in range(count)]


def train_eager(model, optimizer, data, accumulation=1):
    losses = []
    for count, (x, y) in enumerate(data, start=1):
        loss = F.cross_entropy(model(x), y)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if count % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def equal(model, eager, optimizer=None, theirs=None):
    for (name, found), wanted in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda m, name=name: f"{name}: {m}", **TOLERANCE)
    if optimizer is not None:
        found, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
        assert found.keys() == wanted.keys()
        for place, held in wanted.items():
            assert found[place].keys() == held.keys()
            for kind, tensor in held.items():
                torch.testing.assert_close(found[place][kind], tensor, **TOLERANCE)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}


def twins(model, name):
    """Return a model and a copy for eager PyTorch, and the optimizer of each."""
    eager = copy.deepcopy(model)
    return model, eager, OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](eager.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_eager_and_goes_on_in_either(name):
    model, eager, mine, theirs = twins(mlp(), name)
    data = batches(9)
    found = train_eager(model, mine, data[:1])  # the optimizer holds something before
    with torchedge.Trainer(model, *data[0], loss=F.cross_entropy, optimizer=mine) as trainer:
        found += [trainer.step(x, y) for x, y in data[1:7]]  # RAdam takes its variance from step 6 on
        assert trainer.steps == trainer.batches == 6
    found += train_eager(model, mine, data[7:])
    np.testing.assert_allclose(found, train_eager(eager, theirs, data), **TOLERANCE)
    equal(model, eager, mine, theirs)


@pytest.mark.slow
def test_a_network_with_batch_norm_predicts_and_evaluates_with_what_it_has_learnt():
    model, eager, mine, theirs = twins(SmallCNN(), "sgd")
    data = [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(3)]
    x, y = data[0]
    trainer = torchedge.Trainer(model, x, y, loss=F.cross_entropy, optimizer=mine)
    found = [trainer.step(*batch) for batch in data]
    np.testing.assert_allclose(found, train_eager(eager, theirs, data), **TOLERANCE)
    eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(trainer.predict(x), eager(x), **TOLERANCE)
        torch.testing.assert_close(trainer.predict(x[:2].numpy()), eager(x[:2]), **TOLERANCE)
        assert trainer.evaluate(x, y) == pytest.approx(F.cross_entropy(eager(x), y).item(), rel=1e-4)
    assert model.training and model.norm.num_batches_tracked == 0, "nothing is copied before sync()"
    trainer.sync()
    assert model.norm.num_batches_tracked == 3
    equal(model, eager, mine, theirs)
    trainer.close()
    with pytest.raises(OpenCLError, match="closed"):
        trainer.step(x, y)


def test_gradients_of_several_batches_make_one_update():
    model, eager, mine, theirs = twins(mlp(), "adam")
    data = batches(6)
    with torchedge.Trainer(model, *data[0], loss=F.cross_entropy, optimizer=mine, accumulation=3) as trainer:
        found = [trainer.step(x, y) for x, y in data]
        assert (trainer.steps, trainer.batches) == (2, 6)
    np.testing.assert_allclose(found, train_eager(eager, theirs, data, 3), **TOLERANCE)
    equal(model, eager, mine, theirs)


def test_a_smaller_last_batch_gets_its_own_program_also_after_a_sync():
    model, eager, mine, theirs = twins(mlp(), "adam")
    data = [*batches(2), *batches(1, 5), *batches(1), *batches(1, 5)]
    with torchedge.Trainer(model, *data[0], loss=F.cross_entropy, optimizer=mine) as trainer:
        found = [trainer.step(*data[0]), trainer.step(*data[1])]
        trainer.sync()
        found += [trainer.step(x, y) for x, y in data[2:]]
    np.testing.assert_allclose(found, train_eager(eager, theirs, data), **TOLERANCE)
    equal(model, eager, mine, theirs)


def test_schedulers_and_lr_set_the_learning_rate():
    model = mlp()
    eager = copy.deepcopy(model)
    groups = lambda m: [{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.5}]  # noqa: E731
    mine, theirs = torch.optim.SGD(groups(model), lr=0.1), torch.optim.SGD(groups(eager), lr=0.1)
    data = batches(4)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (mine, theirs)]
    with torchedge.Trainer(model, *data[0], loss=F.cross_entropy, optimizer=mine) as trainer:
        for x, y in data[:3]:
            trainer.step(x, y)
            schedules[0].step()
        assert trainer.lr == 0.0125
        trainer.lr = 0.3
        trainer.step(*data[3])
        mine.param_groups[0]["momentum"] = 0.5
        with pytest.raises(InputError, match=r"momentum is 0\.5 in group 0"):
            trainer.step(*data[3])
    for batch in data[:3]:
        train_eager(eager, theirs, [batch])
        schedules[1].step()
    for group in theirs.param_groups:
        group["lr"] = 0.3
    train_eager(eager, theirs, data[3:])
    equal(model, eager)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: optimizer.add_param_group({"params": [*model[2].parameters()]}),
        lambda model, optimizer: model[0].weight.requires_grad_(False),
    ],
)
def test_a_step_after_other_parameters_are_trained_is_refused(change):
    model, batch = mlp(), batches(1)[0]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with torchedge.Trainer(model, *batch, loss=F.cross_entropy, optimizer=optimizer) as trainer:
        trainer.step(*batch)
        for rate in (-1.0, float("nan"), float("inf")):
            with pytest.raises(InputError, match="expected a number from 0 to"):
                trainer.lr = rate
        change(model, optimizer)
        with pytest.raises(InputError, match="require a gradient, have changed"):
            trainer.step(*batch)


@pytest.mark.parametrize(
    "hook",
    [
        lambda model, optimizer: model[0].weight.register_hook(lambda g: g.clamp(-1, 1)),
        lambda model, optimizer: model[0].bias.register_post_accumulate_grad_hook(lambda p: None),
        lambda model, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
        lambda model, optimizer: optimizer.register_step_post_hook(lambda *_: None),
    ],
)
def test_hooks_that_a_step_would_not_run_are_refused(hook):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = hook(model, optimizer)
    with pytest.raises(InputError, match="has a hook, which a captured step does not run; remove it"):
        torchedge.Trainer(model, *batches(1)[0], loss=F.cross_entropy, optimizer=optimizer)
    handle.remove()
    torchedge.Trainer(model, *batches(1)[0], loss=F.cross_entropy, optimizer=optimizer).close()


def test_weights_set_in_pytorch_are_loaded():
    model = mlp()
    other = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    (x, y), *_ = batches(1)
    with torchedge.Trainer(model, x, y, loss=F.cross_entropy, optimizer=optimizer) as trainer:
        trainer.step(x, y)
        trainer.sync()
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        first = trainer.step(x, y)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        trainer.load()
        assert trainer.step(x, y) == first
        model.load_state_dict(other.state_dict())
        trainer.load()
        torch.testing.assert_close(trainer.predict(x), other(x).detach(), **TOLERANCE)


@pytest.mark.slow
def test_dropout_is_drawn_from_the_seed():
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    (x, y), *_ = batches(1)

    def losses(seed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = torchedge.Trainer(model, x, y, loss=F.cross_entropy, optimizer=optimizer, seed=seed)
        return [trainer.step(x, y) for _ in range(3)]

    first = losses(1)
    assert first == losses(1) and first != losses(2) and len(set(first)) == 3


@pytest.mark.slow
def test_a_language_model_with_its_own_loss_and_keyword_arguments():
    model, eager, mine, theirs = twins(SmallGPT(), "sgd")
    tokens = torch.randint(23, (2, 8))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    with torchedge.Trainer(model, batch, loss="model", optimizer=mine) as trainer:
        found = [trainer.step(batch) for _ in range(3)]
        logits = trainer.predict({"tokens": tokens})["logits"]
        assert trainer.evaluate(batch) == pytest.approx(trainer.predict(batch)["loss"].item())
    wanted = []
    for _ in range(3):
        loss = eager(**batch)["loss"]
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        wanted.append(loss.item())
    np.testing.assert_allclose(found, wanted, **TOLERANCE)
    torch.testing.assert_close(logits, eager.eval()(tokens)["logits"].detach(), **TOLERANCE)
    equal(model, eager)


def test_memory_and_report():
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    (x, y), *_ = batches(1)
    count = sum(p.numel() for p in model.parameters())
    trainer = torchedge.Trainer(model, x, y, loss=F.cross_entropy, optimizer=optimizer, profile=True)
    trainer.step(x, y)
    memory = trainer.memory
    assert memory.parameters == 4 * count and memory.optimizer == 3 * 4 * count + 4
    assert memory.total == sum(
        (memory.parameters, memory.buffers, memory.optimizer, memory.arena, memory.other)
    )
    (report,) = trainer.report()
    assert sum(time.launches for time in report.times) == report.launches >= report.kernels > 0
    assert (
        report.ms > 0
        and f"{report.launches} launches" in str(report)
        and report.times[0].kernel in str(report)
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.randn(8, 6).double(), torch.zeros(8).long()), r"float64\[8, 6\].* expected float32\[8, 6\]"),
        ((torch.randn(8, 1, 6), torch.zeros(8).long()), "expected float32"),
        ((torch.randn(8, 6),), "expected float32"),
        (("words", ()), "without tensors"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = (torch.randn(8, 6), torch.zeros(8).long())
    trainer = torchedge.Trainer(model, *example, loss=F.cross_entropy, optimizer=optimizer)
    with pytest.raises(InputError, match=message):
        trainer.step(*batch)


@pytest.mark.parametrize("after, lines", [(0.0, 2), (1e6, 0)])
def test_making_a_program_is_noticed_once_it_lasts(monkeypatch, caplog, after, lines):
    monkeypatch.setattr(notices, "AFTER_S", after)
    model = mlp()
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    with caplog.at_level("INFO", "torchedge"), trained(model, x, y) as trainer:
        trainer.step(x, y)
        trainer.step(x[:4], y[:4])
        trainer.step(x[:4], y[:4])
    ends = [r.getMessage() for r in caplog.records if " took " in r.getMessage()]
    assert len(ends) == lines
    for text, size in zip(ends, (8, 4), strict=False):
        reason = ", as batches of this size are new" * (size == 4)
        assert f"Sequential for float32[{size}, 6], int64[{size}]{reason} took" in text
    stages = [r.getMessage().rpartition(": ")[2] for r in caplog.records]
    assert not lines or {"capturing", "building"} <= {stage.split()[0] for stage in stages}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_the_stages_of_an_export(monkeypatch, capsys, tmp_path, terminal):
    monkeypatch.setattr(notices, "AFTER_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    options = {"device": "adreno", "onnx": False}
    torchedge.export(mlp(), torch.randn(8, 6), out=tmp_path / "a", **options)
    told = capsys.readouterr().err
    for words in ("torchedge: exporting for adreno", "capture ...", "  lower ...", " took "):
        assert (words in told) == terminal
    torchedge.export(mlp(), torch.randn(8, 6), out=tmp_path / "b", progress=lambda name: None, **options)
    assert not capsys.readouterr().err


def trained(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchedge.Trainer(model, x, y, loss=F.cross_entropy, optimizer=optimizer)


class Bags(nn.Module):
    """Bags of rows of a table, with weights of their own if there are any."""

    def __init__(self, **options):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(30, 6, **options), nn.Linear(6, 4)

    def forward(self, rows, offsets=None, weights=None):
        return self.head(self.bags(rows, offsets, weights))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "offsets", "weighted"),
    [
        ({"mode": "sum"}, False, True),
        ({"mode": "mean", "padding_idx": 3}, False, False),
        ({"mode": "max", "padding_idx": 3}, False, False),
        ({"mode": "sum", "padding_idx": 3, "include_last_offset": True}, True, True),
        ({"mode": "mean"}, True, False),
    ],
)
def test_embedding_bags_train_as_in_pytorch(options, offsets, weighted):
    torch.manual_seed(0)
    model, y = Bags(**options), torch.tensor([0, 1, 2, 3])
    rows = torch.randint(30, (20,) if offsets else (4, 5))
    rows.view(-1)[:5] = 3  # the first bag is padding alone
    starts = torch.tensor([0, 5, 5, 12, 20][: 5 if options.get("include_last_offset") else 4])
    inputs = (rows, *([starts] if offsets else [None] * weighted), *[torch.rand(rows.shape)] * weighted)
    eager = copy.deepcopy(model)
    F.cross_entropy(eager(*inputs), y).backward()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with torchedge.Trainer(model, inputs, y, loss=F.cross_entropy, optimizer=sgd) as trainer:
        trainer.step(inputs, y)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - theirs.grad, rtol=1e-5, atol=1e-6)
    assert torchedge.predict(model, 4, "nvidia-h200", example=inputs).unsupported == ()


def test_rrelu_draws_its_slopes():
    x, y = -torch.ones(4, 2000), torch.zeros(4, 2000)
    model = nn.Sequential(nn.RReLU(0.1, 0.3), nn.Linear(2000, 1, bias=False))
    nn.init.ones_(model[1].weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(outputs, target):
        return -outputs.mean() / 2000

    with torchedge.Trainer(model, x, y, loss=loss, optimizer=sgd) as trainer:
        slopes = [trainer.step(x, y) for _ in range(2)]
        assert trainer.evaluate(x, y) == pytest.approx(0.2, rel=1e-5)
    assert slopes[0] != slopes[1] and slopes == pytest.approx([0.2, 0.2], abs=0.005)


def test_what_cannot_be_trained_is_refused():
    class Algebra(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.linear, self.call = nn.Linear(6, 4), call

        def forward(self, x):
            return self.call(self.linear(x))

    for call, error, message in (
        (lambda y: torch.linalg.qr(y)[1], LoweringError, "qr"),
        (  # PyTorch 2.11 and 2.13 take it apart in other ways
            lambda y: torch.linalg.inv(y.T @ y),
            (CaptureError, LoweringError),
            r"linalg_(check_errors|inv_ex).*torch\.compile",
        ),
    ):
        model = Algebra(call)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(error, match=message):
            torchedge.Trainer(model, torch.randn(8, 6), loss=lambda out: out.sum(), optimizer=optimizer)
    with pytest.raises(InputError, match="ASGD"):
        torchedge.Trainer(
            mlp(), *batches(1)[0], loss=F.cross_entropy, optimizer=torch.optim.ASGD(mlp().parameters())
        )


class OfDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch):
        return self.linear(batch["x"])


def test_a_dict_is_passed_as_keyword_arguments_and_errors_say_so():
    model, x, y = OfDict(), torch.randn(3, 4), torch.randn(3, 2)
    options = {"loss": F.mse_loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(InputError, match=r"passed as keyword arguments \(x\).*pass a tuple with that dict"):
        torchedge.Trainer(model, {"x": x}, y, **options)
    with torchedge.Trainer(model, ({"x": x},), y, **options) as trainer:
        assert trainer.step(({"x": x},), y) > 0


@pytest.mark.parametrize("tuner", ["fixed", "model", pytest.param("measured", marks=pytest.mark.slow)])
def test_every_tuner_trains_the_same(tuner):
    model, data = mlp(), batches(2)
    eager = copy.deepcopy(model)
    expected = train_eager(eager, torch.optim.SGD(eager.parameters(), lr=0.1), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchedge.Trainer(
        model, *data[0], loss=F.cross_entropy, optimizer=optimizer, tuner=tuner
    ) as trainer:
        assert [trainer.step(x, y) for x, y in data] == pytest.approx(expected, rel=1e-5)
    equal(model, eager)


def without_capture(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model is captured again")

    monkeypatch.setattr(trainers, "capture_step", refuse)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_that_was_captured_before_is_not_captured_again(tmp_path, monkeypatch, accumulation):
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path))
    data = batches(4)

    def losses():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with torchedge.Trainer(
            model, *data[0], loss=F.cross_entropy, optimizer=optimizer, accumulation=accumulation
        ) as trainer:
            return [trainer.step(*batch) for batch in data], model.state_dict()

    first, weights = losses()
    without_capture(monkeypatch)
    second, again = losses()
    assert first == second
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_resumed_optimizer_another_seed_and_another_loss_are_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path))
    model, (batch,) = mlp(), batches(1)

    def trainer(**options):
        settings = {"loss": F.cross_entropy, "optimizer": torch.optim.Adam(model.parameters()), "seed": 1}
        return torchedge.Trainer(model, *batch, **{**settings, **options})

    trainer().close()
    without_capture(monkeypatch)
    trainer().close()
    stepped = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    stepped.step()
    for options in (
        {"seed": 2},
        {"loss": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1)},
        {"optimizer": torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))},
        {"optimizer": torch.optim.Adam(list(model.parameters())[:2])},
        {"optimizer": stepped},
        {"accumulation": 2},
    ):
        with pytest.raises(AssertionError, match="captured again"):
            trainer(**options)


def test_a_module_that_stands_in_two_places_is_trained_once_and_stays_whole():
    linear, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    model = nn.Sequential(linear, norm, nn.ReLU(), linear, norm)
    eager, x, y = copy.deepcopy(model), torch.randn(16, 8), torch.randn(16, 8)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    with torchedge.Trainer(model, (x,), targets=y, loss=nn.functional.mse_loss, optimizer=ours) as trainer:
        assert not [n for n, t in model.state_dict().items() if type(t) is not torch.Tensor]
        for _ in range(3):
            loss = nn.functional.mse_loss(eager(x), y)
            theirs.zero_grad()
            loss.backward()
            theirs.step()
            assert trainer.step(x, y) == pytest.approx(loss.item(), rel=1e-5)
        trainer.sync()
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, **TOLERANCE)
