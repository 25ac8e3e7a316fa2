"""Weights of GGUF files: `load_gguf` puts their integers into a model of transformers as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchedge.errors import InputError, check_path, checked_call, described, first_line, needed
from torchedge.tracing.quantizing import QuantizedWeight, in_nibbles, kind_of, with_quantized

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Whose files hold what transformers' models do; other ones change weights (Gemma adds 1 to norms)."""
FLOATS, INTEGERS = ("F32", "F16", "BF16"), ("Q4_0", "Q8_0")
GROUP = 32
UNUSED = ("rope_freqs.weight",)
"""Tensors that follow from the configuration."""


@checked_call()
def load_gguf(model: object, path: str | Path) -> torch.nn.Module:
    """Return a copy of a causal model of transformers with the weights of a GGUF file.

    Matrices of Q4_0 and Q8_0 become int4 and int8 in groups of 32, without rounding: they are the file's own
    integers and scales, as `torchedge.quantize` stores them. F32, F16 and BF16 become the model's floats.
    model: of a configuration that fits the file, of a Llama, Mistral, Qwen2 or Qwen3.

    Raises:
        InputError: the file is none, lacks a weight or has another shape, or has a type that groups with a
        scale do not hold (Q4_K, Q4_1: named). MissingExtraError: gguf is not installed.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(f"model is {described(model)}; expected a causal model of transformers")
    with needed("gguf", extra="gguf", purpose="reading a GGUF file"):
        import gguf
    file = check_path("path", path)
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a GGUF file")
    try:
        reader = gguf.GGUFReader(file)
        kind = str(reader.fields["general.architecture"].contents())
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise InputError(f"{file}: is no GGUF file: {first_line(error)}") from error
    if kind not in ARCHITECTURES:
        raise InputError(f"{file}: holds a model of {kind}; expected one of {', '.join(ARCHITECTURES)}")
    config: Any = model.config
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    floats, integers, taken = dict[str, Any](), dict[int, Any](), set(UNUSED)
    for name, parameter in model.named_parameters():
        known = names.get_name(name, (".weight", ".bias"))
        if known not in tensors:
            raise InputError(f"{file}: lacks {name}; expected the file of a model with this configuration")
        tensor = tensors[known]
        taken.add(known)
        shape, sort = tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name
        if shape != tuple(parameter.shape):
            raise InputError(
                f"{file}: {known} has shape {shape}; expected {tuple(parameter.shape)}, as {name}"
            )
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        turned = heads.get(known.split(".")[-2]) if kind == "llama" else None
        layer = model.get_submodule(name.rpartition(".")[0])
        if sort in INTEGERS and len(shape) == 2 and kind_of(layer) is not None:
            integers[id(parameter)] = _rows(tensor.data, turned), sort, shape[1], parameter.dtype
        elif sort in FLOATS:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            floats[name] = torch.from_numpy(np.array(_rows(values, turned)))
        else:
            raise InputError(
                f"{file}: {known} is {sort}; expected {', '.join((*FLOATS, *INTEGERS))}: others do not fit "
                "into groups with a scale; convert the file with llama-quantize"
            )
    more = sorted(tensors.keys() - taken)
    if more:
        raise InputError(f"{file}: holds {more[0]}, which {type(model).__name__} does not have")
    layers = {
        n: layer for n, layer in model.named_modules() if id(getattr(layer, "weight", None)) in integers
    }
    copy = with_quantized(model, layers, lambda name, _: _packed(*integers[id(layers[name].weight)]))
    with torch.no_grad():
        for name, values in floats.items():
            copy.get_parameter(name).copy_(values)
    return copy


def _rows(values: npt.NDArray[Any], heads: int | None) -> npt.NDArray[Any]:
    """Return rows in transformers' order; Llama's files have the two halves of each head's rows in turn."""
    if heads is None:
        return values
    parts = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return parts.swapaxes(1, 2).reshape(values.shape)


def _packed(blocks: npt.NDArray[Any], kind: str, columns: int, dtype: torch.dtype) -> QuantizedWeight:
    """Return blocks of 32 weights, each behind its scale in float16, as groups."""
    rows = blocks.shape[0]
    blocks = blocks.reshape(rows, columns // GROUP, -1)
    scale = torch.from_numpy(blocks[:, :, :2].copy().view(np.float16))
    data = torch.from_numpy(blocks[:, :, 2:].copy())
    if kind == "Q8_0":
        return QuantizedWeight(data.view(torch.int8).reshape(rows, -1), scale, None, "int8", columns, dtype)
    halves = torch.cat([data & 15, data >> 4], -1).reshape(rows, -1)  # weights 0 to 15, then 16 to 31
    return QuantizedWeight(in_nibbles(halves), scale, None, "int4", columns, dtype)
