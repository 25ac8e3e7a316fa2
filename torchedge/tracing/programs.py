"""A program from a file as a module: it is traced like any other model, and never runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchedge.errors import InputError, ProfileError, TorchedgeError, clipped, first_line
from torchedge.tracing.recorder import Recorder, active_recorder

MAX_NODES = 100_000
MAX_SIZE = 2**40
"""The most operators of a file, and the most elements of a tensor."""


@contextmanager
def reading_model(path: str | Path, expected: str) -> Iterator[None]:
    """Raise InputError for anything that goes wrong inside, in the libraries that read a format too."""
    try:
        yield
    except ProfileError as error:
        raise InputError(*error.args) from error
    except TorchedgeError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {clipped(first_line(error))}"
        raise InputError(f"{path}: is not understood ({reason}); expected {expected}") from error


def checked_sizes(sizes: Iterable[int]) -> list[int]:
    """Return the sizes of a tensor; raises ValueError for a negative one, or for too many elements."""
    shape = [int(size) for size in sizes]
    if len(shape) > 64 or any(not 0 <= size <= MAX_SIZE for size in shape) or math.prod(shape) > MAX_SIZE:
        raise ValueError(f"a tensor of shape {shape[:8]}, expected at most {MAX_SIZE} elements")
    return shape


class FileProgram(torch.nn.Module):
    """Base class of programs from files: weights are meta tensors by their names in the file."""

    def __init__(self, title: str, weights: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
        super().__init__()
        self.title = title
        self.names: dict[str, str] = {}
        self.names_in_file: dict[str, str] = {}
        for name, tensor, trainable in weights:
            key = name.replace(".", "/") or "weight"
            while hasattr(self, key):
                key += "_"
            self.names[name] = key
            self.names_in_file[key] = name
            if trainable:
                self.register_parameter(key, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(key, tensor)

    def example(self) -> tuple[torch.Tensor, ...]:
        """Return meta tensors of the input shapes in the file, with a batch of one."""
        raise NotImplementedError

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight by its name in the file."""
        weight: torch.Tensor = getattr(self, self.names[name])
        return weight

    def recorder(self) -> Recorder:
        """Return the recorder of the running trace; raises InputError outside of a trace."""
        recorder = active_recorder()
        if recorder is None:
            raise InputError(
                f"{self.title} was read to be captured, not to be run; use torchedge.capture or predict"
            )
        return recorder


@contextmanager
def scope(recorder: Recorder, path: str) -> Iterator[None]:
    """Record the operators inside with this module path."""
    recorder.scopes.append(path)
    try:
        yield
    finally:
        recorder.scopes.pop()
