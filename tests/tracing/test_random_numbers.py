"""Dropout and noise in captured steps: drawn by counter, as in an eager step that is fed the numbers."""

import copy

import torch
from oracles.eager_steps import TOLERANCE, classes, double, held_equals, images, train
from oracles.step_interpreter import Interpreter, philox_uniform
from torch import nn
from torch.nn import functional as F

from torchedge.tracing.steps import capture_step


class Noisy(nn.Module):
    """Dropouts and noise; `draw` stands for PyTorch's generator, so that both sides draw the same numbers."""

    draw = None

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        if self.draw is None:
            x = F.dropout(F.relu(self.first(x)), 0.3)
            x = F.dropout1d(x.unsqueeze(-1), 0.25).squeeze(-1) + torch.rand_like(x)
            return self.last(x * torch.bernoulli(torch.full_like(x, 0.5)))
        x = F.relu(self.first(x))
        x = (self.draw(0, x.shape) > 0.3) * x * (1 / (1 - 0.3))
        kept = (self.draw(1, (*x.shape, 1)) < 1 - 0.25).squeeze(-1)
        x = x * kept / (1 - 0.25) + self.draw(2, x.shape)
        return self.last(x * (self.draw(3, x.shape) < 0.5))


def test_random_operators_draw_by_counter():
    model = double(Noisy)
    eager = copy.deepcopy(model)
    x, y = images(4, 6), classes(of=3)
    captured = capture_step(
        model,
        x,
        targets=y,
        loss=F.cross_entropy,
        seed=77,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    offsets = [op.attrs["offset"] for op in captured.step.ops if op.kind == "random_uniform"]
    assert offsets == [0, 1, 2, 3]
    interpreter = Interpreter(captured.tensors)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    losses = []
    for count in range(3):
        eager.draw = lambda offset, shape, count=count: philox_uniform(
            77, count, offset, tuple(shape)
        ).double()
        (found,) = interpreter.run(captured.step, x, y)
        torch.testing.assert_close(found, train(eager, optimizer, F.cross_entropy, ((x,), (y,))), **TOLERANCE)
        losses.append(found.item())
    assert interpreter.held["random.counter"].item() == 3
    assert len(set(losses)) == 3
    held_equals(interpreter, eager)


def test_normal_numbers_and_whole_ones():
    class Drawing(nn.Module):
        def forward(self, x):
            noise = torch.randn(20000, dtype=x.dtype) * x[0]
            spread = torch.empty(20000).exponential_(4.0)
            return noise, torch.randint(2, 7, (20000,)), torch.empty(20000).uniform_(-1, 3), spread

    x = torch.ones(2, dtype=torch.float64)
    captured = capture_step(Drawing(), x)
    normal, whole, uniform, spread = Interpreter(captured.tensors).run(captured.step, x)
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert sorted(set(whole.tolist())) == [2, 3, 4, 5, 6]
    assert -1 <= uniform.min() < -0.99 and 2.99 < uniform.max() < 3
    assert spread.min() >= 0 and abs(spread.mean() - 0.25) < 0.01


def test_philox_is_philox():
    """The known answer of Random123 for a counter and a key of zeros: its first word is 6627e8d5."""
    assert philox_uniform(0, 0, 0, (1,)).item() == (0x6627E8D5 >> 8) * 2.0**-24


def test_the_seed_is_pytorch_s_unless_one_is_given():
    def seeds(**options):
        step = capture_step(nn.Dropout(), images(3), **options).step
        names = {step.values[i].name: number for i, number in step.initial.items()}
        assert names.keys() == {"random.seed"}
        return names["random.seed"]

    torch.manual_seed(1 << 33 | 5)
    assert seeds() == 5
    assert seeds(seed=9) == 9
    assert capture_step(nn.Dropout().eval(), images(3)).step.ops == ()
