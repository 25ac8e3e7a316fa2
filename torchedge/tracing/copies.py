"""Copies of a model and of its Python functions: a capture changes no model and no other thread.

A capture runs the forward pass in a mode of its own thread, on a copy of the module tree: new module objects
with copied attributes and containers that share parameters, buffers and every other object. So training
flags, counters, caches and assigned buffers of the user's model do not change, even if other threads use it.

Some calls never reach a mode: `range` over the batch, Python's and numpy's random numbers, scripted and
memoized functions. If the code of the model's classes names one of them, the copy gets methods with copied
globals, in which a substitute has that name. Functions that such a method names are copied in the same way.
Other code (a method of a base class by `super()`, a static method, a function in an attribute) runs
unchanged: it draws from the global generators, and only the limit on operators stops its loops over samples.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchedge.errors import CaptureError, TorchedgeWarning
from torchedge.tracing.torch_calls import cell_content, forget_patched

_LONGEST_RANGE = 50_000_000
_ATOMS = frozenset((int, float, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype))
_BOXES = frozenset((dict, OrderedDict, list, set))
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_Module = torch.nn.Module


class Draws(random.Random):
    """The generator that copies of functions draw from in place of Python's, from a fixed seed.

    count: numbers drawn since `restart`. numpy: the generator in place of NumPy's, where one is needed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._extreme: float | None = None
        self.numpy: Any = None
        super().__init__(0)

    def restart(self, extreme: float | None = None) -> None:
        """Begin again; extreme: a number that most draws return."""
        self.count, self._extreme = 0, extreme
        self.seed(0)

    def random(self) -> float:
        """Return a number from 0 to below 1; every fourth is not extreme, so that rejection sampling ends."""
        self.count += 1
        number = super().random()
        return number if self._extreme is None or self.count % 4 == 0 else self._extreme

    def getrandbits(self, k: int) -> int:
        """Return a number of k bits, of another sequence for each extreme."""
        if self._extreme is not None and not self.count:
            self.seed(1 + round(self._extreme))
        self.count += 1
        return super().getrandbits(k)


def in_float32(model: _Module) -> _Module:
    """Return a model whose bfloat16 weights are float32, the same numbers; the model itself without any.

    Kernels do not compute with bfloat16. The copy shares all other weights; what layers share stays shared.
    """
    held = [*model.parameters(), *model.buffers()]
    if all(tensor.dtype is not torch.bfloat16 for tensor in held):
        return model
    warnings.warn(
        TorchedgeWarning(
            f"{type(model).__name__} has weights in bfloat16, with which kernels do not compute: they count "
            "in float32, the same numbers in twice the memory; float16 or integers take less"
        ),
        stacklevel=2,
    )
    twin = sharing(model)
    twin._apply(lambda t: t.float() if t.dtype is torch.bfloat16 else t)
    return twin


def sharing(model: _Module) -> _Module:
    """Return a copy of a model over the same memory: parameters of its own, with the same contents."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    memo |= {id(p): torch.nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


@contextmanager
def isolated(model: _Module, training: bool | None = None, draws: Draws | None = None) -> Iterator[_Module]:
    """Yield a copy of a model to capture, in training or evaluation mode (None: every module in its own)."""
    twin, boxes = _copied(model)
    if training is not None and twin.training != training:
        try:
            twin.train(training)
        except NotImplementedError as error:  # a module of torch.export
            raise CaptureError(
                f"{type(model).__name__} cannot change to {'training' if training else 'evaluation'} mode: "
                "torch.export fixed its mode; pass the model that was exported"
            ) from error
    functions, modules = FunctionCopies(draws), [*twin.modules()]
    methods = {kind: _methods_to_copy(kind) for kind in {*map(type, modules)}}
    for module in modules:
        for name, function in methods[type(module)]:
            vars(module)[name] = MethodType(functions.copied(function), module)
    homes = [vars(module) for module in modules]
    try:
        yield twin
    finally:
        for box in [*homes, *boxes]:  # bound methods form cycles, which keep weights alive
            box.clear()


def _copied(model: _Module) -> tuple[_Module, list[Any]]:
    """Return a copy of a module tree that shares its tensors, and the copies of containers in attributes."""
    twins: dict[int, Any] = {}
    boxes: list[Any] = []
    waiting: list[tuple[_Module, _Module]] = []

    def twin_of(item: Any) -> Any:
        kind = type(item)
        if kind in _ATOMS:
            return item
        twin = twins.get(id(item))
        if twin is not None:
            return twin
        if isinstance(item, _Module):
            twin = twins[id(item)] = object.__new__(kind)
            waiting.append((item, twin))
        elif isinstance(item, dict):
            twin = twins[id(item)] = item.copy() if kind in _BOXES else copy.copy(item)
            if not _ATOMS.issuperset(map(type, item.values())):
                for key, value in item.items():
                    if (new := twin_of(value)) is not value:
                        twin[key] = new
        elif isinstance(item, list):
            twin = twins[id(item)] = item.copy() if kind is list else copy.copy(item)
            if not _ATOMS.issuperset(map(type, item)):
                twin[:] = [twin_of(value) for value in item]
        elif isinstance(item, set):
            twin = twins[id(item)] = copy.copy(item)
        elif kind is tuple:
            twin = item if _ATOMS.issuperset(map(type, item)) else tuple([twin_of(i) for i in item])
        elif kind is MethodType:
            twin = MethodType(item.__func__, twin_of(item.__self__))
        elif kind is functools.partial:
            keywords = {key: twin_of(value) for key, value in item.keywords.items()}
            twin = functools.partial(twin_of(item.func), *map(twin_of, item.args), **keywords)
            vars(twin).update({key: twin_of(value) for key, value in vars(item).items()})
        else:
            twin = item
        return twin

    root: _Module = twin_of(model)
    while waiting:
        module, twin = waiting.pop()
        home = vars(twin)
        home.update(vars(module))
        for key, value in vars(module).items():
            kind = type(value)
            if kind in _ATOMS:
                continue
            if kind not in _BOXES:
                home[key] = twin_of(value)
            elif value or key not in _OF_EVERY_MODULE:
                home[key] = twin_of(value)
                boxes.append(home[key])
            else:
                home[key] = kind()
        home["_compiled_call_impl"] = None
    return root, boxes


@contextmanager
def scoped(model: _Module, scopes: list[str], root: str = "") -> Iterator[None]:
    """Make each module of a copy push its path, behind the name of the root, to `scopes`.

    Hooks of the backward pass are dropped: what they do with gradients is not part of a forward pass.
    """
    forget_patched()
    for name, module in model.named_modules():
        home = vars(module)
        home["_compiled_call_impl"] = _scoped_call(
            module._call_impl, ".".join(filter(None, (root, name))), scopes
        )
        for hooks in _BACKWARD_HOOKS:  # they pass gradients on by functions that stand-ins cannot run
            if home.get(hooks):
                home[hooks] = type(home[hooks])()
    yield


_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def _scoped_call(call: Callable[..., Any], name: str, scopes: list[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        scopes.append(name)
        try:
            return call(*args, **kwargs)
        finally:
            scopes.pop()

    return run


def forget_cached(kinds: tuple[type, ...]) -> list[Any]:
    """Clear each `functools.lru_cache` that contains a stand-in, which no real run may read; return them."""
    import gc

    # Not gc.get_objects(), which refers to the objects of other threads for a while: to tuples that are being
    # filled, which breaks them, and to values whose end a capture notes.
    kind = functools._lru_cache_wrapper
    caches: list[Any] = [o for o in gc.get_referrers(kind) if type(o) is kind]
    if not _contain(caches, kinds):
        return []
    caches = [cached for cached in caches if _contain([cached], kinds)]
    for cached in caches:
        cached.cache_clear()
    return caches


def forget_held(tensors: list[Any]) -> None:
    """Drop stand-ins from dicts and lists of the user's code; a variable or an attribute becomes None."""
    import gc

    for holder in gc.get_referrers(*tensors):
        if type(holder) is list and holder is not tensors:
            holder[:] = [entry for entry in holder if not _is_among(entry, tensors)]
            continue
        home = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        held = [key for key, entry in [*home.items()] if _is_among(entry, tensors)]
        named = home is not holder or "__builtins__" in home
        if held and not named:  # once for all of a dict: it looks at every object of the process
            named = any(getattr(owner, "__dict__", None) is home for owner in gc.get_referrers(home))
        for key in held:
            if isinstance(holder, type):
                setattr(holder, key, None)
            elif named:
                home[key] = None
            else:
                del home[key]


def _is_among(item: Any, others: list[Any]) -> bool:
    return any(item is other for other in others)


def _contain(caches: list[Any], kinds: tuple[type, ...]) -> bool:
    """Return whether such an object is within three steps: an entry, or in a container that is one."""
    import gc

    reached = gc.get_referents(*caches)
    for _ in range(3):
        if not set(map(type, reached)).isdisjoint(kinds):
            return True
        reached = gc.get_referents(
            *[r for r in reached if isinstance(r, (tuple, list, dict)) or "lru" in type(r).__name__]
        )
    return False


# functions --------------------------------------------------------------------------------------------------


class _RangeKind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, range)

    def __call__(cls, *bounds: Any) -> range:
        numbers = range(*bounds)
        if numbers.stop - numbers.start > _LONGEST_RANGE:
            raise CaptureError(
                f"the forward pass loops over the samples of the batch ({numbers}{where()}); capture it for "
                "one batch size with batch_size="
            )
        return numbers


_Range = _RangeKind("range", (), {})
"""The substitute of `range`: a loop over the samples, endless at the batch prime, raises an error."""


def is_library(frame: FrameType) -> bool:
    """Return whether a frame runs code of PyTorch or of this library, not the user's."""
    name = frame.f_globals.get("__name__", "")
    return bool(name == "torch" or name.startswith(("torch.", "torchedge.")))


def where() -> str:
    """Return " at FILE:LINE" of the innermost frame outside torch and torchedge, or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


class FunctionCopies:
    """Copies of Python functions for one capture, with substitutes in their globals and closures.

    Random numbers come from separate generators with fixed seeds, so that models that draw in Python
    (stochastic depth, layer drop) have the same graph every time.
    """

    def __init__(self, draws: Draws | None = None) -> None:
        self._copies: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._random = Draws() if draws is None else draws

    def copied(self, function: FunctionType) -> FunctionType:
        """Return a copy of a function (and of the functions that it names) with the substitutes."""
        if id(function) in self._copies:
            known: FunctionType = self._copies[id(function)]
            return known
        home = function.__globals__
        if id(home) not in self._globals:
            self._globals[id(home)] = dict(home)
        names = self._globals[id(home)]
        twin = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, self._cells(function)
        )
        twin.__kwdefaults__, twin.__qualname__ = function.__kwdefaults__, function.__qualname__
        twin.__module__ = function.__module__
        vars(twin).update(vars(function))
        self._copies[id(function)] = twin
        for name in _names_in(function.__code__):
            if name in home or name == "range":
                names[name] = self.substitute(home.get(name, range))
        return twin

    def substitute(self, item: Any) -> Any:
        """Return the substitute of a global or a cell in copied functions: mostly the object itself."""
        if item is range:
            return _Range
        if item is random:
            return self._module(random, self._random)
        if isinstance(item, ModuleType):
            return self._numpy_module(item)
        if isinstance(item, torch.jit.ScriptFunction):
            return getattr(item, "_torchdynamo_inline", item)
        if _draws_in_python(item):
            return getattr(self._random, item.__name__, item)
        if isinstance(item, functools._lru_cache_wrapper):
            if id(item) not in self._copies:
                inner = item.__wrapped__
                self._copies[id(item)] = functools.lru_cache(maxsize=None)(
                    self.copied(inner) if isinstance(inner, FunctionType) else inner
                )
            return self._copies[id(item)]
        return self.copied(item) if isinstance(item, FunctionType) and _must_copy(item) else item

    def _cells(self, function: FunctionType) -> Any:
        def cell(old: Any) -> Any:
            content = cell_content(old)
            new = self.substitute(content)
            return old if new is content else type(old)(new)

        return None if function.__closure__ is None else tuple([cell(old) for old in function.__closure__])

    def _module(self, module: ModuleType, generator: Any) -> ModuleType:
        """Return a module of random numbers whose functions draw from a generator of this capture."""
        if id(module) not in self._copies:
            twin = ModuleType(module.__name__)
            vars(twin).update(vars(module))
            for name, item in vars(module).items():
                if getattr(item, "__self__", None) is not None and hasattr(generator, name):
                    setattr(twin, name, getattr(generator, name))
            self._copies[id(module)] = twin
        known: ModuleType = self._copies[id(module)]
        return known

    def _numpy_module(self, module: ModuleType) -> ModuleType:
        numpy = sys.modules.get("numpy")
        if numpy is None or (module is not numpy and module is not numpy.random):
            return module
        if self._random.numpy is None:
            self._random.numpy = numpy.random.RandomState(0)
        draws = self._module(numpy.random, self._random.numpy)
        if module is not numpy:
            return draws
        if id(numpy) not in self._copies:
            twin = ModuleType("numpy")
            vars(twin).update(vars(numpy))
            twin.random = draws  # type: ignore[attr-defined]
            self._copies[id(numpy)] = twin
        known: ModuleType = self._copies[id(numpy)]
        return known


_SHARED_RANDOM = random._inst
_decided: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()
_methods: WeakKeyDictionary[type, list[tuple[str, FunctionType]]] = WeakKeyDictionary()


def _methods_to_copy(kind: type) -> list[tuple[str, FunctionType]]:
    """Return the methods of a class and its bases that name an object with a substitute."""
    if kind not in _methods:
        _methods[kind] = [
            (name, item)
            for name, item in {k: v for base in reversed(kind.__mro__) for k, v in vars(base).items()}.items()
            if isinstance(item, FunctionType) and not name.startswith("__") and _must_copy(item)
        ]
    return _methods[kind]


def _must_copy(function: FunctionType) -> bool:
    """Return whether a function of the user's code, or one that it names, names what has a substitute."""
    if function not in _decided:
        _decided[function] = any(
            _needs_substitute(item, each.__code__)
            for each in _reachable(function)
            for item in _named_by(each)
        )
    return _decided[function]


def _reachable(function: FunctionType) -> Iterator[FunctionType]:
    """Yield a function and those that it names, directly or not, as far as they are the user's code."""
    seen, waiting = set[FunctionType](), [function]
    while waiting:
        each = waiting.pop()
        room = (each.__module__ or "").partition(".")[0]
        if each in seen or room in ("torch", "torchedge") or room in sys.stdlib_module_names:
            continue
        seen.add(each)
        yield each
        waiting += [item for item in _named_by(each) if isinstance(item, FunctionType)]


def _named_by(function: FunctionType) -> list[Any]:
    """Return the globals and the cells that a function reads."""
    home = function.__globals__
    items = [home.get(name, range if name == "range" else None) for name in _names_in(function.__code__)]
    return items + [cell_content(cell) for cell in function.__closure__ or ()]


def _needs_substitute(item: Any, code: CodeType) -> bool:
    if isinstance(item, ModuleType):
        numpy = item.__name__ == "numpy" and "random" in _names_in(code)
        return item is random or numpy or item.__name__ == "numpy.random"
    return (
        item is range
        or isinstance(item, (torch.jit.ScriptFunction, functools._lru_cache_wrapper))
        or _draws_in_python(item)
    )


def _draws_in_python(item: Any) -> bool:
    """Return whether an object is a function of `random`, such as `random.random`."""
    return type(item) in (MethodType, BuiltinMethodType) and item.__self__ is _SHARED_RANDOM


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function and the functions within it read."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
