"""Elements at places that tensors hold, read and written: the same as PyTorch's."""

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import apply, check, tensor

from torchedge.errors import LoweringError

aten = torch.ops.aten


def places(size, *shape, dtype=torch.int64, low=None):
    generator = torch.Generator().manual_seed(size + sum(shape))
    return torch.randint(-size if low is None else low, size, shape, generator=generator).to(dtype)


def distinct(size, count):
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))[:count]


READS = [
    (aten.embedding.default, tensor(7, 3), places(7, 2, 4, low=0), 1),
    (aten.embedding.default, tensor(7, 3), places(7, low=0)),
    (aten.embedding.default, tensor(1, 3), places(1, 5, low=0, dtype=torch.int32)),
    (aten.index_select.default, tensor(4, 5, 3), 1, places(5, 6, low=0)),
    (aten.index_select.default, tensor(4, 5), -2, places(4, low=0)),
    (aten.index_select.default, tensor(), 0, torch.tensor([0])),
    (aten.gather.default, tensor(4, 5, 3), 1, places(5, 2, 7, 3, low=0)),
    (aten.gather.default, tensor(6), 0, places(6, 4, low=0)),
    (aten.gather.default, tensor(6), 0, places(6, low=0)),
    (aten.gather.default, tensor(), 0, torch.tensor(0)),
    (aten.index.Tensor, tensor(4, 5, 3), [places(4, 6)]),
    (aten.index.Tensor, tensor(4, 5, 3), [None, places(5, 2, 2)]),
    (aten.index.Tensor, tensor(4, 5, 3), [None, places(5, 2, 1), places(3, 1, 3)]),
    (aten.index.Tensor, tensor(4, 5, 3), [places(4, 2, 3), None, places(3, 3)]),
    (aten.index.Tensor, tensor(4, 5, 3, 2), [None, places(5, 2), None, places(2, 3, 1)]),
    (aten.index.Tensor, tensor(4, 5), [places(4), places(5)]),
    (aten.index.Tensor, places(9, 4, 5), [places(4, 3)]),
    (aten._unsafe_index.Tensor, tensor(2, 3, 4, 5), [None, None, places(4, 8, 1), places(5, 10)]),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", READS, ids=lambda c: f"{c[0]}{tuple(c[1].shape)}")
def test_read(case):
    check(*case, rtol=0, atol=0, device=True)


def test_a_place_outside_reads_nan():
    nodes, data = apply(
        aten.embedding.default, (tensor(7, 3), torch.tensor([0, 9, -1])), {}, [torch.empty(3, 3)]
    )
    found = compute(nodes[0], data)
    assert np.isnan(found[1:]).all() and not np.isnan(found[0]).any()


WRITES = [
    (aten.embedding_dense_backward.default, tensor(2, 4, 3), places(7, 2, 4, low=0), 7, -1, False),
    (aten.embedding_dense_backward.default, tensor(2, 4, 3), places(3, 2, 4, low=0), 3, 1, False),
    (aten.embedding_dense_backward.default, tensor(5, 3), places(40, 5, low=0), 40, -1, False),
    (aten.embedding_dense_backward.default, tensor(5, 3), places(4, 5, low=0), 4, -1, True),
    (aten.index_put.default, tensor(4, 5, 3), [places(4, 9)], tensor(9, 5, 3), True),
    (aten.index_put.default, tensor(4, 5, 3), [None, places(5, 2, 2)], tensor(2, 2, 3), True),
    (aten.index_put.default, tensor(4, 5, 3), [None, places(5, 4, 1), places(3, 1, 5)], tensor(1), True),
    (aten.index_put.default, tensor(4, 5, 3), [places(4, 2, 3), None, places(3, 3)], tensor(2, 3, 5), True),
    (aten.index_put.default, tensor(30, 6), [places(30, 3)], tensor(3, 6), True),
    (aten.index_put.default, tensor(4, 5), [places(4), places(5)], tensor(), False),
    (aten.index_put.default, tensor(6, 5), [distinct(6, 4) - 6], tensor(4, 5), False),
    (aten.index_put.default, tensor(6, 5), [None, distinct(5, 2)], tensor(1), False),
    (aten.index_put.default, tensor(6, 5), [tensor(6, 5) > 0], tensor(), False),
    (aten.index_put.default, tensor(6, 5), [tensor(6) > 0], tensor(1), True),
    (aten.scatter.src, tensor(4, 5), 1, torch.tensor([[0, 3, 1], [4, 2, 0]]), tensor(3, 4)),
    (aten.scatter.value, tensor(4, 5), 0, places(4, 3, 5, low=0), 2.5),
    (aten.scatter.value, tensor(6), 0, torch.tensor(2), 2.5),
    (aten.scatter.value, tensor(), 0, torch.tensor(0), 2.5),
    (aten.scatter_add.default, tensor(4, 5), 1, places(5, 3, 8, low=0), tensor(3, 9)),
    (aten.scatter_add.default, tensor(4, 5, 3), 0, places(4, 6, 5, 2, low=0), tensor(6, 5, 3)),
    (aten.scatter_add.default, tensor(6), 0, places(6, 4, low=0), tensor(4)),
    (aten.scatter_add.default, tensor(), 0, torch.tensor(0), tensor()),
    (aten.scatter_add.default, places(9, 4, 5), 1, places(5, 4, 8, low=0), places(9, 4, 8)),
    (aten.index_add.default, tensor(4, 5, 3), 1, places(5, 7, low=0), tensor(4, 7, 3)),
    (aten.index_add.default, tensor(4), 0, places(4, 7, low=0), tensor(7)),
    (aten.put.default, tensor(4, 5), places(20, 2, 4), tensor(8), True),
    (aten.put.default, tensor(4, 5), distinct(20, 4), tensor(4), False),
    (aten.index_copy.default, tensor(4, 5, 3), -2, distinct(5, 3), tensor(4, 3, 3)),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", WRITES, ids=lambda c: f"{c[0]}{tuple(c[1].shape)}")
def test_write(case):
    check(*case, device=True)


def test_no_index_changes_nothing():
    empty, x = torch.tensor([], dtype=torch.int64), tensor(4, 3)
    check(aten.scatter_add.default, x, 0, empty, tensor(0))
    check(aten.scatter.value, x, 0, empty, 1.0)
    check(aten.scatter_reduce.two, x, 0, empty, tensor(0), "amax")
    check(aten.index_copy.default, x, 0, empty, x[:0], device=True)
    check(aten.index_put.default, x, [empty], x[:0], device=True)


def test_refusals():
    with pytest.raises(LoweringError, match="mask"):
        check(aten.index.Tensor, tensor(4), [torch.tensor([True, False, True, False])])
