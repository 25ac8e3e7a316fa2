"""How `torch.compile(model, backend="torchedge")` finds the backend where no installed package announces it.

An installed torchedge is found by PyTorch through its entry point (`torch_dynamo_backends`). From a checkout,
`import torchedge` announces it: at once where PyTorch's registry of backends is loaded, else when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

BACKEND = "torchedge"
_REGISTRY = "torch._dynamo.backends.registry"


def announce_backend() -> None:
    """Make the backend known to `torch.compile`; imports nothing now."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _register(registry)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(registry: ModuleType) -> None:
    if BACKEND not in registry._BACKENDS:  # there, its entry point was found before
        registry.register_backend(_compile, name=BACKEND)


def _compile(*args: Any, **options: Any) -> Any:
    from importlib import import_module

    return import_module("torchedge.runtime.backends").compile_graph(*args, **options)


class _Watch(MetaPathFinder):
    """Waits for PyTorch's registry of backends to be imported, and is gone then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Announcing(spec.loader)
        return spec


class _Announcing(Loader):
    """Loads the registry as its own loader does, then adds the backend."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
