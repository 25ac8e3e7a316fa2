"""A batch as the user gives it: arguments of a model and targets of a loss, with the tensors among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_flatten, tree_map

from torchedge.errors import InputError


@dataclass(frozen=True)
class Batch:
    """Arguments, keyword arguments and targets; `tensors` in their order.

    form: structure, dtypes and everything that is no tensor, as text; shapes: of the tensors.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    form: str
    shapes: tuple[tuple[int, ...], ...]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the tensors as arrays in main memory."""
        return [array_of(tensor) for tensor in self.tensors]


def batch_of(inputs: Any, targets: Any = ()) -> Batch:
    """Read a batch: a tensor, a tuple of arguments or a dict of keyword arguments; numpy arrays will do.

    Raises:
        InputError: there is no tensor in it.
    """
    inputs, targets = tree_map(_tensor, (inputs, targets))
    keywords = isinstance(inputs, Mapping)
    args = () if keywords else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    kwargs = dict(inputs) if keywords else {}
    wanted = tuple(targets) if isinstance(targets, (tuple, list)) else (targets,)
    leaves, structure = tree_flatten((args, kwargs, wanted))
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    if not tensors:
        raise InputError(
            f"inputs are a {type(inputs).__name__} without tensors; expected a tensor, a tuple of arguments "
            "or a dict of keyword arguments"
        )
    marks = [str(leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    shapes = tuple([tuple(tensor.shape) for tensor in tensors])
    return Batch(args, kwargs, wanted, tensors, f"{structure} {marks}", shapes)


def check_form(batch: Batch, example: Batch) -> None:
    """Raise InputError where a batch is not made up like the example: number of tensors, dtypes, ranks."""
    if [len(s) for s in batch.shapes] == [len(s) for s in example.shapes] and batch.form == example.form:
        return
    found, wanted = _described(batch), _described(example)
    if found == wanted:
        raise InputError(
            "the batch has another structure, or other arguments that are no tensors, than the example that "
            "the Trainer was made with; pass them alike, or make another Trainer"
        )
    raise InputError(
        f"the batch is {found}; the Trainer was made for {wanted}; convert it (.to(dtype), .unsqueeze()), or "
        "make another Trainer"
    )


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor of any device as an array in main memory."""
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def _described(batch: Batch) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in batch.tensors)
