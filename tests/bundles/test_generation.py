"""Text from bundles: greedy tokens are those of transformers' generate, sampled ones follow from a seed."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import torchedge
from torchedge.bundles.generation import Generator, Sampling
from torchedge.errors import CaptureError, IndexRangeError, InputError, TorchedgeWarning
from torchedge.tracing.vision import prepare_torchvision

pytest.importorskip("pyopencl")
prepare_torchvision()
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, CHUNK = 101, 48, 8
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 8}
NETWORKS = {
    "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": WIDE,
    "Mistral": GROUPED | {"sliding_window": 16},
    "Gemma": WIDE,
    "Gemma2": WIDE | {"sliding_window": 16},
    "Phi": SIZES,
    "Phi3": GROUPED,
    "OPT": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "GPTNeoX": SIZES,
}
SLOW = {*NETWORKS} - {"GPT2", "Llama"}


def network(name, **more):
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64} | NETWORKS[name] | more
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = getattr(transformers, f"{name}Config")(**sizes, **ends)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def prompt(length):
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def llama():
    return network("Llama")


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("language") / "llama"
    torchedge.export_lm(llama, "local-cpu", out=out, max_length=LENGTH, chunk=CHUNK)
    return out


@pytest.fixture
def bundle(folder):
    return torchedge.load_bundle(folder)


CASES = [
    *[pytest.param(name, "local-cpu", marks=[pytest.mark.slow] * (name in SLOW)) for name in NETWORKS],
    pytest.param("Llama", "adreno-740", marks=pytest.mark.slow),  # weights in images
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), CASES)
def test_greedy_tokens_are_those_of_transformers(name, device, tmp_path):
    model = network(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    bundle = torchedge.export_lm(model, device, out=tmp_path / "lm", max_length=LENGTH, chunk=CHUNK)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for length in (1, 7, 8, 9, 17, 33, 41):
        ids = prompt(length)
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert bundle.generate(ids[0], 8) == wanted[0, length:].tolist(), length


@pytest.mark.parametrize(
    ("form", "group"), [pytest.param("int8", None, marks=pytest.mark.slow), ("int4", 32)]
)
@pytest.mark.slow
def test_quantised_tokens_are_those_of_the_dequantised_model(llama, bundle, form, group, tmp_path):
    floats, bundle = (
        bundle,
        torchedge.export_lm(
            llama, "local-cpu", out=tmp_path / "lm", max_length=LENGTH, chunk=CHUNK, quantize=form
        ),
    )
    dequantised, quantised = copy.deepcopy(llama), torchedge.quantize(llama, form, group=group)
    layers = dict(quantised.named_modules())
    with torch.no_grad():
        for name, layer in dequantised.named_modules():
            if isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)):
                assert not torch.equal(layer.weight, layers[name].weight)
                layer.weight.copy_(layers[name].weight)
    for length in (1, 8, 13, 30):
        ids = prompt(length)
        wanted = dequantised.generate(
            ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert bundle.generate(ids[0], 8) == wanted[0, length:].tolist(), length
    assert bundle.manifest.memory.resident_bytes < floats.manifest.memory.resident_bytes / 2


@pytest.mark.slow
def test_a_model_in_bfloat16_generates_in_float32_and_stays_as_it_is(tmp_path):
    model = network("Qwen2", tie_word_embeddings=True).bfloat16()
    with pytest.warns(TorchedgeWarning, match="they count in float32"):
        bundle = torchedge.export_lm(model, "local-cpu", out=tmp_path / "lm", max_length=LENGTH, chunk=CHUNK)
    assert model.dtype is torch.bfloat16 and model.lm_head.weight is model.get_input_embeddings().weight
    ids = prompt(11)
    expected = model.float().generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)[0, 11:]
    assert bundle.generate(ids[0].tolist(), max_new_tokens=9) == expected.tolist()


def test_a_token_is_written_into_the_caches_alone(bundle):
    program = bundle.programs["decode"]
    cache = min(t.nbytes for t in program.tensors if t.role == "state")
    assert all(t.nbytes < cache for t in program.tensors if t.role == "intermediate")  # no copy of a cache
    for launch in program.launches:
        kernel = program.kernels[launch.kernel]
        for place, access in enumerate(kernel.access):
            if access == "update":  # named twice: as an argument, and where rows of it are written
                lines = [line for line in kernel.source.splitlines() if re.search(rf"\bt{place}\b", line)]
                assert len(lines) == 2 and " = " in lines[1] and "if (" in kernel.source


@pytest.mark.slow
def test_early_tokens_read_a_part_of_long_caches(tmp_path):
    model = network("Qwen3")
    bundle = torchedge.export_lm(model, "local-cpu", out=tmp_path / "lm", max_length=130, chunk=16, batch=2)
    assert bundle.methods == ("prefill", "decode", "decode_64")
    calls, step = [], bundle.runner.step
    bundle.runner.step = lambda *arrays, method: calls.append(method) or step(*arrays, method=method)
    texts = [prompt(count)[0].tolist() for count in (60, 49)]
    wanted = [
        model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
        for ids in texts
    ]
    assert bundle.generate(texts, 8) == [tokens.tolist() for tokens in wanted]
    assert calls == ["prefill"] * 4 + ["decode_64"] * 4 + ["decode"] * 3  # at places 60 to 63, 64 to 66
    cache = min(t.nbytes for t in bundle.programs["decode_64"].tensors if t.role == "state")
    for name in ("decode", "decode_64"):
        between = [t.nbytes for t in bundle.programs[name].tensors if t.role == "intermediate"]
        assert max(between) < cache  # no copy of one


@pytest.mark.slow
def test_early_chunks_read_a_part_of_long_caches(llama, tmp_path):
    sizes = {"max_length": 1024, "chunk": 96}
    bundle = torchedge.export_lm(llama, "local-cpu", out=tmp_path / "lm", **sizes)
    assert {name for name in bundle.methods if name.startswith("prefill")} == {"prefill", "prefill_256"}
    calls, step = [], bundle.runner.step
    bundle.runner.step = lambda *arrays, method: calls.append(method) or step(*arrays, method=method)
    ids = prompt(250)
    wanted = llama.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert bundle.generate(ids[0], 6) == wanted[0, 250:].tolist()
    assert calls[:3] == ["prefill_256", "prefill_256", "prefill"]  # places 192 to 287
    plan = torchedge.plan_lm(llama, "local-cpu", **sizes, prompt=250, new_tokens=6)
    times = [plan.runs[name].latency.value for name in calls[:3]]
    assert plan.first_token.value == pytest.approx(sum(times)) and times[0] < times[2]


@pytest.mark.slow
def test_a_kept_prefix_changes_nothing_and_is_not_computed_again(bundle, folder):
    ids = prompt(21)[0].tolist()
    first = bundle.generate(ids, 6)
    calls = []
    step = bundle.runner.step
    bundle.runner.step = lambda *arrays, method: calls.append(method) or step(*arrays, method=method)
    longer = [*ids, *first, 5, 9]
    for text, most in ((longer, 1), (longer[:23], 1), ([7, *longer[1:20]], 3)):
        calls.clear()
        fresh = torchedge.load_bundle(folder)
        assert bundle.generate(text, 3) == fresh.generate(text, 3)
        assert calls.count("prefill") == most
    bundle.runner.reset()
    calls.clear()
    bundle.generate(longer[:8], 1)
    assert calls == ["prefill"]


@pytest.mark.parametrize("name", ["Llama", pytest.param("Mistral", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_prompts_of_mixed_lengths_run_together_in_half_caches(name, tmp_path):
    model, prompts = network(name), [prompt(n)[0].tolist() for n in (17, 1, 9)]
    bundle = torchedge.export_lm(
        model,
        "local-cpu",
        out=tmp_path / "lm",
        max_length=LENGTH,
        chunk=CHUNK,
        batch=3,
        cache_dtype="float16",
    )
    wanted = [
        model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
        for ids in prompts
    ]
    told = []
    together = bundle.generate(prompts, 8, stream=told.append)
    assert together == [tokens.tolist() for tokens in wanted]
    assert list(map(list, zip(*told, strict=True))) == together
    assert [bundle.generate(ids, 8) for ids in prompts] == together
    longer = [ids + new for ids, new in zip(prompts, together, strict=True)]
    bundle.generate(prompts, 8)
    assert bundle.generate(longer[:2], 4) == [bundle.generate(ids, 4) for ids in longer[:2]]
    settings = {"temperature": 1.5, "stop": together[0][:3]}
    drawn = bundle.generate(prompts, 8, seed=4, **settings)
    assert drawn == [bundle.generate(ids, 8, seed=4 + n, **settings) for n, ids in enumerate(prompts)]
    tensors = bundle.programs["decode"].tensors
    caches = [t for t in tensors if t.role == "state"]
    assert {t.dtype for t in caches} == {"float16"}
    assert all(  # no copy of a cache in float32
        t.nbytes < 2 * caches[0].nbytes for t in tensors if t.role == "intermediate"
    )


def test_tokens_are_drawn_by_seed(bundle):
    settings = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
    drawn = [bundle.generate([5, 6, 7], 12, seed=seed, **settings) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = bundle.generate([5, 6, 7], 12)
    assert bundle.generate([5, 6, 7], 12, temperature=2.0, top_k=1, seed=3) == greedy
    told = []
    assert bundle.generate([5, 6, 7], 12, stop=[greedy[2]], stream=told.append) == told
    assert told == greedy[: greedy.index(greedy[2]) + 1]


def test_draws_follow_the_distribution_that_transformers_leaves():
    logits = np.random.default_rng(0).normal(size=12)
    warpers = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(6),
            transformers.TopPLogitsWarper(0.8),
        ]
    )
    wanted = torch.softmax(warpers(torch.zeros(1, 1), torch.tensor(logits)[None])[0], -1).numpy()
    generator, sampling = Generator(1), Sampling(0.7, 6, 0.8)
    counts = np.bincount([sampling.draw(logits, generator) for _ in range(4000)], minlength=12) / 4000
    np.testing.assert_allclose(counts, wanted, atol=0.03)
    assert not counts[wanted == 0].any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], 4), {}, "ids has no token"),
        (([1] * 48, 2), {}, "the caches hold 48"),
        (([1.5], 2), {}, "expected whole numbers"),
        (([[1, 2], [3, 4]], 2), {}, "2 prompts are given, and the bundle takes 1 at once"),
        (([[1, 2], []], 2), {}, "ids has no token"),
        (([[[1, 2]]], 2), {}, "expected whole numbers in one row"),
        ((5, 2), {}, "ids is"),
        (([1], 0), {}, "max_new_tokens is 0"),
        (([1], 2), {"temperature": -1}, "temperature is -1"),
        (([1], 2), {"top_p": 0}, "top_p is 0"),
        (([1], 2), {"top_k": 0}, "top_k is 0"),
        (([1], 2), {"stream": 3}, "stream"),
    ],
)
def test_what_cannot_be_generated_is_told(bundle, arguments, options, message):
    with pytest.raises(InputError, match=message):
        bundle.generate(*arguments, **options)


def test_tokens_beyond_the_vocabulary_leave_nothing_kept(bundle):
    wanted = bundle.generate([3, 4, 5], 4)
    with pytest.raises(IndexRangeError):
        bundle.generate([3, 4, VOCABULARY], 4)
    assert bundle.generate([3, 4, 5], 4) == wanted
    assert len(bundle.generate([1] * 48, 1)) == 1


def test_what_is_no_language_model_is_told(inference, tmp_path):
    with pytest.raises(InputError, match="with the methods infer generates no text"):
        torchedge.load_bundle(inference).generate([1], 1)
    with pytest.raises(InputError, match="expected a causal model or an encoder-decoder of transformers"):
        torchedge.export_lm("gpt2", "local-cpu", out=tmp_path / "lm", max_length=8)
    with pytest.raises(CaptureError, match="expected a causal model of transformers"):
        config = transformers.BertConfig(vocab_size=9, **SIZES)
        torchedge.export_lm(transformers.BertModel(config), "local-cpu", out=tmp_path / "lm", max_length=8)
    with pytest.raises(CaptureError, match=r"masks or positions of its own|on one token and a cache"):
        config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
        torchedge.export_lm(config, "local-cpu", out=tmp_path / "lm", max_length=20)
    with pytest.raises(CaptureError, match=r"masks or positions of its own|on one token and a cache"):
        config = transformers.GPTNeoConfig(
            vocab_size=99,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
        )
        torchedge.export_lm(config, "local-cpu", out=tmp_path / "lm", max_length=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "device"), [(None, "local-cpu"), ("int4", "local-cpu"), ("int8", "adreno-740")]
)
def test_a_model_generates_with_what_its_adapters_have_learnt(llama, form, device, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    before = {name: p.clone() for name, p in llama.named_parameters()}
    bundle = torchedge.export_lm(
        llama, device, out=tmp_path / "lm", max_length=LENGTH, chunk=CHUNK, lora=4, quantize=form
    )
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in llama.named_parameters())
    torch.manual_seed(1)
    base = (
        copy.deepcopy(llama)
        if form is None
        else torchedge.quantize(llama, form, group={"int4": 32}.get(form))
    )
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
    bundle.runner.set("lr", 0.02)
    ids = prompt(LENGTH)
    labels = ids.clone()
    labels[:, 40:] = -100

    def expected():
        tokens = adapted.eval().generate(
            input_ids=ids[:, :5], max_new_tokens=9, do_sample=False, eos_token_id=None
        )
        return tokens[0, 5:].tolist()

    first = bundle.generate(ids[0, :5], 9)
    assert first == expected()
    for _ in range(6):
        optimizer.zero_grad()
        loss = adapted.train()(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        assert bundle.train_step(ids.numpy(), labels.numpy()) == pytest.approx(loss.item(), rel=1e-4)
    assert bundle.generate(ids[0, :5], 9) == expected() != first


def test_adapters_that_cannot_be(llama, tmp_path):
    peft = pytest.importorskip("peft")
    options = {"out": tmp_path / "lm", "max_length": 16}
    with pytest.raises(InputError, match=r"lora is 0; expected"):
        torchedge.export_lm(llama, "local-cpu", lora=0, **options)
    adapted = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(InputError, match="has adapters"):
        torchedge.export_lm(adapted, "local-cpu", lora=4, **options)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer.json whose tokens are bytes, and two special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *letters[:99]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({name: n for n, name in enumerate(names)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(names[:2])
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(file))
    return file


def test_words_in_and_words_out(llama, bundle, words, tmp_path):
    tokenizers, text = pytest.importorskip("tokenizers"), "SOME 42 WORDS"
    made = tokenizers.Tokenizer.from_file(str(words))
    ids = made.encode(text).ids
    tokens, pieces = bundle.generate(ids, 12), []
    found = bundle.generate_text(text, 12, tokenizer=words, stream=pieces.append)
    assert found == made.decode(tokens) and found.startswith("".join(pieces)) and pieces
    stop, until = made.id_to_token(tokens[3]), made.decode(bundle.generate(ids, 12, stop=[tokens[3]]))
    assert bundle.generate_text(text, 12, tokenizer=words, stop=stop) == until
    ending = replace(bundle, manifest=replace(bundle.manifest, ends=(tokens[3],)))
    assert ending.generate_text(text, 12, tokenizer=words) == until
    assert ending.generate_text(text, 12, tokenizer=words, stop=()) == found
    with pytest.raises(InputError, match="holds no tokenizer"):
        bundle.generate_text(text)
    with pytest.raises(InputError, match=r"'nothing' is no token of tokenizer\.json"):
        bundle.generate_text(text, tokenizer=words, stop=["nothing"])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="is no tokenizer"):
        bundle.tokenizer(tmp_path / "tokenizer.json")


def test_as_many_tokens_follow_as_the_caches_hold(bundle):
    assert len(bundle.generate(prompt(5)[0])) == LENGTH - 4
    assert len(bundle.generate(prompt(LENGTH)[0])) == 1


@pytest.mark.slow
def test_a_folder_of_transformers_becomes_a_bundle_that_writes(words, tmp_path, capsys):
    from torchedge.cli import main

    model, folder = network("Qwen2", tie_word_embeddings=True).bfloat16(), tmp_path / "model"
    model.generation_config.eos_token_id = [7, 5]
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(words.read_bytes())
    line = ["export", f"hf:{folder}", "-o", str(tmp_path / "lm"), "--max-length", str(LENGTH), "--chunk", "8"]
    assert main([*line, "--quantize", "int4"]) == 0
    assert "random" not in capsys.readouterr().err
    assert main(["run", str(tmp_path / "lm"), "--prompt", "A TEXT", "--max-new-tokens", "9", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert torchedge.load_bundle(tmp_path / "lm").manifest.ends == (5, 7)
    expected = torchedge.export_lm(
        torchedge.quantize(model.float(), "int4", group=32), "local-cpu", out=tmp_path / "other",
        max_length=LENGTH, chunk=CHUNK, tokenizer=words,
    )  # fmt: skip
    assert document["text"] == expected.generate_text("A TEXT", 9)
    assert main(["run", str(tmp_path / "lm"), "--prompt", "A TEXT", "--max-new-tokens", "9"]) == 0
    assert document["text"].split() == capsys.readouterr().out.split()
    assert main([*line, "--force", "--seq-len", "8"]) == 2 and main([*line[:4], "--chunk", "8"]) == 2
    (folder / "model.safetensors").unlink()
    assert main([*line, "--force"]) == 0
    assert "are random" in capsys.readouterr().err


def test_text_on_the_command_line(folder, bundle, capsys):
    from torchedge.cli import main

    line = ["run", str(folder), "--prompt-ids", "5,6,7", "--max-new-tokens", "4"]
    assert main([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == bundle.generate([5, 6, 7], 4)
    assert main(line) == 0
    assert ",".join(map(str, document["tokens"])) in capsys.readouterr().out.replace(" ", "")
    assert main([*line, "--random"]) == 2
    assert main(["run", str(folder), "--prompt-ids", "a"]) == 2
    assert main(["run", str(folder), "--prompt", "a"]) == 2 and main([*line, "--prompt", "a"]) == 2
