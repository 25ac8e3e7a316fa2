"""What shares a kernel: closed forms for small networks, and nothing overwritten before it was read."""

from collections import Counter

import numpy as np
import pytest
import torch
from oracles.targets import target_here
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step

KEEP = frozenset(all_rules())


def inference(model, *args):
    return lower(capture_step(model.eval(), args, keep=KEEP).step)


def training(model, x, y, target="cpu", **options):
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
    loss = nn.functional.cross_entropy
    return lower(
        capture_step(model, (x,), targets=(y,), loss=loss, optimizer=optimizer, keep=KEEP).step, target
    )


def test_bias_batch_norm_activation_and_residual_ride_along_with_the_convolution():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x)) + x)

    program = inference(Block(), torch.zeros(2, 16, 8, 8))
    kinds = [program.kernels[launch.kernel].kind for launch in program.launches]
    assert kinds == ["pointwise", "convolution"]  # one root for each of 16 channels, then all the rest
    assert [t.shape for t in program.tensors if t.role == "intermediate"] == [(16,)]


def test_views_cost_no_launch():
    class Views(nn.Module):
        def forward(self, x):
            y = x.view(2, 3, 4, 5).permute(0, 2, 1, 3).reshape(8, 15)[:, 3:12].transpose(0, 1)
            return torch.cat([y, y.flip(0)], 1) * 2

    assert len(inference(Views(), torch.zeros(6, 20)).launches) == 1


def test_softmax_and_layer_norm_are_one_kernel_each():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(32)

        def forward(self, x):
            return torch.softmax(self.norm(x), -1)

    kinds = [k.kind for k in inference(Both(), torch.zeros(4, 32)).kernels]
    assert sorted(kinds) == ["layer_norm", "softmax"]


class Attention(nn.Module):
    """Scaled queries and keys that are parts of one product, as in MultiheadAttention."""

    def __init__(self, scale):
        super().__init__()
        self.project, self.scale = nn.Linear(32, 96), scale

    def forward(self, x):
        q, k, v = self.project(x).view(-1, 3, 4, 8).permute(1, 2, 0, 3)
        scores = (self.scale(q) @ self.scale(k).transpose(1, 2)).softmax(-1)
        return (scores @ v).transpose(0, 1).reshape(-1, 32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("count", [5, 40])
def test_scalings_of_operands_ride_in_the_prologue_of_their_product(target, count):
    torch.manual_seed(0)
    model, x = Attention(lambda part: part * 0.3).eval(), torch.randn(count, 32)
    captured = capture_step(model, (x,), keep=KEEP)
    program = lower(captured.step, target_here(target))
    kinds = [program.kernels[launch.kernel].kind for launch in program.launches]
    assert [k for k in kinds if k != "sum of slices"] == ["matmul", "matmul", "softmax", "matmul"]
    with Executor(program, checks=True) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        np.testing.assert_allclose(executor.run(x.numpy())[0], model(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_residual_of_windows_rides_along_with_their_product():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, x):  # (8, 12, 16) in windows of 4 x 4
            windows = x.view(2, 4, 3, 4, 16).transpose(1, 2).reshape(6, 16, 16)
            return x + self.project(windows).view(2, 3, 4, 4, 16).transpose(1, 2).reshape(8, 12, 16)

    torch.manual_seed(0)
    model, x = Windows().eval(), torch.randn(8, 12, 16)
    captured = capture_step(model, (x,), keep=KEEP)
    for target in TARGETS:
        program = lower(captured.step, target_here(target))
        assert [k.kind for k in program.kernels] == ["matmul"]
        with Executor(program, checks=True) as executor:
            executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
            np.testing.assert_allclose(executor.run(x.numpy())[0], model(x).detach(), rtol=1e-4, atol=1e-5)


def test_costly_operands_of_many_blocks_are_computed_once():
    costly = Attention(lambda part: part.erf().exp().tan()).eval()
    few, many = (inference(costly, torch.zeros(count, 32)) for count in (16, 1600))
    kinds = [[p.kernels[launch.kernel].kind for launch in p.launches] for p in (few, many)]
    assert [k.count("pointwise") for k in kinds] == [0, 1]  # both in one kernel


class Packed(nn.Module):
    """A linear layer whose weight is whole numbers of four bits, two a byte, and a scale for 32 of them."""

    def __init__(self, rows, columns):
        super().__init__()
        self.register_buffer("numbers", torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(rows, columns // 32, 1) / columns)
        self.register_buffer("shifts", torch.tensor([0, 4], dtype=torch.uint8))

    @property
    def weight(self):
        numbers = (self.numbers.unsqueeze(-1) >> self.shifts) & 15
        return ((numbers.reshape(len(self.scale), -1, 32).float() - 8) * self.scale).flatten(1)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_quantised_weights_are_dequantised_where_they_are_read(target):
    torch.manual_seed(0)
    # Many rows, which read a weight several times; backward reads it, too, and the first layer twice.
    model = nn.Sequential(nn.Linear(32, 96), first := Packed(96, 96), nn.ReLU(), first, Packed(64, 96))
    x, y = torch.randn(700, 32), torch.randint(0, 64, (700,))
    program = training(model, x, y, target)
    made = [tensor for tensor in program.tensors if tensor.role == "intermediate"]
    assert made and not [tensor.name for tensor in made if tensor.shape[:2] in ((96, 96), (64, 96), (96, 3))]
    captured = capture_step(model.eval(), (x,), keep=KEEP)
    with Executor(lower(captured.step, target_here())) as executor:
        executor.load({name: tensor.numpy().copy() for name, tensor in captured.tensors.items()})
        exact = model.double()(x.double()).detach()
        np.testing.assert_allclose(executor.run(x.numpy())[0], exact, rtol=1e-4, atol=1e-5)


def test_an_operand_that_is_overwritten_is_not_read_late():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(8, 8))

        def forward(self, x):
            y = x @ (self.state * 2)
            self.state += y
            return y

    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(8, 8)
    captured = capture_step(model, (x,), keep=KEEP)
    with Executor(lower(captured.step, target_here())) as executor:
        executor.load({name: tensor.numpy().copy() for name, tensor in captured.tensors.items()})
        for _ in range(2):
            np.testing.assert_allclose(executor.run(x.numpy())[0], model(x), rtol=1e-4, atol=1e-4)


def test_the_update_of_a_weight_rides_along_with_its_gradient():
    program = training(
        nn.Linear(64, 32), torch.zeros(16, 64), torch.zeros(16, dtype=torch.int64), momentum=0.9
    )
    weight = next(i for i, t in enumerate(program.tensors) if t.name == "weight")
    writers = [launch for launch in program.launches if _writes(program, launch, weight)]
    assert [program.kernels[w.kernel].kind for w in writers] == ["matmul"]
    assert not [t for t in program.tensors if t.role == "intermediate" and t.shape == (32, 64)]


def test_small_updates_share_a_launch():
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)]
    program = training(nn.Sequential(*layers), torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))
    kinds = Counter(program.kernels[launch.kernel].kind for launch in program.launches)
    assert kinds["updates"] <= 1


def _writes(program, launch, tensor):
    access = program.kernels[launch.kernel].access
    return any(t == tensor and a != "read" for t, a in zip(launch.tensors, access, strict=True))


@pytest.mark.parametrize("target", ["cpu", "gpu", "mobile"])
def test_what_is_overwritten_has_been_read_by_all_who_need_it(target):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )
    program = training(
        model, torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), target, momentum=0.9
    )
    kept = {i for i, t in enumerate(program.tensors) if t.role in ("parameter", "state")}
    overwritten = set()
    for launch in program.launches:
        access = program.kernels[launch.kernel].access
        for tensor, how in zip(launch.tensors, access, strict=True):
            assert how == "write" or tensor not in overwritten or program.tensors[tensor].role == "state"
        overwritten |= {t for t, a in zip(launch.tensors, access, strict=True) if a != "read" and t in kept}
    assert {program.tensors[i].name for i in overwritten} >= {n for n, _ in model.named_parameters()}


def test_the_same_step_gives_the_same_program():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
        return training(model, torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))

    assert made().digest == made().digest


def test_an_element_wise_kernel_may_write_where_it_reads():
    class Chain(nn.Module):
        def forward(self, x):
            return torch.softmax(torch.tanh(torch.softmax(x, -1)) @ x, -1)

    program = inference(Chain(), torch.zeros(64, 64))
    pairs = [kernel.in_place for kernel in program.kernels if kernel.kind == "pointwise"]
    assert all(read != written for kernel in pairs for read, written in kernel)
    transposed = inference(_Transposed(), torch.zeros(8, 8))
    assert all(not kernel.in_place for kernel in transposed.kernels)


class _Transposed(nn.Module):
    def forward(self, x):
        return x + x.transpose(0, 1)
