"""Bundles that stream their weights: the executor's bits within the plan's memory, and plans made to harm."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles.test_encoder_decoders import network as encoder_decoder
from bundles.test_generation import network, prompt
from bundles.test_hostile_bundles import REFUSED, edit
from bundles.test_methods import CALLS
from bundles.test_methods import Deep as Tied
from runner.test_methods import DRAWN, words
from runner.test_runner import assert_same, hold_training

import torchedge
from torchedge.bundles.manifests import digest_of
from torchedge.errors import LimitError
from torchedge.storage.tensors import write_tensors

pytest.importorskip("pyopencl")
LIMIT = "600KiB"


class Deep(torch.nn.Module):
    """Layers of several sizes, with a table of whole rows and one that nothing reads."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(300, 128)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
        self.last = torch.nn.Linear(128, 250)
        self.register_buffer("unused", torch.zeros(7))

    def forward(self, numbers):
        x = self.words(numbers)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


@pytest.fixture(scope="module", params=["adreno-740", "local-cpu"])
def streaming(request, tmp_path_factory):
    torch.manual_seed(0)
    model, numbers = Deep().eval(), torch.randint(0, 300, (2, 5))
    out = tmp_path_factory.mktemp("streaming") / "bundle"
    return torchedge.export(
        model, numbers, out=out, device=request.param, onnx=False, memory_limit=LIMIT, check=True
    ), numbers.numpy()


@pytest.mark.slow
def test_weights_stream_within_the_plan_s_memory_with_the_executor_s_bits(native, streaming, tmp_path):
    bundle, numbers = streaming
    total = bundle.manifest.memory.total_bytes
    assert total <= 600 << 10 < sum(t.nbytes for t in bundle.program.tensors if t.role == "parameter")
    batches = [{"numbers": np.roll(numbers, k)} for k in range(3)]
    outputs = native.run(bundle.path, tmp_path, batches, "--memory-limit", str(total))
    assert_same(bundle, batches, outputs)
    write_tensors(tmp_path / "one.safetensors", batches[0])
    words = (bundle.path, "--device", native.device, "--inputs", tmp_path / "one.safetensors")
    figures = json.loads(native.start(*words, "--figures").stdout)
    assert figures["streamed_bytes"] >= sum(r.nbytes for r in bundle.plan.loads.run) > 0
    done = native.start(bundle.path, "--device", native.device, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "use a limit of at least" in native.refusal(*words, "--memory-limit", str(total // 2))


def least_limit(export, tmp_path):
    """Return the smallest limit within which something can be exported."""
    with pytest.raises(LimitError) as raised:
        export(memory_limit="1KiB", out=tmp_path / "none")
    return raised.value.works_bytes


def figures_of(native, bundle, *words):
    """Return the figures of a run within what the manifest says that it takes."""
    total = bundle.manifest.memory.total_bytes
    done = native.start(bundle.path, "--device", native.device, *words, "--memory-limit", total, "--figures")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    if bundle.manifest.target.device_class == "cpu":  # a processor's driver makes no images from buffers
        assert figures["allocated_bytes"] == total
    return figures, done.stdout[: done.stdout.index("{")]


@pytest.fixture(scope="module", params=["local-cpu", pytest.param("adreno-740", marks=pytest.mark.slow)])
def methods(request, tmp_path_factory):
    """Two methods that stream, and load a tied weight twice in a run."""
    torch.manual_seed(0)
    model, folder = Tied().eval(), tmp_path_factory.mktemp("methods")
    calls = {"many": (model, (torch.zeros(16, 64),)), "one": (model, (torch.zeros(1, 64),))}

    def export(**options):
        return torchedge.export(calls, device=request.param, check=True, **options)

    return export(memory_limit=f"{least_limit(export, folder)}B", out=folder / "bundle")


def test_methods_stream_in_one_arena_with_the_executor_s_bits(native, methods, tmp_path):
    assert methods.plans["one"].parts
    draw, state = np.random.default_rng(0), tmp_path / "state"
    for number, (method, shape) in enumerate(CALLS):
        inputs = {methods.method(method).inputs[0].name: draw.standard_normal(shape, np.float32)}
        more = ("--load", state) if number else ()
        outputs = native.run(methods.path, tmp_path, [inputs], "--method", method, "--save", state, *more)
        (wanted,) = methods.run(*inputs.values(), method=method)
        assert wanted.tobytes() == outputs[f"0.{methods.method(method).outputs[0].name}"].tobytes()
    write_tensors(tmp_path / "inputs", inputs)
    figures, _ = figures_of(native, methods, "--inputs", tmp_path / "inputs", "--method", method)
    assert figures["streamed_bytes"] >= sum(read.nbytes for read in methods.plans[method].loads.run) > 0
    done = native.start(methods.path, "--device", native.device, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


LARGER = {
    "Llama": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4},
    "GPT2": {"n_embd": 64, "n_layer": 4, "n_positions": 128, "max_position_embeddings": 128},
}
FORMATS = [
    ("Llama", None, "local-cpu"),
    ("Llama", "int4", "adreno-740"),
    ("Llama", "int4", "local-cpu"),
    ("GPT2", "int8", "local-cpu"),
    ("GPT2", None, "adreno-740"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form", "device"), FORMATS)
def test_tokens_of_streamed_weights_are_those_of_python(native, family, form, device, tmp_path):
    model = network(family, **LARGER[family])

    def export(**options):
        sizes = {"max_length": 128, "chunk": 8, "quantize": form, "batch": 1 + (form == "int8")}
        return torchedge.export_lm(model, device, **sizes, **options)

    whole = export(out=tmp_path / "whole")
    with pytest.raises(LimitError) as raised:
        whole.place(memory_limit="1KiB")
    least = raised.value.works_bytes
    for limit in (least, (least + whole.manifest.memory.total_bytes) // 2)[: 1 + (form is None)]:
        bundle = export(memory_limit=f"{limit}B", out=tmp_path / f"{limit}")
        assert {"prefill", "decode", "decode_64"} == {*bundle.plans}
        for length, settings in ((21, {}), (60, DRAWN | {"seed": 5})):
            ids = prompt(length)[0].tolist()
            line = words(prompt_ids=",".join(map(str, ids)), max_new_tokens=9, **settings)
            figures, text = figures_of(native, bundle, *line)
            assert figures["streamed_bytes"] > 0
            found = [int(token) for token in text.strip().split(",")]
            assert found == bundle.generate(ids, 9, **settings) == whole.generate(ids, 9, **settings)
    library = native.program.with_name("libtorchedge.so")
    if library.exists():
        kept_prefixes(native, library, bundle)


def kept_prefixes(native, library, bundle):
    """Hold a text that continues an earlier one against Python."""
    ids = prompt(21)[0].tolist()
    script = Path(__file__).with_name("generating.py")
    done = subprocess.run(
        [sys.executable, script, library, bundle.path, native.device, json.dumps(ids)],
        env={**os.environ, **native.environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, steps = json.loads(done.stdout)
    assert steps == [3 + 5, 1 + 2]
    assert first == bundle.generate(ids, 6)
    assert second == bundle.generate([*ids, *first, 5, 9], 3, seed=7, **DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "int4"])
def test_tokens_of_a_streamed_encoder_decoder_are_those_of_python(native, form, tmp_path):
    def export(**options):
        sizes = {"max_length": 20, "chunk": 4, "encoder_length": 18, "quantize": form}
        return torchedge.export_lm(encoder_decoder("deep"), "local-cpu", **sizes, **options)

    bundle = export(memory_limit=f"{least_limit(export, tmp_path)}B", out=tmp_path / "lm")
    for ids in ([3, 9, 1], [*range(18)]):
        line = words(prompt_ids=",".join(map(str, ids)), max_new_tokens=8, **DRAWN)
        _, text = figures_of(native, bundle, *line)
        assert [int(token) for token in text.strip().split(",")] == bundle.generate(ids, 8, **DRAWN)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_streams_frozen_weights_and_goes_on_from_a_saved_state(native, accumulation, tmp_path):
    torch.manual_seed(0)
    model = Tied()
    for layer in (model.first, model.layers, model.tied):
        layer.requires_grad_(False)
    model.layers[-1].requires_grad_(True)
    batch, target = torch.randn(2, 1, 4, 64)  # one sample, which no limit cuts
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def export(**options):
        return torchedge.export(
            model, batch, loss=torch.nn.functional.mse_loss, targets=target, optimizer=optimizer,
            mode="train", accumulation=accumulation, device="local-cpu", onnx=False, **options,
        )  # fmt: skip

    bundle = export(memory_limit=f"{least_limit(export, tmp_path)}B", out=tmp_path / "bundle")
    hold_training(native, bundle, [batch.numpy(), target.numpy()], tmp_path)
    weights = bundle.state_dict()  # frozen ones among them
    assert weights.keys() == model.state_dict().keys()
    write_tensors(tmp_path / "weights", weights)
    figures_of(native, bundle, "--inputs", tmp_path / "inputs.safetensors", "--load", tmp_path / "weights")
    write_tensors(tmp_path / "others", weights | {"first.weight": weights["first.weight"] + 1})
    line = native.refusal(bundle.path, "--device", native.device, "--load", tmp_path / "others", "--steps", 1)
    assert "first.weight with other numbers" in line


@pytest.mark.slow
@pytest.mark.parametrize("device", ["local-cpu", "adreno-740"])
def test_adapters_of_a_streamed_int4_model_train_as_in_python(native, device, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = torchedge.quantize(network("Llama", **LARGER["Llama"]), "int4", group=32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=r".*(_proj)"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = prompt(16)

    def export(**options):
        return torchedge.export(
            model, {"input_ids": ids, "labels": ids}, loss="model", optimizer=optimizer, mode="train",
            device=device, onnx=False, **options,
        )  # fmt: skip

    bundle = export(memory_limit=f"{least_limit(export, tmp_path)}B", out=tmp_path / "bundle")
    assert bundle.plan.parts
    hold_training(native, bundle, [ids.numpy()] * len(bundle.inputs), tmp_path)
    figures, _ = figures_of(native, bundle, "--inputs", tmp_path / "inputs.safetensors")
    assert figures["streamed_bytes"] > 0


@pytest.mark.parametrize("file", ["weights.safetensors", "streaming_plan.json"])
def test_changed_files_are_refused(native, streaming, tmp_path, file):
    folder = tmp_path / "copied"
    shutil.copytree(streaming[0].path, folder)
    data = bytearray((folder / file).read_bytes())
    data[-2] ^= 1
    (folder / file).write_bytes(data)
    assert "SHA-256" in native.refusal(folder, "--device", native.device)


def run(document, number=0):
    return document["loads"]["run"][number]


def copy(document, number=0):
    return run(document, number)["copies"][0]


def swap(document):
    """Exchange the destinations of two copies."""
    first, second = copy(document), document["loads"]["run"][-1]["copies"][-1]
    first["tensor"], second["tensor"] = second["tensor"], first["tensor"]


HARM = {
    "reads beyond the file": lambda d: run(d).update(offset=2**30),
    "reads beyond staging": lambda d: run(d).update(at=d["staging_bytes"] // 4096 * 4096),
    "reads within a page": lambda d: run(d).update(at=run(d)["at"] + 1),
    "reads less than it copies": lambda d: run(d).update(nbytes=1),
    "copies beyond staging": lambda d: copy(d).update(at=2**31),
    "copies beyond the tensor": lambda d: copy(d)["place"].__setitem__(-1, 2**20),
    "copies to another place": lambda d: copy(d).update(place=[1] * len(copy(d)["place"])),
    "copies to no tensor": lambda d: copy(d).update(tensor=60_000),
    "copies for another weight": swap,
    "copies twice": lambda d: run(d)["copies"].append(copy(d)),
    "copies too little": lambda d: d["loads"]["run"].pop(),
    "waits for later copies": lambda d: d["loads"]["run"][0].update(after=1),
    "overwrites staging": lambda d: [r.update(at=0, after=0) for r in d["loads"]["run"]],
    "no launch waits": lambda d: d["loads"].update(waits=[0] * len(d["loads"]["waits"])),
    "waits for too many": lambda d: d["loads"]["waits"].__setitem__(-1, 10_000),
    "too few waits": lambda d: d["loads"]["waits"].pop(),
    "copies after its launch": lambda d: copy(d).update(after=len(d["loads"]["waits"])),
    "no preload": lambda d: d["loads"].update(preload=[]),
    "no staging": lambda d: d.update(staging_bytes=0),
    "endless staging": lambda d: d.update(staging_bytes=2**50),
    "an arena without places": lambda d: d["arena"].update(offsets=[], slot_of=[]),
    "a small arena": lambda d: d["arena"].update(nbytes=1),
    "no loads": lambda d: d.pop("loads"),
    "text for a number": lambda d: run(d).update(offset="0"),
    "another schema": lambda d: d.update(schema="torchedge-streaming-plan-1"),
}


@pytest.mark.parametrize("change", HARM.values(), ids=HARM)
def test_plans_made_to_harm_are_refused(native, streaming, reseal, tmp_path, change):
    folder = tmp_path / "copied"
    shutil.copytree(streaming[0].path, folder)
    edit(folder, "streaming_plan.json", reseal, change)
    with pytest.raises(REFUSED):
        torchedge.load_bundle(folder, trust=True)
    native.refusal(folder, "--device", native.device)


PARTS = {
    "a part of an intermediate": lambda d: d["parts"][0].update(tensor=d["arena"]["offsets"][-1][0]),
    "a part of no tensor": lambda d: d["parts"][0].update(tensor=2**40),
    "a part of a part": lambda d: d["parts"].append({"tensor": 60_000, "first": 1}),
    "a part from no launch on": lambda d: d["parts"][0].update(first=len(d["loads"]["waits"])),
    "a part from another launch on": lambda d: d["parts"][0].update(first=d["parts"][0]["first"] + 1),
    "a part twice": lambda d: d["parts"].append(d["parts"][-1]),
    "more parts": lambda d: d["parts"].insert(0, {"tensor": d["parts"][0]["tensor"], "first": 0}),
    "no parts": lambda d: d.pop("parts"),
    "parts that are never loaded": lambda d: d.update(parts=[{"tensor": 0, "first": 0}, *d["parts"]]),
    "parts as a number": lambda d: d.update(parts=1),
    "no place of a part": lambda d: d["arena"].update(
        offsets=[pair for pair in d["arena"]["offsets"] if pair[0] != max(d["arena"]["offsets"])[0]]
    ),
    "other staging memory": lambda d: d.update(staging_bytes=d["staging_bytes"] + 4096),
}


@pytest.mark.parametrize("change", [*HARM.values(), *PARTS.values()], ids=[*HARM, *PARTS])
@pytest.mark.sampled(12)
def test_plans_of_methods_made_to_harm_are_refused(native, methods, reseal, tmp_path, change):
    folder = shutil.copytree(methods.path, tmp_path / "copied")
    edit(folder, "streaming_plan.one.json", reseal, change)
    with pytest.raises(REFUSED):
        torchedge.load_bundle(folder, trust=True)
    native.refusal(folder, "--device", native.device)


@pytest.mark.parametrize("plan", ["streaming_plan.json", "streaming_plan.one.json"])
def test_programs_without_a_plan_beside_others_are_refused(native, methods, reseal, tmp_path, plan):
    folder = shutil.copytree(methods.path, tmp_path / "copied")
    edit(folder, "manifest.json", lambda *_: None, lambda d: d["files"].pop(plan))
    document = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**document, "sha256": digest_of(document)}))
    with pytest.raises(REFUSED):
        torchedge.load_bundle(folder, trust=True)
    native.refusal(folder, "--device", native.device)
