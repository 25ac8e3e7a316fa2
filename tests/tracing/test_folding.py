"""Constant folding: the same results from fewer operators, and never more memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.step_interpreter import Interpreter
from torch import nn

from torchedge.graphs.steps import GraphBuilder, Ref
from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
from torchedge.tracing.folding import SMALL_BYTES, fold_constants
from torchedge.tracing.steps import CapturedStep, capture_step

KEEP = frozenset(all_rules())
WEIGHTS = ("parameter", "buffer", "constant")
WIDE = 2 * SMALL_BYTES // 4
"""Elements of a vector that is not small."""


def both(model, *args):
    """The step of an inference before and after folding."""
    captured = capture_step(model.eval(), args, keep=KEEP)
    return captured, fold_constants(captured)


def kinds(captured):
    return [op.kind for op in captured.step.ops]


def nbytes(captured):
    return sum(t.numel() * t.element_size() for t in captured.tensors.values())


def forms(captured):
    return {name: (t.shape, t.dtype) for name, t in captured.tensors.items()}


def outputs(captured, *args):
    return Interpreter(captured.tensors).run(captured.step, *args)


def assert_same(model, *args):
    captured, folded = both(model, *args)
    for a, b in zip(outputs(captured, *args), outputs(folded, *args), strict=True):
        assert torch.equal(a, b)
    return folded


class Weighed(nn.Module):
    """Applies a function to its input and one weight."""

    def __init__(self, function, *shape):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


# what is folded ---------------------------------------------------------------------------------------------


def test_arithmetic_on_weights_alone_becomes_one_constant():
    folded = assert_same(Weighed(lambda x, w: x * (w.exp() + 1).sqrt(), WIDE), torch.randn(3, WIDE))
    assert kinds(folded) == ["mul"]
    assert [v.role for v in folded.step.values] == ["input", "constant", "activation"]


def test_a_table_is_replaced_by_the_rows_that_are_read():
    def positions(x, w):
        return x + nn.functional.embedding(torch.arange(4), w)

    folded = assert_same(Weighed(positions, 64, WIDE), torch.randn(4, WIDE))
    assert kinds(folded) == ["add"] and [t.shape for t in folded.tensors.values()] == [(4, WIDE)]


def test_a_slice_is_stored_where_it_is_at_most_half_of_its_weight():
    half, most = (
        both(Weighed(lambda x, w, n=n: x + w[:, :n], 64, 64), torch.zeros(64, n))[1] for n in (32, 33)
    )
    assert kinds(half) == ["add"] and [t.shape for t in half.tensors.values()] == [(64, 32)]
    assert kinds(most) == ["slice", "add"] and [t.shape for t in most.tensors.values()] == [(64, 64)]


def test_normalized_weights_are_computed_once():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, 64))
    model = nn.Sequential(layer, nn.ReLU())
    folded = assert_same(model, torch.randn(2, 32))
    assert kinds(folded) == ["permute", "addmm", "relu"]


# what is not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: x + w.expand(3, 64, 64),
        lambda x, w: x + w.half().float(),
        lambda x, w: x + w.reshape(2, 32, 64).permute(2, 0, 1).reshape(64, 64),
    ],
    ids=["transposed", "expanded", "converted", "reshaped"],
)
def test_views_and_copies_stay(function):
    captured, folded = both(Weighed(function, 64, 64), torch.zeros(64, 64))
    assert kinds(captured) == kinds(folded) and captured.tensors.keys() == folded.tensors.keys()


def test_no_second_copy_of_a_weight_that_is_read_as_it_is():
    captured, folded = both(Weighed(lambda x, w: x + w + w.exp(), WIDE), torch.zeros(WIDE))
    assert kinds(captured) == kinds(folded) == ["add", "exp", "add"]


def test_no_value_larger_than_its_weights():
    captured, folded = both(Weighed(lambda x, w: x + (w[:, None] + w), 64), torch.zeros(64, 64))
    assert nbytes(captured) == nbytes(folded) and kinds(folded).count("add") == 2


def test_two_values_of_one_weight_are_folded_together_or_not_at_all():
    model = Weighed(lambda x, w: (x + w.exp(), x + w.sin()), WIDE)
    captured, folded = both(model, torch.zeros(WIDE))
    assert kinds(captured) == kinds(folded)  # two constants for one weight
    _, folded = both(Weighed(lambda x, w: (x + w.exp().sum(), x + w.sin().sum()), WIDE), torch.zeros(WIDE))
    assert kinds(folded) == ["add", "add"]


def test_updated_buffers_random_numbers_and_inputs_stay():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.count += 1
            return x * self.count.exp() + torch.rand(4) * self.weight + x.exp()

    captured, folded = both(Counting(), torch.zeros(4))
    assert sorted(kinds(captured)) == sorted(kinds(folded))
    assert captured.tensors.keys() == folded.tensors.keys()


# batch norm -------------------------------------------------------------------------------------------------


def randomized(model):
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_evaluated_batch_norm_is_a_scale_and_a_shift(rank, affine):
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 2](6, affine=affine)
    x = torch.randn(4, 6, *[3] * (rank - 2))
    model = randomized(nn.Sequential(norm))
    _, folded = both(model, x)
    assert [k for k in kinds(folded) if k != "view"] == ["mul", "add"]
    assert sorted(folded.tensors) == ["0.scale", "0.shift"]
    torch.testing.assert_close(outputs(folded, x)[0], model(x), rtol=1e-6, atol=1e-6)


def test_batch_norm_of_halves_computes_in_single_precision():
    model = randomized(nn.Sequential(nn.BatchNorm2d(6))).half()
    x = torch.randn(2, 6, 5, 5).half()
    _, folded = both(model, x)
    assert {t.dtype for t in folded.tensors.values()} == {torch.float32}
    torch.testing.assert_close(outputs(folded, x)[0], model(x), rtol=1e-3, atol=1e-3)


def test_batch_norm_by_the_statistics_of_a_batch_stays():
    model = nn.Sequential(nn.BatchNorm2d(6, track_running_stats=False))
    captured, folded = both(model, torch.randn(2, 6, 5, 5))
    assert kinds(captured) == kinds(folded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_batch_norms_of_networks_cost_no_launch(name):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.get_model(name, weights=None).eval()
    x = torch.randn(1, 3, 32, 32)
    captured = capture_inference_step(model, (x,))
    with torch.device("meta"):
        twin = models.get_model(name, weights=None).eval()
    for target in TARGETS.values():
        program = lower_inference(captured, target).program
        inner = {i for i, t in enumerate(program.tensors) if t.role in ("input", "intermediate")}
        assert all(len(inner & {*launch.tensors}) > 0 for launch in program.launches)
        assert "pointwise" not in {program.kernels[launch.kernel].kind for launch in program.launches}
    assert program.digest == lower_inference(capture_inference_step(twin, (x,)), target).program.digest
    np.testing.assert_allclose(outputs(captured, x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)


# any graph --------------------------------------------------------------------------------------------------

SIDE = 8
SQUARE = ((SIDE, SIDE), "float32")
UNARY = {
    "exp": {}, "neg": {}, "permute": {"dims": (1, 0)}, "sum": {"dim": (0,), "keepdim": True},
    "slice": {"dim": 0, "start": 0, "end": 1, "step": 1},
}  # fmt: skip
"""Operators on a square, with their attributes; a row becomes a square again by `expand`."""
Calls = st.lists(
    st.tuples(st.sampled_from([*UNARY, "add", "mul"]), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


def random_step(calls):
    """A step on an input, two parameters, a constant and an updated buffer, each a square."""
    builder = GraphBuilder()
    roles = {"x": "input", "a": "parameter", "b": "parameter", "c": "constant", "d": "buffer"}
    values = [builder.add(name, *SQUARE, role=role) for name, role in roles.items()]
    for kind, i, j in calls:
        one, other = (Ref(values[n % len(values)]) for n in (i, j))
        if kind in UNARY:
            form = ((1, SIDE), "float32") if kind in ("sum", "slice") else SQUARE
            value = builder.call(kind, {"input": one, **UNARY[kind]}, [form])[0]
            if form != SQUARE:
                value = builder.call("expand", {"input": Ref(value), "size": SQUARE[0]}, [SQUARE])[0]
        else:
            value = builder.call(kind, {"input": one, "other": other}, [SQUARE])[0]
        values.append(value)
    return builder.finish(values[:1], values[5:], updates=[(values[4], values[-1])])


@given(Calls, st.sampled_from([0, SMALL_BYTES]))
def test_random_graphs_give_the_same_bits_and_take_no_more_memory(calls, small):
    step = random_step(calls)
    generator = torch.Generator().manual_seed(0)
    weights = {v.name: torch.randn(v.shape, generator=generator) for v in step.values if v.role in WEIGHTS}
    captured = CapturedStep(step, weights, None, (), list)
    meta = replace(captured, tensors={name: t.to("meta") for name, t in weights.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchedge.tracing.folding.SMALL_BYTES", small)
        folded, without_values = fold_constants(captured), fold_constants(meta)
    x = torch.randn(SQUARE[0], generator=generator)
    for a, b in zip(outputs(captured, x), outputs(folded, x), strict=True):
        assert torch.equal(a, b)
    assert len(folded.step.ops) <= len(step.ops)
    assert small or nbytes(folded) <= nbytes(captured)
    assert (folded.step.values, folded.step.ops) == (without_values.step.values, without_values.step.ops)
    assert forms(folded) == forms(without_values)
