"""Write a model of transformers into a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    sort: GGMLQuantizationType,
    kind: str = "llama",
    *,
    listed: str | None = None,
    vocabulary: bool = False,
) -> None:
    """Write weights as blocks of a type; vectors stay float32.

    listed: the kind that the file names, where it is another one.
    vocabulary: name a token for each number, without which llama.cpp opens no file.
    """
    config = model.config
    hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    inner = config.n_inner if kind == "gpt2" else config.intermediate_size
    keys = heads if kind == "gpt2" else config.num_key_value_heads
    writer = gguf.GGUFWriter(path, listed or kind)
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    if kind == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(keys)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(hidden // heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if vocabulary:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
        writer.add_token_scores([0.0] * config.vocab_size)
        writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[kind], layers)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = heads if "q_proj" in name else keys
            values = values.reshape(rows, 2, -1, hidden).swapaxes(1, 2).reshape(values.shape)
        if kind == "gpt2" and values.ndim == 2 and not name.endswith(("wte.weight", "wpe.weight")):
            values = values.T
        chosen = sort if values.ndim == 2 else GGMLQuantizationType.F32
        name_there = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(name_there, _blocks_of(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks_of(values: np.ndarray, sort: GGMLQuantizationType) -> np.ndarray:
    """Quantise a matrix; of a type that gguf cannot write, draw blocks with scales near 0.001."""
    if "_K" not in sort.name:
        return gguf.quants.quantize(np.ascontiguousarray(values), sort)
    draw, size = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[sort][1]
    blocks = draw.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    scales = draw.uniform(0.0005, 0.001, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if sort.name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(values.shape[0], -1)
