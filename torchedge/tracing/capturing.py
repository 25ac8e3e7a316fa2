"""`capture`: any nn.Module to a Graph, by the fast path where possible, by torch.export elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from torchedge.errors import CaptureError, InputError, TorchedgeError
from torchedge.graphs import Graph
from torchedge.tracing.input_size import infer_input
from torchedge.tracing.losses import default_loss
from torchedge.tracing.symbolic import trace

Mode = Literal["train", "infer"]


def capture(
    model: torch.nn.Module,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    *,
    input_size: tuple[int, ...] | None = None,
    mode: Mode = "train",
    loss: Callable[[Any], Any] | Literal["default"] | None = "default",
    method: Literal["auto", "trace", "export"] = "auto",
    name: str | None = None,
) -> Graph:
    """Capture one forward pass of `model` (with its loss in train mode) as a Graph valid for every batch size.

    example: any pytree of tensors (a tuple is taken as positional, a dict as keyword arguments); only shapes and dtypes count.
    input_size: shape of one sample without the batch, instead of `example`. With neither, the model's own metadata decides.
    loss: called with the outputs, returns the scalar to differentiate; "default" is cross entropy, None captures no loss.
    method: "trace" is the fast path, "export" torch.export, "auto" the first that works.
    The model is left as found: no weight, buffer, mode, gradient or random state changes. Nothing is computed.
    Raises InputError for unusable arguments and CaptureError, naming the reason, where the model cannot be captured.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if mode not in ("train", "infer"):
        raise InputError(f"mode is {mode!r}; expected 'train' or 'infer'")
    model = _unwrapped(model)
    args, kwargs, notes = _arguments(model, example, input_size)
    title = name or type(model).__name__
    objective = None if mode == "infer" else default_loss if loss == "default" else loss
    with _in_mode(model, mode), _kept_random_state():
        if method == "export":
            return _by_export(model, args, kwargs, objective, mode, title, notes)
        try:
            return _by_trace(model, args, kwargs, objective, mode, title, notes)
        except TorchedgeError as error:
            reason = error
            if method == "trace" or isinstance(error, InputError):
                raise
        try:
            graph = _by_export(model, args, kwargs, objective, mode, title, notes)
        except CaptureError as error:
            raise CaptureError(f"{title} cannot be captured. Tracing: {reason}. torch.export: {error}") from error
        return graph


def _by_trace(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any, mode: Mode, name: str,  # noqa: ANN401
              notes: tuple[str, ...]) -> Graph:  # fmt: skip
    try:
        with torch.set_grad_enabled(mode == "train"):
            return trace(model, args, kwargs, loss=loss, training=mode == "train", name=name, notes=notes)
    except TorchedgeError:
        raise
    except Exception as error:
        raise CaptureError(f"the forward pass raised {type(error).__name__}: {_first_line(error)}") from error


def _by_export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any, mode: Mode, name: str,  # noqa: ANN401
               notes: tuple[str, ...]) -> Graph:  # fmt: skip
    from torchedge.tracing.exporting import export_graph

    return export_graph(model, args, kwargs, loss=loss, training=mode == "train", name=name, notes=notes)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    return model


def _arguments(model: torch.nn.Module, example: Any, input_size: tuple[int, ...] | None  # noqa: ANN401
               ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:  # fmt: skip
    if example is not None and input_size is not None:
        raise InputError("both example and input_size are given; expected one of them")
    if example is not None:
        if isinstance(example, Mapping):
            return (), dict(example), ()
        return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}, ()
    if input_size is not None:
        size = _checked_size(input_size)
        spec = infer_input(model) if _wants_integers(model) else None
        dtype = spec.dtype if spec is not None else _floating_dtype(model)
        keyword = getattr(model, "main_input_name", None) if hasattr(model, "config") else None
        return _fed(torch.empty((1, *size), dtype=dtype, device="meta"), keyword, ())
    found = infer_input(model)
    dtype = found.dtype if not found.dtype.is_floating_point else _floating_dtype(model)
    tensor = torch.empty((1, *found.size), dtype=dtype, device="meta")
    return _fed(tensor, found.keyword, (found.note,) if found.note else ())


def _fed(tensor: torch.Tensor, keyword: str | None, notes: tuple[str, ...]
         ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:  # fmt: skip
    return ((), {keyword: tensor}, notes) if keyword else ((tensor,), {}, notes)


def _wants_integers(model: torch.nn.Module) -> bool:
    first = next((m for m in model.modules() if getattr(m, "weight", None) is not None), None)
    return isinstance(first, torch.nn.Embedding)


def _floating_dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _checked_size(size: Any) -> tuple[int, ...]:  # noqa: ANN401
    usable = isinstance(size, (tuple, list)) and all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in size)
    if not usable:
        raise InputError(f"input_size is {size!r}; expected positive whole numbers without the batch, such as (3, 224, 224)")
    return tuple(size)


@contextmanager
def _in_mode(model: torch.nn.Module, mode: Mode) -> Iterator[None]:
    """Put the model into the mode asked for, unless it is already; every module's own flag comes back afterwards."""
    wanted = mode == "train"
    if model.training == wanted:
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(wanted)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Keep the CPU generator's state: some models draw numbers with Python code that tracing cannot see."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
