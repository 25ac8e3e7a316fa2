"""Sequence length as a second free size, beside the batch size: one family of graphs for every length.

A model is captured at four lengths. Every size and every number among the operators' attributes is read as a
polynomial of degree two through the first three, which has to meet the fourth: whatever does not follow the
length so (a window to which sequences are padded, a branch on the length) is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchedge.errors import CaptureError, InputError, check_whole
from torchedge.graphs import ForwardGraph, GraphFamily, Mode
from torchedge.graphs.sizes import Affine, Size
from torchedge.tracing.capturing import CaptureRequest, Loss, arguments_of, capture_request, checked_model

MOST_POSITIONS = 1 << 20
"""The longest sequence of a model whose configuration has no limit."""
_LENGTH = "sequence length"
_STEPS = (0, 1, 3, 4)
"""Distances of the captured lengths from the first one, in sixths of the example's length."""
_LEAST = 4
_SAME = frozenset(
    ("inputs", "outputs", "loss", "releases", "alias", "region", "tensors", "gradients", "forward", "saved")
)
"""Fields that hold no sizes: they are the same at every length."""


@dataclass(frozen=True, eq=False)
class LengthFamily:
    """The graphs of a model at every sequence length; captured at four of them on first use.

    request: with an example, whose length is `length`: that of the dimensions which change together.
    results: what others computed of the family, by their module.
    """

    request: CaptureRequest
    length: int = field(init=False)
    results: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Find the length; raises InputError where the example has none."""
        request = self.request.loaded()
        if request.example is None:
            example = getattr(request.model, "example_inputs", None)
            if example is None and request.input_size is None:
                args, kwargs, _ = arguments_of(checked_model(request.model), None, None)
                example = {**kwargs} or args
            request = replace(request, example=example)
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "length", example_length(self.request.example))

    def graph(self, length: int) -> ForwardGraph:
        """Return the graph at one length.

        Raises:
            InputError: the length is no whole number from 2 on, or beyond the model's positions.
            CaptureError: the model cannot be captured, or does not follow the length.
        """
        self.check_length(length)
        if length == self.length:
            return self.own
        return self._family.graph([length], name=self.own.name)

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

    @cached_property
    def _family(self) -> GraphFamily:
        unit, last = max(_LEAST, self.length // 6), _STEPS[-1]
        downwards = [self.length - unit * step for step in reversed(_STEPS)]
        lengths = (
            downwards if self.length > last * unit + 1 else [self.length + unit * step for step in _STEPS]
        )
        graphs = [self.own if n == self.length else capture_request(self.at(n)) for n in lengths]
        return GraphFamily(_through(graphs, lengths), (_LENGTH,))

    def at(self, length: int) -> CaptureRequest:
        """Return the request with an example of a length; raises InputError as `graph` does."""
        example = with_length(self.request.example, self.length, self.check_length(length))
        return replace(self.request, example=example)


def capture_lengths(
    model: torch.nn.Module | str,
    example: Any = None,
    *,
    mode: Mode = "train",
    loss: Loss = "default",
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
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
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


def _through(graphs: list[ForwardGraph], lengths: list[int]) -> ForwardGraph:
    """Return the template of the family that has these graphs at these lengths."""
    first = graphs[0]
    for graph in graphs[1:]:
        if len(graph.ops) != len(first.ops) or len(graph.values) != len(first.values):
            raise CaptureError(
                f"{first.name} has {len(first.ops)} operators at length {lengths[0]} and {len(graph.ops)} at "
                "another: its graph depends on the sequence length; capture it at each length"
            )
    own = {"name", "captured_by", "notes"}
    return replace(first, **_fields(graphs, [f.name for f in fields(first) if f.name not in own], lengths))


def _fields(items: list[Any], names: Iterable[str], lengths: list[int]) -> dict[str, Any]:
    """Return the fields of dataclasses, followed along the lengths."""
    followed = {}
    for name in names:
        parts = [getattr(item, name) for item in items]
        if name in _SAME and any(part != parts[0] for part in parts):
            raise _bent(parts)
        followed[name] = _line(parts, lengths)
    return followed


def _line(items: list[Any], lengths: list[int]) -> Any:
    """Return plain data whose numbers follow the length."""
    first = items[0]
    if all(item is first for item in items) or all(type(i) is type(first) and i == first for i in items):
        return first
    if all(type(item) in (int, Affine) for item in items):
        return _line_of_dims(items, lengths)
    if any(type(item) is not type(first) for item in items):
        raise _bent(items)
    if isinstance(first, (tuple, list)) and len({len(item) for item in items}) == 1:
        return type(first)(_line(list(entries), lengths) for entries in zip(*items, strict=True))
    if isinstance(first, slice):
        return slice(*_line([(item.start, item.stop, item.step) for item in items], lengths))
    if isinstance(first, Mapping) and all(item.keys() == first.keys() for item in items):
        return {key: _line([item[key] for item in items], lengths) for key in first}
    if hasattr(first, "__dataclass_fields__"):
        return replace(first, **_fields(items, [f.name for f in fields(first) if f.name != "scope"], lengths))
    raise _bent(items)


def _line_of_dims(items: list[Any], lengths: list[int]) -> Any:
    dims = [item if isinstance(item, Affine) else Affine(0, item) for item in items]
    slope = _line_of_numbers([dim.slope for dim in dims], lengths)
    const = _line_of_numbers([dim.const for dim in dims], lengths)
    return const if slope == 0 else Affine(slope, const)


def _line_of_numbers(numbers: list[int], lengths: list[int]) -> Any:
    """Return the polynomial of degree two through three numbers; the fourth has to lie on it."""
    (a, b, c, d), (x, y, z, w) = numbers, lengths
    first, second = Fraction(b - a, y - x), Fraction(c - b, z - y)
    bend = (second - first) / (z - x)
    square, slope = bend, first - bend * (x + y)
    const = a - slope * x - square * x * x
    if any(part.denominator > 1 for part in (square, slope, const)) or const + (slope + square * w) * w != d:
        raise _bent(numbers)
    length = Size.symbol(_LENGTH)
    return int(const) + int(slope) * length + int(square) * (length * length)


def _bent(items: list[Any]) -> CaptureError:
    shown = ", ".join(str(item)[:40] for item in items)
    return CaptureError(
        f"{shown}: this follows the sequence length in no straight line or parabola (padding to a window, a "
        "branch on the length); capture the model at each length"
    )
