"""Products of matrices and vectors: the same as PyTorch's."""

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import check

from torchedge.lowering.nodes import Contraction, Pointwise, RowsResult
from torchedge.lowering.rules import all_rules
from torchedge.lowering.translation import translate
from torchedge.tracing.steps import capture_step

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_bias_is_element_wise_on_top_of_a_contraction():
    (node,) = check(aten.addmm.default, tensor(5), tensor(3, 4), tensor(4, 5))
    assert isinstance(node, Pointwise)
    (product,) = [n for n in node.operands if isinstance(n, Contraction)]
    assert product.roles == ("row", "col") and product.flops == 2 * 3 * 4 * 5


@pytest.mark.parametrize("shape", [(1, 48, 70), (70, 48, 1)])
@pytest.mark.parametrize("moved", [False, True])
def test_a_product_with_one_vector_is_a_reduction_of_rows(shape, moved):
    rows, inner, cols = shape
    a, b = tensor(rows, inner), tensor(inner, cols)
    if moved:  # the other order in memory
        a, b = a.T.contiguous().T, b.T.contiguous().T
    (node,) = check(aten.mm.default, a, b, device=True)
    assert isinstance(node, RowsResult)
    short = check(aten.mm.default, a[:, :8], b[:8])
    assert isinstance(short[0], Contraction)


def test_linear_layer_of_a_vector():
    layer = torch.nn.Linear(4, 5)
    captured = capture_step(layer, tensor(4).float(), keep=frozenset(all_rules()))
    translation = translate(captured.step)
    data = {name: t.detach().double().numpy() for name, t in captured.tensors.items()}
    x = tensor(4)
    data[captured.step.values[captured.step.inputs[0]].name] = x.numpy()
    expected = layer.double()(x).detach()
    np.testing.assert_allclose(compute(translation.outputs[0], data, {}), expected, rtol=1e-10)
