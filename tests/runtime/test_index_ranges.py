"""Class labels and indices out of range raise, as they do in PyTorch, and nothing has moved."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge.errors import IndexRangeError
from torchedge.lowering.index_ranges import index_ranges
from torchedge.lowering.inference import capture_inference_step

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


@pytest.mark.sampled(3)
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
        F.cross_entropy(copy.deepcopy(model)(*inputs), labels)
    with pytest.raises(IndexRangeError, match=r"holds -?\d+ at \[.*expected classes or indices from 0 to \d"):
        trainer.step(inputs, labels)
    after = state_of(trainer, model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.step(*batch())
    trainer.close()


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "write",
    [
        lambda x, places: x.index_reduce(0, places, x[:3], "amax"),
        lambda x, places: x.index_add(0, places, x[:3]),
        lambda x, places: x.index_copy(0, places, x[:3]),
        lambda x, places: x.scatter(0, places.view(3, 1), 1.0),
        lambda x, places: x.scatter_reduce(0, places.view(3, 1).expand(3, 3), x, "amin"),
    ],
    ids=["index_reduce", "index_add", "index_copy", "scatter", "scatter_reduce"],
)
def test_places_that_are_written_to_are_checked(write):
    x, places = torch.randn(4, 3), torch.tensor([3, 0, 1])
    compiled = torch.compile(write, backend="torchedge", dynamic=False)
    torch.testing.assert_close(compiled(x, places), write(x, places))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([3, 0, 4]))


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


class Computing(nn.Module):
    """Looks rows up at places that it computes, and at places among its weights."""

    def __init__(self, rows=(0, 2)):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.register_buffer("rows", torch.tensor(rows))

    def forward(self, x):
        looked_up = self.table((x * 2).long()) + self.table(x.argmax(-1) // 2).sum()
        return looked_up.index_select(0, self.rows) * 2


GOOD, BAD = torch.tensor([0.1, 1.0, 2.4]), torch.tensor([0.1, 2.6, 0.0])


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.norm, self.last = Computing(), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.norm(self.rows(x)))


WITH_BAD = [GOOD, BAD, GOOD + 0.05, GOOD, BAD, BAD, GOOD + 0.01]


@pytest.mark.slow
def test_a_step_that_raises_updates_nothing_and_does_not_count():
    torch.manual_seed(0)
    model, target = Normalised(), torch.zeros(2, 4)
    alone = copy.deepcopy(model)
    for network, batches in ((model, WITH_BAD), (alone, [x for x in WITH_BAD if x is not BAD])):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
        with torchedge.Trainer(
            network, GOOD, target, loss=F.mse_loss, optimizer=optimizer, accumulation=2
        ) as trainer:
            for x in batches:
                if x is BAD:
                    with pytest.raises(IndexRangeError, match="updated nothing"):
                        trainer.step(x, target)
                else:
                    trainer.step(x, target)
            assert (trainer.batches, trainer.steps) == (4, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, alone.state_dict()[name]), name


@pytest.mark.slow
def test_a_bundle_that_raises_updates_nothing_and_does_not_count(tmp_path):
    torch.manual_seed(0)
    model, target = Normalised(), torch.zeros(2, 4)
    torchedge.export(
        model, GOOD, targets=target, loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        accumulation=2, mode="train", device="local-cpu", out=tmp_path / "bundle", onnx=False,
    )  # fmt: skip
    states = []
    for batches in (WITH_BAD, [x for x in WITH_BAD if x is not BAD]):
        bundle = torchedge.load_bundle(tmp_path / "bundle")
        for x in batches:
            if x is BAD:
                with pytest.raises(IndexRangeError, match="updated nothing"):
                    bundle.train_step(x.numpy(), target.numpy())
            else:
                bundle.train_step(x.numpy(), target.numpy())
        assert bundle.runner.batches == 4
        states.append(bundle.state_dict())
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


def test_computed_indices_out_of_range_raise_in_compiled_models():
    model = Computing()
    compiled = torch.compile(model, backend="torchedge", dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(GOOD), model(GOOD))
        with pytest.raises(IndexError, match="computed by the model"):
            compiled(BAD)
        torch.testing.assert_close(compiled(GOOD), model(GOOD))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["local-cpu", "nvidia-h200", "adreno-740"])
def test_computed_indices_out_of_range_raise_in_bundles(device, tmp_path):
    model = Computing()
    torchedge.export(model, GOOD, device=device, out=tmp_path / "bundle", onnx=False)
    bundle = torchedge.load_bundle(tmp_path / "bundle")
    (result,) = bundle.run(GOOD.numpy())
    np.testing.assert_allclose(result, model(GOOD).detach().numpy(), rtol=1e-3, atol=1e-3)
    with pytest.raises(IndexRangeError):
        bundle.run(BAD.numpy())


def test_weights_that_are_indices_are_checked_before_a_run(tmp_path):
    with pytest.raises(IndexRangeError, match=r"rows holds 3 at \[1\]; .* from 0 to 2"):
        torchedge.export(Computing((0, 3)), GOOD, device="local-cpu", out=tmp_path / "bundle", onnx=False)


class Bounded(nn.Module):
    """Computes indices whose operators show that they lie within five rows, and two that may not."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8)

    def forward(self, x):
        rest, clamped = (x[..., 0] * 10).long() % 5, (x * 100).long().clamp(0, 4)[..., 0]
        places = [
            x.argmax(-1) // 2,
            clamped,
            torch.where(rest > 2, rest, torch.full_like(rest, 3)),
            torch.minimum(rest, clamped),
            (rest + clamped) & 3,
            (x[..., :3].topk(2, -1)[1] + x[..., :3].sort(-1)[1][..., :2])[..., 0],
            torch.cat([rest, clamped], 1)[:, :3],
            4 - x[..., :5].max(-1)[1],
            (x > 0).long()[..., 1] * 4,
        ]
        beyond = [rest + 1, x.argmin(-1)]
        return sum(self.table(place) for place in [*places, *beyond])


def test_only_indices_that_may_be_out_of_range_are_checked():
    step = capture_inference_step(Bounded(), (torch.randn(2, 3, 8),), {}).step
    checked = [next(op for op in step.ops if value in op.outputs) for value in index_ranges(step)]
    assert [op.kind for op in checked] == ["add", "argmin"]
    assert {(r.low, r.high) for r in index_ranges(step).values()} == {(0, 5)}


@pytest.mark.parametrize("count", [1, 3])
def test_a_place_to_which_a_run_is_added_is_checked_before_the_step(count):
    class Window(nn.Module):
        def forward(self, x, place):
            return x[place + torch.arange(count)]

    x, place = torch.randn(8, 2), torch.tensor([2])
    step = capture_inference_step(Window(), (x, place), {}).step
    (bound,) = index_ranges(step).values()
    assert (bound.low, bound.high) == (-8, 9 - count)
    compiled = torch.compile(Window(), backend="torchedge")
    torch.testing.assert_close(compiled(x, place), Window()(x, place))
    with pytest.raises(IndexRangeError):
        compiled(x, torch.tensor([9 - count]))
