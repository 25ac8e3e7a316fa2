"""Weights of GGUF files: the file's own integers, and the logits that transformers computes from it."""

import pytest
import torch

import torchedge
from torchedge.errors import InputError
from torchedge.tracing.vision import prepare_torchvision

gguf = pytest.importorskip("gguf")
prepare_torchvision()
transformers = pytest.importorskip("transformers")

from oracles.gguf_writing import write_gguf  # noqa: E402 - it imports gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}


def network(tied=True, kind="llama", hidden=64):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": hidden, "n_inner": 2 * hidden, "n_layer": 2, "n_head": 4, "n_positions": 32}
        config = transformers.GPT2Config(vocab_size=64, **sizes)
        return transformers.GPT2LMHeadModel(config).eval()
    made = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind]
    config = made(
        **{**SIZES, "hidden_size": hidden, "intermediate_size": 2 * hidden},
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases begin with zeros
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def read_by_transformers(folder, model):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="lm.gguf", config=model.config, dtype=torch.float32
    )


@pytest.mark.parametrize(("sort", "bits", "tied"), [("Q4_0", 4, True), ("Q8_0", 8, False), ("F16", 0, False)])
def test_a_file_gives_the_weights_that_transformers_reads(sort, bits, tied, tmp_path):
    model = network(tied)
    write_gguf(tmp_path / "lm.gguf", model, gguf.GGMLQuantizationType[sort])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = torchedge.load_gguf(model, tmp_path / "lm.gguf")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    wanted = read_by_transformers(tmp_path, model)
    for name, layer in wanted.named_modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)):
            assert torch.equal(loaded.get_submodule(name).weight, layer.weight), name
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)
    kinds = [m for m in loaded.modules() if type(m).__name__ == "QuantizedWeight"]
    assert {m.bits for m in kinds} == {bits} - {0} and all(m.group == 32 for m in kinds)
    if bits:
        assert (loaded.lm_head.quantized is loaded.model.embed_tokens.quantized) == tied


@pytest.mark.parametrize(("kind", "sort"), [("qwen2", "Q4_0"), ("gpt2", "Q8_0"), ("gpt2", "Q4_0")])
def test_files_of_other_models_are_read(kind, sort, tmp_path):
    model = network(kind=kind)
    write_gguf(tmp_path / "lm.gguf", model, gguf.GGMLQuantizationType[sort], kind)
    loaded, wanted = torchedge.load_gguf(model, tmp_path / "lm.gguf"), read_by_transformers(tmp_path, model)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(ids).logits, wanted(ids).logits, rtol=1e-5, atol=1e-5)
    assert sum(type(m).__name__ == "QuantizedWeight" for m in loaded.modules()) > 4


@pytest.mark.parametrize("sort", ["Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_other_types_become_floats_or_are_rounded_again(sort, tmp_path):
    model = network(hidden=256)
    write_gguf(tmp_path / "lm.gguf", model, gguf.GGMLQuantizationType[sort])
    with pytest.warns(torchedge.errors.TorchedgeWarning, match=rf"weights, such as .*\({sort}\)"):
        loaded = torchedge.load_gguf(model, tmp_path / "lm.gguf")
    wanted, ids = read_by_transformers(tmp_path, model), torch.arange(9)[None]
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)
    rounded = torchedge.load_gguf(model, tmp_path / "lm.gguf", requantize="int8")
    again = torchedge.quantize(wanted, "int8", group=32)
    assert torch.equal(rounded(ids).logits, again(ids).logits)


def test_what_is_not_read_is_named(tmp_path):
    model, file = network(), tmp_path / "lm.gguf"
    write_gguf(file, model, gguf.GGMLQuantizationType.F16, listed="gemma")
    with pytest.raises(InputError, match="a model of gemma; expected one of gpt2, llama, qwen2, qwen3"):
        torchedge.load_gguf(model, file)
    with pytest.raises(InputError, match=r"requantize is 'int2'"):
        torchedge.load_gguf(model, file, requantize="int2")
    with pytest.raises(InputError, match=r"holds output.weight, which|lacks lm_head.weight"):
        write_gguf(file, model, gguf.GGMLQuantizationType.Q8_0)
        torchedge.load_gguf(network(False), file)
