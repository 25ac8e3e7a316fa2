"""Whole numbers divided by zero raise, as they do in PyTorch."""

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import DivisionError, LoweringError
from torchedge.lowering.assembly import lower
from torchedge.lowering.inference import capture_inference_step

pytest.importorskip("pyopencl")

A = torch.tensor([7, -7, 3])
FORMS = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide,
    "remainder": lambda a, b: torch.remainder(a[:, None], b),
    "fmod": torch.fmod,
    "scalar by tensor": lambda a, b: (a + 17 // b, a + torch.remainder(17, b)),
    "a column": lambda a, b: a[:, None] // b[:1],
    "computed": lambda a, b: a // (b * 2),
    "by 0": lambda a, b: a + b // 0,
    "in place": lambda a, b: a.clone().remainder_(b),
    "small": lambda a, b: a.to(torch.uint8) % b.to(torch.int16),
    "fmod by 0": lambda a, b: a + torch.fmod(b, b),
    "a bool": lambda a, b: (a > 0) // b,
    **{
        f"{dtype} {name}": lambda a, b, dtype=dtype, form=form: form(a.abs().to(dtype), b.abs().to(dtype))
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)
        for name, form in (("//", torch.floor_divide), ("fmod", torch.fmod))
    },
}


class Dividing(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, a, b):
        return self.form(a, b)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS)
def test_functions_of_torch_compile_raise_where_eager_does(name):
    form, bad = FORMS[name], torch.tensor([0, 2, -1])
    compiled = torch.compile(Dividing(form), backend="torchedge", dynamic=False)
    if name != "by 0":
        good = torch.tensor([3, 2, -1])
        torch.testing.assert_close(compiled(A, good), form(A, good))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        form(A, bad)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(A, bad)


def test_whole_numbers_to_negative_powers_are_refused():
    form = Dividing(lambda a, b: a + b**-1)
    with pytest.raises(RuntimeError, match="negative integer powers"):
        torch.compile(form, backend="torchedge", dynamic=False)(A, A)
    with pytest.raises(LoweringError, match="raised to the power -1; expected a power from 0 on"):
        lower(capture_inference_step(form, (A, A)).step)


class Grouped(nn.Module):
    """Scales rows by a quotient of whole numbers that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, sizes):
        return self.linear(x) * (12 // sizes)[:, None]


X, SIZES, ZERO = torch.randn(2, 3), torch.tensor([3, 4]), torch.tensor([3, 0])


def test_trainers_raise_and_go_on():
    model = Grouped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.tensor([0, 1])
    loss = nn.functional.cross_entropy
    with torchedge.Trainer(model, (X, SIZES), labels, loss=loss, optimizer=optimizer) as trainer:
        expected = loss(model(X, SIZES), labels).item()
        assert trainer.step((X, SIZES), labels) == pytest.approx(expected, rel=1e-4)
        updated = trainer.evaluate((X, SIZES), labels)
        with pytest.raises(DivisionError, match=r"expected divisors other than 0.*updated nothing"):
            trainer.step((X, ZERO), labels)
        assert trainer.evaluate((X, SIZES), labels) == pytest.approx(updated, rel=1e-6)


def test_bundles_keep_the_check(tmp_path):
    model = Grouped()
    torchedge.export(model, (X, SIZES), device="local-cpu", out=tmp_path / "bundle", onnx=False)
    bundle = torchedge.load_bundle(tmp_path / "bundle")
    (scores,) = bundle.run(X.numpy(), SIZES.numpy())
    np.testing.assert_allclose(scores, model(X, SIZES).detach().numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ZeroDivisionError):
        bundle.run(X.numpy(), ZERO.numpy())


@pytest.mark.parametrize(
    "form",
    [
        lambda a: a // 2,
        lambda a: a % -3,
        lambda a: a // a.clamp(1, 5),
        lambda a: a.float() // 0,
        lambda a: a / a,
    ],
)
def test_divisors_that_cannot_be_zero_and_floats_need_no_check(form):
    class Module(nn.Module):
        def forward(self, a):
            return form(a)

    step = capture_inference_step(Module(), (A,)).step
    assert not [tensor.name for tensor in lower(step).tensors if tensor.divisor]


def test_tensors_without_elements_divide_by_zero():
    compiled = torch.compile(Dividing(FORMS["//"]), backend="torchedge", dynamic=False)
    nothing = torch.zeros(0, 3, dtype=torch.int64)
    assert compiled(nothing, torch.tensor([0, 1, 2])).shape == (0, 3)
