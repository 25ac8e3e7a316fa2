"""`capture`: any nn.Module to a Graph, by the fast path where possible, by torch.export elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_map

from torchedge.errors import CaptureError, InputError, TorchedgeError
from torchedge.graphs import Graph
from torchedge.tracing.input_size import infer_input
from torchedge.tracing.losses import default_loss
from torchedge.tracing.patches import LOCK
from torchedge.tracing.programs import FileProgram
from torchedge.tracing.refusals import refuse_unsuitable
from torchedge.tracing.restoring import kept_modes, kept_random_states
from torchedge.tracing.symbolic import batch_of, trace

Mode = Literal["train", "infer"]
Method = Literal["auto", "trace", "export"]
Loss = Callable[[Any], Any] | Literal["default"] | None
_Inputs = tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]


def capture(
    model: torch.nn.Module,
    example: Any = None,
    *,
    input_size: tuple[int, ...] | None = None,
    mode: Mode = "train",
    loss: Loss = "default",
    method: Method = "auto",
    batch_size: int | None = None,
    name: str | None = None,
) -> Graph:
    """Capture a forward pass of `model` (with its loss in train mode) as a Graph for every batch size.

    example: any pytree of tensors (a tuple is taken as positional, a dict as keyword arguments); only shapes
    and dtypes count, and dimension 0 of the first tensor is the batch.
    input_size: shape of one sample without the batch, instead of `example`. With neither, the model's own
    attribute `example_inputs` or its metadata decides.
    loss: called with the outputs, returns the scalar to differentiate; "default" is cross entropy, None
    captures none.
    method: "trace" is the fast path, "export" torch.export, "auto" the first that works.
    batch_size: capture for this batch size only (`Graph.fixed_batch`), for models that no batch-independent
    graph fits.
    The model is left as found: no weight, buffer, mode, gradient or random state changes. Nothing is
    computed.
    Raises InputError for unusable arguments and CaptureError, naming the reason, where the model cannot be
    captured.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    for given, value, choices in (
        ("mode", mode, ("train", "infer")),
        ("method", method, ("auto", "trace", "export")),
    ):
        if value not in choices:
            raise InputError(f"{given} is {value!r}; expected one of {', '.join(choices)}")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise InputError(
            f"batch_size is {batch_size!r}; expected a whole number of at least 1, or None for every one"
        )
    model = unwrapped(model)
    refuse_unsuitable(model)
    if example is None and input_size is None:
        example = getattr(model, "example_inputs", None)
    args, kwargs, notes = arguments_of(model, example, input_size)
    objective = None if mode == "infer" else default_loss if loss == "default" else loss
    training = mode == "train"
    from_file = isinstance(model, FileProgram)
    title = name or (model.title if isinstance(model, FileProgram) else type(model).__name__)
    options = {"loss": objective, "training": training, "name": title, "notes": notes}
    methods = ("trace",) if from_file else ("trace", "export") if method == "auto" else (method,)
    retry = from_file or (example is not None and method == "auto")
    with LOCK, kept_modes(model, training), kept_random_states():
        return _by_first(methods, model, args, kwargs, batch_size, options, retry)


def _by_first(
    methods: tuple[str, ...],
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    batch_size: int | None,
    options: dict[str, Any],
    retry: bool,
) -> Graph:
    """Try each method for every batch size, then (`retry`) each at the batch size of the example."""
    failures: dict[str, TorchedgeError] = {}
    for method in methods:
        try:
            return _by(method, model, args, kwargs, batch_size, options)
        except InputError:
            raise
        except TorchedgeError as error:
            failures[method] = error
    batch = batch_of((args, kwargs))
    if batch_size is None and retry and batch:
        note = f"valid for batch size {batch} only: the model's shapes do not follow the batch size"
        for method in methods:
            try:
                return _by(
                    method, model, args, kwargs, batch, {**options, "notes": (*options["notes"], note)}
                )
            except TorchedgeError:
                continue  # the reasons of the first attempts are the ones to report
    if len(failures) == 1:
        raise next(iter(failures.values()))
    tracing, exporting = failures["trace"], failures["export"]
    raise CaptureError(
        f"{options['name']} cannot be captured. By tracing: {tracing}. By torch.export: {exporting}."
    ) from tracing


def _by(
    method: str,
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    batch_size: int | None,
    options: dict[str, Any],
) -> Graph:
    """Capture by one method; whatever the model raises becomes a CaptureError of one line."""
    if batch_size is not None:
        args, kwargs = resized((args, kwargs), batch_size)
    run: Callable[..., Graph] = partial(trace, fixed_batch=batch_size)
    if method == "export":
        from torchedge.tracing.exporting import export_graph

        run = partial(export_graph, fixed_batch=batch_size)
    try:
        with torch.set_grad_enabled(options["training"]):
            return run(model, args, kwargs, **options)
    except TorchedgeError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "required" in str(error) and "argument" in str(error):
            raise InputError(
                f"{_first_line(error)}; pass every input of {options['name']} with example="
            ) from error
        raise CaptureError(f"the forward pass raised {type(error).__name__}: {_first_line(error)}") from error


def resized(tree: Any, batch_size: int) -> Any:
    """Return an example with another batch size, as meta tensors."""
    batch = batch_of(tree)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = tuple(leaf.shape)
        sizes = (batch_size, *sizes[1:]) if sizes and sizes[0] == batch else sizes
        return torch.empty(sizes, dtype=leaf.dtype, device="meta")

    return tree_map(resize, tree)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers for parallel training and compilation."""
    while isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def arguments_of(model: torch.nn.Module, example: Any, input_size: tuple[int, ...] | None) -> _Inputs:
    """Return positional and keyword arguments of a model, and notes on what was guessed.

    Without an example they are meta tensors of batch size one, of `input_size` or what the model's metadata
    says. Raises InputError where both are given, or nothing tells.
    """
    if example is not None and input_size is not None:
        raise InputError("both example and input_size are given; expected one of them")
    if example is not None:
        return _from_example(example)
    if input_size is not None:
        size = _checked_size(input_size)
        spec = infer_input(model) if _wants_integers(model) else None
        dtype = spec.dtype if spec is not None else _floating_dtype(model)
        keyword = getattr(model, "main_input_name", None) if hasattr(model, "config") else None
        return _fed(torch.empty((1, *size), dtype=dtype, device="meta"), keyword, ())
    if isinstance(model, FileProgram):
        return model.example(), {}, ()
    found = infer_input(model)
    dtype = found.dtype if not found.dtype.is_floating_point else _floating_dtype(model)
    tensor = torch.empty((1, *found.size), dtype=dtype, device="meta")
    return _fed(tensor, found.keyword, (found.note,) if found.note else ())


def _from_example(example: Any) -> _Inputs:
    tensors = [t for t in tree_flatten(example)[0] if isinstance(t, torch.Tensor)]
    if not tensors:
        raise InputError(
            f"example is a {type(example).__name__} without tensors; expected a tensor or a pytree of tensors"
        )
    if isinstance(example, Mapping):
        return (), dict(example), ()
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}, ()


def _fed(tensor: torch.Tensor, keyword: str | None, notes: tuple[str, ...]) -> _Inputs:
    return ((), {keyword: tensor}, notes) if keyword else ((tensor,), {}, notes)


def _wants_integers(model: torch.nn.Module) -> bool:
    first = next((m for m in model.modules() if getattr(m, "weight", None) is not None), None)
    return isinstance(first, torch.nn.Embedding)


def _floating_dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _checked_size(size: Any) -> tuple[int, ...]:
    plain = isinstance(size, (tuple, list)) and all(
        isinstance(s, int) and not isinstance(s, bool) for s in size
    )
    if not plain or any(s < 1 for s in size):
        raise InputError(
            f"input_size is {size!r}; expected whole numbers above 0 without the batch, like (3, 224, 224)"
        )
    return tuple(size)
