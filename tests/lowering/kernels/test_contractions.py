"""Products and convolutions by every schedule, on PoCL, against PyTorch in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.node_runs import program_of, run_nodes
from oracles.rule_checks import apply

import torchedge
from torchedge.lowering.assembly import lower
from torchedge.lowering.building import contraction, elementwise
from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules import all_rules
from torchedge.lowering.rules.convolution import y_of
from torchedge.lowering.rules.taps import Taps
from torchedge.lowering.schedules import LARGE, MIDDLE, NARROW, SMALL, TILE, ContractionSchedule
from torchedge.lowering.targets import TARGETS
from torchedge.runtime import Executor
from torchedge.textures.layouts import PATTERNS
from torchedge.tracing.steps import capture_step

pytest.importorskip("pyopencl")

PANEL = ContractionSchedule("panel", 8, 32, 16, 4, 2, 8)
LOCAL = ContractionSchedule("local", 32, 16, 8, 4, 1, 4)
SCHEDULES = {
    "cpu": ("cpu", None),
    "panel": ("cpu", PANEL),
    "panel in slices": ("cpu", replace(PANEL, slices=3, rows_first=False)),
    "local": ("gpu", LOCAL),
    "local in slices": ("gpu", replace(LOCAL, slices=3, band=2)),
    "tile": ("mobile", TILE),
    "narrow in slices": ("mobile", replace(NARROW, slices=3)),
    "two rows": ("mobile", replace(TILE, block_rows=2, tile_rows=2)),
    "tiles of twelve rows": ("cpu", replace(PANEL, block_rows=24, tile_rows=12)),
}
WHOLE = [name for name in SCHEDULES if "slices" not in name]
ATEN = torch.ops.aten


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def held(operator, *args, schedule):
    """Assert that an operator's kernels make what PyTorch makes in float64, within 1e-5 of its norm."""
    wanted = operator(*args)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    nodes, data = apply(operator, args, {}, wanted)
    target, chosen = SCHEDULES[schedule]
    wanted = [w.numpy() for w in wanted if w is not None]
    for found, want in zip(run_nodes(nodes, data, target, chosen), wanted, strict=True):
        assert np.linalg.norm(found - want) <= 1e-5 * np.linalg.norm(want) + 1e-6


def pairs(cases, schedules, each, kinds=("cpu", "local", "tile")):
    """Return some cases with every schedule, and every case with one schedule of each kind."""
    return [(case, schedule) for case in cases for schedule in schedules if case in each or schedule in kinds]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sizes", "schedule"),
    pairs(["1x1x1x1", "1x5x21x3", "2x17x36x20", "3x33x10x67"], SCHEDULES, ["3x33x10x67"]),
)
def test_products(sizes, schedule):
    batch, rows, cols, inner = map(int, sizes.split("x"))
    held(ATEN.bmm.default, normal(batch, rows, inner), normal(batch, inner, cols, seed=1), schedule=schedule)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("transposed", "schedule"), pairs(["nn", "nt", "tn", "tt"], SCHEDULES, ["tn"]))
def test_transposed_operands(transposed, schedule):
    """Operands that lie row-major as they come, so that each combination of directions is read."""
    rows, cols, inner = 24, 40, 48
    a = Stored((inner, rows) if transposed[0] == "t" else (rows, inner), "float32", "a", 0)
    b = Stored((cols, inner) if transposed[1] == "t" else (inner, cols), "float32", "b", 1)
    made = contraction(
        (rows, cols),
        ("row", "col"),
        (inner,),
        lambda out, over: a.at(over[0], out[0]) if transposed[0] == "t" else a.at(out[0], over[0]),
        lambda out, over: b.at(out[1], over[0]) if transposed[1] == "t" else b.at(over[0], out[1]),
        "float32",
    )
    data = {"a": normal(*a.shape).numpy(), "b": normal(*b.shape, seed=1).numpy()}
    left = data["a"].T if transposed[0] == "t" else data["a"]
    right = data["b"].T if transposed[1] == "t" else data["b"]
    target, chosen = SCHEDULES[schedule]
    (found,) = run_nodes([made], data, target, chosen, inputs=[a, b])
    np.testing.assert_allclose(found, left @ right, rtol=1e-4, atol=1e-4)


CONVOLUTIONS = {
    "3x3": ((2, 16, 8, 8), (32, 16, 3, 3), 1, 1, 1, 1),
    "odd channels": ((1, 5, 7, 9), (21, 5, 3, 3), 1, 1, 1, 1),
    "stem": ((2, 3, 14, 14), (8, 3, 7, 7), 2, 3, 1, 1),
    "1x1": ((1, 12, 6, 6), (20, 12, 1, 1), 1, 0, 1, 1),
    "one channel": ((3, 10, 5, 5), (1, 10, 5, 5), 2, 2, 1, 1),
    "1x1 with stride": ((2, 8, 9, 7), (24, 8, 1, 1), 2, 0, 1, 1),
    "3x3 with stride": ((1, 32, 9, 9), (16, 32, 3, 3), 2, 1, 1, 1),
    "dilated groups": ((1, 8, 9, 9), (12, 4, 3, 3), 1, 2, 2, 2),
}


HELD = pairs(CONVOLUTIONS, WHOLE, ["odd channels", "dilated groups"], ["cpu", "tile"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "schedule"), HELD)
def test_convolutions(case, schedule):
    x, w, stride, padding, dilation, groups = CONVOLUTIONS[case]
    x, w, bias = normal(*x), normal(*w, seed=1), normal(w[0], seed=2)
    more = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    held(ATEN.convolution.default, x, w, bias, *more, schedule=schedule)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "schedule"), HELD)
def test_gradients_of_convolutions(case, schedule):
    gradients_are_held(case, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in WHOLE])
@pytest.mark.parametrize("case", ["odd channels", "3x3 with stride"])
def test_gradients_of_convolutions_in_parts(case, schedule):
    gradients_are_held(case, schedule)


def gradients_are_held(case, schedule):
    x, w, stride, padding, dilation, groups = CONVOLUTIONS[case]
    x, w = normal(*x), normal(*w, seed=1)
    more = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    grad = normal(*ATEN.convolution(x, w, None, *more).shape, seed=3)
    arguments = (grad, x, w, [w.shape[0]], *more, [True, True, False])
    held(ATEN.convolution_backward.default, *arguments, schedule=schedule)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", [TILE, LOCAL, PANEL], ids=lambda s: s.kind)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_operands_and_results_in_textures(pattern, schedule):
    x, w, v = normal(2, 16, 8, 8), normal(32, 16, 3, 3, seed=1), normal(32, 32, 1, 1, seed=2)
    more = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    first = ATEN.convolution(x, w, None, *more)
    (y,), data = apply(ATEN.convolution.default, (x, w, None, *more), {}, [first])
    weight = Stored(tuple(v.shape), "float32", "v", 9)
    z = y_of(y, weight, Taps((6, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1), (6, 6))
    target = replace(TARGETS["mobile"], pattern=pattern)
    made = program_of([z], target, schedule)
    assert sum(t.layout.storage == "image" and t.layout.pattern == pattern for t in made.tensors) >= 3
    (found,) = run_nodes([z], {**data, "v": v.numpy()}, target, schedule)
    want = ATEN.convolution(first, v, None, *more).numpy()
    assert np.linalg.norm(found - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [SMALL, MIDDLE, LARGE], ids=["small", "middle", "large"])
def test_large_blocks(schedule):
    x, w = normal(2, 16, 18, 18), normal(130, 16, 3, 3, seed=1)
    want = ATEN.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    arguments = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    nodes, data = apply(ATEN.convolution.default, arguments, {}, [want])
    (found,) = run_nodes(nodes, data, "gpu", schedule)
    assert np.linalg.norm(found - want.numpy()) <= 1e-5 * np.linalg.norm(want.numpy())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_update_rides_along(schedule):
    """The gradient of a weight is never stored: the product's kernel writes the new weight in place."""
    x = Stored((40, 24), "float32", "x", 0)
    grad = Stored((40, 10), "float32", "grad", 1)
    weight = Stored((10, 24), "float32", "weight", 2)
    product = contraction(
        (10, 24),
        ("row", "col"),
        (40,),
        lambda out, over: grad.at(over[0], out[0]),
        lambda out, over: x.at(over[0], out[1]),
        "float32",
    )
    new = elementwise(lambda w, g: w - g * 0.1, weight, product, dtype="float32")
    data = {n.name: normal(*n.shape, seed=n.index).numpy() for n in (x, grad, weight)}
    target, chosen = SCHEDULES[schedule]
    made = program_of([], target, chosen, [(weight, new)])
    assert sum(t.role == "intermediate" for t in made.tensors) == ("slices" in schedule)
    (found,) = run_nodes([], data, target, chosen, [(weight, new)])
    np.testing.assert_allclose(found, data["weight"] - 0.1 * data["grad"].T @ data["x"], rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("float64", 1e-13)])
def test_other_precisions(dtype, tolerance, schedule):
    """Half precision is summed in single: 1,000 products lose no more than storing the result does."""
    a, b = Stored((9, 1000), dtype, "a", 0), Stored((1000, 24), dtype, "b", 1)
    made = contraction(
        (9, 24),
        ("row", "col"),
        (1000,),
        lambda out, over: a.at(out[0], over[0]),
        lambda out, over: b.at(over[0], out[1]),
        dtype,
    )
    data = {n.name: normal(*n.shape, seed=n.index).numpy().astype(dtype) for n in (a, b)}
    want = data["a"].astype(np.float64) @ data["b"].astype(np.float64)
    target, chosen = SCHEDULES[schedule]
    (found,) = run_nodes([made], data, target, chosen)
    assert found.dtype == dtype
    assert np.linalg.norm(found - want) <= tolerance * np.linalg.norm(want)


def test_launches_that_are_equal_bit_for_bit():
    x, w = normal(2, 16, 8, 8), normal(32, 16, 3, 3, seed=1)
    arguments = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    nodes, data = apply(ATEN.convolution.default, arguments, {}, [ATEN.convolution(*arguments)])
    first, second = (run_nodes(nodes, data, *SCHEDULES["panel in slices"])[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", [5, 7, 8, 14])
@pytest.mark.parametrize("slices", [1, 3])
def test_weight_gradients_divide_no_positions_in_their_loop(side, slices):
    """A few work-items find the places of a block that crosses rows of pixels; the others look them up."""
    x, w = normal(3, 8, side, side), normal(12, 8, 3, 3)
    grad = normal(3, 12, side, side, seed=1)
    more = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    want = ATEN.convolution_backward(grad, x, w, *more)[1]
    nodes, data = apply(ATEN.convolution_backward.default, (grad, x, w, *more), {}, [None, want, None])
    schedule = replace(LOCAL, slices=slices)
    gradient = [node for node in nodes if node is not None]
    (found,) = run_nodes(gradient, data, "gpu", schedule)
    assert np.linalg.norm(found - want.numpy()) <= 1e-5 * np.linalg.norm(want)
    source = program_of(gradient, "gpu", schedule).kernels[0].source
    assert ("points[next & 1]" in source) == (side != 8)


@pytest.mark.parametrize(
    ("form", "group", "zero_points"),
    [
        ("int4", 32, False),
        ("int4", 64, True),
        ("int4", None, False),
        ("int8", None, False),
        ("int8", 32, True),
    ],
)
def test_many_rows_load_vectors_of_a_quantised_weight_that_lies_as_one_row_reads_it(form, group, zero_points):
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 64)
    model = torchedge.quantize(linear, form, group=group, zero_points=zero_points).eval()
    x = torch.randn(64, 128)
    token, step = [
        capture_step(model, rows, training=False, keep=frozenset(all_rules())) for rows in (x[:1], x)
    ]
    layouts = {tensor.name: tensor.layout for tensor in lower(token.step).tensors}
    program = lower(step.step, "cpu", {name: layouts[name] for name in step.tensors})
    (kernel,) = [kernel for kernel in program.kernels if kernel.kind == "matmul"]
    assert "panel" in kernel.name and "v[x] =" in kernel.source  # read along the inner points, transposed
    with Executor(program) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in step.tensors.items()})
        (found,) = executor.run(x.numpy())
    wanted = x.double() @ model.weight.double().t() + model.bias.double()
    assert np.abs(found - wanted.detach().numpy()).max() < 1e-5
