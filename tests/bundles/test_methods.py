"""Methods: several programs of a bundle over one weights file and shared states on the device."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge import TrainingStep
from torchedge.errors import InputError, LimitError

pytest.importorskip("pyopencl")


class Cached(nn.Module):
    """Attention over a cache that each call extends."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.norm = nn.BatchNorm1d(64)  # folded
        self.project = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("keys", torch.zeros(1, 32, 64))
        self.register_buffer("offset", torch.full((1,), 0.25))

    def forward(self, ids, position):
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        places = position + torch.arange(ids.shape[1])
        self.keys.index_copy_(1, places, self.project(x) + self.offset)
        later = torch.arange(32) > places[:, None]
        scores = (x @ self.keys.transpose(1, 2)).masked_fill(later, -1e9)
        return self.head(torch.softmax(scores, -1) @ self.keys)


class Peek(nn.Module):
    """Reads the cache of another model, and has tensors of the same names."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("keys", torch.full((64,), 2.0))

    def forward(self, offset):
        return (self.inner.keys.sum(1) * self.keys + offset) @ self.inner.project.weight


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Cached()
    model.norm.running_mean.normal_()
    return model.eval()


def pairs(model):
    position = torch.tensor([0])
    return {
        "prefill": (model, (torch.zeros(1, 8, dtype=torch.int64), position)),
        "decode": (model, (torch.zeros(1, 1, dtype=torch.int64), position)),
        "peek": (Peek(model), (torch.zeros(64),)),
    }


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("methods") / "bundle"
    torchedge.export(pairs(model), device="local-cpu", out=out)
    return out


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("local-cpu", "float32"),
        pytest.param("adreno-740", "float32", marks=pytest.mark.slow),
        ("adreno-740", "float16"),
    ],
)
def test_methods_share_weights_and_states(model, tmp_path, device, precision):
    bundle = torchedge.export(pairs(model), device=device, out=tmp_path / "bundle", precision=precision)
    alone = torchedge.export(*pairs(model)["prefill"], device, out=tmp_path / "alone", precision=precision)
    assert bundle.methods == ("prefill", "decode", "peek") and alone.methods == ("infer",)
    weights = {name for name in alone.header.entries if not name.startswith("~")}
    new = {name for name in bundle.header.entries if not name.startswith("~")} - weights
    assert new == {"keys.1"}  # Peek's own; its constants aside, nothing is stored twice
    assert [port.name for port in bundle.states] == ["keys"]
    layouts = [
        {t.name: t.layout for t in program.tensors if t.role == "parameter"}
        for program in bundle.programs.values()
    ]
    assert all(layouts[0][name] == layout for each in layouts[1:] for name, layout in each.items())
    eager, draw = copy.deepcopy(model), np.random.default_rng(0)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "float32" else {"rtol": 0.05, "atol": 0.1}
    calls = (("prefill", 8, 0), ("decode", 1, 8), ("decode", 1, 9), ("prefill", 8, 10))
    for method, length, position in calls:
        ids, place = draw.integers(0, 20, (1, length)), np.array([position])
        (found,) = bundle.method(method).run(ids, place)
        with torch.no_grad():
            wanted = eager(torch.from_numpy(ids), torch.from_numpy(place))
            peeked = Peek(eager)(torch.ones(64))
        np.testing.assert_allclose(found, wanted.numpy(), **tolerance)
        (found,) = bundle.run(np.ones(64, np.float32), method="peek")
        np.testing.assert_allclose(found, peeked.numpy(), **tolerance, err_msg=method)
    methods = sum(method.memory.resident_bytes for method in bundle.manifest.methods)
    assert bundle.manifest.memory.resident_bytes < methods - 2 * 64 * 64 * 4  # weights are shared
    arenas = [method.memory.arena_bytes for method in bundle.manifest.methods]
    assert max(arenas) <= bundle.manifest.memory.arena_bytes < sum(arenas)
    made = [executor._arena for executor in bundle.runner.executors.values()]
    allocations = {id(memory): memory.size for arena in made for memory in (*arena.buffers, *arena.images)}
    assert sum(allocations.values()) == bundle.manifest.memory.arena_bytes  # in one arena
    assert torchedge.load_bundle(bundle.path).methods == bundle.methods


def test_a_bundle_of_methods_tells_what_it_is(exported):
    bundle = torchedge.load_bundle(exported)
    text = str(bundle)
    assert "prefill: inputs" in text and "decode: outputs" in text
    assert [port.shape for port in bundle.method("decode").inputs] == [(1, 1), (1,)]
    assert bundle.inputs == bundle.method().inputs == bundle.method("prefill").inputs
    with pytest.raises(InputError, match="has no method 'chat'; expected prefill, decode, peek"):
        bundle.run(method="chat")
    assert "several methods" in bundle.manifest.onnx["left_out"]


class Deep(nn.Module):
    """Layers between two uses of a tied weight; counts its calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(6)])
        self.tied = nn.Linear(64, 64, bias=False)
        self.register_buffer("calls", torch.zeros(64))

    def forward(self, x):
        self.calls.add_(1.0)
        x = torch.tanh(self.tied(self.first(x)))
        return self.tied(self.layers(x)) * self.calls


def own_bytes(runner):
    """Bytes of all memory objects of a runner, each counted once, and of the staging memory."""
    sizes = {}
    for executor in runner.executors.values():
        made = [held.memory for held in executor._tensors.values()]
        for memory in (*made, *executor._arena.buffers, *executor._arena.images):
            sizes[memory.int_ptr] = memory.size
    return sum(sizes.values()) + runner.executor.allocated["staging"]


@pytest.mark.parametrize("device", ["local-cpu", pytest.param("adreno-740", marks=pytest.mark.slow)])
def test_methods_stream_what_a_limit_does_not_hold(tmp_path, device):
    torch.manual_seed(0)
    model = Deep().eval()
    methods = {"many": (model, (torch.zeros(16, 64),)), "one": (model, (torch.zeros(1, 64),))}
    whole = torchedge.export(methods, device=device, out=tmp_path / "whole")
    with pytest.raises(LimitError) as raised:
        whole.place(memory_limit="1KiB")
    limit = f"{raised.value.works_bytes}B"
    assert raised.value.works_bytes < whole.manifest.memory.total_bytes
    bundle = torchedge.export(methods, device=device, out=tmp_path / "streamed", memory_limit=limit)
    assert set(bundle.plans) == {"many", "one"}
    draw = np.random.default_rng(0)
    calls = [(name, draw.standard_normal(shape, np.float32)) for name, shape in CALLS]
    wanted = [whole.run(x, method=name)[0] for name, x in calls]
    for planned in (bundle.place(), whole.place(memory_limit=limit)):
        with planned as runner:
            assert own_bytes(runner) == bundle.manifest.memory.total_bytes <= raised.value.works_bytes
            for (name, x), output in zip(calls, wanted, strict=True):
                np.testing.assert_array_equal(runner.step(x, method=name)[0], output)
            assert runner.read("calls")[0] == len(calls)
    parts = bundle.plans["one"].parts
    names = [bundle.programs["one"].tensors[part.tensor].name for part in parts]
    assert "tied.weight" in names  # loaded twice in a run
    with whole.place(memory_limit="1GiB") as runner:
        assert not runner.streams


CALLS = [("many", (16, 64)), ("one", (1, 64)), ("one", (1, 64)), ("many", (16, 64)), ("one", (1, 64))]


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_bundles_stream_frozen_weights(tmp_path, accumulation):
    torch.manual_seed(0)
    model = Deep()
    for layer in (model.first, model.layers, model.tied):
        layer.requires_grad_(False)
    model.layers[-1].requires_grad_(True)
    batch, target = torch.randn(2, 1, 4, 64)  # one sample, which no limit cuts
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"loss": nn.functional.mse_loss, "targets": target, "optimizer": optimizer}
    options |= {"mode": "train", "accumulation": accumulation, "device": "local-cpu", "onnx": False}
    whole = torchedge.export(model, batch, out=tmp_path / "whole", **options)
    with pytest.raises(LimitError) as raised:
        torchedge.export(model, batch, out=tmp_path / "none", memory_limit="1KiB", **options)
    limit = f"{raised.value.works_bytes}B"
    bundle = torchedge.export(model, batch, out=tmp_path / "streamed", memory_limit=limit, **options)
    assert bundle.manifest.memory.total_bytes < whole.manifest.memory.total_bytes
    arrays = [value.numpy() for value in (batch, target)]
    losses = [whole.train_step(*arrays) for _ in range(4)]
    assert own_bytes(bundle.runner) == bundle.manifest.memory.total_bytes
    assert [bundle.train_step(*arrays) for _ in range(4)] == losses
    with whole.place(memory_limit=limit) as runner:
        assert [float(runner.step(*arrays)[0]) for _ in range(4)] == losses


WRONG = [
    (lambda d: d["methods"][1].update(name="Decode"), "a method's name"),
    (lambda d: d["methods"][1].update(name="peek"), "methods has the files"),
    (lambda d: d["methods"][1].update(program="program.json"), "methods has the files"),
    (lambda d: d["methods"][1].update(program="../program.json"), "methods has the files"),
    (lambda d: d["methods"].reverse(), "methods has the files"),
    (lambda d: d["methods"].pop(), "lists the file 'program.peek.json'"),
    (lambda d: d["methods"][1]["inputs"].pop(), "different inputs"),
    (lambda d: d["methods"][0]["inputs"].pop(), "different methods"),
    (lambda d: d["methods"][2]["outputs"][0].update(shape=[2, 64]), "different outputs"),
    (lambda d: d["methods"][1]["memory"].update(live_bytes=1), "different memory of decode"),
    (lambda d: d["files"].pop("program.decode.json"), "files has no 'program.decode.json'"),
    (lambda d: d.update(accumulation=2), "methods are given with a training step"),
    (lambda d: d.update(mode="train"), "methods are given with a training step"),
    (lambda d: d.update(methods=d["methods"] * 9), "methods"),
    (lambda d: d.update(methods={}), "methods"),
    (lambda d: d["methods"][0].pop("memory"), "memory"),
    (lambda d: d["methods"][1].update(more=1), "more"),
    (lambda d: d["methods"][1].update(name="x" * 33), "a method's name"),
    (lambda d: d["methods"][1].update(name="1x"), "a method's name"),
    (lambda d: d["memory"].update(arena_bytes=d["memory"]["arena_bytes"] * 2), "memory.total_bytes is"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_in_methods_is_named(exported, tmp_path, manifest, change, message):
    folder = shutil.copytree(exported, tmp_path / "bundle")
    manifest(folder, change)
    with pytest.raises(InputError, match=message) as caught:
        torchedge.load_bundle(folder, trust=True)
    assert "\n" not in str(caught.value)


class Norms(nn.Module):
    """A convolution, whose batch norm is folded where nothing trains it, and two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.hidden = nn.Sequential(*[nn.Linear(*pair) for pair in [(64, 512), (512, 64)] * 3])
        self.head = nn.Linear(64, 5)

    def forward(self, images):
        features = self.norm(self.first(images)).relu().mean((2, 3))
        return self.head(self.hidden(features).relu())


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("device", ["local-cpu", "adreno-740"])
def test_a_method_trains_what_the_others_compute_with(tmp_path, device, frozen):
    torch.manual_seed(0)
    model, images, labels = Norms(), torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))
    if frozen:
        model.first.requires_grad_(False)
        model.hidden.requires_grad_(False)
    eager = copy.deepcopy(model)
    optimizer, same = (
        torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, eager)
    )
    loss = nn.functional.cross_entropy
    step = TrainingStep(optimizer=optimizer, loss=loss, targets=labels)
    asked = {"classify": (model, images), "train": (model, images, step)}
    bundle = torchedge.export(asked, device=device, out=tmp_path / "bundle")
    assert bundle.manifest.hyperparameters == {"lr": pytest.approx(0.01)} and not bundle.trains
    whole, limited = bundle.manifest.memory.total_bytes, None
    if frozen:
        with pytest.raises(LimitError) as refused:
            torchedge.export(asked, device=device, out=tmp_path / "none", memory_limit="1KiB")
        limit = refused.value.works_bytes / 2**20
        limited = torchedge.export(asked, device=device, out=tmp_path / "limited", memory_limit=limit)
        assert limited.manifest.memory.total_bytes <= limit * 2**20 < whole
    for lr in (0.01, 0.01, 0.02, 0.02):
        bundle.runner.set("lr", lr)
        same.param_groups[0]["lr"] = lr
        eager.train()
        same.zero_grad()
        wanted = loss(eager(images), labels)
        wanted.backward()
        same.step()
        arrays = images.numpy(), labels.numpy()
        found = bundle.train_step(*arrays)
        assert found == pytest.approx(wanted.item(), abs=1e-4)
        (scores,) = bundle.run(images.numpy(), method="classify")
        assert np.allclose(scores, eager.eval()(images).detach().numpy(), rtol=1e-4, atol=1e-3)
        if limited is not None:
            limited.runner.set("lr", lr)
            assert limited.train_step(*arrays) == found
            assert np.array_equal(limited.run(images.numpy())[0], scores)
    for name, array in bundle.state_dict().items():
        if name in (known := eager.state_dict()):
            assert np.allclose(array, known[name].numpy(), atol=1e-3), name
    loaded = torchedge.load_bundle(tmp_path / "bundle")
    assert not np.allclose(loaded.run(images.numpy())[0], scores)


@pytest.mark.parametrize("name", ["program.json", "program.decode.json"])
def test_programs_of_methods_are_those_of_the_source(exported, tmp_path, reseal, name):
    folder = shutil.copytree(exported, tmp_path / "bundle")
    document = json.loads((folder / name).read_text())
    document["launches"][0]["flops"] += 1
    (folder / name).write_text(json.dumps(document))
    reseal(folder, name)
    with pytest.raises(InputError, match="is lowered to other launches"):
        torchedge.load_bundle(folder)
    document["tensors"] = [
        {**t, "layout": {**t["layout"], "order": t["layout"]["order"][::-1]}} if t["role"] == "state" else t
        for t in document["tensors"]
    ]
    (folder / name).write_text(json.dumps(document))
    reseal(folder, name)
    with pytest.raises(InputError, match=r"hold keys in different ways|is read|accesses|keys is"):
        torchedge.load_bundle(folder, trust=True)


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ({}, {}, "there are 0 methods"),
        ({"one": 1}, {}, "method one is"),
        ({"One": 1}, {}, "'One' is a method's name"),
        ({"a": (nn.Linear(2, 2), torch.ones(1, 2))}, {}, "there are 1 methods; expected 2"),
        (2, {"example": torch.ones(1)}, "example is given beside several methods"),
        (2, {"mode": "train"}, "mode is 'train' beside several methods"),
        (3, "step", "method b has a str behind its example"),
        (3, TrainingStep(), "method b gives no loss"),
        (3, TrainingStep(loss="model", accumulation=2), "accumulation is 2 in method b"),
        (3, TrainingStep(loss="model", amp="bfloat16"), "amp is 'bfloat16'"),
    ],
)
def test_methods_that_cannot_be(tmp_path, methods, options, message):
    if methods in (2, 3):
        pair = nn.Linear(2, 2), torch.ones(1, 2)
        methods, options = {"a": pair, "b": pair if methods == 2 else (*pair, options)}, options
        options = options if isinstance(options, dict) else {}
    with pytest.raises(InputError, match=message):
        torchedge.export(methods, device="local-cpu", out=tmp_path / "out", **options)
