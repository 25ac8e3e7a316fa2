"""Layers that users write on tensors of (batch, width): recurrence, attention, parametrizations, function
transforms, custom functions, hooks, buffers, dispatch. The width is a multiple of 256.

All run in float32 without autocast, whose lists of operators differ between devices.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

TOKENS = 16
Function = torch.autograd.Function


class Apart(nn.Module):
    """Runs a layer in float32 without autocast and adds its result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x + self.layer(x.float())


class Applied(nn.Module):
    """Calls a function with parts of it as submodules."""

    def __init__(self, function: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(*self.parts, x)


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (TOKENS, -1))


# recurrence and attention -----------------------------------------------------------------------------------


def _of_tokens(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(tokens(x)).flatten(1)


def _recurrent(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(tokens(x))[0].flatten(1)


def _cells(cell: nn.Module, x: torch.Tensor) -> torch.Tensor:
    steps, state = tokens(x), None
    results = []
    for step in steps.unbind(1):
        state = cell(step, state)
        results.append(state[0] if isinstance(state, tuple) else state)
    return torch.cat(results, 1)


def _attended(layer: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    y = tokens(x)
    if "padding" in options:
        mask = torch.zeros(y.shape[:2], dtype=torch.bool, device=x.device)
        return layer(y, y, y, key_padding_mask=mask, need_weights=False)[0].flatten(1)
    return layer(y, y, y, **options)[0].flatten(1)


def _decoded(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = tokens(x)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=x.device)
    return layer(y, y.flip(1), tgt_mask=mask, tgt_is_causal=True).flatten(1)


def _linear_attention(x: torch.Tensor) -> torch.Tensor:
    q = tokens(x)
    k = F.elu(q) + 1
    return ((k @ (k.mT @ q)) / (k @ k.sum(1).unsqueeze(-1) + 1)).flatten(1)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    y = torch.view_as_complex(tokens(x).unflatten(-1, (-1, 2)).contiguous())
    angles = torch.outer(torch.arange(TOKENS, device=x.device), torch.ones(y.shape[-1], device=x.device))
    return torch.view_as_real(y * torch.polar(torch.ones_like(angles), angles)).flatten(1)


def _scan(x: torch.Tensor) -> torch.Tensor:
    state, results = torch.zeros_like(tokens(x)[:, 0]), []
    for step in tokens(x).unbind(1):
        state = torch.tanh(state * 0.9 + step)
        results.append(state)
    return torch.stack(results, 1).flatten(1)


def _encoder(width: int, **options: Any) -> nn.Module:
    size = width // TOKENS
    return nn.TransformerEncoderLayer(size, 4, 4 * size, batch_first=True, **options)


def _attention(width: int, **options: Any) -> nn.Module:
    return nn.MultiheadAttention(width // TOKENS, 4, batch_first=True, **options)


# parametrizations -------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _parametrized(width: int, *parts: nn.Module) -> nn.Module:
    layer = nn.Linear(width, width)
    for part in parts:
        parametrize.register_parametrization(layer, "weight", part, unsafe=True)
    return layer


def _cached_parametrization(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with parametrize.cached():
        return layer(layer(x).tanh())


class Low(nn.Module):
    """An adapter of low rank beside a frozen layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(F.dropout(x, 0.1))) * 0.5


class Generated(nn.Module):
    """A layer whose weights another one generates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.code, self.made = nn.Parameter(torch.zeros(8)), nn.Linear(8, 64 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.unflatten(-1, (-1, 64)), self.made(self.code).view(64, 64)).flatten(1)


class Fourier(nn.Module):
    """A spectral convolution with complex weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, 16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unflatten(-1, (4, -1))
        modes = torch.fft.rfft(y)
        kept = torch.zeros_like(modes)
        kept[..., :16] = torch.einsum("bim,iom->bom", modes[..., :16], self.weight)
        return torch.fft.irfft(kept, n=y.shape[-1]).flatten(1)


class ComplexLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width // 2, width // 2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        y = y @ self.weight
        return torch.view_as_real(y * torch.sigmoid(y.abs())).flatten(1)


# calls with other weights -----------------------------------------------------------------------------------


def _functional(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights = {name: weight * 2 for name, weight in layer.named_parameters()}
    return torch.func.functional_call(layer, weights, (x,))


# custom functions -------------------------------------------------------------------------------------------


class Quantized(Function):
    """Returns codes, which are not differentiable, beside the values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        codes = (x * 4).round().long()
        ctx.mark_non_differentiable(codes)
        ctx.save_for_backward(x)
        return codes.to(x.dtype) / 4, codes

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 4)


class TwoResults(Function):
    """Has two results, of which one may not be used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        (x,) = ctx.saved_tensors
        parts = [g * f for g, f in ((first, x.cos()), (second, -x.sin())) if g is not None]
        return sum(parts) if parts else None


class SetUp(Function):
    """Is written with a `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        inner = gradient * (1 - y * y)
        return inner * weight if ctx.needs_input_grad[0] else None, (inner * x).sum(0)


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class WithWeight(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SetUp.apply(x, self.weight)


def _quantized(x: torch.Tensor) -> torch.Tensor:
    values, codes = Quantized.apply(x)
    return values + codes.clamp(0, 1).to(x.dtype)


# views in place, hooks, buffers, dispatch -------------------------------------------------------------------


def _chained_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = tokens(y).transpose(1, 2)[:, :4]
    z.mul_(0.5).add_(1)
    y.view(-1)[: x.shape[0]].zero_()
    return y


def _parts_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    for place in range(4):
        y[:, place::4].add_(y[:, 3 - place :: 4].detach() * place)
    y.narrow(1, 0, 8).copy_(x[:, 8:16])
    return y


def _transposed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y.t().mul_(2)
    y.unsqueeze_(1)
    return y.squeeze_(1)


def _hooked(width: int) -> nn.Module:
    layer = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    layer.register_forward_hook(lambda module, args, kwargs, output: output * 2, with_kwargs=True)
    layer[0].register_full_backward_pre_hook(lambda module, gradients: None)
    layer[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return layer


class Codebook(nn.Module):
    """Nearest codes, and moving averages of what they stand for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(64, 32))
        self.register_buffer("sizes", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1, 32)
        nearest = torch.cdist(y.detach(), self.codes).argmin(1)
        hot = F.one_hot(nearest, 64).to(y.dtype)
        if self.training:
            with torch.no_grad():
                self.sizes.lerp_(hot.sum(0), 0.1)
                self.codes.mul_(0.9).add_(hot.t() @ y / (self.sizes.unsqueeze(1) + 1), alpha=0.1)
        found = self.codes[nearest]
        return (y + (found - y).detach()).view_as(x)


class Dispatched(nn.Module):
    """Chooses a layer by name from the shape, and returns early."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"wide": nn.Linear(width, width), "narrow": nn.Linear(width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return x
        y = self.layers["wide" if x.shape[1] > 512 else "narrow"](x)
        if x.shape[-1] == 512:
            return y
        return y.relu()


class Experts(nn.Module):
    """Mixes experts by the weights of a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = self.gate(x).topk(2, -1)
        weights = torch.zeros(x.shape[0], 4, device=x.device).scatter(1, places, values.softmax(-1))
        return sum(weights[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


Pair = namedtuple("Pair", ["value", "scale"])


def _named_results(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    pair = Pair(value=layer(x), scale=x.sigmoid())
    return pair.value * pair._replace(scale=pair.scale * 2).scale


def _generator(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def parts() -> Any:
        for part in x.chunk(4, -1):
            yield part.tanh()

    return layer(torch.cat([*parts()], -1))


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU())


def _nested(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(b, y * 2, use_reentrant=False) + y

    return checkpoint(inner, a(x), use_reentrant=False)


def _power_iteration(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        v = F.normalize(torch.ones(x.shape[1], device=x.device), dim=0)
        for _ in range(2):
            v = F.normalize(layer.weight.t() @ (layer.weight @ v), dim=0)
    return x * (layer.weight @ v).norm()


def _sinkhorn(x: torch.Tensor) -> torch.Tensor:
    y = tokens(x)
    for _ in range(3):
        y = y - y.logsumexp(2, keepdim=True)
        y = y - y.logsumexp(1, keepdim=True)
    return y.exp().flatten(1)


Build = Callable[[int], nn.Module]


def _sized(kind: Callable[..., nn.Module], **options: Any) -> Build:
    return lambda width: kind(width // TOKENS, width // TOKENS, batch_first=True, **options)


def _cell(kind: Callable[..., nn.Module]) -> Build:
    return lambda width: kind(width // TOKENS, width // TOKENS)


def _wired(function: Callable[..., torch.Tensor], *builds: Build) -> Build:
    return lambda width: Applied(function, *[build(width) for build in builds])


def _linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def _image(layer: Callable[[], nn.Module]) -> Build:
    """A layer on images of 4 channels that keeps the number of elements."""
    return _wired(lambda part, x: part(x.unflatten(-1, (4, 8, -1))).reshape(x.shape), lambda width: layer())


RECURRENT: dict[str, Build] = {
    "gru": _wired(_recurrent, _sized(nn.GRU)),
    "gru of two layers": _wired(_recurrent, _sized(nn.GRU, num_layers=2, dropout=0.1)),
    "rnn": _wired(lambda layer, x: layer(tokens(x))[1][-1].repeat(1, TOKENS), _sized(nn.RNN)),
}
"""Recurrent layers without kernels of their own on the CPU, outside of checkpoints."""
RICH: dict[str, Build] = {
    "gru cells": _wired(_cells, _cell(nn.GRUCell)),
    "rnn cells": _wired(_cells, _cell(nn.RNNCell)),
    "lstm cells": _wired(_cells, _cell(nn.LSTMCell)),
    "attention": _wired(partial(_attended, need_weights=False), _attention),
    "attention with weights": _wired(_attended, partial(_attention, dropout=0.1)),
    "padded attention": _wired(partial(_attended, padding=True), _attention),
    "encoder": _wired(_of_tokens, _encoder),
    "encoder normed first": _wired(_of_tokens, partial(_encoder, norm_first=True, activation="gelu")),
    "decoder": _wired(
        _decoded, lambda width: nn.TransformerDecoderLayer(width // TOKENS, 4, width // 4, batch_first=True)
    ),
    "linear attention": _wired(_linear_attention),
    "rotated": _wired(_rotated),
    "scan": _wired(_scan),
    "sinkhorn": _wired(_sinkhorn),
    "weight norm": lambda width: parametrizations.weight_norm(nn.Linear(width, width)),
    "spectral norm": lambda width: parametrizations.spectral_norm(nn.Linear(width, width)),
    "old spectral norm": lambda width: nn.utils.spectral_norm(nn.Linear(width, width)),
    "symmetric": lambda width: _parametrized(width, Symmetric()),
    "two parametrizations": lambda width: _parametrized(width, Scaled(), Symmetric()),
    "cached parametrization": _wired(_cached_parametrization, lambda width: _parametrized(width, Scaled())),
    "pruned": lambda width: prune.identity(nn.Linear(width, width), "weight"),
    "adapter": Low,
    "generated": Generated,
    "fourier": Fourier,
    "complex linear": ComplexLinear,
    "functional call": _wired(_functional, _linear),
    "quantized": _wired(_quantized),
    "two results": _wired(lambda x: sum(TwoResults.apply(x))),
    "one of two results": _wired(lambda x: TwoResults.apply(x)[1]),
    "set up": WithWeight,
    "reversed": _wired(lambda layer, x: layer(Reversed.apply(x)), _linear),
    "chained views": _wired(_chained_views),
    "parts in place": _wired(_parts_in_place),
    "transposed in place": _wired(_transposed_in_place),
    "hooked with keywords": _hooked,
    "codebook": Codebook,
    "batch norm without averages": lambda width: nn.BatchNorm1d(width, track_running_stats=False),
    "dispatched": Dispatched,
    "experts": Experts,
    "named results": _wired(_named_results, _linear),
    "generator": _wired(_generator, _linear),
    "frozen": lambda width: nn.Sequential(_linear(width).requires_grad_(False), nn.ReLU(), _linear(width)),
    "nested": _wired(_nested, _block, _block),
    "in sequence": _wired(
        lambda layers, x: checkpoint_sequential(layers, 2, x, use_reentrant=False),
        lambda width: nn.Sequential(*[_block(width) for _ in range(4)]),
    ),
    "power iteration": _wired(_power_iteration, _linear),
    "transposed convolution": _wired(
        lambda layer, x: layer(tokens(x))[..., : x.shape[1] // TOKENS].flatten(1),
        lambda width: nn.ConvTranspose1d(TOKENS, TOKENS, 4, 1),
    ),
    "depthwise": _image(lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4)),
    "upsampled": _image(lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.MaxPool2d(2))),
    "shuffled": _image(lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2))),
    "local response": _image(lambda: nn.LocalResponseNorm(3)),
    "group norm of images": _image(lambda: nn.GroupNorm(2, 4)),
    "lp pooled": _image(lambda: nn.Sequential(nn.LPPool2d(2, 2), nn.Upsample(scale_factor=2))),
    "bilinear layer": _wired(
        lambda layer, x: layer(tokens(x), tokens(x).flip(1)).flatten(1),
        lambda width: nn.Bilinear(width // TOKENS, width // TOKENS, width // TOKENS),
    ),
}
