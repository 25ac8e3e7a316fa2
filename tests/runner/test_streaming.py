"""Bundles that stream their weights: the executor's bits within the plan's memory, and plans made to harm."""

import json
import shutil

import numpy as np
import pytest
import torch
from bundles.test_hostile_bundles import REFUSED, edit
from runner.test_runner import assert_same

import torchedge
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["methods", "training", "accumulation"])
def test_streams_that_the_runner_does_not_run_are_named(native, tmp_path, kind):
    torch.manual_seed(0)
    model, numbers = Deep().eval().requires_grad_(False), torch.randint(0, 300, (2, 5))
    model.layers[0].bias.requires_grad_(kind != "methods")
    calls = {"one": (model, numbers), "two": (model, numbers[:1])} if kind == "methods" else model
    optimizer = torch.optim.SGD([model.layers[0].bias], lr=0.1)
    step = {"memory_limit": LIMIT} if kind == "methods" else {
        "example": numbers, "mode": "train", "loss": lambda y: y.square().mean(), "optimizer": optimizer,
        "accumulation": 1 + (kind == "accumulation"), "memory_limit": "700KiB",
    }  # fmt: skip
    bundle = torchedge.export(calls, out=tmp_path / "bundle", device="local-cpu", onnx=False, **step)
    assert bundle.schedules
    assert "run it in Python" in native.refusal(bundle.path, "--device", native.device)


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
