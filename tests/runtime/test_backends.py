"""`torch.compile(model, backend="torchedge")` against eager PyTorch, on PoCL."""

from __future__ import annotations

import copy
import gc
import threading
import warnings

import pytest
import torch
from oracles.step_networks import SmallCNN, SmallGPT, SmallViT
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchedge
from torchedge.runtime import graph_runs
from torchedge.runtime.open_devices import open_device

pytest.importorskip("pyopencl")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs(monkeypatch):
    """Every graph that is compiled during the test."""
    made = []
    original = graph_runs.GraphRun.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(graph_runs.GraphRun, "__init__", init)
    return made


def compiled(model, **options):
    return torch.compile(model, backend="torchedge", options=options or None)


def mlp(inputs=6, width=16, classes=4):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))


def equal(model, eager):
    for (name, found), wanted in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda m, name=name: f"{name}: {m}", **TOLERANCE)


def step(call, optimizer, x, y, loss=F.cross_entropy):
    optimizer.zero_grad()
    value = loss(call(x), y)
    value.backward()
    optimizer.step()
    return value.detach()


def train_both(model, make_optimizer, batches, loss=F.cross_entropy):
    """Train a model compiled, and a copy of it in eager PyTorch; both must come out the same."""
    eager = copy.deepcopy(model)
    call = compiled(model)
    mine, theirs = make_optimizer(model.parameters()), make_optimizer(eager.parameters())
    for x, y in batches:
        found = step(call, mine, x, y, loss)
        torch.testing.assert_close(found, step(eager, theirs, x, y, loss), **TOLERANCE)
    equal(model, eager)
    return call, eager


def batches(count, shape, classes):
    return [(torch.randn(shape), torch.randint(classes, (shape[0],))) for _ in range(count)]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_a_perceptron(name):
    train_both(mlp(), OPTIMIZERS[name], batches(4, (8, 6), 4))


def test_training_and_inference_of_a_convolutional_network_with_batch_norm():
    model = SmallCNN()
    call, eager = train_both(model, OPTIMIZERS["sgd"], batches(3, (4, 3, 8, 8), 5))
    assert model.norm.num_batches_tracked == 3
    x = torch.randn(4, 3, 8, 8)
    model.eval(), eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(call(x), eager(x), **TOLERANCE)
    with torch.inference_mode():
        torch.testing.assert_close(call(x), eager(x), **TOLERANCE)
    model.train(), eager.train()
    torch.testing.assert_close(call(x), eager(x), **TOLERANCE)
    equal(model, eager)


# With SGD: what moves a bias of attention's keys is rounding alone, which Adam would blow up.
@pytest.mark.slow
def test_a_vision_transformer():
    train_both(SmallViT(), OPTIMIZERS["sgd"], batches(2, (2, 3, 16, 16), 5))


@pytest.mark.slow
def test_a_language_model_with_tied_weights():
    model = SmallGPT()
    tokens = [torch.randint(23, (2, 8)) for _ in range(3)]

    def loss(outputs, labels):
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    train_both(model, OPTIMIZERS["sgd"], [(t, t.roll(-1, 1)) for t in tokens], loss)


def test_a_dataloader_with_a_smaller_last_batch_and_other_sizes(runs):
    model = mlp()
    data = TensorDataset(torch.randn(23, 6), torch.randint(4, (23,)))
    train_both(model, OPTIMIZERS["sgd"], [*DataLoader(data, batch_size=8), *DataLoader(data, batch_size=6)])
    assert all(not graph.programs or graph.programs[0].segment.lowered for graph in runs)


def test_gradients_add_up_over_batches_and_graphs_may_overlap():
    model = mlp()
    eager, call = copy.deepcopy(model), compiled(model)
    inputs = [torch.randn(8, 6) for _ in range(3)]
    for network, run in ((model, call), (eager, eager)):
        losses = [run(x).square().mean() for x in inputs]
        losses[1].backward()
        (losses[0] + losses[2]).backward()
        assert network[0].weight.grad is not None
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, **TOLERANCE)


def test_a_graph_can_be_gone_through_twice_and_inputs_get_gradients():
    model = mlp()
    x = torch.randn(8, 6, requires_grad=True)
    y = torch.randn(8, 6, requires_grad=True)
    loss = compiled(model)(x * 2).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with torch.no_grad():
        y.copy_(x)
    model(y * 2).square().sum().backward()
    torch.testing.assert_close(once, y.grad, **TOLERANCE)


def test_frozen_layers_get_no_gradient_and_parameters_of_one_model_stay_on_the_device():
    model = mlp()
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    train_both(model, OPTIMIZERS["sgd"], batches(2, (8, 6), 4))
    assert model[0].weight.grad is None and torch.equal(frozen, model[0].weight)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5, self.training)


def test_dropout_follows_the_seed_of_pytorch():
    model = Dropping()
    call = compiled(model)
    x = torch.ones(40, 6)

    def draw():
        model.zero_grad()
        out = call(x)
        out.sum().backward()
        return out.detach(), model.linear.bias.grad.clone()

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    again = draw()
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], second[0])
    kept = first[0] != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(first[1], 2.0 * kept.sum(0))
    model.eval()
    torch.testing.assert_close(call(x), model.linear(x), **TOLERANCE)


def test_weights_are_copied_only_when_they_change_however_they_do():
    model = mlp()
    call, residents = compiled(model), open_device().residents
    x = torch.randn(8, 6)
    with torch.no_grad():
        call(x)
        before = residents.uploads
        call(x)
        assert residents.uploads == before
        model[0].bias.add_(1.0)
        torch.testing.assert_close(call(x), model(x), **TOLERANCE)
        assert residents.uploads == before + 1
        model[2].weight.data.mul_(0.5)  # moves no version counter
        torch.testing.assert_close(call(x), model(x), **TOLERANCE)
        model[0].weight.data[[0, 1]] = model[0].weight.data[[1, 0]]
        torch.testing.assert_close(call(x), model(x), **TOLERANCE)
        model.load_state_dict(mlp().state_dict())
        torch.testing.assert_close(call(x), model(x), **TOLERANCE)


def test_nothing_is_left_on_the_device(runs):
    residents = open_device().residents
    gc.collect()
    before = residents.nbytes
    model = mlp()
    call = compiled(model)
    for _ in range(3):
        call(torch.randn(8, 6)).sum().backward()
    taken = runs[0].programs[0].result_bytes
    for _ in range(3):
        out = call(torch.randn(8, 6))
        with pytest.raises(ZeroDivisionError):
            _ = out.sum() / 0 if False else 1 / 0
        del out
        call(torch.randn(8, 6))  # no backward
    assert runs[0].programs[0].result_bytes == taken
    kept = [call(torch.randn(8, 6)) for _ in range(3)]
    assert runs[0].programs[0].result_bytes > taken
    del kept, call, model
    torch._dynamo.reset()
    gc.collect()
    assert residents.nbytes == before


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.last(x)


def test_graph_breaks(runs):
    train_both(Breaking(), OPTIMIZERS["sgd"], batches(2, (8, 6), 4))
    assert sorted(graph.traced.part for graph in runs) == ["backward", "backward", "forward", "forward"]


@pytest.fixture(scope="module")
def unknown():
    """An operator for which there will never be a kernel."""
    with torch.library._scoped_library("torchedge_test", "DEF") as library:
        library.define("triple(Tensor x) -> Tensor")
        library.impl("triple", lambda x: x * 3, "CPU")
        library.impl("triple", lambda x: torch.empty_like(x), "Meta")
        triple = torch.ops.torchedge_test.triple.default

        class Triple(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return triple(x)

            @staticmethod
            def backward(ctx, gradient):
                return triple(gradient)

        yield Triple.apply


def test_operators_without_a_kernel_run_in_pytorch_with_a_warning(unknown, runs):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.last(unknown(self.first(x).relu()))

    with pytest.warns(UserWarning, match=r"torchedge_test\.triple of the .* graph in PyTorch") as caught:
        train_both(Odd(), OPTIMIZERS["sgd"], batches(3, (8, 6), 4))
    ours = [w for w in caught if "torchedge runs" in str(w.message)]
    assert len(ours) == 2, "one for the forward, one for the backward"
    assert "2 OpenCL programs" in str(ours[0].message) and "MiB" in str(ours[0].message)
    assert [len(graph.programs) for graph in runs] == [2, 2]


def test_complex_numbers_run_in_pytorch():
    def spectrum(x):
        return torch.fft.rfft(x * 2).abs() + 1

    x = torch.randn(4, 16)
    with pytest.warns(UserWarning, match="in PyTorch"):
        found = torch.compile(spectrum, backend="torchedge")(x)
    torch.testing.assert_close(found, spectrum(x), **TOLERANCE)


def test_functions_whose_results_are_their_inputs_or_constants():
    def several(x, y):
        return x, x.t(), torch.ones(3), y + 1, None, (x * y).sum()

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    found = torch.compile(several, backend="torchedge")(x, y)
    for mine, wanted in zip(found, several(x, y), strict=True):
        assert (mine is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(mine, wanted)
            assert mine.stride() == wanted.stride()


def test_inputs_that_are_written_to():
    def update(x, y):
        x.add_(y)
        return x * 2

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    wanted = x + y
    found = torch.compile(update, backend="torchedge")(x, y)
    torch.testing.assert_close(x, wanted)
    torch.testing.assert_close(found, 2 * wanted)


def test_channels_last_models_and_inputs():
    model = SmallCNN().to(memory_format=torch.channels_last)
    data = [(x.to(memory_format=torch.channels_last), y) for x, y in batches(2, (4, 3, 8, 8), 5)]
    train_both(model, OPTIMIZERS["sgd"], data)


def test_several_threads_share_a_model():
    model = mlp()
    call = compiled(model)
    inputs = [torch.randn(8, 6) for _ in range(4)]
    with torch.no_grad():
        call(inputs[0])
        wanted = [model(x) for x in inputs]
    found = {}

    def work(n):
        with torch.no_grad():
            found[n] = [call(inputs[n]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, results in found.items():
        for result in results:
            torch.testing.assert_close(result, wanted[n], **TOLERANCE)
    assert len(found) == 4


def test_reports_tell_what_programs_take():
    model = mlp()
    call = compiled(model, profile=True)
    call(torch.randn(8, 6)).sum().backward()
    forward, backward = torchedge.program_reports()[-2:]
    assert forward.name.endswith("forward") and backward.name.endswith("backward")
    assert forward.launches == sum(time.launches for time in forward.times) and forward.ms > 0
    assert f"{forward.launches} launches" in str(forward)


def test_half_precision():
    model = mlp().half()
    x = torch.randn(8, 6).half()
    found = compiled(model)(x)
    found.float().sum().backward()
    assert found.dtype == model[0].weight.grad.dtype == torch.float16
    torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-3)


def test_activation_checkpoints_with_dropout():
    class Checkpointed(Dropping):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed()
    with pytest.warns(UserWarning, match="rng_state"):
        out = compiled(model)(torch.ones(20, 6))
        out.sum().backward()
    torch.testing.assert_close(model.linear.bias.grad, 2.0 * (out != 0).sum(0))


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_in_eval_mode(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    x, padded = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    call = compiled(layer)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(call(x), layer(x), **TOLERANCE)
        found = call(x, src_key_padding_mask=padded)
        torch.testing.assert_close(found[0], layer(x)[0], **TOLERANCE)
        torch.testing.assert_close(found[1, :3], layer(x[1:, :3])[0], **TOLERANCE)


def test_hooks_that_copy_what_is_kept_are_refused():
    call = compiled(mlp())
    with pytest.raises(Exception, match=r"(?i)meta|stays? on the device|saved"):
        with torch.autograd.graph.save_on_cpu():
            out = call(torch.randn(8, 6))
        out.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"devise": 0}}, "takes device, profile"),
        ({"options": {"device": "no such device"}}, "fits no device"),
        ({"mode": "max-autotune"}, "has no modes"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    with pytest.raises(Exception, match=message):
        torch.compile(mlp(), backend="torchedge", **arguments)(torch.randn(8, 6))


def test_without_a_device_it_is_said(monkeypatch):
    monkeypatch.setenv("TORCHEDGE_OPENCL_DEVICE", "quantum")
    with pytest.raises(Exception, match="'quantum' fits no device"):
        compiled(mlp())(torch.randn(8, 6))


def test_the_backend_is_known_by_name():
    assert torchedge.__version__
    assert "torchedge" in torch._dynamo.list_backends()
