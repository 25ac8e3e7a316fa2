"""Products of matrices and vectors: the same as PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import check

from torchedge.lowering.nodes import Contraction, Pointwise
from torchedge.lowering.rules import all_rules
from torchedge.lowering.translation import translate
from torchedge.tracing.steps import capture_step

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


CASES = [
    (aten.mm.default, tensor(3, 4), tensor(4, 5)),
    (aten.mm.default, tensor(1, 7), tensor(7, 1)),
    (aten.mm.default, torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)),
    (aten.bmm.default, tensor(2, 3, 4), tensor(2, 4, 5)),
    (aten.bmm.default, torch.arange(12).view(2, 2, 3), torch.arange(24).view(2, 3, 4)),
    (aten.mv.default, tensor(3, 4), tensor(4)),
    (aten.dot.default, tensor(9), tensor(9)),
    (aten.vdot.default, tensor(9), tensor(9)),
    (aten.linear.default, tensor(2, 3, 4), tensor(5, 4), tensor(5)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{tuple(c[1].shape)}")
def test_product(case):
    check(*case, device=True)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        (aten.addmm.default, [(3, 5), (3, 4), (4, 5)]),
        (aten.addmm.default, [(5,), (3, 4), (4, 5)]),
        (aten.baddbmm.default, [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
        (aten.baddbmm.default, [(1, 3, 1), (2, 3, 4), (2, 4, 5)]),
        (aten.addmv.default, [(3,), (3, 4), (4,)]),
    ],
)
@pytest.mark.parametrize("factors", [{}, {"beta": 0.5, "alpha": -2.0}, {"beta": 0}])
def test_product_and_sum(target, shapes, factors):
    check(target, *[tensor(*s) for s in shapes], device=True, **factors)


def test_a_bias_is_element_wise_on_top_of_a_contraction():
    (node,) = check(aten.addmm.default, tensor(5), tensor(3, 4), tensor(4, 5))
    assert isinstance(node, Pointwise)
    (product,) = [n for n in node.operands if isinstance(n, Contraction)]
    assert product.roles == ("row", "col") and product.flops == 2 * 3 * 4 * 5


def test_linear_layer_of_a_vector():
    layer = torch.nn.Linear(4, 5)
    captured = capture_step(layer, tensor(4).float(), keep=frozenset(all_rules()))
    translation = translate(captured.step)
    data = {name: t.detach().double().numpy() for name, t in captured.tensors.items()}
    x = tensor(4)
    data[captured.step.values[captured.step.inputs[0]].name] = x.numpy()
    expected = layer.double()(x).detach()
    np.testing.assert_allclose(compute(translation.outputs[0], data, {}), expected, rtol=1e-10)
