"""Elements at places that other tensors hold: gather, embedding, indexing. Places outside hold NaN (or 0)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torchedge.errors import LoweringError
from torchedge.expressions.indices import Fetched, Index, of
from torchedge.expressions.scalars import Scalar, constant, guarded, where
from torchedge.lowering.building import (
    broadcast_shape,
    elementwise,
    expanded,
    permuted,
    pointwise,
    reshaped,
)
from torchedge.lowering.nodes import Node
from torchedge.lowering.rules.promotion import is_floating
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.sources import Sources, added, counted, replaced

_ANY = 2**31 - 1


def _read(x: Node, indices: Sequence[Index], places: dict[int, Scalar]) -> Scalar:
    """Return x at indices, of which those of some dimensions are themselves elements."""
    at = list(indices)
    bounds = []
    for dim, place in places.items():
        bounds.append((of(Fetched(place, -_ANY, _ANY)), 0, x.shape[dim]))
        at[dim] = of(Fetched(place, 0, max(0, x.shape[dim] - 1)))  # what the bounds promise
    outside = float("nan") if is_floating(x.dtype) else 0
    return guarded(bounds, x.at(*at), outside)


@rule("embedding")
def embedding(
    result: Result,
    weight: Node,
    indices: Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:
    """The rows of weight that indices name."""
    rank = len(indices.shape)
    return pointwise(
        result.shape, result.dtype, lambda *i: _read(weight, (i[0], *i[rank:]), {0: indices.at(*i[:rank])})
    )


@rule("embedding_dense_backward")
def embedding_dense_backward(
    result: Result,
    grad_output: Node,
    indices: Node,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Node:
    """The gradients of all the places where each row of the weight was read, `padding_idx` left out."""
    if scale_grad_by_freq:
        raise LoweringError(
            "aten.embedding_dense_backward was asked to scale gradients by frequency; "
            "expected scale_grad_by_freq=False"
        )
    flat = reshaped(indices, (indices.numel,))
    grads = reshaped(grad_output, (indices.numel, *result.shape[1:]))

    def row(source: Index, *tail: Index) -> Scalar:
        place = flat.at(source)
        return place if padding_idx < 0 else where(place.equals(padding_idx), constant(-1, flat.dtype), place)

    return added(result.shape, result.dtype, Sources(indices.numel, row, grads.at), None)


@rule("index_select")
def index_select(result: Result, input: Node, dim: int, index: Node) -> Node:
    """Input at the indices of a dimension that index names."""
    if not input.shape:
        return reshaped(input, result.shape)
    place, flat = dim % len(input.shape), reshaped(index, (index.numel,))

    def element(*at: Index) -> Scalar:
        return _read(input, at, {place: counted(flat.at(at[place]), input.shape[place])})

    return pointwise(result.shape, result.dtype, element)


@rule("gather")
def gather(result: Result, input: Node, dim: int, index: Node, sparse_grad: bool = False) -> Node:
    """Input at the places along a dimension that index holds."""
    if not input.shape:
        return expanded(input, result.shape)
    place = dim % len(input.shape)
    places = index if index.shape else reshaped(index, (1,))

    def element(*at: Index) -> Scalar:
        return _read(input, at, {place: counted(places.at(*at), input.shape[place])})

    return reshaped(pointwise(places.shape, result.dtype, element), result.shape)


@rule("index", "_unsafe_index")
def index(result: Result, input: Node, indices: Sequence[Node | None]) -> Node:
    """Input at the places that tensors hold, together, for some of its dimensions."""
    given = _given("index", indices)
    shape = broadcast_shape(*[n.shape for n in given.values()])
    first, space = _block(given), len(shape)

    def element(*at: Index) -> Scalar:
        block, others = at[first : first + space], iter((*at[:first], *at[first + space :]))
        indices = [Index(()) if d in given else next(others) for d in range(len(input.shape))]
        places = {d: counted(_broadcast(n, block), input.shape[d]) for d, n in given.items()}
        return _read(input, indices, places)

    return pointwise(result.shape, result.dtype, element)


def _given(kind: str, indices: Sequence[Node | None]) -> dict[int, Node]:
    given = {d: n for d, n in enumerate(indices) if n is not None}
    masks = [n for n in given.values() if n.dtype in ("bool", "uint8")]
    if masks:
        raise LoweringError(
            f"aten.{kind} was called with a mask; how many elements it takes is not known beforehand: "
            "use torch.where, or run this part of the model in PyTorch"
        )
    return given


def _block(given: dict[int, Node]) -> int:
    """Return where the index tensors' dimensions stand in the result: in place if together, else first."""
    dims = list(given)
    return dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0


def _broadcast(node: Node, at: Sequence[Index]) -> Scalar:
    return node.at(*at[len(at) - len(node.shape) :])


@rule("index_put", "_unsafe_index_put")
def index_put(
    result: Result, input: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False
) -> Node:
    """Input with values at (or added to) the places that tensors hold for some of its dimensions."""
    masks = [n for n in indices if n is not None and n.dtype == "bool"]
    if len(masks) == 1 and len(indices) == 1 and values.numel == 1:
        return _masked(result, input, masks[0], values, accumulate)
    given = _given("index_put", indices)
    shape = broadcast_shape(*[n.shape for n in given.values()])
    first, space = _block(given), len(shape)
    others = [d for d in range(len(input.shape)) if d not in given]
    sizes, tail = [input.shape[d] for d in given], [input.shape[d] for d in others]
    spread = expanded(values, [*tail[:first], *shape, *tail[first:]])
    lead = permuted(
        spread, [*range(first, first + space), *range(first), *range(first + space, len(spread.shape))]
    )
    count = prod(shape)
    flat_values = reshaped(lead, (count, *tail))
    flat_indices = [reshaped(expanded(n, shape), (count,)) for n in given.values()]

    def row(source: Index, *_: Index) -> Scalar:
        return _flat_row([n.at(source) for n in flat_indices], sizes)

    order = [*given, *others]
    base = reshaped(permuted(input, order), (prod(sizes), *tail))
    put = added if accumulate else replaced
    made = put(base.shape, result.dtype, Sources(count, row, flat_values.at), base.at)
    back = [order.index(d) for d in range(len(order))]
    return permuted(reshaped(made, (*sizes, *tail)), back)


def _flat_row(places: Sequence[Scalar], sizes: Sequence[int]) -> Scalar:
    """Return the row-major position of places, -1 where one is outside."""
    position: Scalar | None = None
    inside: Scalar | None = None
    for place, size in zip(places, sizes, strict=True):
        found = counted(place, size)
        good = (found >= 0) & (found < size)
        position = found if position is None else position * size + found
        inside = good if inside is None else inside & good
    assert position is not None and inside is not None
    return where(inside, position, -1)


def _masked(result: Result, input: Node, mask: Node, value: Node, accumulate: bool) -> Node:
    """Return input with one value where a mask over its first dimensions holds."""
    wide = reshaped(mask, (*mask.shape, *[1] * (len(input.shape) - len(mask.shape))))
    single = reshaped(value, [1] * len(input.shape))

    def body(holds: Scalar, old: Scalar, new: Scalar) -> Scalar:
        return where(holds, old + new if accumulate else new, old)

    return elementwise(body, wide, input, single, dtype=result.dtype)
