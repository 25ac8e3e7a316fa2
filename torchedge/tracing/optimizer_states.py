"""What a torch.optim optimizer holds, by the names that a captured step gives it, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchedge.errors import InputError
from torchedge.tracing.optimizer_updates import SCOPE, learning_rates

_OF_THE_LOOP = frozenset(
    ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "max_lr", "min_lr")
)
"""Settings that a step takes from elsewhere, or that say only how PyTorch itself computes."""

Read = Callable[[str], Any]


class OptimizerSettings:
    """The settings that a captured step was made with; learning rates alone may change afterwards."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._fixed = self._now()
        self._states = {
            parameter: {key: item.clone() if _is_number(item) else item for key, item in state.items()}
            for parameter, state in optimizer.state.items()
        }

    def rates(self) -> dict[str, float]:
        """Return today's learning rates by hyperparameter.

        Raises:
            InputError: another setting has changed since.
        """
        for number, (before, now) in enumerate(zip(self._fixed, self._now(), strict=True)):
            changed = [key for key in now if now[key] != before.get(key)]
            if changed:
                key = changed[0]
                raise InputError(
                    f"the optimizer's {key} is {now[key]} in group {number}, it was {before.get(key)} when "
                    "the step was captured; only lr may change (schedulers: cycle_momentum=False), or make "
                    "another Trainer"
                )
        return learning_rates(self._optimizer)

    @contextmanager
    def as_captured(self) -> Iterator[None]:
        """Let the optimizer hold the states of then, so that a step captured again has the same names."""
        held = dict(self._optimizer.state)
        _exchange(self._optimizer, self._states)
        try:
            yield
        finally:
            _exchange(self._optimizer, held)

    def count_step(self) -> None:
        """Let PyTorch's schedulers know that a step was made before theirs."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def counter_of(self, parameter: torch.Tensor) -> str:
        """Return the name of the state that counts a parameter's steps (Adam, AdamW)."""
        start = float(self._states.get(parameter, {}).get("step", 0.0))
        return f"{SCOPE}.step" if start == 0 else f"{SCOPE}.step.from_{start:g}"

    def _now(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in group.items() if k not in _OF_THE_LOOP}
            for group in self._optimizer.param_groups
        ]


def take_states(
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    names: Mapping[str, torch.Tensor],
    known: frozenset[str],
    read: Read,
) -> None:
    """Put what the device holds into `optimizer.state`, as `optimizer.step` would have left it.

    names: parameters by name. known: names of the step's states. read: returns a state's array by name.
    """
    for name, parameter in names.items():
        start = f"{SCOPE}.{name}."
        kinds = [state.removeprefix(start) for state in known if state.startswith(start)]
        if not kinds:
            continue
        held: dict[str, Any] = optimizer.state[parameter]
        counter = settings.counter_of(parameter)
        if not isinstance(optimizer, torch.optim.SGD) and counter in known:
            held["step"] = torch.tensor(float(read(counter)), dtype=torch.float32)
        for kind in sorted(kinds):
            held[kind] = torch.from_numpy(read(start + kind)).to(parameter.dtype)


def states_of(
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    names: Mapping[str, torch.Tensor],
    known: frozenset[str],
) -> dict[str, torch.Tensor]:
    """Return what the optimizer holds by the names of the step's states."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in names.items():
        for kind, item in optimizer.state.get(parameter, {}).items():
            title = settings.counter_of(parameter) if kind == "step" else f"{SCOPE}.{name}.{kind}"
            if title in known and item is not None:
                found[title] = torch.as_tensor(item)
    return found


def _is_number(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0


def _exchange(optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, Any]) -> None:
    optimizer.state.clear()
    optimizer.state.update(states)
