"""PyTorch's optimizers (those of `_RULES`): their updates as operators of a step, and their states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchedge.errors import InputError, check_rate, described
from torchedge.graphs.steps import UPDATES, GraphBuilder, Term

Group = Mapping[str, Any]

_hooks_of = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_requires_grad = attrgetter("requires_grad")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained parameter: its name, its value before the step, its present value and its gradient."""

    name: str
    before: int
    now: int
    gradient: int


@dataclass
class OptimizerPart:
    """The values, updates and states that an optimizer adds to a step.

    dtype: of the 0-d hyperparameters and counters; updates: of parameters and states; hyperparameters: `lr`
    (`lr_1`, ... of further groups), 0-d inputs; initial: states before the first step; tensors: states that
    PyTorch's optimizer has already, and the learning rates, by value name.
    """

    dtype: str = "float32"
    updates: list[tuple[int, int]] = field(default_factory=list)
    hyperparameters: dict[str, int] = field(default_factory=dict)
    initial: dict[int, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise InputError unless this is one of `_RULES` over parameters of the model."""
    if type(optimizer) not in _RULES:
        names = ", ".join(sorted(kind.__name__ for kind in _RULES))
        raise InputError(
            f"optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}; expected one "
            f"of {names} of torch.optim; for any other write the loop yourself: compiled = "
            'torch.compile(model, backend="torchedge"), then loss.backward() and optimizer.step()'
        )
    check_parameters(optimizer, parameters)
    check_hooks(optimizer)


def check_kind(optimizer: object) -> None:
    """Raise InputError unless this is one optimizer of PyTorch."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    given = repr(optimizer[:40]) if isinstance(optimizer, str) else described(optimizer)
    raise InputError(
        f"optimizer is {given}; expected one torch.optim.Optimizer, such as "
        "torch.optim.Adam(model.parameters())"
    )


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for hooks on gradients or on the optimizer's step: no captured step runs them.

    A method in place of the optimizer's `step` counts as a hook, unless it is a scheduler's.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    hooked = compress(parameters, map(any, map(_hooks_of, parameters)))
    places = [f"a parameter of shape {tuple(parameter.shape)}" for parameter in hooked]
    exchanged = type(optimizer) in _RULES and not _is_own(optimizer.step)  # others are refused by kind
    if exchanged or any(getattr(optimizer, kind, None) for kind in _OPTIMIZER_HOOKS):
        places.append("the optimizer")
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        places.append("every optimizer (register_optimizer_step_pre_hook or _post_hook)")
    if places:
        raise InputError(
            f"{places[0]} has a hook, which a captured step does not run; remove it, or train in a loop of "
            'your own, on torch.compile(model, backend="torchedge")'
        )


def _is_own(step: Any) -> bool:
    """Return whether a method is PyTorch's own, and so is everything that it wraps."""
    while step is not None:
        function = getattr(step, "__func__", step)
        if not str(getattr(function, "__globals__", {}).get("__name__")).startswith("torch."):
            return False
        step = getattr(function, "__wrapped__", None)
    return True


def check_parameters(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise InputError if one of the optimizer's parameters is none of the model's."""
    known = {id(p) for p in parameters}
    for number, group in enumerate(optimizer.param_groups):
        foreign = [p for p in group["params"] if id(p) not in known]
        if foreign:
            raise InputError(
                f"{len(foreign)} of the optimizer's parameters in group {number} (the first of shape "
                f"{tuple(foreign[0].shape)}) are not the model's; build the optimizer from model.parameters()"
            )


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return each parameter group's learning rate by the name of its hyperparameter.

    Raises InputError for one that is no number from 0 on.
    """
    names = [f"lr_{number}" if number else "lr" for number in range(len(optimizer.param_groups))]
    groups = zip(names, optimizer.param_groups, strict=True)
    return {name: check_rate(name, group["lr"]) for name, group in groups}


def add_updates(
    builder: GraphBuilder, optimizer: torch.optim.Optimizer, trained: Mapping[int, Trained]
) -> OptimizerPart:
    """Add an optimizer's update of each parameter to a builder.

    trained: by the parameter's id. A parameter outside of it (frozen, or without a gradient) does not change,
    as in PyTorch.
    """
    exact = all(builder.values[place.before].dtype == "float64" for place in trained.values())
    part = OptimizerPart("float64" if exact else "float32")
    rule = _RULES[type(optimizer)]
    for (name, rate), group in zip(learning_rates(optimizer).items(), optimizer.param_groups, strict=True):
        pairs = [(p, trained[id(p)]) for p in group["params"] if id(p) in trained]
        if not pairs:
            continue
        lr = part.hyperparameters[name] = builder.add(name, (), part.dtype, "input")
        part.tensors[name] = torch.tensor(rate, dtype=getattr(torch, part.dtype))
        for parameter, place in pairs:
            build = _UpdateBuilder(builder, part, place.name, optimizer.state.get(parameter, {}))
            step, value, gradient = map(build.term, (lr, place.now, place.gradient))
            gradient = -gradient if group.get("maximize") else gradient
            build.keep(build.term(place.before), rule(build, group, step, value, gradient))
    return part


class _UpdateBuilder:
    """Adds the operators and states of one parameter's update, all of the parameter's shape."""

    def __init__(
        self, builder: GraphBuilder, part: OptimizerPart, parameter: str, existing: Mapping[str, Any]
    ) -> None:
        self.builder, self.part, self.parameter, self.existing = builder, part, parameter, existing

    def term(self, value: int) -> Term:
        """Return a value of the step."""
        return Term(self.builder, value, UPDATES)

    def state(self, kind: str, like: Term) -> Term:
        """Return a state of the parameter's shape: at first zero, or the state of PyTorch's optimizer."""
        model = self.builder.values[like.value]
        index = self.builder.add(f"{UPDATES}.{self.parameter}.{kind}", model.shape, model.dtype, "state")
        if isinstance(self.existing.get(kind), torch.Tensor):
            self.part.tensors[self.builder.values[index].name] = self.existing[kind].detach()
        return self.term(index)

    def scalar(self, kind: str, start: float) -> Term:
        """Return a 0-d state of the parameter's own."""
        index = self.builder.add(f"{UPDATES}.{self.parameter}.{kind}", (), self.part.dtype, "state")
        self.part.initial[index] = float(self.existing.get(kind, start))
        return self.term(index)

    def counter(self, start: float) -> tuple[Term, Term]:
        """Return the steps before and after this one; all parameters that start at `start` share them."""
        title = _counter_name(start)
        known = {self.builder.values[old].name: (old, new) for old, new in self.part.updates}
        if title in known:
            return self.term(known[title][0]), self.term(known[title][1])
        old = self.term(self.builder.add(title, (), self.part.dtype, "state"))
        new = self.keep(old, old + 1.0)
        self.part.initial[old.value] = start
        return old, new

    def counted(self) -> tuple[Term, Term]:
        """Return the steps before and after this one, from those of PyTorch's optimizer on."""
        return self.counter(float(self.existing.get("step", 0.0)))

    def keep(self, state: Term, new: Term) -> Term:
        """Replace a state by a value at the end of the step; returns the value."""
        self.part.updates.append((state.value, new.value))
        return new


def _counter_name(start: float) -> str:
    return f"{UPDATES}.step" if start == 0 else f"{UPDATES}.step.from_{start:g}"


def _sgd(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    gradient = _decayed(group, value, gradient)
    if group["momentum"]:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        state = build.state("momentum_buffer", value)
        scaled = state * momentum
        if dampening == 0.0:
            buffer = scaled + gradient
        elif build.existing.get("momentum_buffer") is not None:
            buffer = scaled.apply("add", gradient, alpha=1.0 - dampening)
        else:  # PyTorch starts from the gradient itself
            later = build.counter(0.0)[0].apply("clamp", max=1.0)
            buffer = scaled + gradient * (1.0 - later * dampening)
        build.keep(state, buffer)
        gradient = gradient.apply("add", buffer, alpha=momentum) if group["nesterov"] else buffer
    return value - gradient * lr


def _either_decayed(group: Group, lr: Term, value: Term, gradient: Term) -> tuple[Term, Term]:
    """Return value and gradient with the weight decay in the first one (decoupled) or in the second one."""
    if group.get("decoupled_weight_decay") and group["weight_decay"]:
        return value * (1.0 - lr * float(group["weight_decay"])), gradient
    return value, _decayed(group, value, gradient)


def _adam(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    (beta1, beta2), eps = group["betas"], float(group["eps"])
    value, gradient = _either_decayed(group, lr, value, gradient)
    _, step = build.counted()
    first, second = build.state("exp_avg", value), build.state("exp_avg_sq", value)
    mean = build.keep(first, _lerp(first, gradient, 1.0 - float(beta1)))
    squares = gradient * gradient * (1.0 - float(beta2))
    square = build.keep(second, second * float(beta2) + squares)
    if group["amsgrad"]:
        largest = build.state("max_exp_avg_sq", value)
        square = build.keep(largest, largest.apply("maximum", square))
    root = square.apply("sqrt")
    if beta2:
        root = root / _bias_correction(step, float(beta2)).apply("sqrt")
    rate = lr / _bias_correction(step, float(beta1)) if beta1 else lr
    return value - mean / (root + eps) * rate


def _lerp(start: Term, end: Term, weight: float) -> Term:
    """Return PyTorch's interpolation, which is exact at the nearer end."""
    difference = end - start
    if weight < 0.5:
        return start.apply("add", difference, alpha=weight)
    return end.apply("sub", difference, alpha=1.0 - weight)


def _bias_correction(step: Term, beta: float) -> Term:
    """Return ``1 - beta^step``; by expm1, as the difference itself would cancel in float32."""
    return -(step * math.log(beta)).apply("expm1")


def _decayed(group: Group, value: Term, gradient: Term) -> Term:
    """Return the gradient with the weight decay that is part of it."""
    decay = float(group["weight_decay"])
    return gradient.apply("add", value, alpha=decay) if decay else gradient


def _mean_square(build: _UpdateBuilder, kind: str, value: Term, beta: float) -> Term:
    """Return a running mean of squares, a state; value: of this step."""
    state = build.state(kind, value)
    squares = value * value * (1.0 - beta)
    return build.keep(state, state * beta + squares)


def _rmsprop(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    alpha, momentum, _ = float(group["alpha"]), float(group["momentum"]), build.counted()
    gradient = _decayed(group, value, gradient)
    variance = _mean_square(build, "square_avg", gradient, alpha)
    if group["centered"]:
        state = build.state("grad_avg", value)
        mean = build.keep(state, _lerp(state, gradient, 1.0 - alpha))
        variance = variance - mean * mean
    change = gradient / (variance.apply("sqrt") + float(group["eps"]))
    if momentum > 0:
        buffer = build.state("momentum_buffer", value)
        change = build.keep(buffer, buffer * momentum + change)
    return value - change * lr


def _adagrad(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    before, _ = build.counted()
    gradient = _decayed(group, value, gradient)
    rate = lr / (before * float(group["lr_decay"]) + 1.0)
    state = build.state("sum", value)
    total = build.keep(state, state + gradient * gradient)
    return value - gradient / (total.apply("sqrt") + float(group["eps"])) * rate


def _adadelta(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    rho, eps, _ = float(group["rho"]), float(group["eps"]), build.counted()
    gradient = _decayed(group, value, gradient)
    deviation = (_mean_square(build, "square_avg", gradient, rho) + eps).apply("sqrt")
    state = build.state("acc_delta", value)
    change = (state + eps).apply("sqrt") / deviation * gradient
    squares = change * change * (1.0 - rho)
    build.keep(state, state * rho + squares)
    return value - change * lr


def _adamax(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    (beta1, beta2), (_, step) = group["betas"], build.counted()
    gradient = _decayed(group, value, gradient)
    first, norm = build.state("exp_avg", value), build.state("exp_inf", value)
    mean = build.keep(first, _lerp(first, gradient, 1.0 - float(beta1)))
    least = gradient.apply("abs") + float(group["eps"])
    largest = build.keep(norm, (norm * float(beta2)).apply("maximum", least))
    rate = lr / _bias_correction(step, float(beta1)) if beta1 else lr
    return value - mean / largest * rate


def _nadam(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    (beta1, beta2), (_, step) = group["betas"], build.counted()
    value, gradient = _either_decayed(group, lr, value, gradient)

    def momentum(steps: Term) -> Term:
        decay = (steps * (math.log(0.96) * float(group["momentum_decay"]))).apply("exp")
        return (1.0 - decay * 0.5) * float(beta1)

    now, after = momentum(step), momentum(step + 1.0)
    state = build.scalar("mu_product", 1.0)
    product = build.keep(state, state * now)
    first = build.state("exp_avg", value)
    mean = build.keep(first, _lerp(first, gradient, 1.0 - float(beta1)))
    root = _mean_square(build, "exp_avg_sq", gradient, float(beta2)).apply("sqrt")
    if beta2:
        root = root / _bias_correction(step, float(beta2)).apply("sqrt")
    root = root + float(group["eps"])
    by_gradient = (1.0 - now) / (1.0 - product)
    by_mean = after / (1.0 - product * after)
    return value - (gradient * by_gradient + mean * by_mean) / root * lr


def _radam(build: _UpdateBuilder, group: Group, lr: Term, value: Term, gradient: Term) -> Term:
    (beta1, beta2), (_, step) = group["betas"], build.counted()
    value, gradient = _either_decayed(group, lr, value, gradient)
    first = build.state("exp_avg", value)
    mean = build.keep(first, _lerp(first, gradient, 1.0 - float(beta1)))
    root = _mean_square(build, "exp_avg_sq", gradient, float(beta2)).apply("sqrt") + float(group["eps"])
    change = mean / _bias_correction(step, float(beta1)) if beta1 else mean
    most = 2.0 / (1.0 - float(beta2)) - 1.0
    if beta2 and most > 5.0:  # the length of the average that a step needs for a variance
        length = _average_length(step, float(beta2), most)
        rectified, clamped = _above(length, 5.0), length.apply("clamp", min=5.0)
        spread = (clamped + -4.0) * (clamped + -2.0)
        spread = spread / clamped * (most / ((most - 4.0) * (most - 2.0)))
        adapted = (spread * _bias_correction(step, float(beta2))).apply("sqrt")
        adapted = change * adapted / root
        plain = change * (1.0 - rectified)
        change = adapted * rectified + plain
    return value - change * lr


def _average_length(step: Term, beta: float, most: float) -> Term:
    """Return RAdam's rho: ``most - 2 step beta^step / (1 - beta^step)``, whose terms cancel in float32.

    With k = -step log(beta) it is a constant plus step (2 / k - 2 / expm1(k)), whose bracket has a series.
    """
    decay = -math.log(beta)
    k = step * decay
    small, large = k.apply("clamp", max=0.5), k.apply("clamp", min=0.5)
    square = small * small
    series = ((square * (-1.0 / 15_120) + 1.0 / 360) * square + -1.0 / 6) * small + 1.0
    whole = large.apply("reciprocal") - large.apply("expm1").apply("reciprocal")
    late = _above(k, 0.5)
    bracket = series * (1.0 - late) + whole * 2.0 * late
    return bracket * step + (most - 2.0 / decay)


def _above(value: Term, limit: float) -> Term:
    """Return 1 where a value is above a limit, else 0."""
    return (value + -limit).apply("sign").apply("relu")


_RULES: Mapping[type, Callable[..., Term]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adamax: _adamax,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
}
"""For each optimizer its update of one parameter: an optimizer is added here."""


_OF_THE_LOOP = frozenset(
    ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "max_lr", "min_lr")
)
"""Settings that are inputs of a step, or that only select an implementation of PyTorch."""

Read = Callable[[str], Any]


class OptimizerSettings:
    """The settings at the capture of a step; only learning rates may change afterwards."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_kind(optimizer)
        check_hooks(optimizer)
        self._optimizer = optimizer
        self._fixed, self._trains = self._now(), self._trains_now()
        self._states = {
            parameter: {
                key: item.clone() if isinstance(item, torch.Tensor) and not item.dim() else item
                for key, item in state.items()
            }
            for parameter, state in optimizer.state.items()
        }

    @property
    def fixed(self) -> list[dict[str, Any]]:
        """The settings of each group of parameters at the capture, without learning rates."""
        return self._fixed

    def rates(self) -> dict[str, float]:
        """Return the present learning rates by hyperparameter.

        Raises InputError if another setting, or what is trained, has changed since the capture, or for hooks.
        """
        check_hooks(self._optimizer)
        if self._trains_now() != self._trains:
            raise InputError(
                "the optimizer's parameters, or which of them require a gradient, have changed since the "
                "step was captured; make another Trainer"
            )
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
        """Restore the states at the capture, so that a step captured again has the same names."""
        current = dict(self._optimizer.state)
        _exchange(self._optimizer, self._states)
        try:
            yield
        finally:
            _exchange(self._optimizer, current)

    def count_step(self) -> None:
        """Mark for PyTorch's schedulers that an optimizer step ran before theirs."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def counter_of(self, parameter: torch.Tensor) -> str:
        """Return the name of the state that counts a parameter's steps (Adam, AdamW)."""
        return _counter_name(float(self._states.get(parameter, {}).get("step", 0.0)))

    def _trains_now(self) -> list[list[int]]:
        """Return what each group trains: the parameters' numbers, then whether they require a gradient."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        return [[*map(id, group), *map(_requires_grad, group)] for group in groups]

    def _now(self) -> list[dict[str, Any]]:
        return [
            {k: tuple(v) if isinstance(v, list) else v for k, v in group.items() if k not in _OF_THE_LOOP}
            for group in self._optimizer.param_groups
        ]


def take_states(
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    names: Mapping[str, torch.Tensor],
    known: frozenset[str],
    read: Read,
) -> None:
    """Copy the states on the device to `optimizer.state`, as `optimizer.step` would leave them.

    names: parameters by name. known: names of the step's states. read: returns a state's array by name.
    """
    for name, parameter in names.items():
        start = f"{UPDATES}.{name}."
        kinds = [state.removeprefix(start) for state in known if state.startswith(start)]
        if not kinds:
            continue
        entries: dict[str, Any] = optimizer.state[parameter]
        counter = settings.counter_of(parameter)
        if not isinstance(optimizer, torch.optim.SGD) and counter in known:
            entries["step"] = torch.tensor(float(read(counter)), dtype=torch.float32)
        for kind in sorted(kinds):
            entries[kind] = torch.from_numpy(read(start + kind)).to(parameter.dtype)


def states_of(
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    names: Mapping[str, torch.Tensor],
    known: frozenset[str],
) -> dict[str, torch.Tensor]:
    """Return the optimizer's states by the names of the step's states."""
    states: dict[str, torch.Tensor] = {}
    for name, parameter in names.items():
        for kind, item in optimizer.state.get(parameter, {}).items():
            title = settings.counter_of(parameter) if kind == "step" else f"{UPDATES}.{name}.{kind}"
            if title in known and item is not None:
                states[title] = torch.as_tensor(item)
    return states


def _exchange(optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, Any]) -> None:
    optimizer.state.clear()
    optimizer.state.update(states)
