"""The dtype of each operator under CUDA's autocast, against PyTorch's own lists, and the memory of casts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.checkpointed import CHECKPOINTED
from oracles.fake_cpu import run_training_on_fake_cpu
from oracles.graph_checks import verify
from oracles.networks import criterion
from oracles.optimizers import OPTIMIZERS
from torch import nn

from torchedge.ops.specs import registry
from torchedge.prediction.memory.autocast import lower_precision
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": {"lower"},
    "AT_FORALL_FP32": {"float32", "float32_on_cuda"},
    "AT_FORALL_FP32_SET_OPT_DTYPE": {"float32", "float32_on_cuda"},
    "AT_FORALL_PROMOTE": {"widest", "join", "join_on_cuda"},
}
ON_CPU_TOO = {"grid_sampler"}  # float32 on the CPU


def listed(name):
    text = HEADER.read_text()
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)*.*)\n", text)
    return set(re.findall(r"_\((\w+)[,)]", body[1])) & set(registry()) - ON_CPU_TOO


@pytest.mark.skipif(not HEADER.exists(), reason="this PyTorch has no headers, or keeps the lists elsewhere")
@pytest.mark.parametrize("name", LISTS)
def test_operators_run_in_the_precision_of_pytorchs_lists(name):
    operators = listed(name)
    assert len(operators) >= 5
    other = {
        kind: registry()[kind].autocast for kind in operators if registry()[kind].autocast not in LISTS[name]
    }
    assert not other


@pytest.mark.skipif(not HEADER.exists(), reason="this PyTorch has no headers, or keeps the lists elsewhere")
def test_operators_that_are_asked_for_float32_read_half_precision():
    casting = {"cumsum", "cumprod"}  # PyTorch casts their input itself
    operators = listed("AT_FORALL_FP32_SET_OPT_DTYPE") - casting
    assert {"sum", "softmax", "linalg_vector_norm", "prod"} <= operators
    assert all(registry()[kind].widens for kind in operators)


MIXED = {
    "scaled": lambda x, weight, bias: x + weight * x,
    "divided": lambda x, weight, bias: x / weight,
    "larger": lambda x, weight, bias: torch.maximum(x, weight),
    "addcmul": lambda x, weight, bias: torch.addcmul(bias, weight, x),
    "normalized": lambda x, weight, bias: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight,
    "unit length": lambda x, weight, bias: nn.functional.normalize(x, dim=-1) * weight,
    "product": lambda x, weight, bias: x * x.prod(-1, keepdim=True),
    "joined": lambda x, weight, bias: torch.cat([x[:, :64], (x * weight)[:, 64:]], 1),
}


class Mixed(nn.Module):
    """Half precision beside float32 parameters, between linear layers."""

    def __init__(self, function):
        super().__init__()
        self.before, self.after = nn.Linear(32, 128), nn.Linear(128, 32)
        self.weight, self.bias = nn.Parameter(torch.ones(128)), nn.Parameter(torch.ones(128))
        self.function = function

    def forward(self, x):
        return self.after(self.function(self.before(x), self.weight, self.bias)).float().sum()


@pytest.mark.parametrize("name", MIXED)
def test_gradients_are_computed_in_the_widest_precision_and_cast_behind_the_call(name):
    recipe = OPTIMIZERS["bfloat16"]
    with torch.device("meta"):
        model = Mixed(MIXED[name])
    graph = capture(model, torch.zeros(2, 32), loss=lambda out: out)
    tape = write_tape(graph, StepSettings(backend="cpu", **recipe.settings))
    feed = ((torch.zeros(4096, 32, device="meta"),), {})
    count = run_training_on_fake_cpu(model, feed, lambda out: out, recipe.make, **recipe.loop)
    assert int(tape.peak_bytes(np.array([4096]))[0]) == pytest.approx(count.peak, rel=0.01)


def test_a_norm_keeps_half_precision_on_cuda():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x):
            x = self.before(x)
            return self.after(x * torch.linalg.vector_norm(x, dim=-1, keepdim=True).to(x.dtype)).float().sum()

    graph = capture(Net(), torch.zeros(2, 32), loss=lambda out: out)
    low = lower_precision(graph, StepSettings(amp="bfloat16", backend="cuda"))
    verify(low)
    (norm,) = [op for op in low.ops if op.kind == "linalg_vector_norm"]
    assert low.values[norm.inputs[0]].dtype == "bfloat16"
    assert low.values[norm.outputs[0]].dtype == "float32"


class Polynomial(nn.Module):
    """The GELU of GPT-2, whose power runs in float32 under autocast, between linear layers."""

    def __init__(self, explicit):
        super().__init__()
        self.before, self.after = nn.Linear(64, 512), nn.Linear(512, 64)
        self.explicit = explicit

    def forward(self, x):
        h = self.before(x)
        cube = torch.pow(h.float() if self.explicit else h, 3.0)
        return self.after(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * cube)))).float().sum()


def peak(model, amp, backend="cuda"):
    graph = capture(model, torch.zeros(2, 64), loss=lambda out: out)
    settings = StepSettings(optimizer="none", amp=amp, backend=backend)
    return int(write_tape(graph, settings).peak_bytes(np.array([4096]))[0])


def test_powers_take_float32_under_autocast():
    assert peak(Polynomial(False), "bfloat16") == peak(Polynomial(True), "bfloat16")
    assert peak(Polynomial(False), None) == peak(Polynomial(True), None)
    assert peak(Polynomial(False), "bfloat16") > peak(Polynomial(False), "bfloat16", "cpu")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in CHECKPOINTED if name != "densenet121-efficient"])
def test_casts_are_repeated_where_a_checkpoint_runs_again(name):
    network, recipe = CHECKPOINTED[name], OPTIMIZERS["bfloat16"]
    with torch.device("meta"):
        model = network.build().train()
    args, kwargs = network.feed(2)
    graph = capture(model, kwargs or args, method="trace")
    tape = write_tape(graph, StepSettings(backend="cpu", **recipe.settings))
    count = run_training_on_fake_cpu(model, network.feed(16), criterion, recipe.make, **recipe.loop)
    assert int(tape.peak_bytes(np.array([16]))[0]) == pytest.approx(count.peak, rel=0.01)


@pytest.mark.parametrize("asks", [False, True])
def test_losses_read_half_precision_on_cuda_but_where_the_model_asks_for_float32(asks):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16, bias=False)

        def forward(self, x):
            scores = self.linear(x)
            return (scores.float() if asks else scores).view(-1, 16)

    graph = capture(Net(), input_size=(8,), mode="train")
    for backend, casts in (("cuda", asks), ("cpu", True)):
        low = lower_precision(graph, StepSettings(amp="bfloat16", backend=backend))
        verify(low)
        loss = low.ops[-1]
        assert loss.kind == "cross_entropy_loss"
        scores = low.values[loss.inputs[0]]
        assert scores.dtype == ("float32" if casts else "bfloat16")
        assert low.values[loss.outputs[0]].dtype == "float32"
        sizes = write_tape(graph, StepSettings(amp="bfloat16", backend=backend)).sizes
        assert (sizes[:, 1] == 4 * 16).sum() >= 2  # log-probabilities and their gradient, in float32
