"""Weights that other libraries have quantised: tokens and weights are those of the dequantised model."""

import pytest
import torch

import torchedge
from torchedge.errors import InputError
from torchedge.tracing.vision import prepare_torchvision

prepare_torchvision()
transformers = pytest.importorskip("transformers")


def network():
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def with_torchao(model, settings):
    quantization = pytest.importorskip("torchao.quantization")
    name, options = settings
    options = {k: getattr(torch, v) if k == "weight_dtype" else v for k, v in options.items()}
    if "group" in options:
        from torchao.quantization.granularity import PerGroup

        options["granularity"] = PerGroup(options.pop("group"))
    quantization.quantize_(model, getattr(quantization, name)(**options))
    floats = {n: layer.weight.dequantize() for n, layer in linear_layers(model) if n != "lm_head"}
    return model, floats | {"lm_head": model.lm_head.weight.dequantize()}


def with_bitsandbytes(model, kind, nested):
    bnb = pytest.importorskip("bitsandbytes")
    floats = {}
    for name, layer in linear_layers(model):
        four = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, quant_type=kind, compress_statistics=nested
        )
        four.weight = bnb.nn.Params4bit(
            layer.weight.detach().clone(), False, quant_type=kind, compress_statistics=nested
        )
        model.set_submodule(name, four.to("cpu"))
        floats[name] = bnb.functional.dequantize_4bit(four.weight.data, four.weight.quant_state)
    return model, floats


def linear_layers(model):
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def check_tokens(quantized, floats, tmp_path):
    """Hold a bundle of a quantised model against transformers with the dequantised weights."""
    plain = network()
    with torch.no_grad():
        for name, weight in floats.items():
            plain.get_submodule(name).weight.copy_(weight)
    before = {name: type(tensor) for name, tensor in quantized.named_parameters()}
    bundle = torchedge.export_lm(quantized, "local-cpu", out=tmp_path / "bundle", max_length=24, chunk=8)
    assert {name: type(tensor) for name, tensor in quantized.named_parameters()} == before
    ids = torch.tensor([[5, 9, 33, 71, 2]])
    wanted = plain.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert bundle.generate(ids[0].tolist(), 8) == wanted[0, 5:].tolist()
    plan = torchedge.plan_lm(quantized, "local-cpu", max_length=24, chunk=8, prompt=5, new_tokens=8)
    assert plan.total_bytes == bundle.manifest.memory.total_bytes
    whole = torchedge.plan_lm(plain, "local-cpu", max_length=24, chunk=8, prompt=5, new_tokens=8)
    assert plan.weights_bytes < 0.6 * whole.weights_bytes and plan.arena_bytes < 1.1 * whole.arena_bytes


@pytest.mark.parametrize(
    "settings",
    [("Int8WeightOnlyConfig", {}), ("IntxWeightOnlyConfig", {"weight_dtype": "int4", "group": 32})],
)
def test_tensors_of_torchao_are_read(settings, tmp_path):
    check_tokens(*with_torchao(network(), settings), tmp_path)


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("fp4", False)])
def test_layers_of_bitsandbytes_are_read(kind, nested, tmp_path):
    check_tokens(*with_bitsandbytes(network(), kind, nested), tmp_path)


def test_what_is_not_read_is_named(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = network()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(InputError, match=r"q_proj.weight is .* of torchao; expected integers of"):
        torchedge.export_lm(model, "local-cpu", out=tmp_path / "bundle", max_length=24)
