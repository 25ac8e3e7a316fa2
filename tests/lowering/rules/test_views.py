"""Views: the same elements as PyTorch's."""

import pytest
import torch
from oracles.rule_checks import check, tensor

from torchedge.expressions.scalars import Read
from torchedge.lowering.building import permuted, reshaped
from torchedge.lowering.fusion import Expander
from torchedge.lowering.nodes import Stored, indices_of

aten = torch.ops.aten


CASES = [
    (aten.view.default, tensor(2, 3, 4), [6, 4]),
    (aten.view.default, tensor(2, 6), [3, 4]),
    (aten.view.default, tensor(1, 4, 1), [4]),
    (aten._unsafe_view.default, tensor(2, 3, 4), [2, -1]),
    (aten.view.default, tensor(), [1, 1]),
    (aten.permute.default, tensor(2, 3, 4), [2, 0, -2]),
    (aten.transpose.int, tensor(2, 3, 4), -1, 0),
    (aten.t.default, tensor(2, 3)),
    (aten.t.default, tensor(2)),
    (aten.expand.default, tensor(3, 1), [2, 3, 4]),
    (aten.expand.default, tensor(), [2, 3]),
    (aten.squeeze.default, tensor(1, 3, 1)),
    (aten.squeeze.dim, tensor(1, 3, 1), 0),
    (aten.squeeze.dims, tensor(1, 3, 1), [0, 1, 2]),
    (aten.unsqueeze.default, tensor(2, 3), -1),
    (aten.select.int, tensor(2, 3, 4), 1, -1),
    (aten.slice.Tensor, tensor(7, 3), 0, 1, 6, 2),
    (aten.slice.Tensor, tensor(7, 3), 0, -3),
    (aten.slice.Tensor, tensor(7, 3), 1, -100, 100),
    (aten.split.Tensor, tensor(7, 3), 3),
    (aten.split_with_sizes.default, tensor(2, 6), [1, 2, 3], -1),
    (aten.unbind.int, tensor(2, 3, 4), 1),
    (aten.flip.default, tensor(2, 3, 4), [0, -1]),
    (aten.flip.default, tensor(1, 3), [0, 1]),
    (aten.roll.default, tensor(3, 5), [2]),
    (aten.roll.default, tensor(3, 5), [2, -8], [0, 1]),
    (aten.roll.default, tensor(3, 5), [1, 1], [1, 1]),
    (aten.repeat.default, tensor(2, 3), [2, 1, 3]),
    (aten.repeat.default, tensor(), [2]),
    (aten.diagonal.default, tensor(4, 3, 5)),
    (aten.diagonal.default, tensor(4, 3, 5), -1, 2, 0),
    (aten.diagonal.default, tensor(4, 5), 2, -2, -1),
    (aten.unfold.default, tensor(2, 9, 3), 1, 4, 2),
    (aten.unfold.default, tensor(), 0, 1, 1),
    (aten.pixel_shuffle.default, tensor(2, 12, 3, 2), 2),
    (aten.pixel_unshuffle.default, tensor(2, 3, 6, 4), 2),
    (aten.channel_shuffle.default, tensor(2, 6, 3, 2), 3),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{tuple(c[1].shape)}{c[2:]}")
def test_view(case):
    for node in check(*case, atol=0, rtol=0, device=True):
        assert isinstance(node, Stored) or isinstance(node.body, Read)


def test_views_of_views_cancel():
    x = Stored((2, 6, 4, 4), "float32", "x", 0)
    there = permuted(reshaped(permuted(x, (0, 2, 3, 1)), (2, 16, 6)), (0, 2, 1))
    back = reshaped(there, (2, 6, 4, 4))
    assert Expander(()).body(back).indices == indices_of(back.axes)
