"""Functions around gamma and erf, against PyTorch; their text in single precision on a device."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

from torchedge.errors import LoweringError
from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules.registry import Result, apply_rule

aten = torch.ops.aten
POSITIVE = torch.cat([torch.linspace(0.05, 9, 40), torch.tensor([20.0, 300.0])]).double()
NEGATIVE = torch.tensor([-0.3, -1.5, -4.7]).double()
INSIDE = torch.cat(
    [torch.linspace(-0.999, 0.999, 40), torch.tensor([0.9999, -0.99999, 1.0, -1.0, 0.0])]
).double()
CASES = {
    "digamma": (aten.digamma.default, (torch.cat([POSITIVE, NEGATIVE]),)),
    "trigamma": (aten.polygamma.default, (1, POSITIVE)),
    "second": (aten.polygamma.default, (2, POSITIVE)),
    "third": (aten.polygamma.default, (3, POSITIVE)),
    "zeta": (aten.special_zeta.default, (torch.tensor([[1.5], [2.0], [7.0]]).double(), POSITIVE)),
    "erfinv": (aten.erfinv.default, (INSIDE,)),
    "erfcx": (aten.special_erfcx.default, (torch.cat([POSITIVE, NEGATIVE, INSIDE]),)),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    target, args = CASES[case]
    check(target, *args, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_values_on_a_device(case):
    pytest.importorskip("pyopencl")
    from oracles.device_checks import run_on_device

    target, args = CASES[case]
    want = target(*[a.float().double() if isinstance(a, torch.Tensor) else a for a in args])
    (found,) = run_on_device(target, args, {}, [want])
    torch.testing.assert_close(torch.from_numpy(found.copy()).double(), want, rtol=2e-5, atol=2e-6)


def test_single_precision_is_said():
    with pytest.raises(LoweringError, match="single precision"):
        apply_rule("erfinv", Result(((3,),), ("float64",)), {"input": Stored((3,), "float64", "x", 0)})
