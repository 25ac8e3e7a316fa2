"""Python state of many kinds that a model reads, each of which can change."""

from __future__ import annotations

import array
import contextvars
import ctypes
import enum
import functools
import io
import operator
import os
import sys
import threading
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
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
LEVEL = 1.0
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
VARIABLE = "TORCHEDGE_TEST_HOLDER"
Pair = namedtuple("Pair", "first second")


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = [1.0]

    def read(self):
        return self.value[0]


class InheritedSlots(Slots):
    __slots__ = ("more",)


class Descriptor:
    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind):
        return self.values.get("value", 1.0)


class Metaclass(type):
    level = 1.0


class Classes(metaclass=Metaclass):
    """State of a class, of its own class, of a descriptor and of a static method."""

    value = 1.0
    described = Descriptor()

    @staticmethod
    def static():
        return 1.0


def through():
    return GLOBAL["scale"] * FACTOR


def closure():
    value = 1.0

    def read():
        return value

    def change(number):
        nonlocal value
        value = number

    return read, change


@dataclass
class Settings:
    value: float = 1.0
    items: list[float] = field(default_factory=lambda: [1.0])


OWNED = [Settings(), Settings()]  # what others refer to weakly


class Mode(enum.Enum):
    LOW = 1.0
    HIGH = 2.0


class OwnList(list):
    value = 1.0


class OwnLength:
    value = 1.0

    def __len__(self):
        return int(self.value)

    def __call__(self):
        return self.value


class Other(Slots):
    __slots__ = ()

    def read(self):
        return 3.0


class Base:
    value = 1.0


class OtherBase:
    value = 2.0


class Attributes(Base):
    """Has attributes that code names by pieces, and one that no code names."""

    other_value = scale_1 = 1.0

    def __init__(self):
        self.unread, self.scale_1 = 0, 1.0

    def scaled(self, number):
        return number * self.scale_1

    doubled = functools.partialmethod(scaled, 2.0)


def shadow(item: Attributes) -> None:
    """Let an attribute take the place of one that no code names, and hide that of the class."""
    del item.unread
    item.other_value = 2.0


def replace_key(item: dict[Any, float]) -> None:
    item.clear()
    item[1.0] = 1.0


class Doubling(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return x * Doubling.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def function(value=1.0, *, more=1.0):
    return value * more


def copied(start: Any) -> Any:
    """Return a function of its own with the code and defaults of another."""
    made = FunctionType(start.__code__, globals(), "copied", start.__defaults__)
    made.__kwdefaults__ = dict(start.__kwdefaults__)
    return made


def set_static(value):
    Classes.static = staticmethod(lambda: value)


OTHER = (lambda value=1.0, *, more=1.0: value + more + 1).__code__
CONTAINERS = lambda: [{"a": [1.0]}, OrderedDict(b=1.0), defaultdict(float, c=1.0), deque([1.0]), {1.0}]  # noqa: E731


def sets(name: str, value: Any = 2.0) -> Callable[[Any], None]:
    """Return what sets an attribute."""
    return lambda x: setattr(x, name, value)


ROWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Defaults": (lambda: copied(function), lambda x: x(), sets("__defaults__", (2.0,))),
    "KeywordDefaults": (lambda: copied(function), lambda x: x(), lambda x: x.__kwdefaults__.update(more=3.0)),
    "Code": (lambda: copied(function), lambda x: x(), sets("__code__", OTHER)),
    "Dataclass": (Settings, lambda x: x.value, sets("value")),
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
    "Namespace": (lambda: SimpleNamespace(value=1.0), lambda x: x.value, sets("value")),
    "ListWithAttribute": (lambda: OwnList([1.0]), lambda x: x.value, sets("value")),
    "FunctionAttribute": (lambda: copied(function), lambda x: getattr(x, "value", 1.0), sets("value")),
    "Partial": (
        lambda: functools.partial(lambda given: given["value"], {"value": 1.0}), lambda x: x(),
        lambda x: x.args[0].update(value=2.0),
    ),
    "PartialAttribute": (
        lambda: functools.partial(function), lambda x: getattr(x, "value", 1.0),
        sets("value"),
    ),
    "Method": (lambda: Slots().read, lambda x: x(), lambda x: x.__self__.value.insert(0, 2.0)),
    "Slots": (Slots, lambda x: x.value[0], sets("value", [2.0])),
    "InheritedSlots": (InheritedSlots, lambda x: x.value[0], sets("value", [2.0])),
    "Descriptor": (
        Classes, lambda x: x.described, lambda x: Classes.__dict__["described"].values.update(value=2.0),
    ),
    "ClassAttribute": (Classes, lambda x: x.value, lambda x: setattr(Classes, "value", 2.0)),
    "Metaclass": (Classes, lambda x: type(x).level, lambda x: setattr(Metaclass, "level", 2.0)),
    "Static": (Classes, lambda x: x.static(), lambda x: set_static(2.0)),
    "Global": (lambda: through, lambda x: x(), lambda x: globals().update(FACTOR=2.0)),
    "GlobalEntry": (lambda: through, lambda x: x(), lambda x: GLOBAL.update(scale=2.0)),
    "Closure": (closure, lambda x: x[0](), lambda x: x[1](2.0)),
    "Enumeration": (lambda: [Mode.LOW], lambda x: x[0].value, lambda x: x.__setitem__(0, Mode.HIGH)),
    "OtherTensor": (
        lambda: [torch.ones(9)], lambda x: x[0][7], lambda x: x.__setitem__(0, torch.full((9,), 3.0)),
    ),
    "ContextVariable": (lambda: CONTEXT, lambda x: x.get(), lambda x: x.set(2.0)),
    "ThreadLocal": (lambda: LOCAL, lambda x: getattr(x, "value", 1.0), sets("value")),
    "Environment": (
        lambda: os.environ.pop(VARIABLE, None), lambda x: float(os.getenv(VARIABLE, "1")),
        lambda x: os.environ.__setitem__(VARIABLE, "2"),
    ),
    "Bytes": (lambda: bytearray([1]), lambda x: x[0], lambda x: x.__setitem__(0, 2)),
    "Autograd": (lambda: Doubling, lambda x: x.apply(torch.ones(())), sets("factor", 3.0)),
    "NameOfPieces": (Attributes, lambda x: getattr(x, f"scale_{1}"), sets("scale_1")),
    "NameWithDefault": (
        lambda: (Attributes(), ["scale_1"]), lambda x: getattr(x[0], x[1][0], "1"),
        lambda x: setattr(x[0], "scale_1", 2.0),
    ),
    "NameInMap": (
        lambda: [Attributes()], lambda x: next(map(getattr, x, ["scale" + "_1"])),
        lambda x: setattr(x[0], "scale_1", 2.0),
    ),
    "AttributeGetter": (
        lambda: (Attributes(), operator.attrgetter("scale" + "_1")), lambda x: x[1](x[0]),
        lambda x: setattr(x[0], "scale_1", 2.0),
    ),
    "MethodCaller": (
        lambda: (Attributes(), operator.methodcaller("sca" + "led", number=1.0)), lambda x: x[1](x[0]),
        lambda x: setattr(x[0], "scale_1", 2.0),
    ),
    "PartialMethod": (Attributes, lambda x: x.doubled(), sets("scale_1")),
    "HidesClassAttribute": (Attributes, lambda x: x.other_value, shadow),
    "OtherClass": (Slots, lambda x: x.read(), sets("__class__", Other)),
    "OtherBases": (
        lambda: type("Derived", (Base,), {"__slots__": ()}), lambda x: x.value,
        sets("__bases__", (OtherBase,)),
    ),
    "Reference": (
        lambda: weakref.ref(OWNED[0]), lambda x: x().value, lambda x: setattr(OWNED[0], "value", 2.0),
    ),
    "WeakValues": (
        lambda: weakref.WeakValueDictionary(key=OWNED[1]), lambda x: x["key"].value,
        lambda x: setattr(OWNED[1], "value", 2.0),
    ),
    "InUserDict": (lambda: UserDict(a=1.0), lambda x: x["a"], lambda x: x.update(a=2.0)),
    "InChainMap": (lambda: ChainMap({}, {"a": 1.0}), lambda x: x["a"], lambda x: x.update(a=2.0)),
    "KeyOfOtherType": (
        lambda: {1: 1.0}, lambda x: 2.0 if isinstance(next(iter(x)), float) else 1.0, replace_key,
    ),
    "MachineArray": (lambda: array.array("d", [1.0]), lambda x: x[0], lambda x: x.__setitem__(0, 2.0)),
    "MachineNumber": (lambda: ctypes.c_double(1.0), lambda x: x.value, sets("value")),
    "MemoryView": (lambda: memoryview(np.ones(1)), lambda x: x[0], lambda x: np.asarray(x).put(0, 2.0)),
    "TextInMemory": (lambda: io.StringIO("1"), lambda x: float(x.getvalue()), lambda x: x.write("2")),
    "ArrayShape": (lambda: np.arange(6.0).reshape(2, 3), lambda x: float(x[1][0]), sets("shape", (3, 2))),
    "RequiresGradient": (
        lambda: torch.ones(()), lambda x: 2.0 if x.requires_grad else 1.0, lambda x: x.requires_grad_(),
    ),
    "ModuleByName": (
        lambda: torch, lambda x: sys.modules["oracles.changing_models"].LEVEL,
        lambda x: globals().update(LEVEL=LEVEL + 1),
    ),
    "ModuleInModule": (
        lambda: torch, lambda x: getattr(x.nn.init, "torchedge_test", 1.0),
        lambda x: setattr(x.nn.init, "torchedge_test", 2.0),
    ),
    "Operators": (OwnLength, len, sets("value")),
    "Callable": (OwnLength, lambda x: x(), sets("value")),
}  # fmt: skip
"""Kinds by name: what the holder has, what is read of it, and how it changes in place."""


class Holder:
    """State of one kind: a forward pass calls `read`, which gives another value after `change`."""

    def __init__(self, start: Any, read: Any, change: Any) -> None:  # names of other kinds stay unread
        self.item, self._read, self._change = start(), read, change

    def read(self) -> Any:
        return self._read(self.item)

    def change(self) -> None:
        self._change(self.item)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 0.5

    def forward(self, weight):
        return weight * self.factor


class Model(nn.Module):
    """A model with holders, modules in containers, hooks, a parametrization and layers that share weights."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.holders = [Holder(*ROWS[kind]) for kind in kinds]
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        parametrize.register_parametrization(self.third, "weight", Half())
        self.unregistered = {"scale": [Half()]}
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for holder in self.holders:
            x = x * holder.read()
        return self.third(self.dropout(self.second(self.unregistered["scale"][0](self.first(x)))))


CHANGES = {
    "hook": lambda m: m.second.register_forward_hook(lambda module, args, output: output * 2),
    "pre-hook": lambda m: m.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
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
