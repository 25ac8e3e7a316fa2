"""A program read from a file as a module: it is traced like any other model, and never runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from torchedge.errors import InputError
from torchedge.tracing.recorder import Recorder, active_recorder


class FileProgram(torch.nn.Module):
    """Base of what the file readers return: weights as meta tensors by their names in the file."""

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
        """Return meta tensors as the file says its inputs are, with a batch of one."""
        raise NotImplementedError

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight by its name in the file."""
        found: torch.Tensor = getattr(self, self.names[name])
        return found

    def recorder(self) -> Recorder:
        """Return the trace that is going on; raises InputError outside of one."""
        recorder = active_recorder()
        if recorder is None:
            raise InputError(
                f"{self.title} was read to be captured, not to be run; use torchedge.capture or predict"
            )
        return recorder


@contextmanager
def scope(recorder: Recorder, path: str) -> Iterator[None]:
    """Let the operators recorded inside bear this module path."""
    recorder.scopes.append(path)
    try:
        yield
    finally:
        recorder.scopes.pop()
