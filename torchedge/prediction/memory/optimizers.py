"""What each optimizer keeps and allocates while it updates the parameters."""

from __future__ import annotations

from torchedge.graphs import Poly
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.tape import TapeWriter

_ADAMS = ("adam", "adamw")
_STATES = {
    "none": (),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}

Trained = list[tuple[int, Poly, int]]
"""Parameters that receive a gradient: value, size in bytes, storage of the gradient."""


def keep_state(tape: TapeWriter, size: Poly, name: str, settings: StepSettings, category: int) -> list[int]:
    """Add one parameter's optimizer state as storages that are there before the step."""
    return [tape.keep(size, category, f"{name}.{state}") for state in _STATES[settings.optimizer]]


def write_update(
    tape: TapeWriter,
    trained: Trained,
    state: dict[int, list[int]],
    settings: StepSettings,
    category: int,
    temporary: int,
) -> None:
    """Write the optimizer's step, and the release of the gradients where `zero_grad` frees them.

    Temporaries follow torch.optim: weight decay goes into a copy of the gradient (not AdamW's); Adam forms
    the denominator sqrt(exp_avg_sq) / correction + eps. The multi-tensor implementation does so for all
    parameters at once, one after the other; the loop does one parameter after the other, its variables alive
    until the next parameter takes their place. State that is missing (first step) is made; momentum starts as
    a clone of the gradient.
    """
    names = _STATES[settings.optimizer]
    decay = settings.weight_decay != 0 and settings.optimizer not in ("none", "adamw")
    if settings.optimizer in _ADAMS:
        for index, size, _ in trained:
            if index not in state:
                state[index] = [tape.new(size, category, name) for name in names]
    write = _write_together if settings.foreach else _write_one_by_one
    write(tape, trained, state, settings, category, temporary, decay)
    if settings.zero_grad == "set_to_none" and settings.accumulation == 1:
        for _, _, gradient in trained:
            tape.drop(gradient)


def _write_together(
    tape: TapeWriter,
    trained: Trained,
    state: dict[int, list[int]],
    settings: StepSettings,
    category: int,
    temporary: int,
    decay: bool,
) -> None:
    if decay:
        made = [tape.new(size, temporary, "optimizer temporary") for _, size, _ in trained]
        _start_momentum(tape, trained, state, settings, category)
        for storage in made:
            tape.drop(storage)
    else:
        _start_momentum(tape, trained, state, settings, category)
    if settings.optimizer in _ADAMS:
        made = [tape.new(size, temporary, "optimizer temporary") for _, size, _ in trained]
        for storage in made:
            tape.drop(storage)


def _write_one_by_one(
    tape: TapeWriter,
    trained: Trained,
    state: dict[int, list[int]],
    settings: StepSettings,
    category: int,
    temporary: int,
    decay: bool,
) -> None:
    adam = settings.optimizer in _ADAMS
    gradient = denominator = -1
    for entry in trained:
        size = entry[1]
        if gradient >= 0:
            tape.drop(gradient)
        gradient = tape.new(size, temporary, "optimizer temporary") if decay else -1
        _start_momentum(tape, [entry], state, settings, category)
        if adam:
            root = tape.new(size, temporary, "optimizer temporary")
            quotient = tape.new(size, temporary, "optimizer temporary")
            tape.drop(root)
            if denominator >= 0:
                tape.drop(denominator)
            denominator = quotient
    for storage in (gradient, denominator):
        if storage >= 0:
            tape.drop(storage)


def _start_momentum(
    tape: TapeWriter, trained: Trained, state: dict[int, list[int]], settings: StepSettings, category: int
) -> None:
    if settings.optimizer != "sgd-momentum":
        return
    for index, size, _ in trained:
        if index not in state:
            state[index] = [tape.new(size, category, "momentum_buffer")]
