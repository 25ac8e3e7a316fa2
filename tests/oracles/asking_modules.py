"""Small modules from a seed that ask for their batch size and device, and what they run as on CUDA.

A module is built twice from its seed: one asks PyTorch (`asks`), the other has the answers that CUDA gives
and autocasts on the CPU, so that it runs without a GPU. Both devices cast its operators alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from oracles.broad_parts import BROAD, LAYERS
from oracles.custom_functions import FUNCTIONS
from oracles.rich_parts import RECURRENT, RICH, Apart
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCHES = {
    "shape": lambda x, n: x.shape[0] > n,
    "size": lambda x, n: x.size(0) <= n,
    "len": lambda x, n: len(x) > n,
    "numel": lambda x, n: x.numel() > n * x.shape[1],
    "log2": lambda x, n: math.log2(x.shape[0]) > math.log2(n + 1),
    "half": lambda x, n: x.shape[0] // 2 > n // 2,
    "dict": lambda x, n: {2 * n: True}.get(x.shape[0], False),
}
DEVICES: dict[str, tuple[Callable[[torch.Tensor], bool], bool]] = {
    "is_cuda": (lambda x: x.is_cuda, True),
    "is_cpu": (lambda x: x.is_cpu, False),
    "type": (lambda x: x.device.type == "cuda", True),
    "get_device": (lambda x: x.get_device() < 0, False),
    "available": (lambda x: torch.cuda.is_available(), True),
    "count": (lambda x: torch.cuda.device_count() == 0, False),
    "capability": (lambda x: torch.cuda.get_device_capability() >= (8, 0), True),
}
_FLOAT32 = torch.float32
WIDE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (lambda x: x.softmax(-1), lambda x: x.softmax(-1, dtype=_FLOAT32)),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda x: x.log_softmax(-1, dtype=_FLOAT32)),
    "layer_norm": (
        lambda x: nn.functional.layer_norm(x, x.shape[1:]),
        lambda x: nn.functional.layer_norm(x.float(), x.shape[1:]),
    ),
    "pow": (lambda x: x.pow(2), lambda x: x.float().pow(2)),
    "exp": (lambda x: x.exp(), lambda x: x.float().exp()),
    "rsqrt": (lambda x: (x.abs() + 1).rsqrt(), lambda x: (x.abs() + 1).float().rsqrt()),
    "softplus": (nn.functional.softplus, lambda x: nn.functional.softplus(x.float())),
    "norm": (
        lambda x: x * torch.linalg.vector_norm(x, dim=-1, keepdim=True),
        lambda x: x * torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_FLOAT32),
    ),
    "log1p": (lambda x: x.abs().log1p(), lambda x: x.abs().float().log1p()),
    "expm1": (lambda x: x.expm1(), lambda x: x.float().expm1()),
    "reciprocal": (lambda x: (x.abs() + 1).reciprocal(), lambda x: (x.abs() + 1).float().reciprocal()),
    "cumsum": (lambda x: x.cumsum(-1), lambda x: x.cumsum(-1, dtype=_FLOAT32)),
    "group_norm": (
        lambda x: nn.functional.group_norm(x.unsqueeze(-1), 4).squeeze(-1),
        lambda x: nn.functional.group_norm(x.float().unsqueeze(-1), 4).squeeze(-1),
    ),
    "mse_loss": (
        lambda x: x * nn.functional.mse_loss(x, x.detach() * 0.5),
        lambda x: x * nn.functional.mse_loss(x.float(), (x.detach() * 0.5).float()),
    ),
    "cosine_similarity": (
        lambda x: x * nn.functional.cosine_similarity(x, x.flip(0), dim=-1).unsqueeze(-1),
        lambda x: x * nn.functional.cosine_similarity(x.float(), x.flip(0).float(), dim=-1).unsqueeze(-1),
    ),
    "sum": (lambda x: x * x.sum(-1, keepdim=True), lambda x: x * x.sum(-1, keepdim=True, dtype=_FLOAT32)),
}
"""Operators that CUDA's autocast runs in float32, and what it runs them as on a tensor of low precision."""


def _scaled(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True) + 1
    return x / scale


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": lambda x: x * x.detach(),
    "without gradients": _scaled,
    "in place": lambda x: x.clone().mul_(2).add_(1).clamp_(max=4),
    "views": lambda x: x.unflatten(-1, (-1, 2)).flip(1).transpose(1, 2).reshape(x.shape),
    "joined": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "masked": lambda x: x.masked_fill(x > 1, 0.5),
    "chosen": lambda x: torch.where(x > 0, x, -0.1 * x),
    "alias": lambda x: x[:].view_as(x) + x[..., :1],
}
"""What both devices compute alike, in any dtype."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Step:
    """One step of a module: its kind, its argument, and the steps of its parts."""

    kind: str
    argument: Any = None
    parts: tuple[tuple[Step, ...], ...] = ()


def drawn(seed: int, wide: bool = False, broad: bool = False, rich: bool = False) -> tuple[Step, ...]:
    """Return the steps of a seed's module.

    wide: with operators that CUDA's autocast runs in float32. broad: with what else users write (`BROAD`,
    `LAYERS`), and with reentrant checkpoints. rich: with whole layers and functions of theirs (`RICH`).
    """
    source = random.Random(seed)

    def block(depth: int, low: bool) -> tuple[Step, ...]:
        return tuple(step(depth, low) for _ in range(source.randint(1, 3)))

    def step(depth: int, low: bool) -> Step:
        kinds = ["linear", "linear", "hooked", "cast", "activation", "residual"]
        kinds += ["wide", "wide", "plain", "plain", "normed", "own"] if wide else []
        kinds += ["broad"] * 6 + ["layer"] * 3 if broad else []
        kinds += ["reentrant"] if broad and depth else []
        kinds += ["rich"] * 8 + ["recurrent"] * (depth == _DEPTH) if rich else []
        if depth:
            kinds += ["batch", "device", "autocast", "autocast", "checkpoint"]
        kind = source.choice(kinds)
        if kind in ("linear", "hooked"):
            return Step(kind, (source.choice([256, 512, 1024]), low))
        if kind in ("residual", "normed"):
            return Step(kind)
        if kind == "plain":
            return Step(kind, source.choice(sorted(PLAIN)))
        if kind == "broad":
            return Step(kind, source.choice(sorted(BROAD)))
        if kind in _NAMED:
            return Step(kind, source.choice(sorted(_NAMED[kind])))
        if kind == "reentrant":
            return Step("checkpoint", kind, (block(depth - 1, low),))
        if kind == "own":
            return Step(kind, source.choice(sorted(FUNCTIONS)))
        if kind == "wide":
            return Step(kind, (source.choice(sorted(WIDE)), low))
        if kind == "activation":
            return Step(kind, source.choice(["relu", "gelu", "tanh", "sigmoid"]))
        if kind == "cast":
            return Step(kind, source.choice([torch.float32, torch.bfloat16, torch.float16]))
        if kind == "batch":
            chosen = (source.choice(sorted(BATCHES)), source.choice([4, 8, 32]))
            return Step(kind, chosen, (block(depth - 1, low), block(depth - 1, low)))
        if kind == "device":
            return Step(kind, source.choice(sorted(DEVICES)), (block(depth - 1, low), block(depth - 1, low)))
        if kind == "autocast":
            enabled, dtype = source.random() < 0.7, source.choice(sorted(DTYPES))
            form = source.choice(["named", "of the tensor", "old"])
            return Step(kind, (enabled, dtype, form), (block(depth - 1, enabled),))
        return Step(kind, None, (block(depth - 1, low),))

    return (Step("linear", (512, False)), *[s for _ in range(3) for s in block(_DEPTH, False)])


_DEPTH = 2
_NAMED: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "layer": LAYERS,
    "rich": {name: lambda width, name=name: Apart(RICH[name](width)) for name in RICH},  # type: ignore[misc]
    "recurrent": {name: lambda width, name=name: Apart(RECURRENT[name](width)) for name in RECURRENT},  # type: ignore[misc]
}
"""Layers by kind of step and name, from the width."""


class Asking(nn.Module):
    """A module of steps on (batch, width) tensors. asks: whether it asks PyTorch about the device."""

    def __init__(self, steps: tuple[Step, ...], width: int = 256, *, asks: bool) -> None:
        super().__init__()
        self.asks, self.steps = asks, steps
        self.layers = nn.ModuleDict()
        self._add(steps, width, "s")

    def _add(self, steps: tuple[Step, ...], width: int, place: str) -> int:
        """Add the layers of steps; parts of branches come back to the width that they begin with."""
        for index, step in enumerate(steps):
            here = f"{place}_{index}"
            if step.kind in ("linear", "hooked"):
                layer = nn.Linear(width, step.argument[0])
                if step.kind == "hooked":
                    layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
                    layer.register_forward_hook(lambda module, args, output: output.relu() + 1)
                self.layers[here] = layer
                width = step.argument[0]
            elif step.kind in _NAMED:
                self.layers[here] = _NAMED[step.kind][step.argument](width)
            elif step.kind in ("residual", "normed"):
                self.layers[here] = nn.Linear(width, width, bias=False)
                if step.kind == "normed":
                    nn.utils.parametrizations.weight_norm(self.layers[here])
            ends = [self._add(part, width, f"{here}_{n}") for n, part in enumerate(step.parts)]
            if len(ends) == 2:
                for n, end in enumerate(ends):
                    self.layers[f"{here}_{n}_end"] = nn.Linear(end, width)
            elif ends:
                width = ends[0]
        return width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(self.steps, x, "s", False)

    def _run(self, steps: tuple[Step, ...], x: torch.Tensor, place: str, low: bool) -> torch.Tensor:
        for index, step in enumerate(steps):
            x = self._step(step, x, f"{place}_{index}", low)
        return x

    def _step(self, step: Step, x: torch.Tensor, here: str, low: bool) -> torch.Tensor:
        if step.kind in ("linear", "hooked", "normed"):
            return self.layers[here](x if low else x.float())
        if step.kind == "plain":
            return PLAIN[step.argument](x)
        if step.kind == "broad":
            return BROAD[step.argument](x)
        if step.kind in _NAMED:
            return self.layers[here](x)
        if step.kind == "own":
            return FUNCTIONS[step.argument](x)
        if step.kind == "residual":
            return x + self.layers[here](x if low else x.float())
        if step.kind == "activation":
            return getattr(torch.nn.functional, step.argument)(x)
        if step.kind == "wide":
            asked, answered = WIDE[step.argument[0]]
            is_low = x.dtype in (torch.bfloat16, torch.float16)
            return (answered if not self.asks and step.argument[1] and is_low else asked)(x)
        if step.kind == "cast":
            return x.to(step.argument)
        if step.kind == "checkpoint":
            if not step.parts[0]:  # no operator leads to it
                return x
            options = {"use_reentrant": step.argument == "reentrant", "preserve_rng_state": False}
            if step.argument == "reentrant":
                return checkpoint(self._run, step.parts[0], x, f"{here}_0", low, **options)
            return checkpoint(self._run, step.parts[0], x, place=f"{here}_0", low=low, **options)
        if step.kind == "autocast":
            enabled, dtype, form = step.argument
            with self._autocast(x, enabled, DTYPES[dtype], form):
                return self._run(step.parts[0], x, f"{here}_0", enabled)
        if step.kind == "batch":
            name, number = step.argument
            chosen = 0 if BATCHES[name](x, number) else 1
        else:
            question, answer = DEVICES[step.argument]
            chosen = 0 if (question(x) if self.asks else answer) else 1
        x = self._run(step.parts[chosen], x, f"{here}_{chosen}", low)
        return self.layers[f"{here}_{chosen}_end"](x if low else x.float())

    def _autocast(self, x: torch.Tensor, enabled: bool, dtype: torch.dtype, form: str) -> Any:
        if not self.asks:
            return torch.autocast("cpu", dtype, enabled=enabled)
        if form == "old":
            return torch.amp.autocast("cuda", dtype=dtype, enabled=enabled)
        return torch.autocast("cuda" if form == "named" else x.device.type, dtype, enabled=enabled)
