"""Sequence length as a second free size, beside the batch size: a model's graph at every length.

Each graph is captured with an example of its length. `prediction.lengths` follows the amounts of a step along
the length, so that a prediction at another length needs no graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchedge.devices import Device
from torchedge.errors import InputError, check_whole, checked_call
from torchedge.graphs import ForwardGraph, Mode
from torchedge.graphs.training_steps import Loss
from torchedge.storage.locks import cached_property
from torchedge.tracing.capturing import CaptureRequest, arguments_of, capture_request, checked_model
from torchedge.tracing.interception import tensors_in

MOST_POSITIONS = 1 << 20
"""The longest sequence of a model whose configuration has no limit."""
_REMEMBERED = 8
"""Captured lengths that stay."""


@dataclass(frozen=True, eq=False)
class LengthFamily:
    """The graphs of a model at every sequence length, captured when they are asked for.

    request: with an example, whose length is `length`: that of the dimensions which change together.
    results: what others computed of the family, by their module.
    """

    request: CaptureRequest
    length: int = field(init=False)
    results: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _graphs: dict[int, ForwardGraph] = field(default_factory=dict, init=False, repr=False)
    _others: dict[tuple[Device | None, int | None], LengthFamily] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Find the length; raises InputError where the example has none."""
        request = self.request.loaded()
        if request.example is None:
            size = request.input_size
            example = getattr(request.model, "example_inputs", None) if size is None else None
            if example is None:
                args, kwargs, _ = arguments_of(checked_model(request.model), None, size)
                example = {**kwargs} or args
            request = replace(request, example=example, input_size=None)
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "length", example_length(self.request.example))

    def graph(self, length: int) -> ForwardGraph:
        """Return the graph at one length.

        Raises:
            InputError: the length is no whole number from 2 on, or beyond the model's positions.
            CaptureError: the model cannot be captured at this length.
        """
        self.check_length(length)
        if length == self.length:
            return self.own
        if length not in self._graphs:
            if len(self._graphs) >= _REMEMBERED:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[length] = capture_request(self.at(length))
        return self._graphs[length]

    def check_length(self, length: object) -> int:
        """Return a length; raises InputError unless it is a whole number from 2 to the model's positions."""
        checked = check_whole("seq_len", length, 2)
        if checked > self.most:
            raise InputError(
                f"seq_len is {length}, and {type(self.request.model).__name__} has {self.most} positions; "
                f"expected at most {self.most}"
            )
        return checked

    @cached_property
    def most(self) -> int:
        """The longest sequence that the model has positions for, by its configuration (as transformers')."""
        positions = getattr(getattr(self.request.model, "config", None), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 1 else MOST_POSITIONS

    @cached_property
    def own(self) -> ForwardGraph:
        """The graph at the length of the example."""
        return capture_request(self.request)

    def on(self, device: Device, batch_size: int | None = None) -> LengthFamily:
        """Return the family as the model runs on a device, at one batch size where its branches depend on it.

        It is this family itself where the model asks for neither.
        """
        known = [self] if self.request.device is not None or "own" in vars(self) else []
        known += [f for f in self._others.values() if f.request.batch_size == self.request.batch_size]
        for family in known:
            if family.request.device == device or family.own.captured_for is None:
                break
        else:
            family = self._other(replace(self.request, device=device))
        own, request = family.own, replace(family.request, batch_size=batch_size)
        if batch_size is None or request.batch_size == family.request.batch_size:
            return family
        return (
            self._other(request) if own.reads_batch or own.fixed_batch not in (None, batch_size) else family
        )

    def _other(self, request: CaptureRequest) -> LengthFamily:
        """Return the family of another request for the same model and example, the same one each time."""
        key = (request.device, request.batch_size)
        if key not in self._others:
            if len(self._others) >= _REMEMBERED:
                del self._others[next(iter(self._others))]
            self._others[key] = LengthFamily(request)
        return self._others[key]

    def at(self, length: int) -> CaptureRequest:
        """Return the request with an example of a length; raises InputError as `graph` does."""
        self.check_length(length)
        example, targets = with_length((self.request.example, self.request.targets), self.length, length)
        return replace(self.request, example=example, targets=targets)


@checked_call()
def capture_lengths(
    model: torch.nn.Module | str, example: Any = None, *, mode: Mode = "train", loss: Loss = "default"
) -> LengthFamily:
    """Return the graphs of a model at every sequence length, for `predict` with seq_len. Captures when used.

    example: a batch of sequences, (batch, length) token numbers or (batch, length, channels) vectors, by
    default the model's `example_inputs` or the input that its metadata or first layer names; all dimensions
    of that length change together. The other arguments are those of `capture`.

    Raises:
        InputError: the example has no sequence, or none is known.
    """
    return LengthFamily(CaptureRequest(model, None, mode, example, None, loss))


def example_length(example: Any) -> int:
    """Return the sequence length of an example: dimension 1 of its first integers, or of its first floats.

    Raises InputError where no tensor has a sequence: integers (batch, length) or floats (batch, length, ...).
    """
    tensors = tensors_in(example, torch.Tensor)
    whole = [t for t in tensors if not t.is_floating_point() and t.dim() == 2]
    real = [t for t in tensors if t.is_floating_point() and t.dim() == 3]
    for tensor in (*whole, *real):
        return int(tensor.shape[1])
    raise InputError(
        "the example has no sequence; expected a tensor of token numbers (batch, length) or of vectors "
        "(batch, length, channels): pass example=, or omit the sequence length"
    )


def with_length(example: Any, length: int, new: int) -> Any:
    """Return an example whose dimensions of one length, the batch's excepted, have another one.

    It is cut off, or goes on with its last values: models may read them, as masks are.
    """

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or length not in leaf.shape[1:]:
            return leaf
        places = torch.arange(new, device=leaf.device).clamp(max=length - 1)
        for dim in range(1, leaf.dim()):
            if leaf.shape[dim] == length:
                leaf = leaf.detach().index_select(dim, places)
        return leaf

    return tree_map(resize, example)
