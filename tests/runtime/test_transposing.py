"""Copies in another order of dimensions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchedge.runtime.transposing import transposed


@pytest.mark.parametrize("shape", [(5, 4, 3, 2), (2, 3, 4, 5), (3, 1, 2, 1), (7, 3), (6,), ()])
def test_every_order(shape):
    tensor = torch.randn(shape)
    for order in itertools.permutations(range(len(shape))):
        found = transposed(tensor, order)
        assert found.is_contiguous() and torch.equal(found, tensor.permute(order))


@given(st.data())
def test_any_shape_and_strides(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    found = transposed(tensor, order)
    assert found.is_contiguous() and torch.equal(found, tensor.permute(order))
