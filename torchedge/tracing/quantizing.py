"""Weights in 8 or 4 bits: `quantize` makes a model that stores packed integers and scales.

The result is plain PyTorch: a layer computes its weight from the integers where it needs it. Captured, that
is a handful of element-wise operators on stored tensors, which kernels compute while they load the weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from torch.nn.functional import embedding, pad

from torchedge.errors import InputError, check_choice, check_whole, checked_call, not_a_module, shown

WeightFormat = Literal["int8", "int4"]


_whole: ContextVar[bool] = ContextVar("whole", default=False)


@contextmanager
def whole_weights() -> Iterator[None]:
    """Compute each weight by one operator, `DEQUANTIZED`, inside: a trace is shorter by its parts."""
    before = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(before)


def dequantized(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    group: int,
    columns: int,
    dtype: torch.dtype,
    table: Sequence[float] | None,
) -> torch.Tensor:
    """Return rows of a matrix; arguments as of `QuantizedWeight`."""
    lead = packed.shape[:-1]
    if bits == 4:
        # In int32: torch.onnx converts no shift of uint8.
        shifts = torch.arange(0, 8, 4, dtype=torch.int32, device=packed.device)
        packed = torch.bitwise_right_shift(packed.unsqueeze(-1).to(torch.int32), shifts) & 15
    compute = torch.promote_types(dtype, torch.float32)
    if table is not None:
        packed = _looked_up(packed, table)
    values = packed.reshape(*lead, -1, group).to(compute)
    if zero is not None:
        values = values - zero.to(compute)
    elif bits == 4 and table is None:
        values = values - 8
    matrix = (values * scale.to(compute)).reshape(*lead, -1)[..., :columns]
    return matrix.to(dtype)


_LIBRARY = torch.library.Library("torchedge", "DEF")
_LIBRARY.define(
    "dequantized(Tensor packed, Tensor scale, Tensor? zero, int bits, int group, int columns, "
    "ScalarType dtype, float[]? table) -> Tensor"
)
DEQUANTIZED = torch.ops.torchedge.dequantized.default


def _shape(packed: torch.Tensor, *others: Any) -> torch.Tensor:
    *_, columns, dtype, _table = others
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)


_LIBRARY.impl("dequantized", _shape, "Meta")  # a trace alone calls it


class QuantizedWeight(torch.nn.Module):
    """A matrix as integers in groups along each row: (q - zero) · scale.

    packed: int8 (columns), or uint8 with zero points; of int4 two columns a byte, the lower half first. Rows
    are padded to whole groups. scale: (rows, groups, 1), in float16 where groups are shorter than rows and
    float16 holds all scales with its full precision, else in float32. zero: uint8 of the same shape, None for
    symmetric integers. dtype: of the matrix. table: 16 numbers that int4 stands for; None: for whole ones.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        kind: WeightFormat,
        columns: int,
        dtype: torch.dtype,
        table: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        self.bits, self.columns, self.dtype = 8 if kind == "int8" else 4, columns, dtype
        self.table = table
        self.group = packed.shape[1] * 8 // self.bits // scale.shape[1]
        self.register_buffer("packed", packed.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    def forward(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the matrix, or only some of its rows, whose numbers may have any shape."""
        packed, scale, zero = self.packed, self.scale, self.zero
        if rows is not None:
            packed = embedding(rows, packed)
            scale = embedding(rows, scale.flatten(1)).unsqueeze(-1)
            zero = None if zero is None else embedding(rows, zero.flatten(1)).unsqueeze(-1)
        form = self.bits, self.group, self.columns, self.dtype, self.table
        compute = DEQUANTIZED if _whole.get() else dequantized
        matrix: torch.Tensor = compute(packed, scale, zero, *form)
        return matrix

    def extra_repr(self) -> str:
        """The format, as modules print it."""
        return f"int{self.bits}, group={self.group}, zero_points={self.zero is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedWeight:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        return self


def _looked_up(numbers: torch.Tensor, table: Sequence[float]) -> torch.Tensor:
    """Return entries of a table by their numbers: a tree of choices, which kernels fuse as arithmetic."""
    level: list[Any] = [*table]
    for bit in range(len(table).bit_length() - 1):
        upper = (numbers >> bit & 1) > 0
        level = [
            torch.where(upper, second, first) for first, second in zip(level[::2], level[1::2], strict=True)
        ]
    entries: torch.Tensor = level[0]
    return entries


def rounded(
    matrix: torch.Tensor, kind: WeightFormat, group: int | None, zero_points: bool
) -> QuantizedWeight:
    """Return a matrix as the nearest integers; arguments as of `quantize`."""
    bits, columns = 8 if kind == "int8" else 4, matrix.shape[1]
    size = min(group or columns, columns)
    size += bits == 4 and size % 2
    whole = group is None or group >= columns
    values = pad(matrix.detach().float(), (0, -columns % size)).reshape(matrix.shape[0], -1, size)
    highest = (1 << bits) - 1 if zero_points else (1 << bits - 1) - 1
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low if zero_points else torch.maximum(high, -low)) / highest
    half = torch.finfo(torch.float16)
    exact = (scale == 0) | ((scale >= half.tiny) & (scale <= half.max))
    if not whole and (scale.is_meta or bool(exact.all())):
        scale = scale.to(torch.float16)
    step = torch.where(scale == 0, 1, scale).float()
    zero = (-low / step).round().clamp(0, highest) if zero_points else None
    least = 0 if zero_points else -highest
    integers = ((values / step).round() + (0 if zero is None else zero)).clamp(least, highest)
    integers = integers.reshape(matrix.shape[0], -1)
    if bits == 4:
        packed = in_nibbles((integers if zero_points else integers + 8).to(torch.uint8))
    else:
        packed = integers.to(torch.uint8 if zero_points else torch.int8)
    return QuantizedWeight(
        packed, scale, None if zero is None else zero.to(torch.uint8), kind, columns, matrix.dtype
    )


def in_nibbles(integers: torch.Tensor) -> torch.Tensor:
    """Return integers from 0 to 15 two a byte, as `QuantizedWeight` has them."""
    return integers[:, 0::2] | integers[:, 1::2] << 4


class _Quantized:
    """What a layer with a quantised weight has in place of the parameter `weight`."""

    quantized: QuantizedWeight

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the dtype of the model, computed anew each time."""
        weight: torch.Tensor = self.quantized()
        return weight


class _QuantizedEmbedding(_Quantized):
    """An embedding that computes only the rows that are asked for."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers."""
        rows: torch.Tensor = self.quantized(input)
        return rows


class QuantizedTransposed(_Quantized):
    """A layer whose weight has the inputs as rows: groups run along the inputs all the same."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the dtype of the model, computed anew each time."""
        return super().weight.t()


def kind_of(layer: Any) -> type[_Quantized] | None:
    """Return what a layer becomes; None where it stays as it is."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    if isinstance(layer, torch.nn.Embedding):
        plain = type(layer).forward is torch.nn.Embedding.forward
        return (_QuantizedEmbedding if plain else _Quantized) if layer.max_norm is None else None
    if isinstance(layer, getattr(transformers, "Conv1D", ())):
        return QuantizedTransposed
    return _Quantized if isinstance(layer, torch.nn.Linear) else None


@checked_call()
def quantize(
    model: torch.nn.Module,
    format: WeightFormat = "int8",
    *,
    group: int | None = None,
    zero_points: bool = False,
    skip: Collection[str] = (),
) -> torch.nn.Module:
    """Return a copy of a model whose linear layers and embeddings store their weights as integers.

    format: "int8" or "int4", rounded to nearest. group: columns of a row that share a scale, such as 32 or
    128; None: the whole row. zero_points: integers from a group's smallest weight to its largest, instead of
    symmetric about zero. skip: names of modules to leave as they are, whole ("decoder.lm_head") or their last
    part ("lm_head"). Weights that layers share stay shared. The copy shares no weight that is quantised with
    `model`, which does not change; what is not quantised is copied. Integers get no gradient.

    Raises InputError for another format, a group below 2, a name that no module has, weights that are not
    finite, or a model without such layers.
    """
    if not isinstance(model, torch.nn.Module):
        raise not_a_module(model, "a torch.nn.Module")
    check_choice("format", format, get_args(WeightFormat))
    if group is not None:
        group = check_whole("group", group, 2)
    names: object = [skip] if isinstance(skip, str) else skip
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InputError(f"skip is {shown(skip)}; expected names of modules, as ['lm_head']")
    layers = _layers(model, names)

    def made(name: str, weight: torch.Tensor) -> QuantizedWeight:
        if not (weight.is_meta or bool(weight.isfinite().all())):
            raise InputError(
                f"{name}.weight is not finite in all places; expected finite weights: correct them, "
                f'or pass skip=["{name}"]'
            )
        return rounded(weight, format, group, zero_points)

    return with_quantized(model, layers, made)


def with_quantized(
    model: torch.nn.Module, layers: Mapping[str, Any], made: Callable[[str, torch.Tensor], QuantizedWeight]
) -> torch.nn.Module:
    """Return a copy whose layers, given by name, have the weights that `made` returns for name and matrix.

    A matrix has the outputs as rows; it is asked for once where layers share it.
    """
    originals = {id(layer.weight): layer.weight for layer in layers.values()}
    copy = deepcopy(model, dict(originals))
    weights: dict[tuple[int, bool], QuantizedWeight] = {}
    classes: dict[tuple[type, type], type] = {}
    for name in layers:
        layer: Any = copy.get_submodule(name)
        weight = layer._parameters.pop("weight")
        kind, plain = kind_of(layer), type(layer)
        if plain.__module__.partition(".")[0] == "bitsandbytes":  # its forward asks for its own weight
            plain = torch.nn.Linear
        assert kind is not None
        transposed = kind is QuantizedTransposed
        key = id(weight), transposed
        if key not in weights:
            weights[key] = made(name, weight.t() if transposed else weight)
        if (kind, plain) not in classes:
            attributes = {"__module__": __name__}
            classes[kind, plain] = type(f"Quantized{plain.__name__}", (kind, plain), attributes)
        layer.__class__ = classes[kind, plain]
        layer.quantized = weights[key]
    return copy


def _layers(model: torch.nn.Module, skip: Collection[str]) -> dict[str, Any]:
    """Return the layers to quantise, by name."""
    layers, unmatched, shared = dict[str, Any](), set(skip), set[int]()
    for name, layer in model.named_modules():
        matched = {name, name.rpartition(".")[2]} & set(skip)
        unmatched -= matched
        weight = layer._parameters.get("weight")
        fits = weight is not None and weight.is_floating_point() and weight.dim() == 2 and weight.numel()
        if matched and weight is not None:
            shared.add(id(weight))
        elif fits and kind_of(layer) is not None:
            layers[name] = layer
    if unmatched:
        raise InputError(
            f"skip names {', '.join(sorted(unmatched))}, which {type(model).__name__} does not have; "
            "expected names of its modules (model.named_modules())"
        )
    layers = {name: layer for name, layer in layers.items() if id(layer.weight) not in shared}
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no linear layer and no embedding to quantise; expected at least one"
        )
    return layers
