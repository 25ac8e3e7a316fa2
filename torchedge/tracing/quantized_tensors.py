"""Weights that torchao or bitsandbytes has quantised, read as our own: the same integers and scales."""

from __future__ import annotations

from typing import Any

import torch

from torchedge.errors import InputError, described
from torchedge.tracing.quantizing import QuantizedWeight, in_nibbles, with_quantized

_AO = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
"""Classes of torchao that hold integers one a byte, their scales and zero points."""


def read_quantized(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose quantised weights are ours; the model itself where it has none.

    Read are torchao's int8 and int4 weights (Int8WeightOnlyConfig, IntxWeightOnlyConfig) and the 4-bit layers
    of bitsandbytes (NF4, FP4). Activations are not quantised.

    Raises:
        InputError: another kind of them, or blocks that do not lie along rows; named with the layer.
    """
    layers = {name: layer for name, layer in model.named_modules() if _library(layer) is not None}
    if not layers:
        return model
    return with_quantized(model, layers, lambda name, _: _read(name, layers[name]))


def _library(layer: torch.nn.Module) -> str | None:
    """Return the library that has quantised a layer's weight."""
    weight: object = layer._parameters.get("weight")
    room = type(weight).__module__.partition(".")[0]
    return room if room in ("torchao", "bitsandbytes") else None


def _read(name: str, layer: Any) -> QuantizedWeight:
    weight = layer._parameters["weight"].detach() if _library(layer) == "torchao" else layer.weight
    if _library(layer) == "bitsandbytes" and hasattr(weight, "quant_state"):
        return _four_bits(name, weight)
    if type(weight).__name__ in _AO and getattr(weight, "act_quant_kwargs", None) is None:
        return _integers(name, weight)
    raise InputError(
        f"{name}.weight is {described(weight)} of {_library(layer)}; expected integers of torchao's "
        "Int8WeightOnlyConfig or IntxWeightOnlyConfig, or a 4-bit layer of bitsandbytes"
    )


def _integers(name: str, weight: Any) -> QuantizedWeight:
    """Read integers of torchao: (q - zero) · scale, one zero and scale for a block of a row."""
    rows, columns = weight.qdata.shape
    kind = str(getattr(weight, "target_dtype", torch.int8)).removeprefix("torch.")
    four, group = kind == "int4", weight.block_size[1]
    if kind not in ("int8", "int4") or weight.block_size[0] != 1 or columns % group or (four and columns % 2):
        raise InputError(
            f"{name}.weight is {kind} in blocks of {tuple(weight.block_size)} of {(rows, columns)}; expected "
            "int8 or int4 in whole blocks along rows"
        )
    integers, zero = weight.qdata.to(torch.int16), weight.zero_point
    zeros = None
    middle = 8 if four else 128
    if zero is not None and bool(zero.any()):
        zeros = (zero.reshape(rows, -1, 1).to(torch.int16) + middle).to(torch.uint8)
    scale = weight.scale.reshape(rows, -1, 1).float()
    if four:
        packed = in_nibbles((integers + middle).to(torch.uint8))
        return QuantizedWeight(packed, scale, zeros, "int4", columns, weight.dtype)
    packed = weight.qdata if zeros is None else (integers + middle).to(torch.uint8)
    return QuantizedWeight(packed, scale, zeros, "int8", columns, weight.dtype)


def _four_bits(name: str, weight: Any) -> QuantizedWeight:
    """Read a weight of bitsandbytes: numbers of a table, in blocks that share their largest magnitude."""
    state = weight.quant_state
    if state is None:
        raise InputError(
            f'{name}.weight is not quantised yet; expected a layer whose integers are there: call .to("cpu")'
        )
    rows, columns = state.shape
    if columns % state.blocksize:
        raise InputError(
            f"{name}.weight has blocks of {state.blocksize} in rows of {columns}; expected whole blocks in "
            "each row"
        )
    scale = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scale = dequantize_blockwise(state.absmax, state.state2) + state.offset
    data = weight.data.cpu().reshape(rows, -1)
    packed = data >> 4 | data << 4  # of two columns the first one is the upper half there
    table = tuple(state.code.cpu().float().tolist())
    return QuantizedWeight(
        packed, scale.cpu().float().reshape(rows, -1, 1), None, "int4", columns, state.dtype, table
    )
