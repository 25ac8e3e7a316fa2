"""Strides worked out from a graph against the strides PyTorch gives."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchedge.graphs import Op, Value
from torchedge.ops.strides import contiguous_strides, dense, viewed
from torchedge.prediction.memory.layouts import Layouts

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(shapes, st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_reshape_is_a_view_exactly_where_pytorch_says_so(shape, random):
    tensor = torch.empty(shape)
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = tensor.permute(order)
    flat = [s for s in tensor.shape]
    while len(flat) > 1 and random.random() < 0.6:
        k = random.randrange(len(flat) - 1)
        flat[k : k + 2] = [flat[k] * flat[k + 1]]
    try:
        expected = tuple(tensor.view(flat).stride())
    except RuntimeError:
        expected = None
    assert viewed(tuple(tensor.shape), tuple(tensor.stride()), tuple(flat)) == expected


@given(shapes, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_chains_of_views(shape, random):
    tensor = torch.empty(shape)
    values = [Value("v0", tuple(shape), "float32", "input")]
    ops = []
    for step in range(4):
        choice = random.choice(["permute", "transpose", "unsqueeze", "getitem"])
        rank = tensor.dim()
        if choice == "permute":
            dims = random.sample(range(rank), rank)
            tensor, attrs = tensor.permute(dims), {"dims": tuple(dims)}
        elif choice == "transpose":
            a, b = random.randrange(rank), random.randrange(rank)
            tensor, attrs = tensor.transpose(a, b), {"dim0": a, "dim1": b}
        elif choice == "unsqueeze":
            dim = random.randrange(rank + 1)
            tensor, attrs = tensor.unsqueeze(dim), {"dim": dim}
        else:
            index = tuple(
                random.choice([slice(None), slice(0, 1)]) for _ in range(random.randrange(rank + 1))
            )
            tensor, attrs = tensor[index], {"index": index}
        values.append(Value(f"v{step + 1}", tuple(tensor.shape), "float32", "activation", step))
        ops.append(Op(choice, (step,), (step + 1,), attrs))
    assert Layouts(values, ops).of(4) == tuple(tensor.stride())


@given(shapes)
def test_contiguous_is_dense(shape):
    assert contiguous_strides(shape) == tuple(torch.empty(shape).stride())
    assert dense(tuple(shape), contiguous_strides(shape))
