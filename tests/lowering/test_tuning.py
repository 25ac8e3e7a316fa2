"""Candidates are legal, their work follows from the loops, and the tuner keeps to its rules."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from torchedge.expressions.indices import Axis, of
from torchedge.lowering.candidates import candidates_of
from torchedge.lowering.kernel_work import sketches_of
from torchedge.lowering.kernels.nests import write_kernel
from torchedge.lowering.nodes import Node, Stored
from torchedge.lowering.schedules import ContractionExtents, RowsExtents, default_schedule, is_legal
from torchedge.lowering.targets import TARGETS
from torchedge.lowering.tuning import LARGEST_OPERANDS, layout_options, score
from torchedge.lowering.walks import Access, Digit, Walk, access_works, evaluate
from torchedge.profiling.operator_cases import OperatorCase, operator_kernel
from torchedge.textures.coefficients import NUMBERS, TERM_COUNT, default_coefficients
from torchedge.textures.layouts import Layout, row_major
from torchedge.textures.work import STRIDE_FEATURES

EXTENTS = [
    ContractionExtents(1, 512, 300, 512, innermost=512),
    ContractionExtents(2, 3, 5, 7, innermost=7),
    RowsExtents((512,), (300,), True, slices=True),
    RowsExtents((4, 30), (3, 3), False),
    RowsExtents((), (1000,), True),
    RowsExtents((6,), (40,), True, searches=True),
    RowsExtents((100, 48), (), False, sum_bytes=0),
    RowsExtents((), (), False, sum_bytes=0),
]


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_candidates_are_legal_and_the_first_is_the_default(extents, name):
    target = TARGETS[name]
    sets = candidates_of(extents, target)
    assert sets[0].pick(0) == default_schedule(extents, target)
    schedules = [candidates.pick(k) for candidates in sets for k in range(len(candidates))]
    assert len(set(schedules)) == len(schedules)
    assert all(is_legal(schedule, extents, target) for schedule in schedules)


def test_indices_over_arrays_are_indices_one_by_one():
    i, j = Axis("i", 12), Axis("j", 5)
    index = (of(i) * 7 + of(j)) // 4 * 3 + (of(i) + 2 * of(j) + 1) % 6
    a, b = np.meshgrid(np.arange(12), np.arange(5))
    expected = (a * 7 + b) // 4 * 3 + (a + 2 * b + 1) % 6
    np.testing.assert_array_equal(evaluate(index, {i: a, j: b}, {}), expected)


def walked(layout, along):
    """Return the work of reading a 64 x 256 tensor, along its rows or down its columns."""
    rows, cols = Axis("r", 64), Axis("c", 256)
    tensor = Stored((64, 256), "float32", "x", 0)
    roles = {"r": (rows,), "c": (cols,)}
    time = (Digit("c", 64, 4),) if along else (Digit("r", 64, 1),)
    walk = Walk(roles, time, (Digit("r" if along else "c", 32, 1 if along else 4),), {"r": 32, "c": 256})
    access = Access(tensor, (of(rows), of(cols)), "float32", cols, 4, 64)
    return access_works(access, walk, [layout], 2, default_coefficients("gpu"))[0]


def test_reads_of_a_buffer_in_the_order_of_memory_and_across_it():
    work = walked(row_major(2), along=True)
    x2 = STRIDE_FEATURES.index("x 2x1")
    assert work.nbytes.tolist() == [16.0, 16.0] and work.count.tolist() == [64.0, 64.0]
    assert work.strides[0, x2] == pytest.approx(0.5, abs=0.05)  # every other vector leaves a block of two
    assert work.warp_lines[0] == 32  # neighbours read other rows
    assert work.distinct_bytes[0] == 64 * 256 * 4 and work.group_bytes[0] == 32 * 256 * 4
    across = walked(row_major(2), along=False)
    assert across.strides[0, STRIDE_FEATURES.index("x 64x64")] == pytest.approx(1, abs=0.05)
    assert across.warp_lines[0] == 4  # 32 neighbours of 16 bytes in lines of 128


def test_reads_of_an_image_follow_its_pattern():
    texture = Layout((0, 1), "image", split=1)
    row = walked(texture, along=True)
    assert row.image.all() and row.nbytes[0] == 16
    assert row.strides[0, STRIDE_FEATURES.index("y 1x1")] == 0.0
    column = walked(replace(texture, pattern="column"), along=True)
    assert column.strides[0, STRIDE_FEATURES.index("y 1x1")] == pytest.approx(1, abs=0.05)
    block = walked(replace(texture, pattern="block-4"), along=True)
    x4 = STRIDE_FEATURES.index("x 4x4")  # a block of 16 texels holds 16 steps of block-4, four of a row
    assert row.strides[0, x4] == pytest.approx(1 / 4, abs=0.05)
    assert block.strides[0, x4] == pytest.approx(1 / 16, abs=0.05)


@pytest.mark.parametrize(
    ("columns", "shift", "vector", "name"),
    [(256, 0, True, "gpu"), (254, 0, False, "gpu"), (256, 1, False, "gpu"), (254, 0, True, "cpu")],
)
def test_gpus_read_vectors_that_are_not_aligned_element_by_element(columns, shift, vector, name):
    rows, cols = Axis("r", 64), Axis("c", columns)
    tensor = Stored((64, columns + 4 * shift), "float32", "x", 0)
    walk = Walk(
        {"r": (rows,), "c": (cols,)}, (Digit("c", 63, 4),), (Digit("r", 32, 1),), {"r": 32, "c": columns}
    )
    access = Access(tensor, (of(rows), of(cols) + shift), "float32", cols, 4, 63)
    (read,), (write,) = [
        access_works(access, walk, [row_major(2)], 1, default_coefficients(name), writes)
        for writes in (False, True)
    ]
    assert (read.count[0], read.nbytes[0]) == ((63, 16) if vector else (252, 4))
    assert (write.count[0], write.nbytes[0]) == (63, 16)  # a cache joins the parts


def test_vectors_within_heads_are_aligned():
    lane, rows = Axis("c", 768), Axis("r", 8)
    tensor = Stored((12, 8, 64), "float32", "x", 0)
    walk = Walk({"r": (rows,), "c": (lane,)}, (Digit("c", 192, 4),), (Digit("r", 8, 1),), {"r": 8, "c": 768})
    access = Access(tensor, (of(lane) // 64, of(rows), of(lane) % 64), "float32", lane, 4, 192)
    (read,) = access_works(access, walk, [row_major(3)], 1, default_coefficients("gpu"))
    assert (read.count[0], read.nbytes[0]) == (192, 16)


def test_rows_beside_each_other_are_written_by_vectors():
    target, coefficients = TARGETS["gpu"], default_coefficients("gpu")
    kernel = operator_kernel(OperatorCase("DwConv2D", (16, 3)), target)
    candidates = candidates_of(kernel.nest.extents, target)[0]
    assert not candidates.schedules.along
    work = sketches_of(kernel.nest, candidates, target)[0][0].work([kernel.layouts], coefficients)
    np.testing.assert_array_equal(work.writes[0].nbytes, 4 * np.asarray(candidates.schedules.vector))


def test_numbers_and_shares_of_candidates_are_those_of_a_profile():
    target, coefficients = TARGETS["gpu"], default_coefficients("gpu")
    kernel = operator_kernel(OperatorCase("MatMul", (16, 64, 256)), target)
    scores = score(kernel.nest, kernel.layouts, target, coefficients)
    places = np.array([0, 5, scores.ms.size - 1])
    trials = scores.trials(places, target, coefficients)
    assert trials.fields.shape == (3, NUMBERS) and trials.shares.shape == (3, TERM_COUNT)
    np.testing.assert_allclose(trials.shares.sum(axis=1), 1)
    np.testing.assert_array_equal(trials.predicted, scores.ms.reshape(-1)[places])
    terms = scores.terms(places, target, coefficients)
    assert all(max(ms[k] for ms in terms.values()) <= trials.predicted[k] for k in range(3))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize(
    "case",
    [
        OperatorCase("MatMul", (64, 64, 256)),
        OperatorCase("Conv2Ds1", (16, 3)),
        OperatorCase("SoftMax", (64, 64)),
    ],
    ids=lambda case: case.name,
)
def test_work_counts_the_arithmetic_and_the_bytes(name, case):
    target, coefficients = TARGETS[name], default_coefficients(name)
    kernel = operator_kernel(case, target)
    for candidates in candidates_of(kernel.nest.extents, target):
        sketch, _ = sketches_of(kernel.nest, candidates, target)[0]
        work = sketch.work([kernel.layouts], coefficients)
        flops = work.items * work.flops
        assert (flops >= 0.99 * case.flops).all()
        tensors = [access.tensor for _, access in sketch.reads]
        for tensor, read in zip(tensors, work.reads, strict=True):
            assert (read.distinct_bytes <= tensor.numel * 4).all()
            assert (read.group_bytes <= read.distinct_bytes + 4).all()
            assert (work.items * read.count * read.nbytes >= 0.99 * read.distinct_bytes).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize(
    "case",
    [
        OperatorCase("MatMul", (60, 72, 1000)),
        OperatorCase("Conv2Ds2", (20, 3)),
        OperatorCase("SoftMax", (60, 100)),
        OperatorCase("LayerNorm", (7, 1000)),
        OperatorCase("DwConv2D", (20, 3)),
        OperatorCase("Conv2Ds1", (9, 5)),
    ],
    ids=lambda case: case.name,
)
def test_what_is_counted_is_what_is_written(name, case):
    """Launches, local memory and slices of all candidates at once are those of the kernels, one by one."""
    target = replace(TARGETS[name], serial=False, storage="buffer")
    coefficients = default_coefficients(name)
    kernel = operator_kernel(case, target)
    for candidates in candidates_of(kernel.nest.extents, target):
        launches = [
            (sketch.work([kernel.layouts], coefficients), np.broadcast_to(share, (len(candidates),)))
            for sketch, share in sketches_of(kernel.nest, candidates, target)
        ]
        for number in range(0, len(candidates), 1 + len(candidates) // 12):
            written = write_kernel(kernel.group, kernel.nest, kernel.layouts, candidates.pick(number), target)
            counted = [work for work, share in launches if share[number]]
            panel = getattr(candidates.schedules, "kind", None) == "panel"  # counts what lies in caches
            for work, one in zip(counted, written, strict=True):
                row = number if work is counted[0] else 0
                assert prod(one.launch.global_size) == work.items[row]
                assert (*one.launch.local_size, 1, 1)[:3] == tuple(work.group[row])
                assert panel or one.kernel.local_bytes == work.local_bytes[row]


@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        ("gpu", OperatorCase("SoftMax", (64, 256)), [False, True, True]),
        ("gpu", OperatorCase("MatMul", (64, 64, 64)), [False, False]),
    ],
)
def test_the_second_pass_over_a_row_reads_again(name, case, expected):
    target = TARGETS[name]
    kernel = operator_kernel(case, target)
    candidates = candidates_of(kernel.nest.extents, target)[0]
    sketch, _ = sketches_of(kernel.nest, candidates, target)[0]
    work = sketch.work([kernel.layouts], default_coefficients(target.name))
    assert [bool(operand.again.all()) for operand in work.reads] == expected
    assert not any(operand.again.any() for operand in (*work.reads[:1], *work.writes))


def test_the_choice_is_the_same_each_time_and_never_predicted_worse_than_the_default():
    target, coefficients = TARGETS["mobile"], default_coefficients("mobile")
    kernel = operator_kernel(OperatorCase("Conv2Ds1", (32, 3)), target)
    options = {n: layout_options(n, kernel.layouts[n], target) for n in kernel.group.reads}
    first, second = (score(kernel.nest, kernel.layouts, target, coefficients, options) for _ in range(2))
    np.testing.assert_array_equal(first.ms, second.ms)
    chosen = first.choice(first.best())
    assert chosen.ms <= first.ms[0, 0]
    launch_ms, default_ms = first.launch_ms, first.ms[0, 0]
    assert first.gains(launch_ms, default_ms) and not first.gains(default_ms, default_ms)
    # 0.30 of 0.33 ms, of which a launch takes 0.28: the kernel itself takes less than half as long.
    assert replace(first, launch_ms=0.28).gains(0.30, 0.33) and not replace(first, launch_ms=0.0).gains(
        0.30, 0.33
    )
    assert first.ms[0, 0] == first.choice(0).ms
    assert first.choice(0).schedule == default_schedule(kernel.nest.extents, target)


def test_results_lie_in_images_only_where_a_schedule_writes_whole_texels():
    target, coefficients = TARGETS["cpu"], default_coefficients("cpu")
    kernel = operator_kernel(OperatorCase("SoftMax", (16, 64)), target)
    (result,) = kernel.group.stored
    image = Layout((0, 1), "image", split=1)
    options = {result: [kernel.layouts[result], image]}
    scores = score(kernel.nest, kernel.layouts, target, coefficients, options)
    widths = np.concatenate([np.broadcast_to(c.schedules.vector, len(c)) for c, _ in scores.sets])
    along = np.concatenate([np.broadcast_to(c.schedules.along, len(c)) for c, _ in scores.sets])
    np.testing.assert_array_equal(np.isfinite(scores.ms[1]), (widths == 4) & along)
    assert np.isfinite(scores.ms[0]).all()


def test_a_table_of_candidates_tells_them_apart():
    target, coefficients = TARGETS["gpu"], default_coefficients("gpu")
    kernel = operator_kernel(OperatorCase("MatMul", (256, 256, 256)), target)
    options = {n: layout_options(n, kernel.layouts[n], target) for n in kernel.group.reads}
    scores = score(kernel.nest, kernel.layouts, target, coefficients, options)
    fields = scores.fields()
    assert len(fields) == scores.ms.size
    assert len(np.unique(fields, axis=0)) == len(fields)
    patterns = fields[: scores.ms.shape[1], -LARGEST_OPERANDS:]
    assert (patterns == 0).all()


def test_layouts_to_choose_among_start_with_the_present_one():
    options = layout_options(Node((2, 8, 5, 5), "float32"), Layout((0, 2, 3, 1)), TARGETS["mobile"])
    assert options[0] == Layout((0, 2, 3, 1))
    assert [o.pattern for o in options[1:]] == ["row", "column", "block-2", "block-4", "block-8"]
    odd = layout_options(Node((2, 7), "float32"), Layout((0, 1)), TARGETS["mobile"])
    assert odd == [Layout((0, 1))]


def test_a_beam_finds_what_all_combinations_give():
    target, coefficients = TARGETS["mobile"], default_coefficients("mobile")
    kernel = operator_kernel(OperatorCase("Conv2Ds1", (32, 3)), target)
    options = {n: layout_options(n, kernel.layouts[n], target) for n in kernel.group.reads}
    whole, beam = (
        score(kernel.nest, kernel.layouts, target, coefficients, options, ablations=False, beam=n)
        for n in (0, 6)
    )
    assert beam.ms.shape[0] == whole.ms.shape[0] and beam.ms.shape[1] < whole.ms.shape[1]
    assert beam.ms.min() <= 1.05 * whole.ms.min()
    assert beam.ms[0, 0] == whole.ms[0, 0]
