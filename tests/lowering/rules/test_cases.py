"""What PyTorch's samples of operators lack: whole numbers, bools, ties, missing numbers, rare arguments."""

from itertools import product

import numpy as np
import pytest
import torch
from oracles.nodes import compute
from oracles.rule_checks import apply, check, tensor

from torchedge.errors import LoweringError
from torchedge.lowering.nodes import Contraction, Pointwise, Rows, RowsResult, Stored, nodes_below
from torchedge.lowering.rules import all_rules
from torchedge.lowering.rules.registry import Result, apply_rule
from torchedge.lowering.translation import translate
from torchedge.tracing.steps import capture_step

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
NUMBERS = torch.tensor([[3, -1, 4, 1], [-5, 9, -2, 6], [0, 0, 0, 0]])
BOOLS = torch.tensor([[False], [True]]), torch.tensor([False, True])
SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.5, INF, -INF, NAN, 3.0], dtype=torch.float64)
HALVES = torch.tensor([0.5, 0.0, 1.0, 3.0], dtype=torch.float64)
ENDS = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
TIED = torch.randint(0, 4, (3, 7, 4), generator=torch.Generator().manual_seed(0))
EQUAL = torch.zeros(2, 2).double()
SLOPES, X = [torch.linspace(low, 2, 34, dtype=torch.float64) for low in (-1, -6)]
UNARY = (
    "sqrt", "exp", "sigmoid", "reciprocal", "floor", "ceil", "trunc", "round", "neg", "abs", "sign", "sgn",
    "signbit", "square", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "nan_to_num", "positive",
)  # fmt: skip
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "fmod",
    "remainder",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "floor_divide",
)


def overload(name):
    packet = getattr(aten, name)
    return packet.Tensor if "Tensor" in packet.overloads() else packet.default


def drawn(shape, dtype, high=120):
    """Return whole numbers, none of them zero."""
    numbers = torch.randint(0 if dtype == torch.uint8 else -20, high, shape, dtype=dtype)
    return torch.where(numbers == 0, 3, numbers).to(dtype)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_wrap_and_round_as_theirs(dtype):
    a, b = drawn((4, 5), dtype), drawn((5,), dtype)
    for name in BINARY:
        check(overload(name), a, b, rtol=1e-6)
    for name in UNARY:
        few = torch.tensor([1, 2, 3, 20] if dtype == torch.uint8 else [1, -2, 3, -20]).to(dtype)
        check(getattr(aten, name).default, few, rtol=1e-6)
    for mode in ("trunc", "floor"):
        check(aten.div.Tensor_mode, a, b, rounding_mode=mode)
    check(aten.clamp.Tensor, a, drawn((5,), dtype), drawn((4, 1), dtype))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        check(getattr(aten, name).Tensor, a, b)
        check(getattr(aten, name).Scalar, a, 6)
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        check(
            getattr(aten, name).Tensor,
            torch.tensor([[1], [77]]).to(dtype),
            torch.tensor([0, 1, 5, 7]).to(dtype),
        )
    check(aten.bitwise_not.default, torch.tensor([0, 1, 5, 100]).to(dtype))


@pytest.mark.parametrize(
    "x", [NUMBERS, NUMBERS.to(torch.int32), NUMBERS.to(torch.uint8), NUMBERS > 0], ids=str
)
def test_reductions_and_scans_of_whole_numbers_and_bools(x):
    for target, *more in (
        (aten.sum.dim_IntList, [1]), (aten.prod.default,), (aten.amax.default, [0]), (aten.amin.default, [0]),
        (aten.max.dim, 1), (aten.any.dim, 1), (aten.all.dim, 1), (aten.count_nonzero.dim_IntList, [0]),
        (aten.cumsum.default, 1),
    ):  # fmt: skip
        check(target, x, *more)
    check(aten.mean.dim, x, [1], dtype=torch.float64)
    check(aten.cumsum.default, x, 1, dtype=torch.float64)
    if x.dtype != torch.bool:
        for target in (aten.argmin.default, aten.cummax.default, aten.cummin.default):
            check(target, x, 1)


@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"]
)
def test_comparisons_and_logic_of_every_dtype(name):
    target = overload(name)
    for a, b in (BOOLS, (NUMBERS[:1], HALVES), (SPECIAL[:, None], SPECIAL), (NUMBERS[:1], torch.tensor(1))):
        check(target, a, b)
    if not name.startswith("logical"):
        check(getattr(aten, name).Scalar, NUMBERS, 0.5)
        check(getattr(aten, name).Scalar, BOOLS[1], True)


@pytest.mark.parametrize("largest", [False, True])
def test_order_of_ties(largest):
    for dim, tied in product((0, 1, -1), (TIED, TIED.double(), TIED > 1)):
        check(aten.sort.stable, tied, stable=True, dim=dim, descending=largest, rtol=0, atol=0)
    check(aten.topk.default, TIED, 3, 1, largest, compare=(0,))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 7, 0.5, -0.5, -1, -2, 1.7])
def test_constant_powers(exponent):
    check(aten.pow.Tensor_Scalar, SPECIAL, exponent, rtol=1e-9)
    if exponent in (0, 1, 2, 3, 7):
        check(aten.pow.Tensor_Scalar, NUMBERS, exponent)


CASES = [
    *((overload(n), *BOOLS) for n in ("add", "mul", "maximum", "minimum", "bitwise_and", "bitwise_xor")),
    (aten.add.Tensor, HALVES, NUMBERS, {"alpha": 2}),
    (aten.sub.Tensor, NUMBERS, NUMBERS.to(torch.int32), {"alpha": -3}),
    (aten.mul.Tensor, HALVES[:2], BOOLS[1]),
    (aten.rsub.Scalar, HALVES, 1, 2),
    (aten.div.Tensor, NUMBERS, torch.tensor(7), {"rtol": 1e-6}),
    (aten.pow.Tensor_Tensor, torch.arange(-3, 4)[:, None], torch.arange(-2, 6)),
    (aten.pow.Scalar, 3, torch.arange(5)),
    (aten.clamp.default, NUMBERS, -1, 2),
    (aten.bitwise_left_shift.Tensor, torch.tensor([[5], [-7]]), torch.tensor([63, 64, 100])),
    (aten.bitwise_right_shift.Tensor, torch.tensor([[5], [-7]]), torch.tensor([63, 64, 100])),
    *((aten.logical_not.default, x) for x in (SPECIAL, BOOLS[0], NUMBERS)),
    (aten.where.self, BOOLS[1], torch.tensor([1, 2]), HALVES[:2]),
    (aten.where.self, BOOLS[1], BOOLS[1], torch.tensor(False)),
    (aten.where.ScalarSelf, BOOLS[1], 2, torch.tensor([1, 2])),
    (aten.where.Scalar, BOOLS[1], 2.0, -1.0),
    (aten.masked_fill.Scalar, torch.tensor([1, 2]), BOOLS[1], 9),
    (aten.mm.default, torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)),
    (aten.bmm.default, torch.arange(12).view(2, 2, 3), torch.arange(24).view(2, 3, 4)),
    *((target, *[torch.ones(shape).double().cumsum(0) for shape in shapes], {"beta": 0.5, "alpha": -2.0})
      for target, shapes in (
          (aten.addmm.default, [(5,), (3, 4), (4, 5)]), (aten.addmv.default, [3, (3, 4), 4]),
          (aten.baddbmm.default, [(1, 3, 1), (2, 3, 4), (2, 4, 5)]),
      )),
    (aten.cat.default, [HALVES, torch.tensor([1, 2])], 0),
    (aten.max_pool2d_with_indices.default, torch.arange(36).view(1, 1, 6, 6) % 7, [3, 3], [2, 2], [1, 1]),
    (aten.bucketize.Scalar, 0.5, torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64), {"right": True}),
    (aten.searchsorted.Tensor, torch.arange(5), torch.tensor([2, 7]), {"side": "left"}),
    (aten.nan_to_num.default, SPECIAL, 1.5, 9.0, -9.0),
    (aten.lerp.Scalar, SLOPES, X, 0.25),  # exact in single precision: the formula itself is held
    (aten.logit.default, torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64), 2**-6),
    (aten.var.correction, torch.ones(2, 1, dtype=torch.float64), [1], {"correction": 1}),
    (aten.var.default, torch.tensor(1.0, dtype=torch.float64)),
    (aten._safe_softmax.default, torch.tensor([[0.0, -INF], [-INF, -INF]], dtype=torch.float64), 1),
    (aten._softmax.default, torch.tensor([[1e4, 1e4 - 1]], dtype=torch.float64), 1, False),
    (aten.logcumsumexp.default, torch.tensor([-INF, 1.0, -INF], dtype=torch.float64), 0),
    (aten.binary_cross_entropy.default, ENDS, torch.tensor([0.0, 0, 1, 1], dtype=torch.float64), None, 0),
    (aten._cdist_backward.default, EQUAL + 1, EQUAL, EQUAL, 2.0, EQUAL),
    (aten.native_dropout_backward.default, SLOPES, SLOPES > 0, 2.0),
    (aten.elu_backward.default, SLOPES, 1.5, 0.7, 2.0, True, aten.elu(X, 1.5, 0.7, 2.0)),
    (aten.gelu_backward.default, SLOPES, X, {"approximate": "tanh"}),
    (aten.slice_backward.default, NUMBERS.double(), [3, 9], 1, -8, 9223372036854775807, 2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c[0]))
def test_rare_arguments(case):
    target, *args = case
    more = args.pop() if isinstance(args[-1], dict) else {}
    check(target, *args, **{"rtol": 1e-9, "atol": 1e-9, **more})


DTYPES = [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("new", DTYPES, ids=str)
@pytest.mark.parametrize("old", DTYPES, ids=str)
def test_conversions(old, new):
    x = torch.tensor([[0, 1, 3, 100]]).to(old)
    check(aten._to_copy.default, x, dtype=new)


def test_fractions_become_whole_numbers():
    x = torch.tensor([0.0, 0.9, 1.5, -0.9, -1.5, 300.7], dtype=torch.float64)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.bool):
        check(aten._to_copy.default, x, dtype=dtype)


def test_copies():
    x = torch.randn(2, 3, dtype=torch.float64)
    check(aten.clone.default, x)
    check(aten.copy.default, x, torch.tensor([1, 2, 3]))
    check(aten.copy.default, x, torch.randn(2, 1, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 5, 32, 33, 64, 65, 1100])
def test_blocks(size):
    x = torch.randn(2, size, 2, dtype=torch.float64)
    check(aten.cumsum.default, x, 1)
    check(aten.cumprod.default, 1 + x / size, -2, rtol=1e-9)
    check(aten.cummax.default, x, 1)
    check(aten.cummin.default, x, -2)
    check(aten.logcumsumexp.default, x * 100, 1)


CLASSES = 5
WEIGHT = torch.rand(CLASSES, dtype=torch.float64)


def test_ignored_samples_need_no_class():
    x, target = torch.randn(3, CLASSES, dtype=torch.float64), torch.tensor([1, -100, 4])
    check(aten.nll_loss_forward.default, x, target, WEIGHT, 1, -100)
    total = aten.nll_loss_forward(x, target, WEIGHT, 1, -100)[1]
    check(aten.nll_loss_backward.default, torch.tensor(2.0).double(), x, target, WEIGHT, 1, -100, total)


def test_what_is_no_class_gives_nan():
    x, target = torch.randn(3, CLASSES, dtype=torch.float64), torch.tensor([1, CLASSES, -7])
    scalar = torch.tensor(0.0, dtype=torch.float64)
    nodes, data = apply(aten.nll_loss_forward.default, (x, target, None, 0, -100), {}, [x[:, 0], scalar])
    assert np.isnan(compute(nodes[0], data)).tolist() == [False, True, True]


def test_windows_that_fit_evenly_need_no_guard():
    nodes = check(aten._adaptive_avg_pool2d.default, tensor(1, 2, 6, 8), (3, 2))
    (rows,) = [n for n in nodes_below(nodes) if isinstance(n, Rows)]
    assert [a.extent for a in rows.inner] == [2, 4]
    assert type(rows.stages[0].body).__name__ == "Read"


def test_single_precision_is_said():
    with pytest.raises(LoweringError, match="single precision"):
        apply_rule("erfinv", Result(((3,),), ("float64",)), {"input": Stored((3,), "float64", "x", 0)})


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
