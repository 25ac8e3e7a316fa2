"""Strides worked out from a graph against the strides PyTorch gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from torchedge.graphs import Op, Value
from torchedge.ops.strides import broadcasted, contiguous_strides, dense, viewed
from torchedge.prediction.memory.decomposition import Layouts, decompose
from torchedge.prediction.memory.settings import StepSettings
from torchedge.tracing.capturing import capture

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


@given(shapes, st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_results_of_element_wise_operators_lie_as_in_pytorch(shape, count, random):
    tensors = []
    for _ in range(count):
        sizes = [random.choice([size, size, 1]) for size in shape]
        order = random.sample(range(len(shape)), len(shape))
        tensor = torch.empty([sizes[axis] for axis in order])
        tensor = tensor.permute([order.index(axis) for axis in range(len(shape))])
        ahead = next((k for k, size in enumerate(sizes) if size != 1), len(sizes))
        tensors.append(tensor[(0,) * random.randint(0, ahead)])
    tensors = (tensors * 3)[:3]
    result = torch.addcmul(*tensors)
    operands = [(tuple(t.shape), tuple(t.stride())) for t in tensors]
    strides = broadcasted(tuple(result.shape), operands)
    pairs = zip(result.shape, strides, result.stride(), strict=True)
    assert all(ours == theirs for size, ours, theirs in pairs if size > 1)


class Biased(nn.Module):
    """Attention with a bias of the heads, permuted as in T5; `way`: what happens to it before."""

    def __init__(self, way):
        super().__init__()
        self.bias, self.way = nn.Embedding(16, 4), way

    def forward(self, x):
        bias = self.bias(torch.arange(16)[:, None].expand(16, 16)).permute(2, 0, 1).unsqueeze(0)
        q = x.view(-1, 16, 4, 8).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=self.way(bias))


def causal(bias):
    allowed = torch.ones(1, 1, 16, 16).tril().bool()
    return torch.where(allowed, bias, torch.finfo(torch.float32).min)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("way", "fused"),
    [
        (lambda bias: bias, False),
        (causal, False),
        (lambda bias: bias + 1, False),
        (lambda bias: causal(bias).contiguous(), True),
        (lambda bias: bias > 0, True),  # becomes a new mask to add
        (lambda bias: None, True),
    ],
)
def test_attention_with_a_strided_mask_writes_its_scores(way, fused):
    with torch.device("meta"):
        graph = capture(Biased(way), torch.zeros(2, 16, 32))
    kinds = {op.kind for op in decompose(graph, StepSettings()).ops}
    assert ("softmax" in kinds, "scaled_dot_product_attention" in kinds) == (not fused, fused)
