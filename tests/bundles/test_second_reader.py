"""A reader written from docs/bundle-format.md alone gets the executor's bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.children import python
from torch import nn

pytest.importorskip("pyopencl")

from drivers.networks import changed, drawn
from drivers.processes import default_device

import torchedge

READER = Path(__file__).with_name("second_reader.py")
STEPS = 4
NETWORKS = {"cnn": "adreno-740", "graph": "mali-g715", "gpt": "local-cpu"}


def read_again(folder, steps, tmp_path):
    """Return the arrays that the reader writes after steps of inputs by name."""
    device, variables = default_device(tmp_path)
    fed, got = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(fed, **{f"{k}.{name}": array for k, step in enumerate(steps) for name, array in step.items()})
    python(READER, folder, fed, got, device, PYOPENCL_NO_CACHE="1", **variables)
    with np.load(got) as arrays:
        return dict(arrays)


def run_both(bundle, arrays, tmp_path):
    """Hold the reader's outputs of some steps against the executor's, bit by bit; return the reader's."""
    batches = [[changed(array, k) for array in arrays] for k in range(STEPS)]
    names = [entry.name for entry in bundle.manifest.inputs]
    again = read_again(bundle.path, [dict(zip(names, b, strict=True)) for b in batches], tmp_path)
    for k, batch in enumerate(batches):
        for entry, array in zip(bundle.manifest.outputs, bundle.run(*batch), strict=True):
            assert array.tobytes() == again.pop(f"{k}.{entry.name}").tobytes(), f"step {k}: {entry.name}"
    if bundle.schedule is not None:
        assert bundle.schedule.streamed
        assert again["bytes"] <= bundle.manifest.memory.total_bytes
    return again


def test_the_reader_imports_nothing_of_torchedge():
    assert "import torchedge" not in READER.read_text() and "from torchedge" not in READER.read_text()
    assert len(READER.read_text().splitlines()) <= 300


@pytest.mark.slow
@pytest.mark.parametrize(("network", "device"), NETWORKS.items())
def test_training_steps_have_the_same_bits(network, device, tmp_path):
    case = drawn(network)
    bundle = torchedge.export(
        case.model, case.inputs, out=tmp_path / "bundle", device=device, mode="train", targets=case.targets,
        loss=case.loss, accumulation=2, onnx=False,
    )  # fmt: skip
    arrays = [tensor.numpy() for tensor in (*case.inputs, case.targets)]
    states = {n: v for n, v in run_both(bundle, arrays, tmp_path).items() if n.startswith("state.")}
    assert states
    for name, array in states.items():
        assert array.tobytes() == bundle.runner.read(name.removeprefix("state.")).tobytes(), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings", [{"precision": "float16"}, {"memory_limit": "400KiB"}, {"tuner": "model"}]
)
def test_inferences_have_the_same_bits(settings, tmp_path):
    case = drawn("wide")
    bundle = torchedge.export(
        case.model, case.inputs, out=tmp_path / "bundle", device="adreno-740", onnx=False, **settings
    )
    run_both(bundle, [tensor.numpy() for tensor in case.inputs], tmp_path)


class Keeping(nn.Module):
    """Adds what it computes to the next of its rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 256), *[nn.Linear(256, 256) for _ in range(4)])
        self.register_buffer("rows", torch.ones(STEPS, 256))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.rows.index_add_(0, self.place, self.layers(x))
        self.place += 1
        return self.rows.sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "limit"), [("adreno-740", None), ("local-cpu", "700KiB")])
def test_states_of_an_inference_are_kept(device, limit, tmp_path):
    model, x = Keeping().eval(), torch.ones(1, 16)
    bundle = torchedge.export(model, x, device, out=tmp_path / "bundle", memory_limit=limit)
    run_both(bundle, [x.numpy()], tmp_path)
    assert bundle.runner.read("place").tolist() == [STEPS]
