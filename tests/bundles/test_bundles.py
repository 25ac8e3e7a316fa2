"""Bundles: what is exported computes what PyTorch computes, here and bit for bit the same after reloading."""

import copy
import json
from itertools import chain

import numpy as np
import pytest
import torch
from oracles.children import python
from oracles.crews import THREADS, together
from torch import nn

import torchedge
from torchedge.bundles.manifests import MANIFESTS
from torchedge.bundles.weights import LINE, PAGE
from torchedge.errors import InputError
from torchedge.graphs import RESIDENT_ROLES
from torchedge.storage import data_folder
from torchedge.storage.tensors import read_tensors

pytest.importorskip("pyopencl")


@pytest.mark.slow
def test_an_inference_is_pytorchs(model, batch, inference):
    bundle = torchedge.load_bundle(inference)
    (found,) = bundle.run(batch[0].numpy())
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(batch[0]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [(p.name, p.shape, p.dtype) for p in bundle.inputs] == [("input", (2, 3, 8, 8), "float32")]
    assert [(p.name, p.shape, p.dtype) for p in bundle.outputs] == [("output", (2, 10), "float32")]
    (again,) = torchedge.load_bundle(inference).run(batch[0].numpy())
    np.testing.assert_array_equal(found, again)


@pytest.mark.slow
def test_training_steps_are_pytorchs(model, batch, training):
    bundle = torchedge.load_bundle(training)
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        assert bundle.train_step(*batch) == pytest.approx(loss.item(), rel=1e-4)
    state = bundle.state_dict()
    assert state.keys() == trained.state_dict().keys()
    for name, held in trained.state_dict().items():
        np.testing.assert_allclose(state[name], held.detach().numpy(), rtol=1e-4, atol=1e-6)
    fresh = copy.deepcopy(model)
    fresh.load_state_dict({name: torch.tensor(array) for name, array in state.items()})


def test_steps_are_bit_identical_after_reloading(batch, training):
    runs = []
    for _ in range(2):
        bundle = torchedge.load_bundle(training)
        losses = [bundle.train_step(*batch) for _ in range(3)]
        runs.append((losses, bundle.state_dict()))
    assert runs[0][0] == runs[1][0]
    for name, array in runs[0][1].items():
        np.testing.assert_array_equal(array, runs[1][1][name])


def test_weights_come_back_as_pytorch_has_them(model, inference, training):
    for folder in (inference, training):
        weights = torchedge.load_bundle(folder).weights()
        for name, held in model.state_dict().items():
            if name in weights:
                np.testing.assert_array_equal(weights[name], held.numpy())
        names = {name for name, _ in model.named_parameters()}
        if folder is inference:  # its batch norm is one scale and one shift of each channel
            names = names - {"1.weight", "1.bias"} | {"1.scale", "1.shift"}
        assert names <= weights.keys()


def test_weights_lie_on_pages_in_the_order_of_use(inference, tmp_path):
    bundle = torchedge.load_bundle(inference)
    order = [index for launch in bundle.program.launches for index in launch.tensors]
    names = list(dict.fromkeys(bundle.program.tensors[index].name for index in order))
    entries = sorted(bundle.header.entries.items(), key=lambda item: item[1].start)
    kept = [name for name, _ in entries if not name.startswith("~padding.")]
    assert kept[: len(kept)] == [name for name in names if name in kept]
    for name, entry in entries:
        if not name.startswith("~padding."):
            assert entry.start % (PAGE if entry.stop - entry.start >= PAGE else LINE) == 0
    assert bundle.header.entries["4.weight"].start % PAGE == 0
    tensors, metadata = read_tensors(inference / "weights.safetensors")
    assert metadata == {"schema": "torchedge-weights-1", "page": str(PAGE)}
    assert set(kept) <= tensors.keys()


@pytest.mark.slow
def test_the_optimizers_state_goes_along(model, batch, tmp_path):
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.002)
    loss = nn.MSELoss()
    wanted = torch.ones(2, 10)

    def step():
        optimizer.zero_grad()
        value = loss(trained(batch[0]), wanted)
        value.backward()
        optimizer.step()
        return value.item()

    step()
    bundle = torchedge.export(
        trained,
        batch[0],
        out=tmp_path / "adam",
        device="local-cpu",
        mode="train",
        targets=wanted,
        loss=loss,
        optimizer=optimizer,
        onnx=False,
    )
    assert bundle.manifest.hyperparameters == {"lr": pytest.approx(0.002)}
    for _ in range(3):
        assert bundle.train_step(batch[0], wanted) == pytest.approx(step(), rel=1e-4)
    state = bundle.state_dict()
    for name in ("0.weight", "4.weight", "4.bias"):  # batch norm takes away what the first bias adds
        held = trained.state_dict()[name].numpy()
        assert np.linalg.norm(state[name] - held) < 1e-4 * np.linalg.norm(held)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["local-cpu", "adreno"])
def test_gradients_are_added_up(batch, tmp_path, device):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bundle = torchedge.export(
        model,
        batch[0],
        out=tmp_path / "b",
        device=device,
        mode="train",
        targets=batch[1],
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        accumulation=3,
        onnx=False,
    )
    assert bundle.manifest.accumulation == 3 and "every 3 batches" in str(bundle)
    memory = bundle.manifest.memory
    executors = [*bundle.runner.executors.values()]
    assert [executor.owns_arena for executor in executors] == [True, False]
    assert [executor.arena_bytes for executor in executors] == [memory.arena_bytes] * 2
    shared = {t.name: t.nbytes for t in bundle.program.tensors if t.role in RESIDENT_ROLES}
    owned = sum(e.resident_bytes for e in executors)
    known = {t.name for t in bundle.programs["accumulating"].tensors}
    assert memory.resident_bytes == owned - sum(size for name, size in shared.items() if name in known)
    for number in range(7):
        images = batch[0] + number
        loss = nn.functional.cross_entropy(model(images), batch[1]) / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        assert bundle.train_step(images, batch[1]) == pytest.approx(3 * loss.item(), rel=1e-4)
    for name, held in model.state_dict().items():
        np.testing.assert_allclose(bundle.state_dict()[name], held.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["local-cpu", "adreno"])
def test_intermediates_in_half_precision(tmp_path, device):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Tanh())
    x = torch.randn(1, 3, 20, 20)
    options = {"device": device, "onnx": False}
    full = torchedge.export(model, x, out=tmp_path / "full", **options)
    half = torchedge.export(model, x, out=tmp_path / "half", precision="float16", **options)
    assert {"float16"} <= {t.dtype for t in half.program.tensors} - {t.dtype for t in full.program.tensors}
    assert half.manifest.memory.arena_bytes < full.manifest.memory.arena_bytes
    with torch.no_grad():
        expected = model.eval()(x).numpy()
    np.testing.assert_allclose(full.run(x)[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(half.run(x)[0], expected, rtol=2e-2, atol=2e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["local-cpu", "adreno"])
def test_weights_in_half_precision_take_half_the_file(tmp_path, device):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    x = torch.randn(4, 256)
    options = {"device": device, "onnx": False}
    full = torchedge.export(model, x, out=tmp_path / "full", **options)
    half = torchedge.export(model, x, out=tmp_path / "half", precision="float16", **options)
    sizes = [bundle.manifest.files["weights.safetensors"].nbytes for bundle in (full, half)]
    assert 1.9 < (sizes[0] - PAGE) / (sizes[1] - PAGE) < 2.0
    weights = half.weights()
    for name, tensor in model.state_dict().items():
        dtype = np.float16 if tensor.dim() == 2 else np.float32
        np.testing.assert_array_equal(weights[name], tensor.numpy().astype(dtype))
    with torch.no_grad():
        expected = model(x).numpy()
    np.testing.assert_allclose(half.run(x)[0], expected, atol=2e-3 * np.abs(expected).max())


def test_weights_beyond_half_precision_are_an_error(tmp_path):
    model = nn.Linear(64, 64)
    model.weight.data[3, 4] = 1e5
    with pytest.raises(InputError, match="weight holds 100000, half precision ends at 65504; use precision"):
        torchedge.export(
            model, torch.zeros(1, 64), out=tmp_path / "b", device="local-cpu", precision="float16", onnx=False
        )
    assert not list(tmp_path.iterdir())


def test_a_model_is_left_as_found(model, batch, tmp_path):
    found = copy.deepcopy(model.state_dict())
    model.train()
    model[1].eval()
    torchedge.export(model, batch[0], out=tmp_path / "a", device="local-cpu", onnx=False)
    torchedge.export(model, batch[0], out=tmp_path / "b", device="local-cpu", mode="train", onnx=False)
    assert model.training and not model[1].training
    model.train()
    for name, held in model.state_dict().items():
        assert torch.equal(held, found[name])
        assert name.endswith("num_batches_tracked") or not held.requires_grad


def test_the_same_model_gives_the_same_bytes(model, batch, inference, tmp_path):
    torchedge.export(model, batch[0], out=tmp_path / "again", device="local-cpu", onnx=False)
    first = {p.relative_to(inference): p.read_bytes() for p in inference.rglob("*") if p.is_file()}
    second = {p.relative_to(tmp_path / "again"): p.read_bytes() for p in (tmp_path / "again").rglob("*.*")}
    assert first == second


def test_the_schema_accepts_manifests(inference, training):
    jsonschema = pytest.importorskip("jsonschema")
    said = json.loads((data_folder("export") / "schemas" / "bundle-manifest.schema.json").read_text())
    validator = jsonschema.Draft202012Validator
    validator.check_schema(said)
    for folder in (inference, training):
        bundle = torchedge.load_bundle(folder)
        document = json.loads((folder / "manifest.json").read_text())
        assert document == MANIFESTS.document(bundle.manifest)
        validator(said).validate(document)
        known = set(document["files"]) | {"manifest.json"}
        assert {str(p.relative_to(folder)) for p in folder.rglob("*.*")} == known
    assert list(validator(said).iter_errors({}))


def test_memory_is_what_the_executor_takes(training):
    bundle = torchedge.load_bundle(training)
    memory = bundle.manifest.memory
    assert bundle.runner.executor.resident_bytes == memory.resident_bytes
    assert bundle.runner.executor.arena_bytes == memory.arena_bytes >= memory.live_bytes
    assert memory.total_bytes == memory.resident_bytes + memory.arena_bytes >= memory.largest_bytes


def test_running_a_bundle_loads_no_torch(inference, tmp_path):
    code = (
        "import sys, numpy, torchedge; bundle = torchedge.load_bundle(sys.argv[1]); "
        "bundle.run(numpy.zeros((2, 3, 8, 8), 'f4')); assert 'torch' not in sys.modules"
    )
    python("-c", code, inference)


def test_a_bundle_tells_what_it_is(inference, training):
    text = str(torchedge.load_bundle(training))
    for words in ("Small: training step", "adreno-740 (mobile)", "loss float32[]", "lr = 0.01", "momentum"):
        assert words in text
    assert "Small: inference" in str(torchedge.load_bundle(inference))


def test_an_inference_does_not_train(batch, inference):
    bundle = torchedge.load_bundle(inference)
    with pytest.raises(InputError, match="is a bundle for inference; expected one that trains"):
        bundle.train_step(*batch)
    with pytest.raises(InputError, match="got 2 inputs, expected 1"):
        bundle.run(*batch)
    with pytest.raises(InputError, match=r"shape \[1\], expected \[2, 3, 8, 8\]"):
        bundle.run(np.zeros(1, np.float32))


def test_several_inputs_and_outputs_by_keyword(tmp_path):
    class Two(nn.Module):
        def forward(self, a, b=None):
            return {"sum": a + b, "product": (a * b,)}

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    bundle = torchedge.export(
        Two(), {"a": a, "b": b}, out=tmp_path / "two", device="local-cpu", onnx=False, name="two"
    )
    assert [p.name for p in bundle.outputs] == ["sum", "product_0"] and bundle.manifest.model == "two"
    total, product = bundle.run(a, b)
    np.testing.assert_array_equal(total, (a + b).numpy())
    np.testing.assert_array_equal(product, (a * b).numpy())


@pytest.mark.slow
def test_threads_that_share_a_training_bundle_take_turns(model, batch, tmp_path):
    options = {"mode": "train", "targets": batch[1], "accumulation": 3, "onnx": False}
    shared = torchedge.export(model, batch[0], out=tmp_path / "bundle", device="local-cpu", **options)
    alone = torchedge.load_bundle(tmp_path / "bundle")
    arrays = [tensor.numpy() for tensor in batch]
    losses = sorted(alone.train_step(*arrays) for _ in range(3 * THREADS))
    seen = together(lambda number: [shared.train_step(*arrays) for _ in range(3)])
    assert sorted(chain(*seen)) == losses
    weights = shared.state_dict()
    assert all(np.array_equal(weights[name], array) for name, array in alone.state_dict().items())
