"""What each optimizer keeps and allocates while it updates the parameters."""

from __future__ import annotations

from torchedge.graphs import Poly
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import TapeWriter

_STATES = {"none": (), "sgd": (), "sgd-momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"),
           "adamw": ("exp_avg", "exp_avg_sq")}  # fmt: skip

Trained = list[tuple[int, Poly, int]]
"""Parameters that receive a gradient: value, size in bytes, storage of the gradient."""


def state_names(optimizer: str) -> tuple[str, ...]:
    """Return the tensors an optimizer keeps for each parameter, each as large as the parameter."""
    return _STATES[optimizer]


def write_update(tape: TapeWriter, trained: Trained, settings: StepSettings, state: int, temporary: int) -> None:
    """Write the optimizer's step: its state is persistent, its temporaries come and go; then gradients are freed.

    Temporaries follow torch.optim: SGD adds weight decay into a copy of the gradient; Adam forms a denominator
    sqrt(exp_avg_sq) / correction + eps. The multi-tensor implementation does so for all parameters at once.
    """
    for _, size, _ in trained:
        for name in _STATES[settings.optimizer]:
            tape.keep(size, state, name)
        if settings.optimizer in ("adam", "adamw"):
            tape.keep((4, 0, 0), state, "step")
    copies = _temporaries(settings)
    if settings.foreach:
        made = [tape.new(size, temporary, "optimizer temporary") for _ in range(copies) for _, size, _ in trained]
        for storage in made:
            tape.drop(storage)
    else:
        for _, size, _ in trained:
            made = [tape.new(size, temporary, "optimizer temporary") for _ in range(copies)]
            for storage in made:
                tape.drop(storage)
    if settings.zero_grad == "set_to_none" and settings.accumulation == 1:
        for _, _, gradient in trained:
            tape.drop(gradient)


def _temporaries(settings: StepSettings) -> int:
    """Parameter-sized temporaries alive at once."""
    decay = settings.weight_decay != 0 and settings.optimizer != "adamw"
    if settings.optimizer in ("sgd", "sgd-momentum"):
        return int(decay)
    if settings.optimizer in ("adam", "adamw"):
        return 1 + int(decay)
    return 0
