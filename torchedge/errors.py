"""Every exception torchedge raises on purpose.

A message is one line: what was given, what was expected, what to do next.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from typing import TypeVar

__all__ = [
    "CaptureError",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "DivisionError",
    "IndexRangeError",
    "InputError",
    "KernelBuildError",
    "KernelCheckError",
    "LimitError",
    "LoweringError",
    "MissingExtraError",
    "OpenCLError",
    "PlanError",
    "ProfileError",
    "TorchedgeError",
    "TorchedgeWarning",
]


_TERMINAL_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


NAMED_FILE = "_torchedge_user_"
"""Modules of Python files that a command line names (nets.py:small) begin so."""

_SHOWN = 60
"""Characters of an over-long path or value that a message shows."""

_F = TypeVar("_F", bound=Callable[..., object])


def _printable(text: str) -> str:
    """Return a text as one line without terminal codes; other unprintable characters are escaped."""
    line = "\\n".join(_TERMINAL_CODE.sub("", text).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class TorchedgeError(Exception):
    """Base of all errors of torchedge: catch this one to catch them all."""

    def __init__(self, *args: object) -> None:
        # A message is one printable line, also where it quotes a name, a path or another library's message.
        super().__init__(*[_printable(arg) if isinstance(arg, str) else arg for arg in args])


class TorchedgeWarning(UserWarning):
    """A choice that torchedge made for the user, or a file that it skipped."""


class CaptureError(TorchedgeError):
    """A model could not be captured as a graph, or a graph breaks one of its invariants."""


class InputError(TorchedgeError, ValueError):
    """An argument, a shape, a file or a dataset given by the user is not usable."""


class IndexRangeError(InputError, IndexError):
    """A class label or an index in an input is outside of the tensor that it names a place of."""


class DivisionError(InputError, ZeroDivisionError, RuntimeError):
    """A model has divided whole numbers by zero; a RuntimeError, too, as PyTorch's is."""


class DeviceError(TorchedgeError, LookupError):
    """A device is unknown, cannot be reached or cannot do what was asked of it."""


class OpenCLError(TorchedgeError, RuntimeError):
    """An OpenCL driver refused or failed what was asked of it; base of the errors below."""


class KernelBuildError(OpenCLError):
    """A kernel does not compile: `kernel` is its name, `log` all that the driver's compiler said."""

    def __init__(self, *args: object, kernel: str = "", log: str = "") -> None:
        super().__init__(*args)
        self.kernel, self.log = kernel, log


class DeviceMemoryError(OpenCLError, MemoryError):
    """An allocation on a device failed or is beyond its limits; `nbytes` is what was asked for."""

    def __init__(self, *args: object, nbytes: int = 0) -> None:
        super().__init__(*args)
        self.nbytes = nbytes


class DeviceLostError(OpenCLError):
    """A device stopped answering (reset, unplugged, a kernel that crashed): what it held is gone."""


class KernelCheckError(OpenCLError):
    """A kernel built with checks found an access outside a tensor."""


class PlanError(TorchedgeError):
    """An overlap plan breaks a rule of its instance."""


class LimitError(PlanError):
    """No plan stays within the memory limit; `works_bytes` is a limit that works, where one is known."""

    def __init__(self, *args: object, works_bytes: int | None = None) -> None:
        super().__init__(*args)
        self.works_bytes = works_bytes


class LoweringError(TorchedgeError):
    """An operator, a dtype or a layout cannot be lowered to kernels."""


class ProfileError(TorchedgeError):
    """A device's profile (device.toml, forests, coefficients) is missing, corrupted or does not match."""


class MissingExtraError(TorchedgeError, ImportError):
    """An optional package is needed for what was asked and is not installed."""

    @classmethod
    def of(cls, package: str, *, extra: str | None = None, purpose: str) -> MissingExtraError:
        """Build the error for one missing package, with the pip command that installs it.

        package: the name to show. extra: the extra of torchedge that lists it, None for a package that users
        install by its own name. purpose: the work that needs the package.
        """
        command = f"pip install {package}" if extra is None else f"pip install 'torchedge[{extra}]'"
        return cls(f"{purpose} needs {package}, which is not installed; run: {command}")


def described(value: object) -> str:
    """Return the kind of an argument for a message: "a list", "an int", "the class Adam", "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def not_a_module(model: object, expected: str = "a torch.nn.Module") -> InputError:
    """Return the error about an argument in place of a torch.nn.Module, with the next step."""
    step = "pass the model object itself"
    if isinstance(model, type):
        step = f"build it: {model.__name__}(...)"
    elif isinstance(model, Mapping):
        step = "build the model, and give it these weights by load_state_dict"
    return InputError(f"model is {described(model)}; expected {expected}: {step}")


def shown(value: object) -> str:
    """Return a value for a message, or only its kind if it is long or has an array's values."""
    text = repr(value)
    return described(value) if len(text) > _SHOWN or "\n" in text or " at 0x" in text else text


def checked_call(more: Iterable[str] = ()) -> Callable[[_F], _F]:
    """Decorate a public function, so that arguments that it does not take raise InputError, not TypeError.

    more: names of keyword arguments that it takes as ``**options``. A parameter annotated as bool takes True
    and False alone.
    """

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        name = function.__qualname__.removesuffix(".__init__")
        own = [p for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        names = [*dict.fromkeys([*(p.name for p in own if p.kind is not p.VAR_POSITIONAL), *more])]
        positional = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [f"{key}=" for key in names if key not in positional]
        star = [f"*{p.name}" for p in own if p.kind is p.VAR_POSITIONAL] or ["*"] * bool(keywords)
        usage = f"{name}({', '.join([*positional, *star, *keywords])})"
        flags = [p.name for p in own if p.annotation in ("bool", bool)]

        @wraps(function)
        def checked(*args: object, **kwargs: object) -> object:
            unknown = [key for key in kwargs if key not in names]
            if unknown:
                hint = did_you_mean(unknown[0], names, f"expected {usage}")
                raise InputError(f"{name} has no argument {unknown[0]!r}; {hint}")
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                reason = str(error).replace("a required", "the required")
                raise InputError(f"{name}: {reason}; expected {usage}") from error
            for flag in flags:
                check_flag(flag, bound.get(flag, False))
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check_flag(name: str, value: object) -> bool:
    """Return an argument that is True or False, also of numpy; raises InputError for any other."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise InputError(f"{name} is {shown(value)}; expected True or False")
    return bool(value)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise InputError unless an argument is one of some words."""
    words = tuple(choices)
    if not isinstance(value, str) or value not in words:
        near = did_you_mean(value, words) if isinstance(value, str) else ""
        step = f"{', '.join(words)}{near and f': {near}'}"
        raise InputError(f"{name} is {shown(value)}; expected one of {step}")


def check_whole(name: str, value: object, least: int = 1, most: int = 2**63 - 1) -> int:
    """Return an argument that is a whole number, also of numpy; raises InputError for any other."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} is {shown(value)}; expected a whole number from {least} on")
    if int(value) > most:
        raise InputError(f"{name} is {value}; expected a whole number from {least} to {most}")
    return int(value)


def check_rate(name: str, value: object) -> float:
    """Return a number from 0 on that float32 holds, as a learning rate; raises InputError for any other."""
    try:
        rate = float("nan") if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        rate = float("nan")
    if not 0 <= rate < 2.0**128:
        raise InputError(f"{name} is {shown(value)}; expected a number from 0 to 3.4e+38")
    return rate


def check_path(name: str, value: object) -> Path:
    """Return a path; raises InputError for another type, and for a text that can be no path here.

    That is: empty, with a name that is too long, with a NUL, through a loop of links, of an unknown user.
    """
    if not isinstance(value, (str, PathLike)) or not isinstance(text := fspath(value), str):
        raise InputError(f"{name} is {shown(value)}; expected a path")
    if not text:
        raise InputError(f"{name} is empty; expected a path")
    try:
        path = Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise InputError(f"{name} is {short!r}: {reason}; expected a path that can be used") from error
    return path


def check_function(name: str, value: object) -> None:
    """Raise InputError unless an argument can be called."""
    if not callable(value):
        raise InputError(f"{name} is {described(value)}; expected a function")


@contextmanager
def needed(package: str, *, extra: str | None = None, purpose: str) -> Iterator[None]:
    """Raise MissingExtraError if an import of the package fails inside; arguments as of its `of`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(package, extra=extra, purpose=purpose) from error
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs {package}, which does not import: {clipped(first_line(error))}; "
            "see: torchedge doctor"
        ) from error


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "", most: int = 1) -> str:
    """Return "did you mean X?" for the known names nearest to a name; `otherwise` if none is near."""
    near = difflib.get_close_matches(str(name)[:100], list(known), n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def clipped(text: str, most: int = 200) -> str:
    """Return a text as one line of at most so many characters, cut between words."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 4].rsplit(" ", 1)[0].rstrip(",;:") + " ..."


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, for an error of one line."""
    return (str(error).strip().splitlines() or ["no message"])[0]
