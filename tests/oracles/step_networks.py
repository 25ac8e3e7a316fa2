"""Networks whose training steps are captured, lowered and run in tests and benchmarks; small by default."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class SmallCNN(nn.Module):
    """Convolution, batch norm, pooling, a residual connection and a classifier, for images (N, 3, 8, 8)."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, groups=2)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(images))), 2)
        x = F.silu(x + self.second(x))
        return self.head(x.mean((2, 3)))


class FSRCNN(nn.Module):
    """Dong et al. 2016: features, shrinking, `depth` mappings, expanding, a deconvolution; one channel."""

    def __init__(self, scale: int = 2, features: int = 56, shrunk: int = 12, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, features, 5, padding=2), nn.PReLU(features)]
        layers += [nn.Conv2d(features, shrunk, 1), nn.PReLU(shrunk)]
        for _ in range(depth):
            layers += [nn.Conv2d(shrunk, shrunk, 3, padding=1), nn.PReLU(shrunk)]
        layers += [nn.Conv2d(shrunk, features, 1), nn.PReLU(features)]
        self.body = nn.Sequential(*layers)
        self.up = nn.ConvTranspose2d(features, 1, 9, stride=scale, padding=4, output_padding=scale - 1)

    def forward(self, low: torch.Tensor) -> torch.Tensor:
        return self.up(self.body(low))


class GroupNormUNet(nn.Module):
    """A small UNet of two levels: convolutions, GroupNorm, SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.down = self._block(3, width), self._block(width, 2 * width)
        self.middle, self.up = self._block(2 * width, 2 * width), self._block(3 * width, width)
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(channels: int, filters: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before in (channels, filters):
            layers += [nn.Conv2d(before, filters, 3, padding=1), nn.GroupNorm(8, filters), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        deep = self.middle(self.down(nn.functional.max_pool2d(wide, 2)))
        return self.last(self.up(torch.cat([nn.functional.interpolate(deep, scale_factor=2), wide], 1)))


class SmallViT(nn.Module):
    """A vision transformer of PyTorch's own encoder layers, for images (N, 3, 16, 16)."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Recurrent(nn.Module):
    """A recurrent layer over (N, steps, features), and scores by its last step; without classes that step."""

    def __init__(
        self, kind: type[nn.RNNBase], features: int, width: int, classes: int = 0, layers: int = 1
    ) -> None:
        super().__init__()
        self.layer = kind(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes) if classes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model: no two programs draw the same random numbers."""
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
    return model


class SmallGPT(nn.Module):
    """A decoder with causal attention whose head shares the embedding's weights; returns its loss too."""

    def __init__(
        self, words: int = 23, width: int = 16, depth: int = 2, length: int = 8, heads: int = 2
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(self.before(x)).chunk(3, dim=-1)
        q, k, v = [p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.inner(self.after(x))
