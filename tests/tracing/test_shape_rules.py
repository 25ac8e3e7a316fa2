"""The shape rules of torchedge.ops against PyTorch's own meta kernels, on random shapes and settings."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torchedge.graphs.sizes import BATCH_PRIME
from torchedge.ops import registry

SIZES = st.integers(1, 40)
BATCHES = st.sampled_from([1, 2, 7, BATCH_PRIME])
RULES = settings(max_examples=150)


def meta(*shape):
    return torch.empty(shape, device="meta")


def rule(name, shapes, **attrs):
    found = registry()[name].infer([None if s is None else tuple(s) for s in shapes], attrs)
    return None if found is None else tuple(found)


def real(function, *args, **kwargs):
    """PyTorch's answer; None where it refuses."""
    try:
        result = function(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError):
        return None
    return tuple(result.shape)


def agree(mine, theirs):
    """A rule gives PyTorch's shape, or None where PyTorch refuses."""
    assert mine == theirs


@RULES
@given(
    rank=st.integers(1, 3), batch=BATCHES, groups=st.sampled_from([1, 2, 4]), inner=st.integers(1, 4),
    outer=st.integers(1, 4), data=st.data(),
    padding=st.one_of(st.integers(0, 4), st.sampled_from(["same", "valid"])),
)  # fmt: skip
def test_convolution(rank, batch, groups, inner, outer, data, padding):
    spatial = [data.draw(SIZES) for _ in range(rank)]
    kernel = [data.draw(st.integers(1, 5)) for _ in range(rank)]
    stride = (
        1
        if padding == "same"
        else data.draw(st.one_of(st.integers(1, 3), st.tuples(*[st.integers(1, 3)] * rank)))
    )
    dilation = data.draw(st.integers(1, 3))
    x, w = (batch, groups * inner, *spatial), (groups * outer, inner, *kernel)
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    theirs = real(function, meta(*x), meta(*w), None, stride, padding, dilation, groups)
    mine = rule(
        f"conv{rank}d", [x, w, None], stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    if theirs is None or 0 not in theirs or mine is not None:  # PyTorch 2.11 lets empty outputs pass
        agree(mine, theirs)


@RULES
@given(
    lead=st.lists(st.integers(1, 6), max_size=3), batch=BATCHES, inner=SIZES, outer=SIZES, fits=st.booleans()
)
def test_linear(lead, batch, inner, outer, fits):
    x, w = (batch, *lead, inner), (outer, inner if fits else inner + 1)
    mine = rule("linear", [x, w, None])
    agree(mine, real(F.linear, meta(*x), meta(*w)))
    assert (mine is not None) == fits


@RULES
@given(data=st.data(), batch=BATCHES)
def test_broadcasting(data, batch):
    whole = [batch, *data.draw(st.lists(st.integers(1, 6), max_size=3))]

    def operand():
        kept = whole[data.draw(st.integers(0, len(whole))) :]
        return tuple(
            s if data.draw(st.booleans()) else data.draw(st.sampled_from([1, s, s + 1])) for s in kept
        )

    a, b = operand(), operand()
    for name, function in (
        ("add", torch.add),
        ("mul", torch.mul),
        ("div", torch.div),
        ("maximum", torch.maximum),
    ):
        agree(rule(name, [a, b]), real(function, meta(*a), meta(*b)))


@RULES
@given(data=st.data(), batch=BATCHES, rank=st.integers(1, 4))
def test_concatenation(data, batch, rank):
    base = [batch, *[data.draw(st.integers(0, 5)) for _ in range(rank - 1)]]
    dim = data.draw(st.integers(-rank, rank - 1))
    shapes = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = list(base)
        shape[dim] = data.draw(st.integers(0, 5))
        shapes.append(
            tuple(shape) if data.draw(st.booleans()) else (0,) if data.draw(st.booleans()) else tuple(base)
        )
    mine, theirs = rule("cat", shapes, dim=dim), real(torch.cat, [meta(*s) for s in shapes], dim)
    if mine is None and any(s == (0,) for s in shapes):
        return  # empty tensors of rank one, which PyTorch skips whatever the other shapes, are left to it
    agree(mine, theirs)


@settings(max_examples=20)
@given(sizes=st.tuples(*[st.integers(1, 3)] * 4), added=st.lists(st.integers(1, 3), max_size=3))
def test_added_product(sizes, added):
    n, m, other, p = sizes
    theirs = real(torch.addmm, meta(*added), meta(n, m), meta(other, p))
    mine = rule("addmm", [added, (n, m), (other, p)])
    if mine is not None or theirs == (n, p):  # the meta kernel lets the sum be larger
        agree(mine, theirs)


@RULES
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2), other=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(*[st.integers(1, 3)] * 6), same=st.booleans(), grouped=st.booleans(),
    mask=st.none() | st.lists(st.integers(1, 3), max_size=4), causal=st.booleans(),
)  # fmt: skip
def test_attention_of_any_shapes(lead, other, sizes, same, grouped, mask, causal):
    rows, width, keys, key_width, out, values = sizes
    q, k = (*lead, rows, width), (*(lead if same else other), keys, width if same else key_width)
    v = (*k[:-2], keys if same else values, out)
    shapes = [q, k, v, None if mask is None else tuple(mask)]
    options = {"is_causal": causal, "enable_gqa": grouped}
    mine = rule("scaled_dot_product_attention", shapes, **options)
    tensors = [None if s is None else meta(*s) for s in shapes]
    theirs = real(F.scaled_dot_product_attention, *tensors, **options)
    if mine is not None or (theirs is not None and same and mask is None):
        agree(mine, theirs)


@RULES
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), batch=BATCHES)
def test_element_wise(shape, batch):
    size = (batch, *shape)
    for name in ("relu", "sigmoid", "tanh", "silu", "gelu", "hardswish", "softplus", "elu", "mish"):
        agree(rule(name, [size]), real(getattr(F, name), meta(*size)))
    agree(rule("softmax", [size], dim=-1), real(torch.softmax, meta(*size), -1))


RECURRENT = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}


@pytest.mark.parametrize("name", RECURRENT)
@settings(max_examples=25)
@given(
    steps=st.integers(1, 4), batch=st.integers(1, 4), first=st.booleans(), both=st.booleans(),
    layers=st.integers(1, 3), hidden=st.integers(1, 6),
)  # fmt: skip
def test_recurrent(name, steps, batch, first, both, layers, hidden):
    layer = RECURRENT[name](5, hidden, layers, batch_first=first, bidirectional=both)
    size = (batch, steps, 5) if first else (steps, batch, 5)
    output, states = layer(torch.zeros(size))
    expected = [tuple(t.shape) for t in (output, *(states if isinstance(states, tuple) else (states,)))]
    state = (layers * (1 + both), batch, hidden)
    weights = [tuple(p.shape) for p in layer.parameters()]
    shapes = [size, *([state] * (2 if name == "lstm" else 1)), *weights]
    found = registry()[name].infer_many(shapes, {"batch_first": first, "bidirectional": both})
    assert [tuple(s) for s in found] == expected
