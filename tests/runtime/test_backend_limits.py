"""The torch.compile backend where there is no kernel, no device or no sense in what is asked for."""

import warnings

import pytest
import torch
from oracles.compiled_models import OPTIMIZERS, TOLERANCE, batches, compiled, mlp, train_both
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("pyopencl")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


def test_half_precision():
    model = mlp().half()
    x = torch.randn(8, 6).half()
    found = compiled(model)(x)
    found.float().sum().backward()
    assert found.dtype == model[0].weight.grad.dtype == torch.float16
    torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-3)


def test_activation_checkpoints_with_dropout():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return checkpoint(lambda y: F.dropout(self.linear(y), 0.5), x, use_reentrant=False)

    model = Checkpointed()
    with pytest.warns(UserWarning, match="rng_state"):
        out = compiled(model)(torch.ones(20, 6))
        out.sum().backward()
    torch.testing.assert_close(model.linear.bias.grad, 2.0 * (out != 0).sum(0))


@pytest.mark.slow
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
