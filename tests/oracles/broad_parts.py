"""What users write on tensors of (batch, width), whose operators autocast treats alike on every device.

The width is a multiple of 256. What CUDA's autocast runs in float32 and the CPU's does not gets float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Part = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Output:
    first: torch.Tensor
    others: dict[str, Any]


def _structured(x: torch.Tensor) -> torch.Tensor:
    output = Output(x.sin(), {"pair": (x.cos(), x * 2), "unused": x + 1})
    return output.first + output.others["pair"][1]


def _views_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :64].view(-1, 8, 8)[:, 0].mul_(2)
    return y


def _slices_written(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = x[:, ::2] * 2
    y[:, 1::2] += x[:, 1::2]
    return y


def _entries_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[x > 1] = 0
    return y


def _switched(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
        a = a + b
    return x + a + b


def _as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())


def _complex(x: torch.Tensor) -> torch.Tensor:
    y = _as_complex(x)
    return torch.view_as_real(y * y + y * (1 + 2j)).flatten(1)


def _conjugated(x: torch.Tensor) -> torch.Tensor:
    y = _as_complex(x)
    return torch.view_as_real((y * y.conj()).resolve_conj()).flatten(1)


def _conjugated_result(x: torch.Tensor) -> torch.Tensor:
    y = _as_complex(x)
    return torch.view_as_real((torch.exp(y).conj() + y.conj() + y).resolve_conj()).flatten(1)


def _extremes(x: torch.Tensor) -> torch.Tensor:
    least, most = x.aminmax(dim=-1, keepdim=True)
    if least.requires_grad and least.grad_fn.name().endswith("NotImplemented"):  # PyTorch 2.11
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return x * (most - least)


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x[:, :256].float().unflatten(-1, (16, 16))


def _products(x: torch.Tensor) -> torch.Tensor:
    y = x.unflatten(-1, (16, -1))
    return torch.einsum("bij,bkj->bik", y, y).bmm(y).flatten(1)


def _loss(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Part:
    return lambda x: x * loss(x.float(), x.detach().float().flip(0))


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "kl": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce of probabilities": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1), label_smoothing=0.1),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y.argmax(1)),
    "poisson nll": F.poisson_nll_loss,
    "ranking": lambda x, y: F.margin_ranking_loss(x, y, y.sign()),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, y.flip(1)),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "multi margin": lambda x, y: F.multi_margin_loss(x, y.argmax(1)),
    "multilabel margin": lambda x, y: F.multilabel_margin_loss(x, y.argsort(1)),
    "multilabel soft margin": lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()),
    "cosine embedding": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
    "cosine embedding of two": lambda x, y: F.cosine_embedding_loss(x, x.flip(1), y[:, 0].sign()),
    "swapped triplet": lambda x, y: F.triplet_margin_loss(x, x.flip(1), y, swap=True),
}
ACTIVATIONS = (
    F.silu, F.elu, F.leaky_relu, F.hardswish, F.mish, F.celu, F.softsign, F.logsigmoid, F.hardsigmoid, F.selu,
    F.relu6, F.tanhshrink,
)  # fmt: skip
BROAD: dict[str, Part] = {
    "sorted": lambda x: x.sort(-1).values,
    "largest": lambda x: torch.cat([x.topk(x.shape[1] // 2).values] * 2, -1),
    "gathered": lambda x: x.gather(1, x.detach().argsort(1)),
    "scattered": lambda x: torch.zeros_like(x).scatter_add(1, x.detach().argsort(1), x),
    "selected": lambda x: x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)),
    "running maximum": lambda x: x.cummax(-1).values,
    "products": _products,
    "complex": _complex,
    "conjugated": _conjugated,
    "conjugated result": _conjugated_result,
    "extremes": _extremes,
    "singular values": lambda x: x * torch.linalg.svdvals(_squares(x)).sum(-1, keepdim=True),
    "decomposed": lambda x: x * torch.linalg.svd(_squares(x))[1].sum(-1, keepdim=True),
    "taken along": lambda x: x.take_along_dim(x.detach().argsort(-1), -1),
    "dropped to a mean": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "differences": lambda x: torch.cat([x.diff(dim=-1), x[:, :1]], -1),
    "distances": lambda x: (
        x
        * torch.cdist(x.float().unflatten(-1, (16, -1)), x.float().unflatten(-1, (16, -1)))
        .mean((1, 2))
        .unsqueeze(-1)
    ),
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x.float()) * 2, n=x.shape[1]),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 3, -1).mean(1),
    "rearranged": lambda x: x.view(x.shape[0], 4, -1, 2).permute(0, 2, 3, 1).reshape(x.shape[0], -1),
    "views in place": _views_in_place,
    "slices written": _slices_written,
    "entries written": _entries_written,
    "detached in place": lambda x: x + (x * 2).detach_(),
    "data": lambda x: x * x.data.abs(),
    "switched": _switched,
    "deviation": lambda x: x / (x.std(-1, keepdim=True) + 1),
    "maximum": lambda x: torch.maximum(x, x.roll(1, -1)) - x.amax(-1, keepdim=True),
    "interpolated": lambda x: torch.lerp(x, x.flip(1), 0.5),
    "triangle": lambda x: x.unflatten(-1, (16, -1)).tril().flatten(1),
    "padded": lambda x: F.pad(x, (1, 1))[:, 1:-1],
    "unfolded": lambda x: x * x.unfold(1, 4, 2).mean((1, 2)).unsqueeze(-1),
    "gated": lambda x: F.glu(torch.cat([x, x], -1)),
    "resized": lambda x: F.avg_pool1d(
        F.interpolate(x.float().unflatten(-1, (4, -1)), scale_factor=2, mode="linear"), 2
    ).flatten(1),
    "structured": _structured,
    "dropped": lambda x: F.dropout(x, 0.1),
    "dropped in place": lambda x: F.dropout(x * 2, 0.1, inplace=True),
    "rectified in place": lambda x: F.relu(x + 1, inplace=True),
    "clipped": lambda x: x.clamp(-1, 1) + x.clamp_min(0),
    "unbound": lambda x: sum(x.unflatten(-1, (-1, 2)).unbind(-1)).repeat(1, 2),
    "one hot": lambda x: x * F.one_hot(x.detach().argmax(-1), x.shape[1]).to(x.dtype),
    **{f"loss {name}": _loss(loss) for name, loss in LOSSES.items()},
    **{function.__name__: function for function in ACTIVATIONS},
}


class Averaging(nn.Module):
    """Keeps a moving average in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return x - self.mean.to(x.dtype)


class Caching(nn.Module):
    """Builds a table in its first call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.table = width, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            positions = torch.arange(self.width, device=x.device, dtype=torch.float32)
            self.table = positions.cos()
        return x * self.table.to(x.dtype)


class LongCaching(nn.Module):
    """Keeps a table of many positions from its first call, and a mask in a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.tables = width, dict[str, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "cos" not in self.tables:
            positions = torch.arange(32768, device=x.device, dtype=torch.float32)
            frequencies = torch.arange(self.width, device=x.device, dtype=torch.float32)
            self.tables["cos"] = torch.outer(positions, frequencies).cos()
            self.tables["mask"] = torch.ones(32768, self.width, dtype=torch.bool, device=x.device).tril()
        return x * self.tables["cos"][:1].to(x.dtype) + self.tables["mask"][:1]


class Bags(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(32, width), nn.Embedding(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x.detach()[:, :4].float().abs().long() % 32
        return x + self.bag(places) + self.table(places[:, 0])


class Around(nn.Module):
    """A layer on float32 tensors of a few channels."""

    def __init__(self, layer: nn.Module, split: tuple[int, int]) -> None:
        super().__init__()
        self.layer, self.split = layer, split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x.float().unflatten(-1, self.split)).flatten(1)


class Spectral(nn.Module):
    """Runs without autocast: the CPU's refuses its product of vectors, which CUDA's runs in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.float())


class Wide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def _shared(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    return nn.Sequential(Wide(), layer, nn.Tanh(), Wide(), layer)


def _hooked(width: int) -> nn.Module:
    layer = nn.Sequential(Wide(), nn.Linear(width, width))
    layer.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    layer[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    return layer


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "averaging": Averaging,
    "caching": Caching,
    "long caching": LongCaching,
    "bags": Bags,
    "spectral": Spectral,
    "shared": _shared,
    "hooked": _hooked,
    "convolved": lambda width: Around(nn.Conv1d(4, 4, 3, padding=1), (4, -1)),
    "normalized": lambda width: nn.Sequential(Wide(), nn.BatchNorm1d(width)),
    "instance": lambda width: Around(nn.InstanceNorm1d(4, affine=True), (4, -1)),
    "pooled": lambda width: Around(nn.MaxPool1d(3, 1, 1), (4, -1)),
    "parametric": lambda width: nn.Sequential(Wide(), nn.PReLU()),
}
