"""The kernel benchmark: summaries from made-up times in closed form, and a small run that is resumed."""

import json
from dataclasses import replace

import numpy as np
import pytest
from kernel_replay import errors_in, read_bench, replay_case, search_again

from torchedge.devices import find_device
from torchedge.errors import InputError
from torchedge.lowering.inference import target_of_device
from torchedge.lowering.targets import TARGETS
from torchedge.profiling import kernel_benchmark
from torchedge.profiling.kernel_benchmark import bench_kernels, rank_correlation, summarize, times_of
from torchedge.profiling.operator_cases import OPERATORS, OperatorCase, all_cases
from torchedge.textures.coefficients import (
    ERRORS,
    KernelErrors,
    coefficients_of,
    default_coefficients,
    errors_of,
)


def row(ms, chosen, operator="MatMul", predicted=None):
    ways = ("tuner", "pure", "warp", "thread", "reuse distance")
    return {
        "case": f"{operator} {ms}", "operator": operator, "candidates": len(ms), "tuning_s": 0.01,
        "places": list(range(len(ms))), "ms": ms, "predicted": predicted or ms, "groups": [0, 1],
        "chosen": {"default": 0, **dict.fromkeys(ways, chosen)}, "tried": [0, chosen],
    }  # fmt: skip


def test_summaries_in_closed_form():
    rows = [row([2.0, 3.0, 1.0], 2), row([1.0, 4.0, 2.0], 2, "SoftMax")]
    summary = summarize(rows)
    ways = {way.way: way for way in summary.ways}
    assert ways["tuner"].regret == pytest.approx((0 + 1) / 2)
    assert ways["tuner"].accuracy == 0.5
    assert ways["tuner"].speedup == pytest.approx((2 * 0.5) ** 0.5)
    assert ways["tuner"].slowest == 0.5
    assert ways["default"].regret == pytest.approx((1 + 0) / 2)
    assert ways["top 3 measured"].slowest == 1.0  # the default is measured, too
    assert ways["work-group search"].regret == pytest.approx((1 + 0) / 2)
    assert summary.cases == {"MatMul": 1, "SoftMax": 1}
    assert summary.exhaustive == 2


def test_candidates_that_do_not_run_never_count_as_fast():
    assert times_of(row([2.0, -1.0, 3.0], 1))["tuner"] == 3.0


def test_rank_correlation():
    assert rank_correlation(row([1.0, 2.0, 3.0], 0, predicted=[10.0, 20.0, 21.0])) == pytest.approx(1)
    assert rank_correlation(row([1.0, 2.0, 3.0], 0, predicted=[3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert rank_correlation(row([1.0, 2.0], 0, predicted=[1.0, 1.0])) == 0.0


def test_cases_are_the_papers_within_limits():
    names = {case.operator for case in all_cases()}
    assert names == set(OPERATORS) and len(OPERATORS) == 9
    assert all(case.flops <= 1e6 for case in all_cases(most_flops=1e6))
    with pytest.raises(InputError, match="expected one of MatMul"):
        all_cases(("Pooling",))
    assert [case.name for case in all_cases(("Conv2Ds1 57 3", "MatMul 20 30 9"), most_flops=1)] == [
        "Conv2Ds1 57 3",
        "MatMul 20 30 9",
    ]
    for wrong in ("MatMul 4 four 4", "MatMul 4 0 4", "MatMul 4 4", "SoftMax 4 -4"):
        with pytest.raises(InputError, match="as in"):
            all_cases((wrong,))


@pytest.mark.slow
def test_a_run_continues_where_it_was(tmp_path, monkeypatch):
    pytest.importorskip("pyopencl")
    from torchedge.opencl import open_context

    monkeypatch.setattr(kernel_benchmark, "PASSES", 1)
    context, target = open_context(), replace(TARGETS["cpu"], vector=4)
    cases = [OperatorCase("SoftMax", (16, 16)), OperatorCase("MatMul", (16, 16, 16))]
    more = (tmp_path, context, target, default_coefficients("cpu"))
    (first,) = bench_kernels(cases[:1], *more, among=4)
    again, second = bench_kernels(cases, *more, among=4)
    assert again == json.loads(json.dumps(first))
    assert len(second["places"]) >= 2 and all(ms > 0 for ms in second["ms"])
    assert set(second["chosen"].values()) <= set(second["places"])
    for measured in read_bench(tmp_path):
        replayed = replay_case(measured, target, default_coefficients("cpu"))
        assert replayed["ms"] == measured["ms"] and replayed["chosen"]["default"] == 0
        search_again([replayed], KernelErrors())
        (timed,) = errors_in([replayed]).kernels
        assert timed.name == measured["case"] and 2 <= len(timed.errors) <= len(measured["places"])
        ERRORS.check(KernelErrors((timed,)))
        assert replayed["tried"][0] == 0 and set(replayed["tried"]) <= set(measured["places"])
        np.testing.assert_allclose(replayed["predicted"], measured["predicted"], atol=1e-6)
        with pytest.raises(InputError, match="measure it again"):
            replay_case({**measured, "schedules": ["another"]}, target, default_coefficients("cpu"))
    with pytest.raises(InputError, match="does not exist"):
        read_bench(tmp_path / "nowhere")
    with pytest.raises(InputError, match="choose another folder"):
        bench_kernels(cases, *more, among=5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["SoftMax 64 64", "MatMul 16 16 16", "DwConv2D 32 3"])
def test_the_errors_of_a_profile_are_those_of_the_present_model(case):
    known = find_device("nvidia-h200")
    target = replace(target_of_device(known), storage="image")
    rows = read_bench(known.folder / "campaign" / "kernel-bench-operators.jsonl.gz")
    (row,) = [row for row in rows if row["case"] == case]
    expected = errors_in([replay_case(row, target, coefficients_of(known))]).kernels
    stored = [kernel for kernel in errors_of(known).kernels if kernel.name == case]
    # else: python benchmarks/kernel_replay.py with --learn, as device.toml gives it
    assert [kernel.schedules for kernel in stored] == [kernel.schedules for kernel in expected]
    np.testing.assert_allclose(stored[0].errors, expected[0].errors, atol=2e-4)
    np.testing.assert_allclose(stored[0].shares, expected[0].shares, atol=1)
