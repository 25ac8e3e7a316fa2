"""Weights of GGUF files: `load_gguf` puts their integers into a model of transformers as they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from torchedge.errors import (
    InputError,
    TorchedgeWarning,
    check_choice,
    check_path,
    checked_call,
    described,
    first_line,
    needed,
)
from torchedge.tracing.quantizing import (
    QuantizedTransposed,
    QuantizedWeight,
    WeightFormat,
    in_nibbles,
    kind_of,
    rounded,
    with_quantized,
)

ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3")
"""Whose files hold what transformers' models do; other ones change weights (Gemma adds 1 to norms)."""
FLOATS, INTEGERS = ("F32", "F16", "BF16"), ("Q4_0", "Q8_0")
OTHERS = ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types whose groups have no whole zero point, or another number of bits: read as floats."""
GROUP = 32
UNUSED = ("rope_freqs.weight",)
"""Tensors that follow from the configuration."""


@checked_call()
def load_gguf(model: object, path: str | Path, *, requantize: WeightFormat | None = None) -> torch.nn.Module:
    """Return a copy of a causal model of transformers with the weights of a GGUF file.

    Matrices of Q4_0 and Q8_0 become int4 and int8 in groups of 32, without rounding: they are the file's own
    integers and scales, as `torchedge.quantize` stores them. F32, F16 and BF16 become the model's floats.
    Matrices of Q4_1, Q5_0, Q5_1 and Q2_K to Q6_K become floats, with a warning, or with requantize="int8"
    or "int4" the nearest integers in groups of 32.
    model: of a configuration that fits the file, of a Llama, Mistral, Qwen2, Qwen3 or GPT-2.

    Raises:
        InputError: the file is none, lacks a weight or has another shape, or has a type that is not read.
        MissingExtraError: gguf is not installed.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(f"model is {described(model)}; expected a causal model of transformers")
    if requantize is not None:
        check_choice("requantize", requantize, get_args(WeightFormat))
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
    turns = kind == "llama"  # its files have the rows of heads in another order
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    floats, integers, taken = dict[str, Any](), dict[int, QuantizedWeight](), set(UNUSED)
    dequantized: list[str] = []
    for name, parameter in model.named_parameters():
        known = names.get_name(name, (".weight", ".bias"))
        if known not in tensors:
            raise InputError(f"{file}: lacks {name}; expected the file of a model with this configuration")
        tensor = tensors[known]
        taken.add(known)
        layer = model.get_submodule(name.rpartition(".")[0])
        become = kind_of(layer) if parameter.dim() == 2 else None
        expected = tuple(parameter.shape)[:: -1 if become is QuantizedTransposed else 1]
        shape, sort = tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name
        if shape != expected:
            raise InputError(f"{file}: {known} has shape {shape}; expected {expected}, as {name}")
        if sort not in (*FLOATS, *INTEGERS, *OTHERS):
            raise InputError(
                f"{file}: {known} is {sort}; expected {', '.join((*FLOATS, *INTEGERS, *OTHERS))}: convert "
                "the file with llama-quantize"
            )
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if turns else {}
        turned = heads.get(known.split(".")[-2])
        if sort in INTEGERS and become is not None:
            data = _rows(tensor.data, turned)
            integers[id(parameter)] = _packed(data, sort, shape[1], parameter.dtype)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        matrix = torch.from_numpy(np.array(_rows(values, turned)))
        if sort in OTHERS and become is not None and requantize is not None:
            integers[id(parameter)] = rounded(matrix.to(parameter.dtype), requantize, GROUP, False)
            continue
        floats[name] = matrix if become is not QuantizedTransposed else matrix.t()
        if sort in OTHERS:
            dequantized.append(f"{known} ({sort})")
    more = sorted(tensors.keys() - taken)
    if more:
        raise InputError(f"{file}: holds {more[0]}, which {type(model).__name__} does not have")
    if dequantized:
        warnings.warn(
            f"{file}: {len(dequantized)} weights, such as {dequantized[0]}, are stored as floats, which take "
            'more memory; requantize="int8" or "int4" rounds them to integers again',
            TorchedgeWarning,
            stacklevel=3,
        )
    layers = {
        n: layer for n, layer in model.named_modules() if id(getattr(layer, "weight", None)) in integers
    }
    copy = with_quantized(model, layers, lambda name, _: integers[id(layers[name].weight)])
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
