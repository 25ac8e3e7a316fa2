"""Models from a seed that read Python state of many kinds, each of which can change.

A holder has `read`, which a forward pass calls, and `change`, after which it reads another value.
"""

from __future__ import annotations

import argparse
import contextvars
import enum
import functools
import os
import random
import threading
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

GLOBAL = {"scale": 1.0}
FACTOR = 1.0
Pair = namedtuple("Pair", "first second")


class Holder:
    """State of one kind."""

    def read(self) -> Any:
        raise NotImplementedError

    def change(self) -> None:
        raise NotImplementedError


class Slots(Holder):
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1.0

    def read(self):
        return self.value

    def change(self):
        self.value = 2.0


class InheritedSlots(Slots):
    __slots__ = ("more",)

    def __init__(self):
        super().__init__()
        self.more = [1.0]

    def read(self):
        return super().read() * self.more[0]

    def change(self):
        self.more[0] = 2.0


class Property(Holder):
    def __init__(self):
        self._value = 1.0

    @property
    def value(self):
        return self._value

    def read(self):
        return self.value

    def change(self):
        self._value = 2.0


class Descriptor:
    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind):
        return self.values.get("value", 1.0)


class Described(Holder):
    value = Descriptor()

    def read(self):
        return self.value

    def change(self):
        Described.__dict__["value"].values["value"] = Described.value + 1


class Dynamic(Holder):
    def __init__(self):
        self.values = {"value": 1.0}

    def __getattr__(self, name):
        if name == "values":
            raise AttributeError(name)
        return self.values[name]

    def read(self):
        return self.value

    def change(self):
        self.values["value"] = 2.0


class ClassAttribute(Holder):
    value = 1.0

    def read(self):
        return self.value

    def change(self):
        ClassAttribute.value = ClassAttribute.value + 1


class Metaclass(type):
    value = 1.0


class OfMetaclass(Holder, metaclass=Metaclass):
    def read(self):
        return type(self).value

    def change(self):
        Metaclass.value = Metaclass.value + 1


def through():
    return GLOBAL["scale"] * FACTOR


class ThroughFunction(Holder):
    def read(self):
        return through()

    def change(self):
        global FACTOR
        FACTOR = FACTOR + 1


class GlobalEntry(Holder):
    def read(self):
        return through()

    def change(self):
        GLOBAL["scale"] += 1


class Closure(Holder):
    def __init__(self):
        value = 1.0

        def read():
            return value

        def change():
            nonlocal value
            value = value + 1

        self.function, self.changing = read, change

    def read(self):
        return self.function()

    def change(self):
        self.changing()


@dataclass
class Settings:
    value: float = 1.0
    items: list[float] = field(default_factory=lambda: [1.0])


class Mode(enum.Enum):
    LOW = 1.0
    HIGH = 2.0


class OwnList(list):
    value = 1.0


class Static(Holder):
    @staticmethod
    def value():
        return 1.0

    def read(self):
        return self.value()

    def change(self):
        before = Static.value()
        Static.value = staticmethod(lambda: before + 1)


class ClassMethod(Holder):
    level = 1.0

    @classmethod
    def value(cls):
        return cls.level

    def read(self):
        return self.value()

    def change(self):
        ClassMethod.level = ClassMethod.level + 1


class OwnLength:
    value = 1.0

    def __len__(self):
        return int(self.value)

    def __call__(self):
        return self.value


def function(value=1.0, *, more=1.0):
    return value * more


def copied(start: Any) -> Any:
    """Return a function of its own with the code and defaults of another."""
    made = FunctionType(start.__code__, globals(), "copied", start.__defaults__)
    made.__kwdefaults__ = dict(start.__kwdefaults__)
    return made


OTHER = (lambda value=1.0, *, more=1.0: value + more + 1).__code__
CONTAINERS = lambda: [{"a": [1.0]}, OrderedDict(b=1.0), defaultdict(float, c=1.0), deque([1.0]), {1.0}]  # noqa: E731
ROWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Defaults": (lambda: copied(function), lambda x: x(), lambda x: setattr(x, "__defaults__", (2.0,))),
    "KeywordDefaults": (
        lambda: copied(function), lambda x: x(), lambda x: x.__kwdefaults__.update(more=3.0),
    ),
    "Code": (lambda: copied(function), lambda x: x(), lambda x: setattr(x, "__code__", OTHER)),
    "Dataclass": (Settings, lambda x: x.value, lambda x: setattr(x, "value", 2.0)),
    "InDataclass": (Settings, lambda x: x.items[0], lambda x: x.items.insert(0, 2.0)),
    "Array": (lambda: np.ones(100_000), lambda x: float(x.sum() / 1e5), lambda x: x.put(77_777, 1e5)),
    "ObjectArray": (
        lambda: np.array([1.0, None], dtype=object), lambda x: x[0], lambda x: x.__setitem__(0, 2.0),
    ),
    "Plain": (lambda: torch.ones(9), lambda x: x[7], lambda x: x.data.__setitem__(7, 2.0)),
    "PlainInPlace": (lambda: torch.ones(9), lambda x: x[7], lambda x: x.mul_(2)),
    "PlainThroughArray": (lambda: torch.ones(9), lambda x: x[7], lambda x: x.numpy().put(7, 3.0)),
    "InDict": (CONTAINERS, lambda x: x[0]["a"][0], lambda x: x[0]["a"].insert(0, 2.0)),
    "InOrderedDict": (CONTAINERS, lambda x: x[1]["b"], lambda x: x[1].update(b=2.0)),
    "InDefaultDict": (CONTAINERS, lambda x: x[2]["c"], lambda x: x[2].update(c=2.0)),
    "InDeque": (CONTAINERS, lambda x: x[3][0], lambda x: x[3].appendleft(2.0)),
    "InSet": (CONTAINERS, lambda x: len(x[4]), lambda x: x[4].add(5.0)),
    "Order": (
        lambda: {"a": 1.0, "b": 2.0}, lambda x: next(iter(x.values())), lambda x: x.update(a=x.pop("a")),
    ),
    "Named": (lambda: Pair([1.0], 2.0), lambda x: x.first[0], lambda x: x.first.insert(0, 2.0)),
    "Namespace": (
        lambda: SimpleNamespace(value=1.0), lambda x: x.value, lambda x: setattr(x, "value", 2.0),
    ),
    "ListWithAttribute": (lambda: OwnList([1.0]), lambda x: x.value, lambda x: setattr(x, "value", 2.0)),
    "FunctionAttribute": (
        lambda: copied(function), lambda x: getattr(x, "value", 1.0), lambda x: setattr(x, "value", 2.0),
    ),
    "Partial": (
        lambda: functools.partial(lambda given: given["value"], {"value": 1.0}), lambda x: x(),
        lambda x: x.args[0].update(value=2.0),
    ),
    "PartialAttribute": (
        lambda: functools.partial(function), lambda x: getattr(x, "value", 1.0),
        lambda x: setattr(x, "value", 2.0),
    ),
    "Method": (lambda: Slots().read, lambda x: x(), lambda x: x.__self__.change()),
    "Operators": (OwnLength, len, lambda x: setattr(x, "value", 2.0)),
    "Callable": (OwnLength, lambda x: x(), lambda x: setattr(x, "value", 2.0)),
}  # fmt: skip
"""Kinds by name: what the holder has, what is read of it, and how it changes in place."""


def row(name: str) -> type[Holder]:
    """Return the class of holders of a row."""
    start, read, change = ROWS[name]
    return type(name, (Holder,), {
        "__init__": lambda self: setattr(self, "item", start()),
        "read": lambda self: read(self.item),
        "change": lambda self: change(self.item),
    })  # fmt: skip


class Replaced(Holder):
    """Another object under the same name."""

    def __init__(self):
        self.name, self.low, self.high, self.mode, self.tensor = "low", 1.0, 2.0, Mode.LOW, torch.ones(9)

    def read(self):
        return getattr(self, self.name) * self.mode.value * self.tensor[7]

    def change(self):
        self.low = 3.0


class ReplacedMember(Replaced):
    def change(self):
        self.mode = Mode.HIGH


class ReplacedTensor(Replaced):
    def change(self):
        self.tensor = torch.full((9,), 3.0)


CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()


class ContextVariable(Holder):
    def read(self):
        return CONTEXT.get()

    def change(self):
        CONTEXT.set(CONTEXT.get() + 1)


class ThreadLocal(Holder):
    def __init__(self):
        LOCAL.value = 1.0

    def read(self):
        return LOCAL.value

    def change(self):
        LOCAL.value = 2.0


class Arguments(Holder):
    def __init__(self):
        self.arguments = argparse.Namespace(value=1.0)

    def read(self):
        return self.arguments.value

    def change(self):
        self.arguments.value = 2.0


class Environment(Holder):
    name = "TORCHEDGE_TEST_HOLDER"

    def __init__(self):
        os.environ.pop(self.name, None)

    def read(self):
        return float(os.getenv(self.name, "1"))

    def change(self):
        os.environ[self.name] = "2"


class Bytes(Holder):
    def __init__(self):
        self.bytes = bytearray([1])

    def read(self):
        return self.bytes[0]

    def change(self):
        self.bytes[0] = 2


class Doubling(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return Doubling.scaled(x)

    @staticmethod
    def scaled(x):
        return x * Doubling.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OfAutograd(Holder):
    def read(self):
        return Doubling.apply(torch.ones(()))

    def change(self):
        Doubling.factor += 1


HOLDERS = sorted(
    [
        *(
            k
            for k in [*globals().values()]
            if isinstance(k, type) and issubclass(k, Holder) and k is not Holder
        ),
        *map(row, ROWS),
    ],
    key=lambda kind: kind.__name__,
)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 0.5

    def forward(self, weight):
        return weight * self.factor


class Model(nn.Module):
    """A model with holders, modules in containers, hooks, a parametrization and layers that share weights."""

    def __init__(self, kinds: list[type[Holder]]) -> None:
        super().__init__()
        self.holders = [kind() for kind in kinds]
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        parametrize.register_parametrization(self.third, "weight", Half())
        self.unregistered = {"scale": [Half()]}
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for holder in self.holders:
            x = x * holder.read()
        return self.third(self.dropout(self.second(self.unregistered["scale"][0](self.first(x)))))


def _pre_hook(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


CHANGES = {
    "hook": lambda m: m.second.register_forward_hook(lambda module, args, output: output * 2),
    "pre-hook": lambda m: m.second.register_forward_pre_hook(_pre_hook),
    "module in a container": lambda m: setattr(m.unregistered["scale"][0], "factor", 2.0),
    "other module in a container": lambda m: m.unregistered.update(scale=[nn.Identity()]),
    "parametrization": lambda m: setattr(m.third.parametrizations.weight[0], "factor", 2.0),
    "second parametrization": lambda m: parametrize.register_parametrization(m.third, "weight", Half()),
    "no parametrization": lambda m: parametrize.remove_parametrizations(
        m.third, "weight", leave_parametrized=False
    ),
    "tied weights": lambda m: setattr(m.second, "weight", m.first.weight),
    "other layer": lambda m: setattr(m, "second", nn.Linear(4, 4)),
    "layer in another place": lambda m: m._modules.update(first=m.second, second=m.first),
    "own forward": lambda m: setattr(m.second, "forward", lambda x: x * 3),
    "other activation": lambda m: setattr(m, "dropout", nn.Tanh()),
}


def drawn(seed: int) -> tuple[Model, list[Any]]:
    """Return the model of a seed, and changes of it by their names, in the order in which to make them."""
    source = random.Random(seed)
    model = Model(source.sample(HOLDERS, 4))
    changes = [(type(holder).__name__, holder.change) for holder in model.holders]
    others = [name for name in sorted(CHANGES) if "parametrization" not in name]
    parametrized = source.choice([name for name in sorted(CHANGES) if "parametrization" in name])
    names = [*source.sample(others, 2), parametrized]
    changes += [(name, functools.partial(CHANGES[name], model)) for name in names]
    source.shuffle(changes)
    return model, changes
