"""PyTorch's answers about devices during a capture: those that it gives on the device that was asked for.

PyTorch without CUDA disables `torch.autocast("cuda")` and says that no GPU is there; with CUDA it says that
one is there although a prediction is for a CPU. During a capture the functions in `_QUIET` and `_ASKED`
answer for the capture's device, in the capture's thread alone.
"""

from __future__ import annotations

import dis
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from torchedge.devices import Device
from torchedge.errors import CaptureError
from torchedge.storage.locks import cached_property
from torchedge.tracing.copies import is_library, where

Ask = Callable[[str], None]
"""Takes note of a question about the device, such as "torch.cuda.is_available()"."""


class QuestionTaker(Protocol):
    """What a capture learns from its model's calls: questions, and the autocasts that the model enters."""

    own_autocasts: int

    def ask(self, question: str) -> None:
        """Take note of a question about the device."""

    def end_autocast(self) -> None:
        """Drop the casts of weights: the outermost autocast ended."""

    def note(self, text: str) -> None:
        """Add a note to the capture, once."""

    def run_function(self, function: Any, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return `apply(*args, **kwargs)`, which runs a custom autograd function."""


@dataclass(frozen=True)
class Accelerator:
    """A device as PyTorch shows it: "cuda" for GPUs of NVIDIA and AMD, "mps" for Apple's, else "cpu".

    profile: None for a capture that is for no device in particular, which is one for a CPU.
    """

    profile: Device | None = None

    @property
    def type(self) -> str:
        """The type of its torch.device."""
        vendor = (
            self.profile.vendor.lower() if self.profile is not None and self.profile.kind == "gpu" else ""
        )
        return {"nvidia": "cuda", "amd": "cuda", "apple": "mps"}.get(vendor, "cpu")

    @cached_property
    def device(self) -> torch.device:
        """The device of the model's tensors."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, 0)

    @property
    def label(self) -> str:
        """Its name for people."""
        return "a CPU" if self.profile is None else self.profile.name

    def figure(self, name: str, question: str) -> float:
        """Return a figure of its profile; raises CaptureError that names the question where it is missing."""
        figures: Mapping[str, Any] = {} if self.profile is None else self.profile.figures
        if name not in figures:
            raise CaptureError(
                f"the forward pass asks for {question}, and the profile of {self.label} has no figure "
                f"{name}; add it to its device.toml"
            )
        return float(figures[name].value)

    def capability(self) -> tuple[int, int]:
        """Return CUDA's compute capability, (9, 0) for 9.0."""
        tenths = round(10 * self.figure("compute_capability", "the compute capability"))
        return tenths // 10, tenths % 10

    def memory(self) -> tuple[int, int]:
        """Return free and total memory in bytes, free as for the first process."""
        total = self.figure("memory_mib", "the memory of the device")
        figures = self.profile.figures if self.profile is not None else {}
        context = figures["context_mib"].value if "context_mib" in figures else 0.0
        return int((total - context) * 2**20), int(total * 2**20)

    def properties(self) -> _Properties:
        """Return what `torch.cuda.get_device_properties` does."""
        return _Properties(self)


PLAIN_CPU = Accelerator()
"""The device of a capture that is for none in particular."""


class _Properties:
    """The properties of a CUDA device, each from its profile when it is read."""

    is_integrated = is_multi_gpu_board = False

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        accelerator = self._accelerator
        if name in ("major", "minor"):
            return accelerator.capability()[name == "minor"]
        if name == "total_memory":
            return accelerator.memory()[1]
        if name == "name":
            assert accelerator.profile is not None
            return next(iter(accelerator.profile.aliases), accelerator.profile.title)
        figures = {
            "multi_processor_count": ("compute_units", 1),
            "warp_size": ("warp_size", 1),
            "L2_cache_size": ("l2_cache_kib", 1024),
            "clock_rate": ("clock_mhz", 1000),
        }
        if name not in figures:
            raise AttributeError(name)
        figure, scale = figures[name]
        return int(scale * accelerator.figure(figure, f"get_device_properties().{name}"))


class _Answering(threading.local):
    accelerator: Accelerator | None = None
    listener: QuestionTaker


_active = _Answering()


# what PyTorch answers ---------------------------------------------------------------------------------------


def _is_cuda(accelerator: Accelerator) -> bool:
    return accelerator.type == "cuda"


def _cuda_only(answer: Callable[[Accelerator], Any]) -> Callable[[Accelerator], Any]:
    """Return the answer of a function that needs CUDA, and raises as PyTorch does where there is none."""

    def run(accelerator: Accelerator) -> Any:
        if accelerator.type != "cuda":
            raise RuntimeError(
                f"No CUDA GPUs are available: the step is predicted for {accelerator.label}, which has none"
            )
        return answer(accelerator)

    return run


def _nothing(accelerator: Accelerator) -> None:
    return None


def _zero(accelerator: Accelerator) -> int:
    return 0


def _is_ampere(accelerator: Accelerator) -> bool:
    return _is_cuda(accelerator) and accelerator.capability() >= (8, 0)


def _supports_bfloat16(accelerator: Accelerator, including_emulation: bool = True) -> bool:
    if not _is_cuda(accelerator):
        return False
    return bool(including_emulation) or accelerator.capability() >= (8, 0)


class Inert:
    """A stream or an event of a device: its methods do nothing and return it, or no time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a stream takes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0.0 if name == "elapsed_time" else self

    def __enter__(self) -> Inert:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave a stream: exceptions pass."""


def _architectures(accelerator: Accelerator) -> list[str]:
    if not _is_cuda(accelerator):
        return []
    major, minor = accelerator.capability()
    return [f"sm_{major}{minor}"]


def _cudnn_version(accelerator: Accelerator) -> int | None:
    """Return the number of cuDNN 9.10 where the profile has no version; 9.10.2 is 91002, 8.0 is 8000."""
    if not _is_cuda(accelerator):
        return None
    software = accelerator.profile.software if accelerator.profile is not None else {}
    major, minor, patch = [*map(int, software.get("cudnn", "9.10").split(".")), 0, 0][:3]
    return major * (10_000 if major >= 9 else 1_000) + 100 * minor + patch


_Answers = Mapping[str, Mapping[str, Callable[..., Any]]]
_QUIET: _Answers = {
    "torch.cuda": {
        "current_device": _cuda_only(_zero),
        "is_initialized": _is_cuda,
        "init": _nothing,
        "_lazy_init": _nothing,
        "set_device": _nothing,
        "_exchange_device": _zero,
        "_maybe_exchange_device": _zero,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "reset_peak_memory_stats": _nothing,
        "memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_allocated": _zero,
        "max_memory_reserved": _zero,
        "get_rng_state": lambda accelerator: torch.Generator().get_state(),
        "set_rng_state": _nothing,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "memory_summary": lambda accelerator: "",
        **dict.fromkeys(("memory_stats", "memory_snapshot"), lambda accelerator: {}),
        **dict.fromkeys(("current_stream", "default_stream", "stream"), Inert),
    },
    "torch.cuda.nvtx": {"range_push": _zero, "range_pop": _zero, "mark": _nothing},
    "torch.backends.cudnn": {"is_acceptable": lambda accelerator: False},
    "torch.accelerator": {"current_device_index": _zero, "synchronize": _nothing},
}
"""Functions that only have to work as on a GPU: no branch of a model depends on their answers."""

_ASKED: _Answers = {
    "torch.cuda": {
        "is_available": _is_cuda,
        "device_count": lambda accelerator: int(_is_cuda(accelerator)),
        "get_device_name": _cuda_only(lambda accelerator: accelerator.properties().name),
        "get_device_capability": _cuda_only(Accelerator.capability),
        "get_device_properties": _cuda_only(Accelerator.properties),
        "mem_get_info": _cuda_only(Accelerator.memory),
        "is_bf16_supported": _supports_bfloat16,
        "is_tf32_supported": _is_ampere,
        "get_arch_list": _architectures,
    },
    "torch.backends.cuda": {"is_built": _is_cuda, "is_flash_attention_available": _is_ampere},
    "torch.backends.cudnn": {"is_available": _is_cuda, "version": _cudnn_version},
    "torch.backends.mps": {
        "is_available": lambda accelerator: accelerator.type == "mps",
        "is_built": lambda accelerator: accelerator.type == "mps",
    },
    "torch.xpu": {"is_available": lambda accelerator: False, "device_count": lambda accelerator: 0},
    "torch.accelerator": {
        "is_available": lambda accelerator: accelerator.type != "cpu",
        "device_count": lambda accelerator: int(accelerator.type != "cpu"),
        "current_accelerator": lambda accelerator: (
            None if accelerator.type == "cpu" else torch.device(accelerator.type)
        ),
    },
}
"""Functions whose answers models branch on: a prediction notes who asked."""


def _home(name: str) -> object:
    """Return a module of PyTorch; an empty one where this PyTorch does not have it."""
    home: object = torch
    for part in name.split(".")[1:]:
        home = getattr(home, part, SimpleNamespace())
    return vars(home).get("m", home)  # the module inside of a PropModule


def _answering(original: Any, answer: Callable[..., Any], question: str | None) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        accelerator = _active.accelerator
        if accelerator is None:
            return original(*args, **kwargs)
        if question is not None:
            frame = sys._getframe(1)
            if not is_library(frame):
                _active.listener.ask(question)
            elif accelerator.type != "cuda" and frame.f_code.co_name == "amp_definitely_not_available":
                _active.listener.ask('torch.autocast("cuda")')
        return answer(accelerator, *args, **kwargs) if answer is _supports_bfloat16 else answer(accelerator)

    return run


class _Version(ModuleType):
    """The module `torch.version`, whose version of CUDA is that of the device of the capture."""

    @property
    def cuda(self) -> Any:
        accelerator = _active.accelerator
        if accelerator is None:
            return vars(self)["cuda"]
        if not is_library(sys._getframe(1)):
            _active.listener.ask("torch.version.cuda")
        software = accelerator.profile.software if accelerator.profile is not None else {}
        return software.get("cuda", "12.8") if accelerator.type == "cuda" else None


_ABSENT = object()


class _Installed:
    """The functions of PyTorch that answer for captures, in place while one of any thread runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._captures = 0
        self._originals: list[tuple[object, str, Any]] = []

    def enter(self) -> None:
        with self._lock:
            self._captures += 1
            if self._captures > 1:
                return
            for tables, asked in ((_QUIET, False), (_ASKED, True)):
                for name, answers in tables.items():
                    home = _home(name)
                    for function in answers.keys() & vars(home).keys():
                        question = f"{name}.{function}()" if asked else None
                        answering = _answering(vars(home)[function], answers[function], question)
                        self._replace(home, function, answering)
            cleared = _heard(torch.clear_autocast_cache, lambda listener, _: listener.end_autocast())
            self._replace(torch, "clear_autocast_cache", cleared)
            self._replace(torch.autocast, "__init__", _heard(torch.autocast.__init__, _made))
            self._replace(torch.autocast, "__enter__", _heard(torch.autocast.__enter__, _entered))
            self._replace(torch.autocast, "__exit__", _heard(torch.autocast.__exit__, _left))
            self._replace(_SingleLevelFunction, "apply", classmethod(_apply))
            for function in _OF_WHOLE_NUMBERS:
                self._replace(math, function, _through_int(vars(math)[function]))
            torch.version.__class__ = _Version

    def _replace(self, home: object, name: str, function: Any) -> None:
        self._originals.append((home, name, vars(home).get(name, _ABSENT)))
        setattr(home, name, function)

    def leave(self) -> None:
        with self._lock:
            self._captures -= 1
            if not self._captures:
                self._restore()

    def _restore(self) -> None:
        for home, name, original in reversed(self._originals):
            if original is _ABSENT:
                delattr(home, name)
            else:
                setattr(home, name, original)
        self._originals.clear()
        torch.version.__class__ = ModuleType

    def forget_threads(self) -> None:
        """Undo in a fork what threads of the parent began, one of which may hold the lock."""
        self._lock = threading.Lock()
        if _active.accelerator is None:  # the thread that forks does not capture
            self._captures = 0
            self._restore()


def _heard(original: Any, listening: Callable[[QuestionTaker, Any], None]) -> Any:
    """Return a function of autocast that captures hear of; `listening` takes listener and autocast."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _active.accelerator is not None:
            listening(_active.listener, args[0] if args else None)
        return result

    return run


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a custom autograd function, through the capture if one runs; reentrant checkpoints are none."""
    run = super(_SingleLevelFunction, function).apply
    if _active.accelerator is None or issubclass(function, CheckpointFunction):
        return run(*args, **kwargs)
    return _active.listener.run_function(function, run, args, kwargs)


_OF_WHOLE_NUMBERS = ("log", "log2", "log10", "isqrt", "gcd", "lcm", "factorial", "comb", "perm")
"""Functions of math that take a subclass of int as a plain int."""


def _through_int(original: Any) -> Any:
    """Return a function of numbers that makes plain ints of sizes by `int`, which captures notice."""

    @functools.wraps(original)
    def run(*numbers: Any) -> Any:
        return original(*[int(n) if isinstance(n, int) else n for n in numbers])

    return run


def _made(listener: QuestionTaker, autocast: Any) -> None:
    vars(autocast)[_MADE_HERE] = True


_MADE_HERE = "made while PyTorch answered for a device"


def _entered(listener: QuestionTaker, autocast: Any) -> None:
    listener.own_autocasts += autocast.device == _type_now()
    if (
        autocast.device == "cuda" == _type_now()
        and not autocast._enabled
        and _MADE_HERE not in vars(autocast)
    ):
        listener.note(
            f'torch.autocast("cuda"){where()} was made before the capture, and PyTorch disables it without a '
            "GPU: counted as disabled; make it inside of forward (with torch.autocast(...):)"
        )
    if autocast.device != _type_now() and autocast._enabled:  # of another device: it does nothing here
        listener.ask(f'torch.autocast("{autocast.device}")')


def _left(listener: QuestionTaker, autocast: Any) -> None:
    listener.own_autocasts -= autocast.device == _type_now()


def _type_now() -> str:
    return "cpu" if _active.accelerator is None else _active.accelerator.type


_installed = _Installed()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_installed.forget_threads)


@contextmanager
def answered(accelerator: Accelerator, listener: QuestionTaker) -> Iterator[None]:
    """Let PyTorch answer questions about devices for an accelerator, in this thread."""
    before = dict(vars(_active))
    _installed.enter()
    _active.accelerator, _active.listener = accelerator, listener
    try:
        yield
    finally:
        vars(_active).clear()
        vars(_active).update(before)
        _installed.leave()


# what tensors answer ----------------------------------------------------------------------------------------

_OF_TENSORS = frozenset(("is_cuda", "is_cpu", "is_mps", "is_meta", "is_xpu", "get_device"))


def is_device_query(kind: str) -> bool:
    """Return whether a query of a tensor is about its device."""
    return kind == "device" or kind in _OF_TENSORS


def tensor_answer(kind: str, accelerator: Accelerator, ask: Ask, frame: FrameType) -> Any:
    """Return a tensor's answer to a query about its device, such as "device" and "is_cuda"."""
    if kind == "device":
        if not is_library(frame) and _is_compared(frame.f_code, frame.f_lasti):
            ask("x.device")
        return accelerator.device
    if not is_library(frame):
        ask(f"x.{kind}" + "()" * (kind == "get_device"))
    if kind == "get_device":
        return -1 if accelerator.type == "cpu" else 0
    return kind == f"is_{accelerator.type}"


@functools.lru_cache(maxsize=4096)
def _is_compared(code: CodeType, place: int) -> bool:
    """Return whether code compares a device, or reads its type, right where it reads the device."""
    following = [i for i in dis.get_instructions(code) if i.offset > place and i.opname != "CACHE"]
    for instruction in following[:_COMPARED_WITHIN]:
        if instruction.opname.startswith(("STORE", "RETURN", "POP")):
            return False
        if instruction.opname in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
            return True
    return bool(following) and following[0].argval == "type"


_COMPARED_WITHIN = 8
"""Instructions from the query of a device to its comparison with another one."""
