"""Weights of GGUF files: the file's own integers, and the logits that transformers computes from it."""

import numpy as np
import pytest
import torch

import torchedge
from torchedge.errors import InputError
from torchedge.tracing.vision import prepare_torchvision

gguf = pytest.importorskip("gguf")
prepare_torchvision()
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}


def network(tied):
    config = transformers.LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def written(path, model, sort, kind="llama"):
    """Write a model as llama.cpp's converter does; return the tensors by name."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(64)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = 4 if "q_proj" in name else 2
            values = values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)
        chosen = sort if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), chosen)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("sort", "bits", "tied"), [("Q4_0", 4, True), ("Q8_0", 8, False), ("F16", 0, False)])
def test_a_file_gives_the_weights_that_transformers_reads(sort, bits, tied, tmp_path):
    model = network(tied)
    written(tmp_path / "lm.gguf", model, gguf.GGMLQuantizationType[sort])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = torchedge.load_gguf(model, tmp_path / "lm.gguf")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    wanted = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="lm.gguf", config=model.config, dtype=torch.float32
    )
    for name, layer in wanted.named_modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)):
            assert torch.equal(loaded.get_submodule(name).weight, layer.weight), name
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)
    kinds = [m for m in loaded.modules() if type(m).__name__ == "QuantizedWeight"]
    assert {m.bits for m in kinds} == {bits} - {0} and all(m.group == 32 for m in kinds)
    if bits:
        assert (loaded.lm_head.quantized is loaded.model.embed_tokens.quantized) == tied


def test_what_no_groups_hold_is_named(tmp_path):
    model, file = network(True), tmp_path / "lm.gguf"
    written(file, model, gguf.GGMLQuantizationType.Q4_1)
    with pytest.raises(InputError, match=r"token_embd.weight is Q4_1; expected F32, F16, BF16, Q4_0, Q8_0"):
        torchedge.load_gguf(model, file)
    with pytest.raises(InputError, match=r"holds output.weight, which|lacks lm_head.weight"):
        written(file, model, gguf.GGMLQuantizationType.Q8_0)
        torchedge.load_gguf(network(False), file)
    written(file, model, gguf.GGMLQuantizationType.Q8_0, kind="gemma")
    with pytest.raises(InputError, match="holds a model of gemma; expected one of llama"):
        torchedge.load_gguf(model, file)
    with pytest.raises(InputError, match="no such file; expected a GGUF file"):
        torchedge.load_gguf(model, tmp_path / "none.gguf")
    for content in (b"", b"GGUF", file.read_bytes()[:900], b"x" * 999):
        file.write_bytes(content)
        with pytest.raises(InputError, match="is no GGUF file"):
            torchedge.load_gguf(model, file)
