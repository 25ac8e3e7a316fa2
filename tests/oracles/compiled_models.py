"""Models compiled with the torchedge backend, beside the same models in eager PyTorch."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


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
