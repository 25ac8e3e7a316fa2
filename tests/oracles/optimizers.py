"""The optimizers and loop options that the memory tests run, with the settings that describe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Recipe:
    """`make(parameters)` builds the optimizer.

    `settings` describe it to the library, `loop` the rest to the oracle.
    """

    make: Callable[[Any], torch.optim.Optimizer] | None
    settings: dict[str, Any]
    loop: dict[str, Any] = field(default_factory=dict)


def _sgd(foreach: bool, momentum: float = 0.0, decay: float = 0.0) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum, weight_decay=decay, foreach=foreach)


def _adam(kind: Any, foreach: bool, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: kind(p, lr=1e-3, foreach=foreach, **options)


OPTIMIZERS: dict[str, Recipe] = {
    "none": Recipe(None, {"optimizer": "none"}),
    "sgd": Recipe(_sgd(True), {"optimizer": "sgd"}),
    "sgd-momentum": Recipe(_sgd(True, 0.9), {"optimizer": "sgd-momentum"}),
    "sgd-momentum-loop": Recipe(_sgd(False, 0.9), {"optimizer": "sgd-momentum", "foreach": False}),
    "sgd-momentum-decay": Recipe(_sgd(True, 0.9, 1e-4), {"optimizer": "sgd-momentum", "weight_decay": 1e-4}),
    "sgd-momentum-decay-loop": Recipe(
        _sgd(False, 0.9, 1e-4), {"optimizer": "sgd-momentum", "weight_decay": 1e-4, "foreach": False}
    ),
    "adam": Recipe(_adam(torch.optim.Adam, True), {"optimizer": "adam"}),
    "adam-decay": Recipe(
        _adam(torch.optim.Adam, True, weight_decay=0.01), {"optimizer": "adam", "weight_decay": 0.01}
    ),
    "adam-loop": Recipe(_adam(torch.optim.Adam, False), {"optimizer": "adam", "foreach": False}),
    "adamw": Recipe(_adam(torch.optim.AdamW, True), {"optimizer": "adamw", "weight_decay": 0.01}),
    "adamw-loop": Recipe(
        _adam(torch.optim.AdamW, False), {"optimizer": "adamw", "weight_decay": 0.01, "foreach": False}
    ),
    "accumulation": Recipe(
        _sgd(True, 0.9), {"optimizer": "sgd-momentum", "accumulation": 2}, {"accumulation": 2}
    ),
    "zeroed": Recipe(
        _sgd(True, 0.9), {"optimizer": "sgd-momentum", "zero_grad": "zero"}, {"set_to_none": False}
    ),
    "bfloat16": Recipe(
        _sgd(True, 0.9), {"optimizer": "sgd-momentum", "amp": "bfloat16"}, {"amp": torch.bfloat16}
    ),
}
