"""Plans that run in the process: the model's outputs, within the limit, from the model's own weights."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import InputError

pytest.importorskip("pyopencl")
pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    wide = [layer for size in (1024, 512, 512, 512) for layer in (nn.Linear(size, 512), nn.GELU())]
    return nn.Sequential(*layers, *wide, nn.Linear(512, 10)).eval()


@pytest.fixture(scope="module")
def image():
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("device", "precision", "loading"),
    [
        ("local-cpu", "float32", "copy"),
        ("adreno-750", "float16", "copy"),
        pytest.param("local-cpu", "float32", "slot", marks=pytest.mark.slow),
    ],
)
def test_a_plan_computes_what_the_model_computes(model, image, device, precision, loading):
    plan = torchedge.plan(model, image, device=device, precision=precision, memory_limit="3.25MiB")
    run = plan.run(image, loading=loading)
    with torch.no_grad():
        expected = model(image).numpy()
    tolerance = 1e-5 if precision == "float32" else 1e-2
    np.testing.assert_allclose(run.outputs[0], expected, rtol=tolerance, atol=tolerance)
    assert run.measured.allocated_bytes <= 3.25 * 2**20
    streamed = sum(copy.nbytes for copy in run.measured.copies if copy.launch is not None)
    assert streamed > 2**20
    again, _ = plan.run(image.numpy(), loading=loading)
    assert again[0].tobytes() == run.outputs[0].tobytes()


def test_weights_are_those_of_the_model_when_it_runs(image):
    layer = nn.Linear(192, 10)
    plan = torchedge.plan(nn.Sequential(nn.Flatten(), layer), image, device="local-cpu")
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(3)
    (output,), _ = plan.run(image)
    np.testing.assert_array_equal(output, np.full((1, 10), 3, np.float32))


def test_plans_without_weights_say_so(image):
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    plan = torchedge.plan(model, image, device="local-cpu")
    with pytest.raises(InputError, match=r"2 weights on the meta device .* load them, and plan it again"):
        plan.run(image)


def test_wrong_inputs_are_refused(model, image):
    plan = torchedge.plan(model, image, device="local-cpu", memory_limit="3.25MiB")
    with pytest.raises(InputError, match="got 2 inputs, expected 1"):
        plan.run(image, image)
    with pytest.raises(InputError, match=r"has shape \[2, 3, 8, 8\], expected \[1, 3, 8, 8\]"):
        plan.run(torch.cat([image, image]))


@pytest.mark.slow
def test_a_plan_that_ran_can_be_exported(model, image, tmp_path):
    plan = torchedge.plan(model, image, device="local-cpu", memory_limit="3.25MiB")
    bundle = torchedge.export(model, image, out=tmp_path / "b", device="local-cpu", plan=plan, onnx=False)
    assert bundle.run(image.numpy())[0].tobytes() == plan.run(image).outputs[0].tobytes()


def test_the_snippet_of_the_documentation_runs(model, image, checkout):
    text = (checkout / "docs" / "streaming-how.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {"torchedge": torchedge, "model": model, "example": image, "image": image}
    exec(next(snippet for snippet in snippets if "plan.run(" in snippet), names)
    assert names["outputs"][0].shape == (1, 10) and names["measured"].latency_ms > 0
