"""Models of transformers by their configuration file."""

import json
import sys

import pytest
import torch

import torchedge
from torchedge.errors import InputError, MissingExtraError
from torchedge.tracing.hub_configs import MOST_PARTS
from torchedge.tracing.sources import load_model

SMALL = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    pytest.importorskip("transformers")

    def write_file(**entries):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**SMALL, **entries}))
        return path

    return write_file


def test_a_configuration_is_built_on_the_meta_device_as_transformers_builds_it(write):
    import transformers

    path = write(architectures=["GPT2ForSequenceClassification"], dtype="bfloat16")
    model, label = load_model(f"hf:{path}")
    assert label == "GPT2ForSequenceClassification"
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    config = transformers.AutoConfig.from_pretrained(path)
    expected = transformers.AutoModelForSequenceClassification.from_config(config)
    shapes = {name: p.shape for name, p in expected.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert load_model(f"hf:{path.parent}")[1] == label  # a folder, as save_pretrained writes it
    assert load_model(f"hf:{path}:GPT2Model")[1] == "GPT2Model"
    assert type(load_model(f"hf:{write()}")[0]) is transformers.GPT2LMHeadModel
    assert transformers.logging.get_verbosity() != transformers.logging.ERROR


def test_a_folder_has_the_weights_that_lie_in_it(write, tmp_path):
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))
    model.save_pretrained(tmp_path / "whole")
    found, _ = load_model(f"hf:{tmp_path / 'whole'}", weights=True)
    assert all(map(torch.equal, found.state_dict().values(), model.state_dict().values()))
    assert load_model(f"hf:{tmp_path / 'whole'}")[0].lm_head.weight.is_meta
    with pytest.raises(
        InputError, match=r"weights lack 1 tensors of GPT2ForSequenceClassification, such as score"
    ):
        load_model(f"hf:{tmp_path / 'whole'}:GPT2ForSequenceClassification", weights=True)
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be built"):
        load_model(f"hf:{tmp_path / 'whole'}", weights=True)


def test_a_configuration_is_predicted_at_any_length_as_its_model(write):
    path, options = write(), {"device": "nvidia-h200", "optimizer": "adamw"}
    model = load_model(f"hf:{path}")[0]
    p = torchedge.predict(f"hf:{path}", 4, seq_len=48, **options)
    example = {"input_ids": torch.zeros(1, 48, dtype=torch.int64)}
    assert p.memory == torchedge.predict(model, 4, example=example, **options).memory
    assert p.max_seq_len(1e6) == SMALL["n_positions"]


@pytest.mark.slow
def test_encoders_with_decoders_and_audio_have_their_inputs(tmp_path):
    pytest.importorskip("transformers")
    files = {
        "t5:T5ForConditionalGeneration": {
            "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50,
        },
        "wav2vec2:Wav2Vec2Model": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
            "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    }  # fmt: skip
    for name, entries in files.items():
        kind, architecture = name.split(":")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **entries}))
        p = torchedge.predict(f"hf:{tmp_path}:{architecture}", 2, device="nvidia-h200")
        assert any("assumed" in note for note in p.notes)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model_type": "gpt-2"}, "model_type is 'gpt-2'; .* did you mean gpt2?"),
        ({"model_type": 3}, "model_type is 3; expected"),
        ({"n_layer": 10**9}, f"n_layer is {10**9}; expected at most {MOST_PARTS}"),
        ({"num_labels": 10**8}, "num_labels is"),
        ({"n_embd": "wide"}, "cannot be built.*n_embd"),
        ({"n_head": 5}, "cannot be built.*divisible"),
        ({"dtype": "hub"}, "dtype is 'hub'; expected one of float32"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized weights"),
        ({"architectures": ["BertForMaskedLM"]}, "takes no GPT2Config; expected one of GPT2's"),
        ({"architectures": ["GPT2LMHeadMode"]}, "did you mean GPT2LMHeadModel"),
        ({"architectures": ["os"]}, "'os' is no model of transformers"),
    ],
)
def test_unusable_configurations_are_refused_by_what_is_wrong(write, entries, words):
    with pytest.raises(InputError, match=words) as caught:
        load_model(f"hf:{write(**entries)}")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_configurations_are_refused(tmp_path):
    for text, words in ((b'{"a":', "not valid JSON"), (b"[1]", "expected a JSON object"), (b"\xff", "UTF-8")):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(InputError, match=words):
            load_model(f"hf:{tmp_path}")
    with pytest.raises(InputError, match=r"there is no file .*config\.json of transformers"):
        load_model(f"hf:{tmp_path}/nothing.json")
    with pytest.raises(InputError, match="names no file"):
        load_model("hf:")


def test_code_and_kernels_that_a_configuration_names_are_not_fetched(write, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", None)
    path = write(
        auto_map={"AutoModelForCausalLM": "evil--module.Evil"}, attn_implementation="kernels-community/evil"
    )
    (path.parent / "module.py").write_text("raise SystemExit")
    assert load_model(f"hf:{path}")[0].config._attn_implementation in ("sdpa", "eager")


def test_a_missing_transformers_is_installed_by_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"run: pip install transformers$"):
        load_model(f"hf:{tmp_path}")
