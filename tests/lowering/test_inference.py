"""One way from a model to the Program of its inference, from real or meta weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.opencl_devices import GPU
from oracles.targets import target_here
from torch import nn

import torchedge
from torchedge.errors import DeviceError, InputError
from torchedge.lowering import inference
from torchedge.lowering.assembly import lower
from torchedge.lowering.inference import capture_inference_step, lower_inference, target_of_device
from torchedge.lowering.limits import profile_limits
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS, Limits
from torchedge.runtime import Executor
from torchedge.tracing.steps import capture_step


def small(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_weights_without_values_give_the_same_program(target):
    x = torch.zeros(2, 3, 8, 8)
    real, meta = (
        lower_inference(capture_inference_step(small(device), (x,)), TARGETS[target]).program
        for device in ("cpu", "meta")
    )
    assert real.digest == meta.digest


def test_a_training_model_is_captured_in_evaluation_mode_and_stays_as_it_is():
    model = small().train()
    captured = capture_inference_step(model, (torch.zeros(2, 3, 8, 8),))
    assert model.training and not captured.step.updates


@pytest.mark.parametrize(("processor", "default", "most"), [(32, 64, 32), (None, 48, 48), (512, 512, 256)])
def test_this_machine_s_processor_has_what_its_drivers_have(processor, default, most, monkeypatch):
    """A machine whose only driver is a GPU's runs there what is exported for `local-cpu`."""

    def choose(query):
        kib = default if query is None else processor
        if kib is None:
            raise DeviceError(f"{query} fits no device")
        return replace(GPU, local_bytes=kib << 10)

    monkeypatch.setattr(inference, "choose_opencl_device", choose)
    assert target_of_device(torchedge.find_device("local-cpu")).local_bytes == most << 10
    assert target_of_device(torchedge.find_device("raspberry-pi-4")).local_bytes == 256 << 10


def test_the_target_of_a_device_has_its_limits_of_images():
    device = torchedge.find_device("adreno-640")
    limits = profile_limits(device)
    target = target_of_device(device, limits, "float16")
    assert target.name == "mobile" and target.half
    assert target.pitch == target.shared_pitch == limits.pitch_texels
    assert target.image_width == limits.image_width
    bare = target_of_device(device, Limits("phone"))
    assert (bare.shared_pitch, bare.half) == (0, False)


class Classifier(nn.Module):
    """An embedding, a product, a convolution, vectors and a number: weights of every kind."""

    def __init__(self):
        super().__init__()
        self.table, self.project = nn.Embedding(64, 32), nn.Linear(32, 48)
        self.conv, self.small = nn.Conv1d(48, 64, 3), nn.Linear(8, 2)
        self.gain, self.long = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(4096))

    def forward(self, tokens):
        x = self.conv(self.project(self.table(tokens)).relu().transpose(1, 2)) * self.gain
        return self.small(x.flatten(1)[:, :8] + self.long[:8])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_matrices_of_weights_are_stored_in_half_precision(target):
    torch.manual_seed(0)
    model, tokens = Classifier().eval(), torch.randint(64, (2, 12))
    captured = capture_inference_step(model, (tokens,))
    program = lower_inference(captured, replace(target_here(target), half=True)).program
    dtypes = {t.name: t.dtype for t in program.tensors if t.role == "parameter"}
    halves = {"table.weight", "project.weight", "conv.weight"}
    assert {name for name, dtype in dtypes.items() if dtype == "float16"} == halves
    with Executor(program, checks=True) as executor:
        executor.load({name: t.detach().numpy() for name, t in captured.tensors.items()})
        got = executor.run(tokens.numpy())[0]
    expected = model(tokens).detach().numpy()
    np.testing.assert_allclose(got, expected, atol=4e-3 * np.abs(expected).max())
    assert np.abs(got - expected).max() > 0


def test_a_training_step_keeps_its_parameters_in_single_precision():
    model, x = nn.Linear(64, 64), torch.zeros(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture_step(
        model, (x,), loss=torch.Tensor.sum, optimizer=optimizer, keep=frozenset(all_rules())
    )
    program = lower(captured.step, replace(TARGETS["cpu"], half=True))
    assert {t.dtype for t in program.tensors if t.role == "parameter"} == {"float32"}


def test_weights_that_are_updated_stay_in_single_precision():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sums", torch.zeros(64, 64))

        def forward(self, x):
            self.sums += x
            return self.sums * 2

    captured = capture_inference_step(Counting(), (torch.zeros(64, 64),))
    program = lower_inference(captured, replace(TARGETS["cpu"], half=True)).program
    assert {t.dtype for t in program.tensors if t.role == "state"} == {"float32"}


def test_intermediate_images_share_the_arena_where_the_device_makes_images_from_buffers():
    device = torchedge.find_device("adreno-640")
    model = nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.Conv2d(256, 64, 3, padding=1))
    captured = capture_inference_step(model, (torch.zeros(1, 64, 64, 64),))
    target = target_of_device(device, profile_limits(device), tuner="fixed")
    program = lower_inference(captured, target).program
    assert {t.layout.storage for t in program.tensors if t.role == "intermediate"} == {"image_buffer"}
    assert not program.arena.slots


# values kept apart ------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """A scaled product, an activation, a second product and a residual: each fusion that can be split."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x):
        hidden = nn.functional.gelu(self.first(self.norm(x)))
        y = self.second(hidden) + x
        parts = self.first(y).view(-1, 2, 64)
        return (parts[:, 0] * 0.5) @ parts[:, 1].t()


@pytest.fixture(scope="module")
def feed():
    torch.manual_seed(0)
    model, x = Feed().eval(), torch.randn(24, 64)
    return model, x, capture_inference_step(model, (x,))


def run(program, captured, x):
    with Executor(program, checks=True) as executor:
        executor.load({name: t.detach().numpy() for name, t in captured.tensors.items()})
        return executor.run(x.numpy())[0]


def test_fused_values_are_listed_by_launch(feed):
    _, _, captured = feed
    lowered = lower_inference(captured, TARGETS["cpu"])
    kernels = [lowered.program.kernels[launch.kernel] for launch in lowered.program.launches]
    assert all(kernels[f.launch].load_class == "reusable" for f in lowered.fused)
    kinds = [value.rpartition("/")[2].partition(".")[0] for f in lowered.fused for value in f.values]
    assert kinds == ["mul", "add", "addmm", "mul"]  # gelu's last operator, residual, bias, scaling


@pytest.mark.parametrize(
    "target", ["cpu", *[pytest.param(name, marks=pytest.mark.slow) for name in ("gpu", "mobile")]]
)
def test_values_apart_cost_one_launch_each_and_change_no_result(target, feed):
    model, x, captured = feed
    whole = lower_inference(captured, target_here(target))
    expected = run(whole.program, captured, x)
    np.testing.assert_allclose(expected, model(x).detach(), rtol=1e-3, atol=1e-4)
    names = [value for f in whole.fused for value in f.values]
    for apart in [*[{name} for name in names], set(names)]:
        split = lower_inference(captured, target_here(target), apart)
        assert len(split.program.launches) == len(whole.program.launches) + len(apart)
        assert not apart & {value for f in split.fused for value in f.values}
        np.testing.assert_allclose(run(split.program, captured, x), expected, rtol=1e-4, atol=1e-5)


def test_a_split_activation_is_elemental_and_its_product_reusable(feed):
    _, _, captured = feed
    whole = lower_inference(captured, TARGETS["cpu"])
    place, gelu = whole.fused[0].launch, whole.fused[0].values[0]
    split = lower_inference(captured, TARGETS["cpu"], {gelu}).program
    kernels = [split.kernels[launch.kernel] for launch in split.launches]
    assert [kernel.load_class for kernel in kernels[place : place + 2]] == ["reusable", "elemental"]
    assert "erf" not in kernels[place].source and "erf" in kernels[place + 1].source
    assert split.digest != whole.program.digest


def test_rows_are_never_split():
    model = nn.Sequential(nn.LayerNorm(64), nn.GELU())
    captured = capture_inference_step(model, (torch.zeros(4, 64),))
    lowered = lower_inference(captured, TARGETS["cpu"])
    assert [k.load_class for k in lowered.program.kernels] == ["hierarchical"] and not lowered.fused


@pytest.mark.parametrize("name", ["none", "norm/native_layer_norm", "view"])
def test_only_element_wise_values_can_be_apart(name, feed):
    _, _, captured = feed
    with pytest.raises(InputError, match=f"'{name}' is no element-wise value of the step; expected names"):
        lower_inference(captured, TARGETS["cpu"], {name})
