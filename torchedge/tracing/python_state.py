"""The Python state that a forward pass may read: as text, and as a guard that microseconds compare.

PyTorch's Dynamo makes guards of the same kind, bound to its own bytecode front end and private classes. Here
the code of the model, the loss and every function that they name gives the names that it loads: of globals,
closures and attributes. The values under these names are the state, with the containers and objects that they
hold, hooks, modes, class attributes, what was patched in PyTorch, and PyTorch's own flags. Installed packages
are known by the time at which they were written, but for the modules that define a class of the model.

A text is portable where nothing else may decide (a file, the environment, an object without readable state):
equal texts mean equal captures, also in another process. The log says at level DEBUG why there is none.
"""

from __future__ import annotations

import builtins
import decimal
import dis
import enum
import functools
import gc
import hashlib
import io
import locale
import logging
import operator
import os
import random
import re
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, contains, getitem, is_, itemgetter, not_
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

_LOG = logging.getLogger(__name__)
_TORCH = ("torch", "torchvision")
_LIBRARIES = frozenset((*_TORCH, "torchedge", "numpy", *sys.stdlib_module_names))
"""Their code is known by version, and not followed."""
_CALLERS = "transformers.generation."
"""Modules whose classes models inherit, and which call the forward pass: it calls none of them."""
_PURE = frozenset(
    (
        *_TORCH, "math", "operator", "functools", "itertools", "typing", "__future__", "abc", "collections",
        "builtins", "contextlib", "copy", "dataclasses", "enum", "logging", "numbers", "types", "warnings",
    )
)  # fmt: skip
"""Modules in which nothing decides but what a text holds."""
_FOLLOWED = ("torch.nn.functional", "torch.functional")
"""Modules of PyTorch whose functions are followed, beside torch.nn.modules: what they name may be patched."""
_SWITCHED = frozenset(
    (
        "handle_torch_function", "has_torch_function", "has_torch_function_unary",
        "has_torch_function_variadic", "is_compiling", "is_exporting", "is_dynamo_compiling",
    )
)  # fmt: skip
"""Names that a capture itself replaces while it runs."""
_ATOMS = frozenset(
    (
        type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice,
        torch.dtype, torch.device, torch.memory_format, torch.layout, torch.finfo, torch.iinfo,
    )
)  # fmt: skip
_INERT = (logging.Logger, re.Pattern, PurePath)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_HOLDERS = frozenset(("argparse", "collections", "configparser", "functools", "weakref"))
"""Modules of classes whose own code reads what their objects hold, such as UserDict: no code names it."""
_TEXTS = (io.StringIO, io.BytesIO)
_CLOCKS = frozenset(("time", "datetime", "uuid", "secrets"))
_UNSEEDED = frozenset(("urandom", "getrandom", "SystemRandom", "default_rng"))
"""Names, in `os`, `random` and `numpy.random`, of what gives other numbers each time."""
_CHANGING = frozenset(
    ("open", "eval", "exec", "globals", "vars", "input", "compile", "__import__", "id", "hash")
)
_COMPUTED = frozenset(
    ("eval", "exec", "globals", "locals", "vars", "__dict__", "__getattribute__", "attrgetter", "asdict")
)
"""Code that names one of them may read any attribute."""
_WITH_NAMES = frozenset(("getattr", "hasattr", "setattr", "delattr"))
_UNCALLED = frozenset(
    (
        "__del__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
        "__init_subclass__", "__subclasshook__", "__class_getitem__", "__sizeof__", "__dir__", "__format__",
        "__deepcopy__", "__copy__", "__prepare_scriptable__",
    )
)  # fmt: skip
_MOST = 200_000
"""Objects of a state; what lies beyond is not compared."""
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
_hooks_of: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*_HOOKS)
_attribute = object.__getattribute__
_ABSENT = object()
_FUNCTIONS = (
    FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType
)  # fmt: skip


def _levels() -> list[Any]:
    loggers = [*logging.root.manager.loggerDict.items()]
    levels = [(name, each.level) for name, each in loggers if isinstance(each, logging.Logger)]
    return [logging.root.level, logging.root.manager.disable, *[entry for entry in levels if entry[1]]]


_ASKED: dict[str, Callable[[], Any]] = {
    "getcontext": lambda: (decimal.getcontext().prec, decimal.getcontext().rounding),
    "geterr": np.geterr,
    "get_printoptions": np.get_printoptions,
    "getrecursionlimit": sys.getrecursionlimit,
    "getswitchinterval": sys.getswitchinterval,
    "isenabled": gc.isenabled,
    "get_threshold": gc.get_threshold,
    "getcwd": os.getcwd,
    "cwd": os.getcwd,
    "getpid": os.getpid,
    "argv": lambda: sys.argv,
    "initial_seed": torch.initial_seed,
    "current_thread": lambda: threading.current_thread().name,
    "active_count": threading.active_count,
    "setlocale": lambda: locale.setlocale(locale.LC_ALL),
    "getlocale": lambda: locale.setlocale(locale.LC_ALL),
    "isEnabledFor": _levels,
    "getEffectiveLevel": _levels,
    "getLogger": _levels,
}
"""State of the process that functions of libraries return, under the names by which code asks for it."""


def _flags() -> tuple[Any, ...]:
    """Return the settings of PyTorch that decide about every capture in this thread."""
    return tuple([flag() for flag in _FLAGS]) + tuple([_precision(flag) for flag in _PRECISIONS])


def _precision(flag: Callable[[], Any]) -> Any:
    """Return a setting of precision; the old ones raise an error where the new ones were set."""
    try:
        return flag()
    except (RuntimeError, AttributeError) as error:
        return type(error).__name__


def _backend(path: str) -> Any:
    """Return a module of torch.backends, which answers faster than by its path; None where it is absent."""
    try:
        return attrgetter(path)(torch.backends)
    except AttributeError:
        return None


_backends = torch.backends
_FLAGS: list[Callable[[], Any]] = [
    torch.get_default_dtype,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    *[functools.partial(torch.is_autocast_enabled, kind) for kind in ("cpu", "cuda")],
    *[functools.partial(torch.get_autocast_dtype, kind) for kind in ("cpu", "cuda")],
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_autocast_cache_enabled,
    torch.get_num_threads,
    _backends.cuda.flash_sdp_enabled,
    _backends.cuda.mem_efficient_sdp_enabled,
    _backends.cuda.math_sdp_enabled,
    _backends.cuda.cudnn_sdp_enabled,
    _backends.mha.get_fastpath_enabled,
    functools.partial(attrgetter("enabled", "strategy"), _backend("opt_einsum.m") or _backends.opt_einsum),
    lambda: (_backends.mkldnn.enabled, _backends.mkldnn.deterministic, _backends.cudnn.enabled),
    lambda: (_backends.cudnn.benchmark, _backends.cudnn.deterministic),
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
]
_PRECISIONS: list[Callable[[], Any]] = [
    torch.get_float32_matmul_precision,
    lambda: (_backends.cudnn.allow_tf32, _backends.cuda.matmul.allow_tf32),
    lambda: _backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    lambda: _backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    functools.partial(attrgetter("fp32_precision"), _backends),
    *[
        functools.partial(attrgetter("fp32_precision"), _backend(name))
        for name in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn")
    ],
]


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of Python state: where it is, and both values (a marker where there was or is none)."""

    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path} ({_shown(self.before)}, then {_shown(self.now)})"

    @property
    def of_tensors(self) -> bool:
        """Whether tensors alone differ."""
        (old, before), (new, now) = tree_flatten(self.before), tree_flatten(self.now)
        return before == now and all(
            isinstance(b, torch.Tensor) if isinstance(a, torch.Tensor) else a is b or _equal(a, b)
            for a, b in zip(old, new, strict=True)
        )


def _shown(item: Any) -> str:
    if item is _ABSENT:
        return "absent"
    if type(item) in _ATOMS or (type(item) is list and all(type(each) in _ATOMS for each in item)):
        text = repr(item)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"a {type(item).__name__}"


@dataclass
class _Watched:
    """Places of values, and the values there.

    missing: names that mappings do not have. unhooked: attributes of modules that have no hooks. kinds:
    objects with their classes. arrays: what has its content in memory that no name leads to.
    """

    values: list[tuple[Mapping[str, Any], str, Any, str]] = field(default_factory=list)
    missing: list[tuple[dict[str, Any], frozenset[str], str]] = field(default_factory=list)
    unhooked: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    homes: list[tuple[Mapping[str, Any], frozenset[str], str]] = field(default_factory=list)
    boxes: list[tuple[Any, list[Any], str]] = field(default_factory=list)
    keyed: list[tuple[dict[Any, Any], list[Any], list[Any] | None, str]] = field(default_factory=list)
    arrays: list[tuple[Any, Any, str]] = field(default_factory=list)
    kinds: list[tuple[Any, type, str]] = field(default_factory=list)
    classes: dict[int, type] = field(default_factory=dict)  # by the id of their attributes' mapping


class PythonState:
    """The Python state that calls of `roots` may read, as it is now; it keeps what it refers to alive.

    roots: models, functions and plain values by name. modes: whether training modes of modules count.
    tracing: for a copy that is being traced: parameters, buffers and flags, which the trace exchanges, do not
    count. known: an earlier state of the same roots, whose names spare walks. text: None where something may
    decide that no text can hold. signature: of this process. generators: of random numbers, with their
    places. iterators: places of what a read changes. clocks: names of modules that answer otherwise each
    time.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        modes: bool = True,
        tracing: bool = False,
        known: PythonState | None = None,
    ) -> None:
        names, everything = ({"forward", "__call__", "_call_impl"}, False) if known is None else known.names
        while True:
            walk = _Walk(names, everything, modes, tracing)
            text = walk.text_of(roots)
            if len(walk.names) == len(names) and walk.everything == everything:
                break
            names, everything = set(walk.names), walk.everything
        self.names: tuple[set[str], bool] = names, everything  # whether of all attributes
        self._watched = walk.watched
        self._keep_alive = walk.alive
        self.generators, self.iterators, self.clocks = walk.generators, walk.iterators, walk.clocks
        self._now = () if tracing else _flags()
        self._tracing = tracing
        versions = [sys.version, *[getattr(sys.modules.get(name), "__version__", "") for name in _TORCH]]
        self._asked = [(name, _ASKED[name], repr(_ASKED[name]())) for name in sorted(walk.asked)]
        asked = [answer for _, _, answer in self._asked]
        whole = f"{versions}{self._now}{text}{asked}"
        here = f"{whole}{walk.weights}"
        self.signature = hashlib.sha256(here.encode("utf-8", "backslashreplace")).hexdigest()
        self.text = whole if walk.unknown is None else None
        if walk.unknown is not None:
            _LOG.debug("what decides about a capture has no text: %s", walk.unknown)
        self._prepare()

    def _prepare(self) -> None:
        seen = self._watched
        present = [entry[:3] for entry in seen.values if entry[2] is not _ABSENT]
        slots = [(home.item, key, value) for home, key, value in present if isinstance(home, _Slots)]
        self._items, self._slots, self._filled = _columns(slots)  # read without a call of Python's
        mapped = [entry for entry in present if not isinstance(entry[0], _Slots)]
        self._maps, self._keys, self._values = _columns(mapped)
        self._absent_maps, self._absent_keys, _ = _columns([e[:3] for e in seen.values if e[2] is _ABSENT])
        missing: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for home, names, _ in seen.missing:
            missing.setdefault(id(home), (home, set()))[1].update(names)
        self._missing = [(home.keys(), names) for home, names in missing.values()]
        self._homes: list[Any] = [home for home, _, _ in seen.homes if home]
        self._homes += [home for home, _, _ in seen.homes if not home]
        self._home_sizes, self._home_ends = [*map(len, self._homes)], self._newest()
        self._kinds = [item for item, _, _ in seen.kinds], [kind for _, kind, _ in seen.kinds]
        self._unhooked = [attributes for attributes, _ in seen.unhooked]
        sized: list[Any] = [entry[0] for entry in (*seen.boxes, *seen.keyed)]
        # Most are empty, such as the children of layers: whether they are true is known faster than a size.
        plain = [not len(box) and not hasattr(type(box), "__bool__") for box in sized]
        self._empty: list[Any] = [*compress(sized, plain)]
        self._sized: list[Any] = [*compress(sized, map(not_, plain))]
        self._sizes = [*map(len, self._sized)]
        boxes = [(box, items) for box, items, _ in seen.boxes if items]
        self._lists = [box for box, _ in boxes if not isinstance(box, set)]
        self._listed = [item for box, items in boxes if not isinstance(box, set) for item in items]
        self._sets = [(box, items) for box, items in boxes if isinstance(box, set)]
        keyed = [(box, keys, items) for box, keys, items, _ in seen.keyed if keys]
        self._dicts = [box for box, _, _ in keyed]
        self._dict_keys = [key for _, keys, _ in keyed for key in keys]
        self._full = [box for box, _, items in keyed if items is not None]
        self._held = [item for _, _, items in keyed if items is not None for item in items]

    def same(self) -> bool:
        """Return whether nothing has changed, by identity: an equal value in place of another is a change."""
        try:
            return (
                all(map(is_, map(getitem, self._maps, self._keys), self._values))
                and all(map(is_, map(_attribute, self._items, self._slots), self._filled))
                and not any(map(contains, self._absent_maps, self._absent_keys))
                and all([present.isdisjoint(names) for present, names in self._missing])
                and [*map(type, self._kinds[0])] == self._kinds[1]
                and not any(chain.from_iterable(map(_hooks_of, self._unhooked)))
                and [*map(len, self._homes)] == self._home_sizes
                and self._newest() == self._home_ends
                and not any(self._empty)
                and [*map(len, self._sized)] == self._sizes
                and all(map(is_, chain.from_iterable(self._lists), self._listed))
                and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._held))
                and all(map(is_, chain.from_iterable(self._dicts), self._dict_keys))
                and all([_content(array) == content for array, content, _ in self._watched.arrays])
                and all([len(box) == len(box.intersection(items)) for box, items in self._sets])
                and (self._tracing or _flags() == self._now)
                and all([repr(ask()) == answer for _, ask, answer in self._asked])
            )
        except (LookupError, AttributeError, ValueError, RuntimeError):  # a name that is gone, an empty cell
            return False

    def _newest(self) -> list[str]:
        """Return the last name of each mapping that has any: a name that is set for the first time is it."""
        return [*map(next, map(reversed, self._homes))]

    def changes(self) -> list[Change]:
        """Return what has changed, in the order in which it was found."""
        found: list[Change] = []
        seen = self._watched
        for home, key, value, path in seen.values:
            now = home.get(key, _ABSENT)
            if now is not value and not _equal(now, value):
                found.append(Change(_joined(path, key), value, now))
        for item, kind, path in seen.kinds:
            if type(item) is not kind:
                found.append(Change(_joined(path, "__class__"), kind, type(item)))
        for attributes, path in seen.unhooked:
            found += [Change(_joined(path, k), {}, attributes[k]) for k in _HOOKS if attributes[k]]
        for home, names, path in seen.homes:
            for key in home.keys() - names:
                if key in self.names[0] or self.names[1]:
                    found.append(Change(_joined(path, key), _ABSENT, home[key]))
        for home, names, path in seen.missing:
            found += [Change(_joined(path, key), _ABSENT, home[key]) for key in sorted(names & home.keys())]
        for box, items, path in seen.boxes:
            now = [*box]
            same = set(now) == set(items) if isinstance(box, set) else _equal_lists(now, items)
            if not same:
                found.append(Change(path, items, now))
        for mapping, keys, held, path in seen.keyed:
            if [*mapping] != keys or (held is not None and not _equal_lists([*mapping.values()], held)):
                before = {} if held is None else dict(zip(keys, held, strict=True))
                apart = [
                    [old[key] for key in old if not _equal_lists([old[key]], [new.get(key, _ABSENT)])]
                    for old, new in ((before, mapping), (mapping, before))
                ]
                found.append(Change(path, *(apart if apart != [[], []] else (held, [*mapping.values()]))))
        found += [Change(path, a, a) for a, content, path in seen.arrays if _content(a) != content]
        for name, ask, answer in self._asked:
            if repr(ask()) != answer:
                found.append(Change(f"what {name} returns", answer, repr(ask())))
        if not self._tracing and _flags() != self._now:
            found.append(Change("a setting of PyTorch (autocast, default dtype, torch.backends)", "", ""))
        return found

    def restore(self) -> None:
        """Restore every value."""
        seen = self._watched
        for home, key, value, _ in seen.values:
            if home.get(key, _ABSENT) is value:
                continue
            if isinstance(home, MutableMapping):
                if value is _ABSENT:
                    del home[key]
                else:
                    home[key] = value
            elif (kind := seen.classes.get(id(home))) is not None:
                if value is _ABSENT:
                    delattr(kind, key)
                else:
                    setattr(kind, key, value)
        for attributes, _ in seen.unhooked:
            for hooks in _hooks_of(attributes):
                hooks.clear()
        for home, names, _ in seen.homes:
            if isinstance(home, dict):
                for key in home.keys() - names:
                    del home[key]
        for home, names, _ in seen.missing:
            for key in names & home.keys():
                del home[key]
        for box, items, _ in seen.boxes:
            if isinstance(box, set):
                box.intersection_update(items)
                box.update(items)
            elif not _equal_lists([*box], items):
                box.clear()
                box.extend(items)
        for mapping, keys, held, _ in seen.keyed:
            if held is None:
                for key in mapping.keys() - set(keys):
                    del mapping[key]
            elif [*mapping] != keys or not _equal_lists([*mapping.values()], held):
                mapping.clear()
                mapping.update(zip(keys, held, strict=True))
        for array, content, _ in seen.arrays:
            if isinstance(array, np.ndarray) and not array.dtype.hasobject and _content(array) != content:
                shape, dtype, data = content
                array[...] = np.frombuffer(data, dtype).reshape(shape)


def identity_of(*parts: Any) -> str | None:
    """Return the text of modules, functions, classes and plain values; None where there is none."""
    return PythonState({str(place): part for place, part in enumerate(parts)}).text


class Guard:
    """Numbers the Python states in which captures were made; a number stands for one state.

    roots, modes: as in `PythonState`.
    """

    def __init__(self, roots: Mapping[str, Any], *, modes: bool = True) -> None:
        self._roots, self._modes = roots, modes
        self._states: dict[str, tuple[int, PythonState]] = {}
        self._current: PythonState | None = None
        self.number = 0
        self.changes: list[Change] = []

    def check(self) -> int:
        """Return the number of the present state; `changes` holds what a new one differs in."""
        if self._current is not None and self._current.same():
            return self.number
        for number, state in self._states.values():
            if state.same():
                self._current, self.number = state, number
                return number
        fresh = PythonState(self._roots, modes=self._modes)
        number = self._states[fresh.signature][0] if fresh.signature in self._states else len(self._states)
        if self._current is not None and fresh.signature not in self._states:
            self.changes = self._current.changes()
        self._states[fresh.signature] = (number, fresh)
        self._current, self.number = fresh, number
        return number

    @property
    def text(self) -> str | None:
        """The portable text of the present state."""
        self.check()
        return None if self._current is None else self._current.text


# names in code ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CodeNames:
    """Names in code: globals that it loads, attributes and constants, modules, whether it computes names."""

    globals: frozenset[str]
    read: frozenset[str]
    imported: frozenset[str]
    computed: bool


_code_names: WeakKeyDictionary[CodeType, _CodeNames] = WeakKeyDictionary()
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "IMPORT_FROM")


def _names_in(code: CodeType) -> _CodeNames:
    known = _code_names.get(code)
    if known is not None:
        return known
    loaded, read, imported = set[str](), set[str](), set[str]()
    instructions = [*dis.get_instructions(code)]
    computed = False
    for place, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        if kind in _GLOBAL:
            loaded.add(str(name))
            if name in _WITH_NAMES:
                computed = computed or _is_computed(instructions[place + 1 : place + 40])
        elif kind in _ATTRIBUTE and not _only_counts(instructions[place : place + 8]):
            read.add(str(name))
        elif kind == "IMPORT_NAME":
            imported.add(str(name))
    computed = computed or not _COMPUTED.isdisjoint(loaded | read)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names_in(constant)
            loaded, read, imported = loaded | inner.globals, read | inner.read, imported | inner.imported
            computed = computed or inner.computed
        elif isinstance(constant, str) and len(constant) < 200:
            parts = constant.split(".")
            read.update(part for part in parts if part.isidentifier())
            if len(parts) > 1 and all(map(str.isidentifier, parts)):  # a module's name
                read.add(constant)
    names = _CodeNames(frozenset(loaded), frozenset(read), frozenset(imported), computed)
    _code_names[code] = names
    return names


def _only_counts(instructions: list[dis.Instruction]) -> bool:
    """Return whether an attribute is loaded to be counted up or appended to, as in `self.calls += 1`."""
    first, *following = instructions
    if following and following[0].argval == "append" and following[0].opname in _ATTRIBUTE:
        return True
    for instruction in following:
        if instruction.opname == "STORE_ATTR":
            return bool(instruction.argval == first.argval)
        if instruction.opname not in _OF_COUNTERS:
            return False
    return False


_OF_COUNTERS = frozenset(
    ("LOAD_CONST", "LOAD_SMALL_INT", "BINARY_OP", "INPLACE_ADD", "SWAP", "ROT_TWO", "CACHE")
)


def _is_computed(following: Iterable[dis.Instruction]) -> bool:
    """Return whether the call of getattr that begins here has another name than one constant.

    The depth of the stack says which instructions push the second argument; none does behind a branch.
    """
    depth, starts, pushing = 0, {0: 0}, list[dis.Instruction]()
    for instruction in following:
        if instruction.opname in _CALLS and instruction.arg == depth:
            name = pushing[starts.get(1, 0) : starts.get(2) if depth > 2 else None]
            return [i.opname for i in name] != ["LOAD_CONST"] or not isinstance(name[0].argval, str)
        if instruction.opcode in _JUMPS:
            return True
        if instruction.opname not in _NO_OPERATION:
            depth += dis.stack_effect(instruction.opcode, instruction.arg)
            pushing.append(instruction)
            starts[depth] = len(pushing)
    return True


_NO_OPERATION = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "KW_NAMES"))
_CALLS = frozenset(("PRECALL",) if "PRECALL" in dis.opmap else ("CALL", "CALL_FUNCTION"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


# texts ------------------------------------------------------------------------------------------------------


class _Literal(str):
    """A text that a list of texts shows as it is: each level of quotes would double its length."""

    __slots__ = ()
    __repr__ = str.__str__


def _lists_itself(item: dict[Any, Any]) -> bool:
    """Return whether a mapping lists what it holds, by methods of Python's own mappings."""
    kind = type(item)
    return all(
        getattr(kind, name) in (getattr(dict, name), getattr(OrderedDict, name))
        for name in ("__iter__", "values", "items")
    )


class _Walk:
    """One walk through the state: texts of objects, and the places to compare. Names that it meets are added.

    Two or three walks reach every name: an attribute that was passed over may be named later.
    """

    def __init__(self, names: set[str], everything: bool, modes: bool, tracing: bool) -> None:
        self.names, self.everything = set(names), everything
        self.modes, self.tracing = modes, tracing
        self.watched = _Watched()
        self.unknown: str | None = None
        self.alive: list[Any] = []
        self.generators: list[tuple[str, Any]] = []
        self.iterators: list[str] = []
        self.clocks: list[str] = []
        self.asked = set[str]()
        self.weights: list[int] = []
        self._met: dict[int, int] = {}
        self._seen: set[tuple[int, str | frozenset[str]]] = set()
        self._weights: set[int] = set()
        self._in_library = False
        self._in_package = False
        self._homes: set[str] = set()

    def text_of(self, roots: Mapping[str, Any]) -> str:
        """Return the text of everything."""
        for root in roots.values():
            if isinstance(root, torch.nn.Module):
                self._weights.update(map(id, (*root.parameters(), *root.buffers())))
                kinds = {kind for module in root.modules() for kind in type(module).__mro__}
                self._homes.update([k.__module__ for k in kinds if not k.__module__.startswith(_CALLERS)])
            else:
                self._homes.add(str(getattr(root, "__module__", "")))
        try:
            texts = [(name, self.of(root, name)) for name, root in roots.items()]
            return f"{texts}{self.of(torch.Tensor, 'torch.Tensor')}"
        except RecursionError:
            self._unknown("a state that is nested too deeply")
            return f"too deep {id(self)}"

    def _packaged(self, module: object) -> str | None:
        """Return the state of an installed package whose code is known by it; None for code that is followed.

        Followed are the user's own code, and of packages the modules that define a class of the model.
        """
        name = str(module)
        if name in self._homes or _room(name) in _LIBRARIES:
            return None
        return _package(_room(name))

    def _unknown(self, reason: str) -> None:
        if self.unknown is None and not self._in_library:
            self.unknown = reason.strip()

    def of(self, item: Any, path: str) -> _Literal:
        """Return the text of an object."""
        kind = type(item)
        if kind in _ATOMS:
            return _Literal(f"{kind.__name__} {item!r}")
        if id(item) in self._met:
            return _Literal(f"#{self._met[id(item)]}")
        if len(self._met) >= _MOST:
            self._unknown(f"more than {_MOST} objects")
            return _Literal("beyond")
        self._met[id(item)] = len(self._met)
        self.alive.append(item)
        return _Literal(self._text(item, kind, path))

    def _text(self, item: Any, kind: type, path: str) -> str:
        text = self._container(item, path)
        if text is None:
            text = self._callable(item, path)
        if text is not None:
            return text
        if isinstance(item, torch.Tensor):
            return self._tensor(item, path)
        if isinstance(item, torch.nn.Module) and "_modules" in vars(item):  # a failed export empties some
            return self._module(item, path)
        if isinstance(item, type):
            with self._within(item.__module__, self._in_library):
                return self._class(item)
        if isinstance(item, ModuleType):
            return self._namespace(item, frozenset(self.names), path)
        if isinstance(item, enum.Enum):
            return f"{self.of(kind, kind.__qualname__)} {item.name} {self._attributes(item, path)}"
        if isinstance(item, ReferenceType):
            return f"reference to {self.of(item(), path)}"
        if isinstance(item, _TEXTS) or _is_buffer(item):
            return self._bytes(item, path)
        if isinstance(item, _GENERATORS):
            self.generators.append((path, item))
        elif isinstance(item, Iterator) and not isinstance(item, io.IOBase) and not self._in_package:
            self.iterators.append(path)
        if isinstance(item, _INERT):
            return f"{kind.__qualname__} {getattr(item, 'name', None) or str(item)}"
        return self._object(item, path)

    def _container(self, item: Any, path: str) -> str | None:
        if isinstance(item, os._Environ):
            self._unknown("module os")
            return f"environment {self.of(item._data, 'os.environ')}"  # type: ignore[attr-defined]
        if isinstance(item, tuple):
            texts = [self.of(each, f"{path}[{place}]") for place, each in enumerate(item)]
            return f"{type(item).__name__} {texts}"
        if isinstance(item, (list, deque, bytearray)):
            self.watched.boxes.append((item, [*item], path))
            texts = [self.of(each, f"{path}[{place}]") for place, each in enumerate([*item])]
            return f"{type(item).__name__} {texts}{self._attributes(item, path)}"
        if isinstance(item, (dict, types.MappingProxyType)):
            if isinstance(item, dict) and _lists_itself(item):
                self.watched.keyed.append((item, [*item], [*item.values()], path))
                pairs = [*item.items()]
            else:  # asking a lazy mapping for its items may import what they stand for
                pairs = [*(dict.items(item) if isinstance(item, dict) else item.items())]
            entries = [(self.of(key, path), self.of(value, f"{path}[{key!r:.40}]")) for key, value in pairs]
            return f"{type(item).__name__} {entries}{self._attributes(item, path)}"
        if isinstance(item, (set, frozenset)):
            if isinstance(item, set):
                self.watched.boxes.append((item, [*item], path))
            return f"set {sorted([self.of(each, path) for each in item])}"
        if isinstance(item, np.ndarray):
            return self._bytes(item, path)
        return None

    def _bytes(self, item: Any, path: str) -> str:
        """Return the text of an object whose content is compared."""
        content = _content(item)
        self.watched.arrays.append((item, content, path))
        self._unknown(type(item).__name__)
        return f"{type(item).__name__} {_digest(content)} {id(item)}"

    def _callable(self, item: Any, path: str) -> str | None:
        if isinstance(item, FunctionType):
            home = item.__globals__.get("__name__")
            followed = _room(home) in _TORCH or not _from_library(item)
            with self._within(home, _room(home) in _TORCH if followed else self._in_library):
                return self._function(item)
        if isinstance(item, MethodType):
            return f"method {self.of(item.__func__, path)} of {self.of(item.__self__, path)}"
        if isinstance(item, (staticmethod, classmethod)):
            return f"{type(item).__name__} {self.of(item.__func__, path)}"
        if isinstance(item, property):
            return f"property {[self.of(part, path) for part in (item.fget, item.fset)]}"
        if isinstance(item, functools.cached_property):
            return f"cached {self.of(item.func, path)}"
        if isinstance(item, (operator.attrgetter, operator.methodcaller)):
            reduced: Any = item.__reduce__()
            kind, parts = reduced[:2]  # of keyword arguments: a partial
            texts = [part for part in (*getattr(kind, "args", ()), *parts) if isinstance(part, str)]
            self.names.update(name for text in texts for name in text.split("."))
            return f"calls by names {self.of((kind, parts), path)}"
        if isinstance(item, (functools.partial, functools.partialmethod)):
            parts = [self.of(part, path) for part in (item.func, item.args, item.keywords)]
            return f"partial {parts}{self._attributes(item, path)}"
        if isinstance(item, functools._lru_cache_wrapper):
            return f"memoized {self.of(item.__wrapped__, path)}"
        if isinstance(item, CellType):
            return f"cell {self._cell(item, path)}"
        if isinstance(item, ContextVar):
            self._unknown("a context variable")
            return f"context variable {self.of(self._watch(_Slots(_Context(item)), 'value', path), path)}"
        if isinstance(item, _FUNCTIONS):
            home = str(
                getattr(item, "__module__", None) or getattr(item, "__objclass__", type(None)).__module__
            )
            owner = getattr(item, "__self__", None)
            bound = owner is not None and not isinstance(owner, (ModuleType, type))
            if bound or not (
                _room(home) in _PURE or home == "None" or vars(builtins).get(item.__name__) is item
            ):
                self._unknown(f"{type(item).__name__} {item.__name__}")
            if (home in _CLOCKS or item.__name__ in _UNSEEDED) and not self._in_library:
                self.clocks.append(f"{home}.{item.__name__}")
            of = f" of {self.of(owner, path)}" if bound else ""
            return f"built in {home}.{item.__qualname__}{of}"
        return None

    def _cell(self, cell: CellType, path: str) -> _Literal:
        content = self._watch(_Slots(cell), "cell_contents", path)
        return _Literal("empty") if content is _ABSENT else self.of(content, path)

    # attributes --------------------------------------------------------------------------------------------

    def _watch(self, home: Mapping[str, Any], key: str, path: str) -> Any:
        """Compare what a mapping holds under a name from now on; returns it."""
        value = home.get(key, _ABSENT)
        self.watched.values.append((home, key, value, path))
        return value

    def _wanted(self, name: str) -> bool:
        return name in self.names or (self.everything and name not in _OF_MODULES)

    def _attributes(self, item: Any, path: str, skipped: frozenset[str] = frozenset()) -> str:
        """Return the text of an object's attributes that code names."""
        home, texts = getattr(item, "__dict__", None), list[tuple[str, str]]()
        wanted = (lambda name: True) if _reads_itself(type(item)) else self._wanted
        if isinstance(home, dict):
            self.watched.homes.append((home, frozenset(home), path))
            texts = [
                (name, self.of(self._watch(home, name, path), _joined(path, name)))
                for name in [*home]
                if name not in skipped and wanted(name)
            ]
        for name in filter(wanted, _slots_of(type(item))):
            slots = _Slots(item)
            value = slots.get(name, _ABSENT)
            if slots.get(name, _ABSENT) is value:  # C structures make a number anew each time
                self._watch(slots, name, path)
            texts.append((name, "absent" if value is _ABSENT else self.of(value, _joined(path, name))))
        return str(texts) if texts else ""

    def _object(self, item: Any, path: str) -> str:
        kind = type(item)
        self._watch_class(item, path)
        has_state = hasattr(item, "__dict__") or _slots_of(kind)
        if not has_state or (_room(kind.__module__) in _LIBRARIES and _room(kind.__module__) not in _PURE):
            self._unknown(f"{kind.__name__} {getattr(item, '__name__', '')}")
            own = "" if self._in_library else self._attributes(item, path)
            return f"object {kind.__module__}.{kind.__qualname__} at {id(item)} {own}"
        return f"object {self.of(kind, kind.__qualname__)} {self._attributes(item, path)}"

    def _watch_class(self, item: Any, path: str) -> None:
        if not self.tracing:  # modules may change theirs in their first call
            self.watched.kinds.append((item, type(item), path))

    def _module(self, module: torch.nn.Module, path: str) -> str:
        own = vars(module)
        self._watch_class(module, path)
        weights = [
            (kind, name, None if tensor is None else self._form(tensor))
            for kind in ("_parameters", "_buffers")
            for name, tensor in own.get(kind, {}).items()
        ]
        for kind in ("_parameters", "_buffers"):
            held = None if self.tracing else [*own[kind].values()]
            self.watched.keyed.append((own[kind], [*own[kind]], held, _joined(path, kind)))
        self.watched.keyed.append((own["_modules"], [*own["_modules"]], [*own["_modules"].values()], path))
        children = [(name, self.of(child, _joined(path, name))) for name, child in own["_modules"].items()]
        mode = self._watch(own, "training", path) if self.modes else ""
        skipped = frozenset(("_parameters", "_buffers", "_modules", "training"))
        if self.tracing:  # recurrent layers keep their weights here too
            skipped |= {"_flat_weights", "_flat_weight_refs"}
        if not any(own.get(name, True) for name in _HOOKS):
            self.watched.unhooked.append((own, path))
            skipped |= {*_HOOKS}
        kind_text = self.of(type(module), type(module).__qualname__)
        return f"module {kind_text} {mode} {weights} {children} {self._attributes(module, path, skipped)}"

    def _form(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the form of a weight, whose content does not decide, and which other weight it is."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not self.tracing:
            self._unknown(f"a weight of {type(tensor).__qualname__}")
        first = self._met.setdefault(id(tensor), len(self._met))
        self.alive.append(tensor)
        self.weights.append(id(tensor))
        form = tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)
        return first, type(tensor).__name__, tensor.requires_grad, tensor.is_leaf, *form

    def _tensor(self, tensor: torch.Tensor, path: str) -> str:
        """Return the text of a tensor outside of parameters and buffers, whose content counts."""
        if self.tracing or id(tensor) in self._weights:
            return f"weight {self._form(tensor)}"
        self._unknown(type(tensor).__name__)
        content = _content(tensor)
        self.watched.arrays.append((tensor, content, path))
        return f"tensor {self._form(tensor)} {id(tensor)} {_digest(content)}"

    # classes and functions ---------------------------------------------------------------------------------

    @contextmanager
    def _within(self, module: object, library: bool) -> Iterator[None]:
        """Note whether what code of a module names is that of an installed package, or of a library."""
        outside, room = (self._in_package, self._in_library), _room(module)
        if room not in _LIBRARIES:  # whose functions wrap those of others
            self._in_package = _package(room) is not None
        self._in_library = library
        try:
            yield
        finally:
            self._in_package, self._in_library = outside

    def _class(self, item: type) -> str:
        name = f"class {item.__module__}.{item.__qualname__}"
        if (package := self._packaged(item.__module__)) is not None:
            return f"{name} {package}"
        own, known = vars(item), _room(item.__module__) in _LIBRARIES
        texts: list[Any] = []
        if not known or _room(item.__module__) in _TORCH:
            self.watched.homes.append((own, frozenset(own), item.__qualname__))
            self.watched.classes[id(own)] = item
            is_module = issubclass(item, torch.nn.Module)
            unnamed = _OF_FUNCTIONS if issubclass(item, torch.autograd.Function) else frozenset()
            for key in [*own]:
                special = key.startswith("__") and key.endswith("__")
                called = special and isinstance(own[key], FunctionType) and key not in _UNCALLED
                if is_module and key == "__init__":
                    called = False
                if self.tracing and item is torch.nn.Module and special:
                    continue  # the trace exchanges some
                if (
                    not (key in self.names or key in unnamed or called)
                    or key in _SWITCHED
                    or key in _OF_CLASSES
                ):
                    continue
                value = self._watch(own, key, item.__qualname__)
                if known and isinstance(value, FunctionType) and not _followed(value):
                    continue
                text = self.of(value, f"{item.__qualname__}.{key}")
                if not known or isinstance(value, FunctionType) or not isinstance(value, _FUNCTIONS):
                    texts.append((key, text))
            bases = self._watch(_Slots(item), "__bases__", item.__qualname__)
            texts = [[self.of(base, base.__qualname__) for base in bases], *texts]
        if not known and type(item) is not type:
            texts.append(self.of(type(item), type(item).__qualname__))
        return f"{name} {texts}"

    def _function(self, item: FunctionType) -> str:
        title = f"{item.__globals__.get('__name__')}.{item.__qualname__}"
        known = _from_library(item)
        cells = dict(zip(item.__code__.co_freevars, item.__closure__ or (), strict=True))
        closure = [self._cell(cell, f"{name} of {item.__qualname__}") for name, cell in cells.items()]
        if known and not _followed(item):
            if _room(str(item.__globals__.get("__name__"))) not in _PURE:
                self._unknown(f"function {title}")
            read = self.of(os.environ, "os.environ") if item is os.getenv else ""
            return f"function {title} {closure} {read}"
        if (package := self._packaged(item.__globals__.get("__name__"))) is not None:
            return f"function {title} {package} {_code_text(item.__code__)} {closure}"
        names = _names_in(item.__code__)
        self.names |= names.read
        if not known:
            self.everything = self.everything or names.computed
            if names.globals & _CHANGING:
                self._unknown(f"{sorted(names.globals & _CHANGING)} in {item.__name__}")
            self.asked.update(_ASKED.keys() & (names.read | names.globals))
        own_globals = names.globals - _SWITCHED
        if not known and "globals" in names.globals:  # `globals()["name"]`
            own_globals |= {n for n in item.__code__.co_consts if type(n) is str and n in item.__globals__}
        globals_ = [(name, self._global(item, name, names)) for name in sorted(own_globals)]
        imported = set(names.imported)
        if not known and not names.read.isdisjoint(("modules", "import_module")):
            imported.update(n for n in names.read if _room(n) not in _LIBRARIES and n in sys.modules)
        for name in sorted(imported):
            module = sys.modules.get(name)
            if not known and _room(name) not in _PURE:
                self._unknown(f"an import of {name} in {item.__name__}")
            if isinstance(module, ModuleType):
                globals_.append((f"import {name}", self._namespace(module, names.read, name)))
        if known:
            return f"function {title} {closure} {globals_}"
        slots = _Slots(item)
        self._watch(slots, "__code__", item.__qualname__)
        more = [
            self.of(self._watch(slots, part, item.__qualname__), f"{part} of {item.__qualname__}")
            for part in ("__defaults__", "__kwdefaults__")
        ]
        own = self._attributes(item, title)
        return f"function {_code_text(item.__code__)} {more} {closure} {globals_} {own}"

    def _global(self, item: FunctionType, name: str, names: _CodeNames) -> str:
        path = f"global of {item.__globals__.get('__name__')}"
        if _from_library(item) and name not in item.__globals__:
            return ""
        value = self._watch(item.__globals__, name, path)
        if value is _ABSENT:
            value = self._watch(vars(builtins), name, "builtins")
            return "" if value is _ABSENT or not isinstance(value, FunctionType) else self.of(value, name)
        if isinstance(value, ModuleType):
            if _room(value.__name__) not in _PURE and not _from_library(item):
                self._unknown(f"module {value.__name__}")
            return self._namespace(value, names.read, value.__name__)
        return self.of(value, f"{path}: {name}")

    def _namespace(self, module: ModuleType, read: Iterable[str], path: str) -> _Literal:
        """Return the text of the names in a module that code reads."""
        home, texts, read = vars(module), list[tuple[str, str]](), frozenset(read)
        if (id(module), read) in self._seen:  # modules name one another
            return _Literal(f"module {module.__name__}")
        self._seen.add((id(module), read))
        if module.__name__ in _CLOCKS and not self._in_library:
            self.clocks.append(module.__name__)
        if not self._in_library:
            self.watched.missing.append((home, read - home.keys() - _SWITCHED, path))
        for name in sorted(home.keys() & read):
            known = name in _SWITCHED or (id(module), name) in self._seen
            if known and not isinstance(home[name], ModuleType):  # which code may read other names of
                texts.append((name, ""))
                continue
            self._seen.add((id(module), name))
            value = home[name] if known else self._watch(home, name, path)
            if name in _UNSEEDED and not self._in_library:
                self.clocks.append(f"{path}.{name}")
            if isinstance(value, ModuleType):
                texts.append((name, self._namespace(value, read, f"{path}.{name}")))
            elif not isinstance(value, FunctionType) and (
                _room(module.__name__) in _LIBRARIES or self._packaged(module.__name__) is not None
            ):
                plain = type(value) in _ATOMS and not name.startswith("_")
                plain = plain or (isinstance(value, os._Environ) and not self._in_library)
                texts.append((name, self.of(value, path) if plain or _is_foreign(value) else ""))
            else:
                texts.append((name, self.of(value, f"{path}.{name}")))
        return _Literal(f"module {module.__name__} {texts}")


_OF_FUNCTIONS = frozenset(("forward", "backward", "vjp", "jvp", "setup_context"))
"""Methods of autograd's functions, which no code names."""
_OF_MODULES = frozenset(("__globals__", "__builtins__", "__loader__", "__spec__"))
"""Names that lead from a function to all of its module, and to how it was loaded."""
_OF_CLASSES = frozenset(
    (
        "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__",
        "__abstractmethods__",
    )
)  # fmt: skip


class _Context:
    """A context variable as an object: `value` is its value in this thread."""

    def __init__(self, item: ContextVar[Any]) -> None:
        self.item = item

    value = property(lambda self: self.item.get(), lambda self, value: self.item.set(value))


class _Slots(MutableMapping[str, Any]):
    """The slots of an object, or the content of a cell, as a mapping."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self.item, name)
        except (AttributeError, ValueError, LookupError):  # an empty slot, cell or context variable
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        with suppress(AttributeError):  # a member of a C structure is read-only
            object.__setattr__(self.item, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.item, name)

    def __iter__(self) -> Iterator[str]:
        return (slot for slot in _slots_of(type(self.item)) if slot in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_slots: WeakKeyDictionary[type, list[str]] = WeakKeyDictionary()


def _slots_of(kind: type) -> list[str]:
    """Return the names of a class's slots, those of its bases among them."""
    known = _slots.get(kind)
    if known is None:
        members = types.MemberDescriptorType
        known = _slots[kind] = [
            name for base in kind.__mro__ for name, slot in vars(base).items() if isinstance(slot, members)
        ]
    return known


def _columns(rows: list[Any]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[], [], []]


@functools.lru_cache(1 << 16)
def _room(name: object) -> str:
    return str(name).partition(".")[0]


@functools.cache
def _package(room: str) -> str | None:
    """Return when an installed package was written, None for one that is not installed."""
    file = getattr(sys.modules.get(room), "__file__", None)
    if file is None or not {"site-packages", "dist-packages"}.intersection(PurePath(file).parts):
        return None
    return str(os.stat(file).st_mtime_ns)


def _from_library(item: Any) -> bool:
    """Return whether a function is a library's own, whatever `functools.wraps` says."""
    if isinstance(item, FunctionType):
        return _room(item.__globals__.get("__name__")) in _LIBRARIES
    return isinstance(item, _FUNCTIONS)


def _is_foreign(item: Any) -> bool:
    """Return whether a user put this callable into a library's module."""
    if not callable(item) or isinstance(item, (type, *_FUNCTIONS)):
        return False
    return _room(type(item).__module__) not in _TORCH


def _followed(item: FunctionType) -> bool:
    """Return whether names in a function's code are followed: the user's, and layers of PyTorch."""
    home = str(item.__globals__.get("__name__"))
    return not _from_library(item) or home in _FOLLOWED or home.startswith("torch.nn.modules.")


def _joined(path: str, name: str) -> str:
    if name == "cell_contents":  # the path names the variable
        return path
    return f"{path}.{name}" if path else name


def _content(item: Any) -> Any:
    """Return the form and the bytes of an array, a tensor, a buffer or a text in memory.

    A tensor whose bytes cannot be read has its version instead.
    """
    if isinstance(item, np.ndarray):
        data = repr(item.tolist()).encode() if item.dtype.hasobject else item.tobytes()
        return item.shape, item.dtype, data
    if isinstance(item, _TEXTS):
        return item.tell(), item.getvalue()
    if not isinstance(item, torch.Tensor):
        return memoryview(item).tobytes()
    form = tuple(item.shape), item.requires_grad
    if item.layout is not torch.strided or item.device.type != "cpu" or type(item) not in _PLAIN_TENSORS:
        return form, 0 if item.is_inference() else item._version
    return form, item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(content: Any) -> str:
    digest = hashlib.sha256()
    for part in content if isinstance(content, tuple) else (content,):
        digest.update(part if isinstance(part, bytes) else f"{part!r};".encode())
    return digest.hexdigest()


def _is_buffer(item: Any) -> bool:
    """Return whether an object has bytes, as those of array and ctypes; a mapped file may have too many."""
    try:
        return type(item).__module__ != "mmap" and memoryview(item).nbytes >= 0
    except (TypeError, ValueError):
        return False


def _reads_itself(kind: type) -> bool:
    """Return whether a library's code reads what an object holds (`_HOLDERS`)."""
    modules = [base.__module__ for base in kind.__mro__]
    return any(_room(module) in _HOLDERS and module != "collections.abc" for module in modules)


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values that are not one object are the same plain value."""
    return type(one) is type(other) and type(one) in _ATOMS and repr(one) == repr(other)


def _equal_lists(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b or _equal(a, b) for a, b in zip(some, others, strict=True))


def _code_text(code: CodeType) -> str:
    constants = [_Literal(_code_text(c) if isinstance(c, CodeType) else _constant(c)) for c in code.co_consts]
    about = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount)
    more = (code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
    return f"{code.co_code.hex()} {constants} {about} {more} {getattr(code, 'co_exceptiontable', b'').hex()}"


def _constant(item: Any) -> str:
    if isinstance(item, frozenset):
        return f"frozenset {sorted(map(repr, item))}"
    return f"{type(item).__name__} {item!r}"
