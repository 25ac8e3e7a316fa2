"""What decides about a capture, as text: equal texts mean equal captures, also in another process.

A text holds the classes, attributes and weights' forms of a model, the code of functions that are the user's
own, and everything that this code names. PyTorch and torchvision count by version. Where anything else may
decide (an attribute of an unknown type, a file, the environment, a hook), there is no text, and the model is
captured again; the log says at level DEBUG what that is.
"""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import sys
from collections import OrderedDict
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_LIBRARIES = ("torch", "torchvision")
_PURE = frozenset(
    ("math", "operator", "functools", "itertools", "typing", "__future__", "abc", "collections")
)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_CHANGING = frozenset(
    ("open", "eval", "exec", "globals", "vars", "input", "compile", "__import__", "id", "hash")
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOG = logging.getLogger(__name__)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_FLAGS = (
    torch.get_default_dtype,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
)


class _Unknown(Exception):
    """Something may decide about the capture that no text can hold."""


def identity_of(*parts: Any) -> str | None:
    """Return the text of modules, functions, classes and plain values; None where there is none."""
    versions = [sys.version, *[getattr(sys.modules.get(name), "__version__", "") for name in _LIBRARIES]]
    try:
        return f"{versions}{[flag() for flag in _FLAGS]}{_Identifier().of(parts)}"
    except (_Unknown, RecursionError) as unknown:
        _LOG.debug("what decides about a capture has no text: %s", unknown)
        return None


class _Identifier:
    """Texts of objects; one that was met before is a number."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []

    def of(self, item: Any) -> str:
        """Return the text of an object; raises _Unknown."""
        if type(item) in _ATOMS:
            return f"{type(item).__name__} {item!r}"
        if type(item) in (tuple, torch.Size):
            return f"{type(item).__name__} [{', '.join(map(self.of, item))}]"
        if id(item) in self._met:
            return f"#{self._met[id(item)]}"
        self._met[id(item)] = len(self._met)
        self._alive.append(item)
        if type(item) is list:
            return f"list [{', '.join(map(self.of, item))}]"
        if type(item) in (dict, OrderedDict):
            return f"dict {[(self.of(key), self.of(value)) for key, value in item.items()]}"
        if type(item) in (set, frozenset):
            return f"set {sorted(map(_plain, item))}"
        if isinstance(item, torch.nn.Module):
            return self._module(item)
        if isinstance(item, type):
            return self._class(item)
        if isinstance(item, FunctionType):
            return self._function(item)
        if isinstance(item, MethodType):
            return f"method {self.of(item.__func__)} of {self.of(item.__self__)}"
        if isinstance(item, (staticmethod, classmethod)):
            return f"{type(item).__name__} {self.of(item.__func__)}"
        if isinstance(item, property):
            return f"property {self.of((item.fget, item.fset))}"
        if isinstance(item, functools.partial):
            return f"partial {self.of((item.func, item.args, item.keywords))}"
        if isinstance(item, ModuleType) and _is_library(item.__name__):
            return f"library {item.__name__}"
        if isinstance(item, BuiltinFunctionType) and (
            _is_library(str(item.__module__)) or getattr(builtins, item.__name__, None) is item
        ):
            return f"built in {item.__module__}.{item.__qualname__}"
        raise _Unknown(f"{type(item).__name__} {getattr(item, '__name__', '')}".strip())

    def _module(self, module: torch.nn.Module) -> str:
        own = dict(vars(module))
        everywhere = torch.nn.modules.module
        if any([own.pop(name, None) or getattr(everywhere, f"_global{name}", None) for name in _HOOKS]):
            raise _Unknown(f"hooks of {type(module).__qualname__}")
        weights = [
            (kind, name, None if tensor is None else self._tensor(tensor))
            for kind in ("_parameters", "_buffers")
            for name, tensor in own.pop(kind).items()
        ]
        children = [(name, self.of(child)) for name, child in own.pop("_modules").items()]
        mode = own.pop("training")
        rest = {name: item for name, item in own.items() if name not in _OF_EVERY_MODULE}
        return f"module {self.of(type(module))} {mode} {weights} {children} {self.of(rest)}"

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the form of a weight, whose content does not decide, and which other weight it is."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise _Unknown(f"a weight of {type(tensor).__qualname__}")
        first = self._met.setdefault(id(tensor), len(self._met))
        self._alive.append(tensor)
        form = tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)
        return first, type(tensor).__name__, tensor.requires_grad, tensor.is_leaf, *form

    def _class(self, item: type) -> str:
        name = f"class {item.__module__}.{item.__qualname__}"
        if _is_library(item.__module__):
            forward = getattr(item, "forward", None)
            if not _is_library(getattr(forward, "__module__", "torch")):
                raise _Unknown(f"the forward of {name}")
            return _found(name, item)
        if type(item) is not type:
            raise _Unknown(f"{name} of {type(item).__qualname__}")
        skipped = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__")
        own = {key: value for key, value in vars(item).items() if key not in skipped}
        return f"{name} {self.of(item.__bases__)} {self.of(own)}"

    def _function(self, item: FunctionType) -> str:
        if _is_library(item.__module__):
            return _found(f"function {item.__module__}.{item.__qualname__}", item)
        cells = [cell.cell_contents for cell in item.__closure__ or ()]
        names = [
            (name, self.of(item.__globals__[name]))
            for name in sorted(_names_in(item.__code__))
            if name in item.__globals__
        ]
        more = self.of([item.__defaults__, item.__kwdefaults__, cells])
        return f"function {_code_text(item.__code__)} {more} {names}"


def _plain(item: Any) -> str:
    if type(item) not in _ATOMS:
        raise _Unknown(f"a set with a {type(item).__qualname__}")
    return f"{type(item).__name__} {item!r}"


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES or name in _PURE


def _found(name: str, item: Any) -> str:
    """Return the name of a library's object; raises _Unknown where another one has its place there."""
    place: Any = sys.modules.get(item.__module__)
    for part in item.__qualname__.split("."):
        place = getattr(place, part, None)
    if place is not item:
        raise _Unknown(f"{name}, which was replaced")
    return name


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code loads; raises _Unknown where they may stand for anything."""
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and not _is_library(str(instruction.argval)):
            raise _Unknown(f"an import of {instruction.argval} in {code.co_name}")
        if instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            names.add(str(instruction.argval))
        if instruction.opname.startswith(("STORE_GLOBAL", "DELETE_GLOBAL")):
            raise _Unknown(f"a global that {code.co_name} sets")
    if names & _CHANGING:
        raise _Unknown(f"{sorted(names & _CHANGING)} in {code.co_name}")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    about = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount)
    more = (code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
    return f"{code.co_code.hex()} {constants} {about} {more} {getattr(code, 'co_exceptiontable', b'').hex()}"


def _constant(item: Any) -> str:
    if isinstance(item, frozenset):
        return f"frozenset {sorted(map(repr, item))}"
    return f"{type(item).__name__} {item!r}"
