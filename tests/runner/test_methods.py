"""Methods and text in the native runner: the bits, states and tokens of Python's bundles."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from bundles.test_generation import CHUNK, LENGTH, VOCABULARY, network, prompt
from bundles.test_hostile_bundles import REFUSED, edit
from bundles.test_methods import WRONG, Cached, pairs
from runner.test_hostile_bundles import first

import torchedge
from torchedge.bundles.generation import Generator
from torchedge.bundles.manifests import digest_of
from torchedge.errors import LimitError
from torchedge.storage.tensors import read_tensors

pytest.importorskip("pyopencl")
DRAWN = {"temperature": 1.5, "top_k": 40, "top_p": 0.9}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["local-cpu", "adreno-740"])
def methods(request, tmp_path_factory):
    import torch

    torch.manual_seed(0)
    model = Cached().eval()
    out = tmp_path_factory.mktemp("methods") / "bundle"
    return torchedge.export(pairs(model), device=request.param, out=out, check=True)


@pytest.fixture(scope="module", params=[(None, "local-cpu"), ("int8", "local-cpu"), ("int4", "adreno-740")])
def language(request, tmp_path_factory):
    form, device = request.param
    out = tmp_path_factory.mktemp("language") / "llama"
    return torchedge.export_lm(
        network("Llama"), device, out=out, max_length=LENGTH, chunk=CHUNK, quantize=form
    )


def feed(bundle, method, step):
    """Return inputs of a method by name."""
    draw = np.random.default_rng(step)
    inputs = bundle.method(method).inputs
    if method == "peek":
        return {inputs[0].name: draw.normal(size=64).astype(np.float32)}
    return {inputs[0].name: draw.integers(0, 20, inputs[0].shape), inputs[1].name: np.array([step])}


def test_methods_share_weights_and_states_with_the_executor_s_bits(native, methods, tmp_path):
    bundle = methods
    state = tmp_path / "state.safetensors"
    limit = ("--memory-limit", bundle.manifest.memory.total_bytes + 1_000_000)
    for number, method in enumerate(("prefill", "decode", "peek", "decode")):
        steps = [feed(bundle, method, 2 * number + k) for k in range(2)]
        outputs = native.run(
            bundle.path, tmp_path, steps, "--method", method, "--save", state, *limit,
            *(("--load", state) if number else ()),
        )  # fmt: skip
        for k, arrays in enumerate(steps):
            (wanted,) = bundle.run(*arrays.values(), method=method)
            assert wanted.tobytes() == outputs[f"{k}.{bundle.method(method).outputs[0].name}"].tobytes()
    kept, _ = read_tensors(state, finite=False)
    assert kept["keys"].tobytes() == bundle.runner.read("keys").tobytes()
    assert bundle.runner.read("keys").any()


def test_methods_take_one_arena_and_are_described(native, methods):
    done = native.start(methods.path, "--device", native.device)
    described = json.loads(done.stdout)
    assert [method["name"] for method in described["methods"]] == list(methods.methods)
    for method in described["methods"]:
        ports = methods.method(method["name"])
        assert [port["name"] for port in method["inputs"]] == [port.name for port in ports.inputs]
    assert described["methods"][0]["inputs"] == described["inputs"]
    line = native.refusal(methods.path, "--device", native.device, "--method", "chat", "--steps", 1)
    assert "no method chat; expected one of prefill, decode, peek" in line


def test_launches_of_every_method_are_checked(native, methods):
    done = native.start(methods.path, "--device", native.device, "--check", "--json")
    report = json.loads(done.stdout)
    results = sum(
        access != "read"
        for program in methods.programs.values()
        for launch in program.launches
        for access in program.kernels[launch.kernel].access
    )
    assert (done.returncode, report["off"], report["results"]) == (0, None, results)


@pytest.mark.parametrize("change", [change for change, _ in WRONG])
def test_what_is_wrong_in_methods_is_refused_as_in_python(native, methods, tmp_path, change):
    folder = shutil.copytree(methods.path, tmp_path / "bundle")
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_text(json.dumps({**document, "sha256": digest_of(document)}))
    with pytest.raises(REFUSED):
        torchedge.load_bundle(folder, trust=True)
    native.refusal(folder, "--device", native.device)


@pytest.mark.parametrize(("form", "limited"), [(None, False), ("int4", True)])
def test_adapters_learn_and_generate_as_in_python(native, form, limited, tmp_path):
    pytest.importorskip("peft")
    options = {"max_length": LENGTH, "chunk": CHUNK, "quantize": form, "lora": 4}

    def export(**more):
        return torchedge.export_lm(network("Llama"), "local-cpu", **options, **more)

    limit = {}
    if limited:
        with pytest.raises(LimitError) as refused:
            export(out=tmp_path / "none", memory_limit="1KiB")
        limit["memory_limit"] = refused.value.works_bytes / 2**20
    bundle = export(out=tmp_path / "lm", **limit)
    ids, state = prompt(LENGTH).numpy(), tmp_path / "state.safetensors"
    steps = [{"input_ids": ids, "labels": ids}] * 5
    set_lr = ("--set", "lr=0.03125")
    outputs = native.run(bundle.path, tmp_path, steps, "--method", "train", *set_lr, "--save", state)
    bundle.runner.set("lr", 0.03125)
    for number in range(5):
        assert bundle.train_step(ids, ids) == float(outputs[f"{number}.loss"])
    words = ",".join(map(str, ids[0, :5]))
    line = ["--device", native.device, "--prompt-ids", words, "--max-new-tokens", 9]
    done = native.start(bundle.path, *line, "--load", state)
    assert done.stdout.strip() == ",".join(map(str, bundle.generate(ids[0, :5], 9)))
    assert done.stdout != native.start(bundle.path, *line).stdout


PROGRAMS = {
    "a weight of another layout": lambda t: t["layout"].update(order=t["layout"]["order"][::-1]),
    "a weight of another role": lambda t: t.update(role="buffer"),
    "a weight of another shape": lambda t: t.update(shape=[1, *t["shape"]]),
    "a weight of another name": lambda t: t.update(name="other"),
}


@pytest.mark.parametrize("change", PROGRAMS.values(), ids=PROGRAMS)
def test_weights_that_methods_hold_in_different_ways_are_refused(native, methods, reseal, tmp_path, change):
    folder = shutil.copytree(methods.path, tmp_path / "bundle")
    edit(folder, "program.decode.json", reseal, lambda d: change(first(d, "tensors", "parameter")))
    with pytest.raises(REFUSED):
        torchedge.load_bundle(folder, trust=True)
    native.refusal(folder, "--device", native.device)


def words(**settings):
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_tokens_are_those_of_python(native, language, tmp_path):
    for length, settings in (
        (1, {}),
        (8, {}),
        (21, DRAWN | {"seed": 5}),
        (41, DRAWN),
        (30, {"temperature": 0.7}),
    ):
        ids = prompt(length)[0].tolist()
        line = words(prompt_ids=",".join(map(str, ids)), max_new_tokens=8, **settings)
        done = native.start(language.path, "--device", native.device, *line)
        assert done.returncode == 0, done.stderr
        wanted = language.generate(ids, 8, **settings)
        assert [int(token) for token in done.stdout.split(",")] == wanted, length
    saved = ("--save", tmp_path / "state")
    done = native.start(
        language.path, "--device", native.device, *line, "--stop", f"99999,{wanted[2]}", *saved
    )
    assert [int(token) for token in done.stdout.split(",")] == wanted[: wanted.index(wanted[2]) + 1]
    assert any(name.startswith("keys.") for name in read_tensors(saved[1])[0])


@pytest.mark.parametrize(("length", "chunk", "tokens"), [(128, 16, 60), (1024, 96, 250)])
def test_early_places_read_a_part_of_long_caches_as_in_python(native, length, chunk, tokens, tmp_path):
    sizes = {"max_length": length, "chunk": chunk}
    bundle = torchedge.export_lm(network("Llama"), "local-cpu", out=tmp_path / "lm", **sizes)
    assert "decode_64" in bundle.methods and (length < 1024 or "prefill_256" in bundle.methods)
    ids, settings = prompt(tokens)[0].tolist(), DRAWN | {"seed": 2}
    line = words(prompt_ids=",".join(map(str, ids)), max_new_tokens=9, **settings)
    done = native.start(bundle.path, "--device", native.device, *line)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split(",")] == bundle.generate(ids, 9, **settings)


@pytest.mark.parametrize("settings", [{}, DRAWN | {"seed": 3}, {"cache_dtype": "float16"}])
def test_tokens_of_several_prompts_are_those_of_python(native, tmp_path, settings):
    cache_dtype = settings.pop("cache_dtype", "float32")
    sizes = {"max_length": LENGTH, "chunk": CHUNK, "batch": 3, "cache_dtype": cache_dtype}
    bundle = torchedge.export_lm(network("Llama"), "local-cpu", out=tmp_path / "lm", **sizes)
    for lengths in ((21, 3, 8), (1, CHUNK + 1), (5,)):
        prompts = [prompt(length)[0].tolist() for length in lengths]
        line = [word for ids in prompts for word in ("--prompt-ids", ",".join(map(str, ids)))]
        wanted = bundle.generate(prompts, 8, **settings)
        stop = wanted[0][3]  # the first text waits for the others
        for ends in ((), (stop,)):
            more = ["--stop", str(stop)] if ends else []
            done = native.start(
                bundle.path, "--device", native.device, *line, *words(max_new_tokens=8, **settings), *more
            )
            assert done.returncode == 0, done.stderr
            found = [[int(token) for token in text.split(",")] for text in done.stdout.split()]
            assert found == bundle.generate(prompts, 8, stop=ends, **settings)
    line = native.refusal(bundle.path, "--device", native.device, *["--prompt-ids", "1"] * 4)
    assert "4 prompts are given, and the bundle takes 3 at once" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_ids": "1,x"}, "--prompt-ids is x"),
        ({"prompt_ids": ""}, "--prompt-ids is ;"),
        ({"prompt_ids": f"3,{VOCABULARY}"}, f"holds {VOCABULARY} at element 1; expected classes or indices"),
        ({"prompt_ids": ",".join(["1"] * LENGTH), "max_new_tokens": 2}, f"the caches hold {LENGTH}"),
        ({"prompt_ids": "1", "top_p": 2}, "top_p 2"),
    ],
)
def test_what_cannot_be_generated_is_refused(native, language, settings, message):
    assert message in native.refusal(
        language.path, "--device", native.device, *words(**{"max_new_tokens": 4} | settings)
    )


def test_other_bundles_generate_no_text(native, inference, methods):
    for path in (inference, methods.path):
        line = native.refusal(path, "--device", native.device, "--prompt-ids", "1")
        assert "expected a bundle of torchedge.export_lm" in line


def test_tokens_of_an_encoder_decoder_are_those_of_python(native, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 40}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    options = {"max_length": 12, "chunk": 2, "encoder_length": 9}
    bundle = torchedge.export_lm(model, "local-cpu", out=tmp_path / "lm", **options)
    for ids in ([3, 9, 1], [*range(9)]):
        line = words(prompt_ids=",".join(map(str, ids)), max_new_tokens=8, **DRAWN)
        done = native.start(bundle.path, "--device", native.device, *line)
        assert done.returncode == 0, done.stderr
        assert [int(token) for token in done.stdout.split(",")] == bundle.generate(ids, 8, **DRAWN)
    line = native.refusal(bundle.path, "--device", native.device, "--prompt-ids", ",".join(["1"] * 10))
    assert "10 tokens are given, and the encoder takes 9" in line


def test_a_kept_prefix_is_not_computed_again(native, language, tmp_path):
    """Through the library, in a process of its own: two drivers' loaders do not share one."""
    library = native.program.with_name("libtorchedge.so")
    if not library.exists():
        pytest.skip("the library is not built beside the program")
    ids = prompt(21)[0].tolist()
    script = Path(__file__).with_name("generating.py")
    done = subprocess.run(
        [sys.executable, script, library, language.path, native.device, json.dumps(ids)],
        env={**os.environ, **native.environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, steps = json.loads(done.stdout)
    fresh = torchedge.load_bundle(language.path)
    assert first == fresh.generate(ids, 6)
    assert second == torchedge.load_bundle(language.path).generate([*ids, *first, 5, 9], 3, seed=7, **DRAWN)
    assert steps == [3 + 5, 1 + 2]  # chunks of the prompt, then tokens


def test_numbers_of_a_seed_fill_the_unit_interval():
    generators = [Generator(seed) for seed in range(100)]
    numbers = [generator.random() for generator in generators for _ in range(100)]
    counts = Counter(int(10 * number) for number in numbers)
    assert len(set(numbers)) == 10_000 and sorted(counts) == list(range(10))
    assert all(850 < count < 1150 for count in counts.values())
    assert Generator(1234567).random() == 6457827717110365317 / 2**64 // 2**-53 * 2**-53  # the published one
