"""Advice for language models: rows of torchedge's own runtime, each the plan of its settings."""

import json

import pytest
import torch

import torchedge
from torchedge.bundles import language_advice
from torchedge.bundles.language_advice import RANK, count_stages, with_runtime
from torchedge.cli import main
from torchedge.errors import InputError, LimitError
from torchedge.prediction.advice import Advice
from torchedge.tracing.capturing import CaptureRequest
from torchedge.tracing.language_models import language_model, with_adapters
from torchedge.tracing.vision import prepare_torchvision

prepare_torchvision()
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

FORMS = [None, "int8", "int4"]
SIZES = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 120, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
MODELS = {
    "llama": lambda **more: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **more)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, decoder_start_token_id=0)
    ),
}
TIED = {"tie_word_embeddings": True}
DEVICE, LENGTH = "adreno-740", 16


def _advised(monkeypatch, planned):
    """Return advice whose plans are those of a function of settings."""
    monkeypatch.setattr(language_advice, "_planned", lambda model, device, settings: planned(settings))
    model, device, stages = MODELS["llama"](), torchedge.find_device(DEVICE), []
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    request = CaptureRequest(model, 2, example={"input_ids": ids, "labels": ids}, device=device)
    found = with_runtime(
        Advice("Llama", DEVICE, 2, 3072.0, 0.95, (), ("own",)), request, device, stages.append
    )
    assert len(stages) == 6 == count_stages(model, device) - count_stages(model, device, runtime=False)
    return found


def test_each_format_of_weights_trains_adapters_and_generates(monkeypatch):
    def refused(settings):
        raise LimitError(f"takes too much with {settings.quantize}")

    advice = _advised(monkeypatch, refused)
    asked = [(row.settings.lora, row.settings.quantize, row.settings.batch) for row in advice.runtime]
    assert asked == [*[(RANK, form, 2) for form in FORMS], *[(None, form, 1) for form in FORMS]]
    assert {(row.settings.max_length, row.settings.memory_limit) for row in advice.runtime} == {
        (LENGTH, 3072.0)
    }
    assert [row.reason for row in advice.runtime] == [f"takes too much with {form}" for form in FORMS * 2]
    assert not advice.fits and advice.notes == ("own",)
    assert [row["reason"] for row in advice.to_dict()["runtime"]] == [row.reason for row in advice.runtime]


def test_what_cannot_be_planned_is_a_note(monkeypatch):
    def refused(settings):
        raise InputError("has adapters" if settings.lora else f"no {settings.quantize}")

    advice = _advised(monkeypatch, refused)
    assert advice.runtime == () and not advice.fits
    steps, *generation = advice.notes[1:]
    assert steps == (
        "a step of adapters with weights in float32, int8, int4 was not tried: InputError: has adapters"
    )
    assert generation[1] == "generation with weights in int8 was not tried: InputError: no int8"


@pytest.mark.parametrize("lora", [None, RANK])
def test_a_step_of_adapters_fits_and_generation_alone_does_not_train(monkeypatch, lora):
    plan = torchedge.plan(torch.nn.Linear(2, 2), torch.zeros(1, 2), DEVICE, step=torchedge.TrainingStep())

    def planned(settings):
        if settings.lora != lora:
            raise LimitError("too much")
        return plan

    advice = _advised(monkeypatch, planned)
    assert advice.fits == advice.trains == (lora is not None)
    assert advice.to_dict()["fits"] == advice.fits


def test_models_that_generate_no_text_have_no_rows():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_hidden_layers=1))
    advice = torchedge.advise(model, 2, DEVICE, seq_len=8, memory_limit="4GiB")
    assert type(advice) is Advice and "runtime" not in advice.to_dict()
    assert not any("runtime" in note or "plan lm" in note for note in advice.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [("llama", {}), ("llama", TIED), ("gpt2", {}), ("t5", {})])
def test_rows_are_the_plans_of_their_settings(kind, more):
    model = MODELS[kind](**more)
    advice = torchedge.advise(model, 2, DEVICE, seq_len=LENGTH, memory_limit="4GiB")
    assert len(advice.runtime) == 6 and advice.fits and all(row.plan for row in advice.runtime)
    for row in (advice.runtime[0], advice.runtime[-1]):
        form = row.settings.quantize
        if row.settings.lora is None:
            plan = torchedge.plan_lm(model, DEVICE, max_length=LENGTH, quantize=form)
        else:
            built = language_model(model, form, shapes=True)
            adapted, example, step = with_adapters(built, RANK, LENGTH, 2)
            plan = torchedge.plan(adapted, example, DEVICE, step=step)
        assert (row.plan.total_bytes, row.plan.step) == (plan.total_bytes, plan.step)
        assert row.to_dict()["settings"] == row.settings


@pytest.mark.slow
def test_rows_keep_the_limit_or_have_a_reason(tmp_path, capsys, monkeypatch):
    limit = 520 * 1024  # less than PyTorch's context, and than a step in float32 that streams nothing
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 4}, dtype=torch.bfloat16)
    config.save_pretrained(tmp_path)
    words = ["advise", f"hf:{tmp_path / 'config.json'}", "-b", "1", "--seq-len", "16", "-d", DEVICE]
    words += ["--memory-limit", f"{limit}B"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["runtime"]
    assert len(rows) == 6 and document["fits"]
    assert all(row["total_bytes"] <= limit for row in rows if "reason" not in row)
    assert not any(setting["fits"] for setting in document["settings"])
    assert rows[0]["settings"]["lora"] == RANK and rows[0]["streamed_bytes"] > 0 and rows[0]["step_ms"]
    monkeypatch.setattr(language_advice, "_CHOICES", [(None, "int4"), (None, None)])
    assert main(words) == 3  # generation alone
    printed = capsys.readouterr().out
    assert "no setting" in printed and "tokens/s" in printed and "plan lm" not in printed


@pytest.mark.slow
def test_a_model_with_adapters_of_its_own_generates():
    import peft

    model = peft.get_peft_model(MODELS["llama"](), peft.LoraConfig(r=2, target_modules="all-linear"))
    advice = torchedge.advise(model, 1, DEVICE, seq_len=LENGTH, memory_limit="4GiB")
    assert [row.settings.lora for row in advice.runtime] == [None] * 3
    assert any("has adapters" in note for note in advice.notes)
