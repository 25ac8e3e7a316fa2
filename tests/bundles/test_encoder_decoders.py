"""Text of encoder-decoders: greedy tokens are those of transformers' generate, by states of one encoding."""

import copy
import json

import numpy as np
import pytest
import torch
from oracles.children import python

import torchedge
from torchedge.errors import CaptureError, IndexRangeError, InputError
from torchedge.tracing.vision import prepare_torchvision

pytest.importorskip("pyopencl")
prepare_torchvision()
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, CHUNK, TOKENS = 61, 20, 4, 18
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "num_layers": 1}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 24,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 3}

pytestmark = pytest.mark.slow


def network(name):
    """Return a T5 or a Whisper with random weights; "gated", "deep": a T5 of version 1.1, of two layers."""
    sizes = {"vocab_size": VOCABULARY, **ENDS}
    torch.manual_seed(0)
    if name == "whisper":
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **WHISPER))
    else:  # distances of both stacks reach numbers of buckets that a logarithm gives
        buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if name != "t5" else {}
        gated |= {"num_layers": 2} if name == "deep" else {}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**{**sizes, **T5, **buckets, **gated})
        )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def sources(name):
    """Return inputs of the encoder: prompts of mixed lengths, or features."""
    for number in (1, 5, 9, TOKENS):
        generator = torch.Generator().manual_seed(number)
        if name == "whisper":
            yield torch.randn(1, 8, 20, generator=generator)
        else:
            yield torch.randint(4, VOCABULARY, (1, number), generator=generator)


def greedy(model, source, most=12):
    """Return the tokens that transformers generates, without the one that begins."""
    generate = transformers.GenerationMixin.generate  # Whisper's own cuts its result at tokens of time
    tokens = generate(model, source, max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokens[0, 1:].tolist()


def export(model, out, **options):
    sizes = {} if model.main_input_name == "input_features" else {"encoder_length": TOKENS}
    return torchedge.export_lm(
        model, "local-cpu", out=out, max_length=LENGTH, chunk=CHUNK, **sizes, **options
    )


@pytest.fixture(scope="module")
def t5():
    return network("t5")


@pytest.fixture(scope="module")
def bundle(t5, tmp_path_factory):
    return export(t5, tmp_path_factory.mktemp("encoder") / "t5")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    return export(network("whisper"), tmp_path_factory.mktemp("encoder") / "whisper")


def test_greedy_tokens_of_t5_are_those_of_transformers(t5, bundle):
    before = {key: value.clone() for key, value in network("t5").state_dict().items()}
    assert all(torch.equal(value, before[key]) for key, value in t5.state_dict().items())
    texts = [bundle.generate(source[0], 12) for source in sources("t5")]
    assert texts == [greedy(t5, source) for source in sources("t5")]
    assert bundle.generate(next(sources("t5")), 12) == texts[:1]  # a row of a matrix gives a list
    assert len({tuple(text) for text in texts}) > 1  # they depend on the prompts


def test_greedy_tokens_of_whisper_are_those_of_transformers(whisper):
    texts = [whisper.generate(source, 12) for source in sources("whisper")]
    assert texts == [greedy(network("whisper"), source) for source in sources("whisper")]
    assert len({tuple(text) for text in texts}) > 1


def test_gated_layers_that_share_positions_have_the_tokens_of_transformers(tmp_path):
    model = network("deep")
    bundle = export(model, tmp_path / "lm")
    for source in sources("deep"):
        assert bundle.generate(source[0], 12) == greedy(model, source)


@pytest.mark.parametrize(("name", "form"), [("gated", "int8"), ("whisper", "int4")])
def test_quantised_tokens_are_those_of_the_dequantised_model(name, form, tmp_path):
    model = network(name)
    bundle = export(model, tmp_path / "lm", quantize=form)
    quantised = torchedge.quantize(model, form, group=32 if form == "int4" else None)
    dequantised, layers = copy.deepcopy(model), dict(quantised.named_modules())
    with torch.no_grad():
        for path, layer in dequantised.named_modules():
            if isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)):
                layer.weight.copy_(layers[path].weight)  # tied ones come twice
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), dequantised.parameters(), strict=True)
    )
    for source in sources(name):
        assert bundle.generate(source if name == "whisper" else source[0], 12) == greedy(dequantised, source)


def test_weights_are_stored_once_and_states_stay_on_the_device(t5, bundle):
    contents = [array.tobytes() for array in bundle.weights().values()]
    for parameter in t5.parameters():  # a tied one comes once
        if parameter.dim() > 1:
            assert contents.count(parameter.detach().numpy().tobytes()) == 1
    states = {port.name: port.shape for port in bundle.states}
    assert states["encoded.keys_0"] == states["encoded.values_0"] == (1, 4, TOKENS, 4)
    assert states["keys.0"] == (1, 4, LENGTH, 4) and states["encoded.mask"] == (1, 1, 1, TOKENS)
    assert bundle.methods == ("prefill", "decode", "encode")


def test_another_process_draws_the_same_tokens(bundle):
    ids, settings = [5, 9, 30], {"temperature": 1.5, "top_k": 20, "seed": 3}
    code = (
        "import sys, json, torchedge\n"
        "bundle = torchedge.load_bundle(sys.argv[1])\n"
        "print(json.dumps([bundle.generate([5, 9, 30], 9, temperature=1.5, top_k=20, seed=3), "
        "bundle.generate([5, 9, 30], 6)]))\n"
        "assert 'transformers' not in sys.modules"
    )
    done = python("-c", code, bundle.path)
    told = []
    drawn = bundle.generate(ids, 9, stream=told.append, **settings)
    assert told == drawn
    assert json.loads(done.stdout) == [drawn, bundle.generate(ids, 6)]


def test_a_decoder_begins_with_tokens_of_the_caller(t5, bundle):
    begins = [3, 40, 7, 22, 11, 50]  # more than a chunk
    source = torch.tensor([[8, 20, 33]])
    wanted = t5.generate(
        source, decoder_input_ids=torch.tensor([begins]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert bundle.generate(source[0], 6, begin_with=begins) == wanted[0, len(begins) :].tolist()
    first = bundle.generate(source[0], 6)
    assert bundle.generate(source[0], 6, begin_with=[3]) == first
    assert bundle.generate(source[0], 6, stop=[first[2]]) == first[: first.index(first[2]) + 1]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "ids has no token"),
        ([5] * (TOKENS + 1), {}, f"{TOKENS + 1} tokens are given, and the encoder takes {TOKENS}"),
        ([[5, 6], [7]], {}, "2 prompts are given to an encoder-decoder; expected one at a time"),
        ([5], {"max_new_tokens": LENGTH + 1}, f"the caches hold {LENGTH}"),
        ([5], {"begin_with": []}, "begin_with has no token"),
        ([5], {"begin_with": [1.5]}, "begin_with has shape"),
    ],
)
def test_what_cannot_be_encoded_is_told(bundle, ids, options, message):
    with pytest.raises(InputError, match=message):
        bundle.generate(ids, **{"max_new_tokens": 2, **options})


def test_features_of_another_shape_and_unknown_tokens_are_told(whisper, bundle):
    with pytest.raises(InputError, match=r"takes features of shape \(1, 8, 20\)"):
        whisper.generate(np.zeros((8, 19), np.float32), 2)
    with pytest.raises(InputError, match="expected features of shape"):
        whisper.generate("speech", 2)
    with pytest.raises(IndexRangeError):
        bundle.generate([VOCABULARY], 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("t5", {"batch": 2, "encoder_length": 8}, "batch is 2 with T5ForConditionalGeneration"),
        ("t5", {"encoder_length": 1}, "encoder_length is 1"),
        ("whisper", {"encoder_length": 8}, "features of a length of its own"),
        ("whisper", {"max_length": 25}, "max_length is 25"),
    ],
)
def test_what_is_not_exported_is_told(name, options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        torchedge.export_lm(network(name), "local-cpu", out=tmp_path / "lm", **{"max_length": 20, **options})


def test_configurations_and_other_models(tmp_path):
    from torchedge.tracing.language_models import language_model

    for name in ("t5", "whisper"):
        model = network(name)
        assert type(language_model(model.config)) is type(model)
    config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    with pytest.raises(InputError, match="has no encoder"):
        torchedge.export_lm(config, "local-cpu", out=tmp_path / "lm", max_length=8, encoder_length=8)
    model = network("t5")
    model.main_input_name = "pixel_values"
    with pytest.raises(CaptureError, match="takes pixel_values; expected an encoder-decoder"):
        torchedge.export_lm(model, "local-cpu", out=tmp_path / "lm", max_length=8)
