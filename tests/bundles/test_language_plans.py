"""Plans of language models: the memory of the bundle to the byte, and times, from shapes alone."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

import torchedge
from torchedge.cli import main
from torchedge.errors import InputError, LimitError
from torchedge.tracing.vision import prepare_torchvision

prepare_torchvision()
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 120, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}


def _config(kind: str):
    if kind == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2Config(vocab_size=120, n_positions=64, n_embd=32, n_layer=2, n_head=4, **ends)
    if kind == "t5":
        sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        return transformers.T5Config(**sizes, decoder_start_token_id=0)
    return getattr(transformers, f"{kind.title()}Config")(**SIZES, **HIDDEN)


KINDS, FORMS, PRECISIONS = ("llama", "t5", "gpt2", "qwen2"), ("int4", None, "int8"), ("float32", "float16")
SETTINGS = [
    (kind, form, precision)
    for (i, kind), (j, form), (k, precision) in product(*map(enumerate, (KINDS, FORMS, PRECISIONS)))
    if (i + j + k) % 2 == 0
]
"""Each pair of a model, a format and a precision in one half of the settings."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form", "precision"), SETTINGS)
def test_memory_is_that_of_the_bundle(kind, form, precision, tmp_path):
    config = _config(kind)
    options = {"max_length": 32, "chunk": 8, "quantize": form, "precision": precision}
    plan = torchedge.plan_lm(config, "local-cpu", **options, prompt=20, new_tokens=8)
    bundle = torchedge.export_lm(config, "local-cpu", out=tmp_path / "bundle", **options)
    memory = bundle.manifest.memory
    assert (plan.total_bytes, plan.arena_bytes) == (memory.total_bytes, memory.arena_bytes)
    assert plan.states_bytes == sum(
        torch.Size(port.shape).numel() * torch.empty(0, dtype=getattr(torch, port.dtype)).itemsize
        for port in bundle.states
    )
    for method in bundle.methods:
        assert plan.runs[method].latency == bundle.predict(method=method).latency
    chunks = 1 if kind == "t5" else 3
    rest = bundle.predict(method="encode").latency.value if kind == "t5" else 0
    first = chunks * bundle.predict(method="prefill").latency.value + rest
    token = bundle.predict(method="decode").latency.value
    assert plan.first_token.value == pytest.approx(first) and plan.token.value == token
    assert plan.reply.value == pytest.approx(first + 7 * token)
    assert plan.tokens_per_s == pytest.approx(1000 / token)


@pytest.mark.slow
def test_memory_of_a_streaming_plan_is_that_of_the_bundle(tmp_path):
    config = _config("llama")
    config.num_hidden_layers = 4  # of two, the staging buffers take what streaming saves
    options = {"max_length": 32, "chunk": 8}
    whole = torchedge.plan_lm(config, "local-cpu", **options, new_tokens=1, prompt=32)
    with pytest.raises(LimitError) as refused:
        torchedge.plan_lm(config, "local-cpu", **options, prompt=8, new_tokens=1, memory_limit="100KiB")
    limit = refused.value.works_bytes / 2**20
    plan = torchedge.plan_lm(config, "local-cpu", **options, prompt=8, new_tokens=1, memory_limit=limit)
    bundle = torchedge.export_lm(config, "local-cpu", out=tmp_path / "bundle", **options, memory_limit=limit)
    assert plan.total_bytes == bundle.manifest.memory.total_bytes <= limit * 2**20 < whole.total_bytes
    assert plan.streamed_bytes > 0 and plan.token.value > whole.token.value
    assert plan.token == bundle.predict(method="decode").latency


@pytest.mark.slow
@pytest.mark.parametrize(("form", "tied"), [(None, False), ("int4", True)])
def test_a_model_that_generates_and_learns_is_planned_as_its_bundle(form, tied, tmp_path):
    pytest.importorskip("peft")
    config, options = _config("llama"), {"max_length": 16, "quantize": form, "lora": 4}
    config.tie_word_embeddings = tied
    plan = torchedge.plan_lm(config, "local-cpu", **options)
    bundle = torchedge.export_lm(config, "local-cpu", out=tmp_path / "bundle", **options)
    assert plan.total_bytes == bundle.manifest.memory.total_bytes
    for method, found in (("train", plan.step), ("prefill", plan.first_token), ("decode", plan.token)):
        assert found == bundle.predict(method=method).latency
    assert plan.tokens_per_s == pytest.approx(1000 / plan.token.value)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "int4"])
def test_memory_of_a_training_step_is_that_of_the_trainer_and_of_its_bundle(form, tmp_path):
    peft = pytest.importorskip("peft")
    config = _config("llama")
    config.num_hidden_layers = 4
    model = transformers.AutoModelForCausalLM.from_config(config)
    if form is not None:
        model = torchedge.quantize(model, form, group=32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad])
    ids = torch.zeros(1, 64, dtype=torch.int64)
    batch, step = (
        {"input_ids": ids, "labels": ids},
        torchedge.TrainingStep(loss="model", optimizer=optimizer),
    )
    whole = torchedge.plan(adapted, batch, "local-cpu", step=step)
    limit = f"{whole.total_bytes * 3 // 4}B"
    less = torchedge.plan(adapted, batch, "local-cpu", step=step, memory_limit=limit)
    with torchedge.Trainer(adapted, batch, optimizer=optimizer) as trainer:
        assert whole.total_bytes == trainer.memory.total
    asked = {"mode": "train", "step": step, "memory_limit": limit, "onnx": False}
    bundle = torchedge.export(adapted, batch, "local-cpu", out=tmp_path / "bundle", **asked)
    assert less.total_bytes == bundle.manifest.memory.total_bytes
    assert whole.step.value > 0 and less.total_bytes <= whole.total_bytes * 3 // 4
    assert less.recomputed or less.streamed_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("form", "lora"), [("int4", None), (None, 4)])
def test_bfloat16_is_planned_as_the_same_numbers_in_float32(form, lora):
    config, options = _config("qwen2"), {"max_length": 16, "quantize": form, "lora": lora}
    config.tie_word_embeddings = True
    expected = torchedge.plan_lm(config, "local-cpu", **options)
    config.dtype = torch.bfloat16
    with pytest.warns(torchedge.errors.TorchedgeWarning, match="they count in float32"):
        plan = torchedge.plan_lm(config, "local-cpu", **options)
    assert plan.to_dict() == expected.to_dict()


@pytest.mark.slow
def test_a_model_keeps_its_weights():
    model = transformers.AutoModelForCausalLM.from_config(_config("llama"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = torchedge.plan_lm(model, "local-cpu", max_length=16, prompt=8, new_tokens=4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shapes = torchedge.plan_lm(model.config, "local-cpu", max_length=16, prompt=8, new_tokens=4)
    assert plan.to_dict() == shapes.to_dict()


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path, capsys):
    _config("llama").save_pretrained(tmp_path)
    words = ["plan", "lm", f"hf:{tmp_path / 'config.json'}", "--device", "local-cpu", "--max-length", "16,32"]
    words += ["--prompt", "8", "--new-tokens", "8"]
    assert main([*words, "--memory-limit", "none,1KiB"]) == 0
    printed = capsys.readouterr().out
    assert "not planned: " in printed and "tokens/s" in printed
    assert main([*words[:-4], "--prompt", "8", "--new-tokens", "8", "--quantize", "int4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    plans = [
        torchedge.plan_lm(
            _config("llama"), "local-cpu", max_length=n, prompt=8, new_tokens=8, quantize="int4"
        )
        for n in (16, 32)
    ]
    assert [row["total_bytes"] for row in rows] == [plan.total_bytes for plan in plans]
    assert main([*words, "--memory-limit", "1KiB"]) == 3
    wide = tmp_path / "wide.json"
    wide.write_text((tmp_path / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    both = ["plan", "lm", f"hf:{tmp_path / 'config.json'}", f"hf:{wide}", "--device", "local-cpu"]
    both += ["--max-length", "16", "--json"]
    capsys.readouterr()
    assert main(both) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == (tmp_path.name, "wide")
    assert first["weights_bytes"] < second["weights_bytes"]


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="max_length is 16; expected no more together"):
        torchedge.plan_lm(_config("llama"), "local-cpu", max_length=16, prompt=10, new_tokens=8)
    short = torchedge.plan_lm(_config("llama"), "local-cpu", max_length=16).settings
    assert (short.prompt, short.new_tokens) == (8, 8)
