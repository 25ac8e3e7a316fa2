"""Small networks, each with one trait that is hard to capture."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn


class Caching(nn.Module):
    """Keeps tensors and counts in attributes, lists, dicts and buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))
        self.calls = 0
        self.cache: dict[str, torch.Tensor] = {}
        self.history: list[torch.Tensor] = []
        self.mask = None

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1], device=x.device)
        y = self.linear(x * self.mask)
        self.last = y.mean(0).detach()
        self.cache["y"] = y
        self.history.append(y)
        self.added = y
        return y


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.norm(self.conv(x))
            y = F.softmax(y, 1)
        return y.float()


@torch.jit.script
def scripted(x: torch.Tensor, scale: float):
    return torch.relu(x) * scale


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return scripted(self.linear(x), 2.0)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x, factor):
        return factor * x * x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x * x * grad, None


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Cube.apply(Square.apply(self.linear(x)), 2.0)


class FunctionalCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        halved = {name: p * 0.5 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, halved, (x,))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.rnn = kind(8, 16, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 4)

    def forward(self, x):
        y, _ = self.rnn(x)
        return self.head(y[:, -1])


class TimeSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 16, device=x.device, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


class SelfAttention(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x).clone()
        y[:, 0] = 0
        y[:, 1:3].mul_(2).add_(1)
        y.relu_()
        z = y.unsqueeze(1)
        z.squeeze_(1)
        z += 1
        return z


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv1d(4, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding="same")
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=2)
        self.three = nn.Conv3d(1, 2, 3, padding=1)
        self.up3 = nn.ConvTranspose3d(2, 2, 2, stride=2)
        self.up1 = nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1)

    def forward(self, x):
        y = self.one(x).unflatten(-1, (4, 4))
        y = self.up(self.two(y)).unsqueeze(1)
        y = self.up3(self.three(y))
        return self.up1(y.flatten(2))


class ManyInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, batch, scale=None, *, extra=()):
        y = self.linear(batch["image"]) + self.words(batch["ids"])
        for tensor in extra:
            y = y + tensor
        return {"out": y if scale is None else y * scale, "pair": (y, y.mean(-1))}


class BatchLoop(nn.Module):
    def __init__(self, how="range"):
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        if self.how == "range":
            return torch.stack([self.linear(x[i]) for i in range(x.shape[0])])
        if self.how == "iterate":
            return torch.stack([self.linear(row) for row in x])
        if self.how == "list":
            order = list(range(len(x)))
            return self.linear(x[order])
        parts = x.split(1)
        return torch.cat([self.linear(p) for p in parts])


class Halving(nn.Module):
    """The batch is halved: no dimension affine in the batch size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x[: x.shape[0] // 2])


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y


class LayerDrop(nn.Module):
    """Draws one random number and looks at it."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.linear, self.rate = nn.Linear(8, 8), rate

    def forward(self, x):
        if self.training and torch.rand([]) < self.rate:
            return x
        return self.linear(x)


@functools.lru_cache
def positions(length: int):
    return torch.arange(length) * 2.0


class Memoised(nn.Module):
    """Remembers a tensor outside of itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x + positions(x.shape[-1]))


class Frozen(nn.Module):
    """A batch norm that stays in evaluation mode and a parameter that does not train."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.norm.eval()
        self.conv.weight.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.conv(x))


class SmallNet(nn.Module):
    """The network of the golden text."""

    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


def hooked() -> nn.Module:
    """A network with forward hooks, one of which changes the output."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    net[0].register_forward_hook(lambda module, args, out: out * 2)
    net[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return net


def parametrized(kind: str) -> nn.Module:
    """A network with a reparametrized layer."""
    layer = nn.Linear(8, 8)
    if kind == "weight_norm":
        layer = nn.utils.parametrizations.weight_norm(layer)
    elif kind == "spectral_norm":
        layer = nn.utils.parametrizations.spectral_norm(layer)
    elif kind == "old_spectral_norm":
        layer = nn.utils.spectral_norm(layer)
    elif kind == "orthogonal":
        layer = nn.utils.parametrizations.orthogonal(layer)
    return nn.Sequential(layer, nn.ReLU())


def encoder() -> nn.Module:
    """A stock transformer encoder (in evaluation mode PyTorch has a fused fast path for it)."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def image(*size: int) -> torch.Tensor:
    return torch.zeros(2, *size)


NETWORKS = {
    "caching": (Caching, lambda: image(8)),
    "no_grad": (NoGrad, lambda: image(8)),
    "autocast": (Autocast, lambda: image(3, 8, 8)),
    "scripted": (Scripted, lambda: image(8)),
    "custom_function": (CustomFunction, lambda: image(8)),
    "functional_call": (FunctionalCall, lambda: image(8)),
    "weight_norm": (lambda: parametrized("weight_norm"), lambda: image(8)),
    "spectral_norm": (lambda: parametrized("spectral_norm"), lambda: image(8)),
    "old_spectral_norm": (lambda: parametrized("old_spectral_norm"), lambda: image(8)),
    "lstm": (lambda: Recurrent(batch_first=True, num_layers=2), lambda: image(5, 8)),
    "bilstm": (lambda: Recurrent(batch_first=True, bidirectional=True), lambda: image(5, 8)),
    "lstm_dropout": (lambda: Recurrent(batch_first=True, dropout=0.5, num_layers=2), lambda: image(5, 8)),
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True), lambda: image(5, 8)),
    "rnn": (lambda: Recurrent(nn.RNN, batch_first=True, nonlinearity="relu"), lambda: image(5, 8)),
    "time_steps": (TimeSteps, lambda: image(5, 8)),
    "attention": (SelfAttention, lambda: image(5, 16)),
    "attention_weights": (lambda: SelfAttention(True), lambda: image(5, 16)),
    "encoder": (encoder, lambda: image(5, 16)),
    "in_place": (InPlace, lambda: image(8)),
    "convolutions": (Convolutions, lambda: image(4, 16)),
    "layer_drop": (LayerDrop, lambda: image(8)),
    "memoised": (Memoised, lambda: image(8)),
    "frozen": (Frozen, lambda: image(3, 8, 8)),
    "hooked": (hooked, lambda: image(8)),
    "data_parallel": (lambda: nn.DataParallel(nn.Linear(8, 8)), lambda: image(8)),
    "small": (SmallNet, lambda: image(3, 8, 8)),
}  # fmt: skip
"""Name -> how to build the network, how to build an example for it; all can be captured."""
