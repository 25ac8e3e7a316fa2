"""The cost model: each level's closed form, the paper's slips, and how the extended terms behave."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.textures.coefficients import DEFAULTS
from torchedge.textures.model import (
    occupancy,
    occupancy_groups,
    predict_kernels,
    predict_reuse,
    thrashing,
    thread_latency,
)
from torchedge.textures.work import BLOCK_SHAPES, STRIDE_FEATURES, KernelWork, ReadWork

ADRENO = replace(
    DEFAULTS["mobile"], compute_units=2, register_bytes=294_912, max_waves=30, gflops=(889.9,) * 5
)


def path(**changes):
    steps = {(2, 2): 10.0, (16, 16): 100.0}
    across = tuple([steps.get(shape, 0.0) for shape in BLOCK_SHAPES] + [0.0] * len(BLOCK_SHAPES))
    return replace(ADRENO.image, hit_ns=50.0, across=across, lines=32, decay=1.5, **changes)


def reads(strides=None, **changes):
    columns = dict(
        image=True, count=8, nbytes=16, distinct_bytes=2**20, reuse=1, warp_lines=32, warp_share=64,
        strides=np.zeros(len(STRIDE_FEATURES)) if strides is None else strides,
    )  # fmt: skip
    return ReadWork(**{**columns, **changes})


def work(*operands, **changes):
    columns = dict(items=np.array([4096]), group=(64, 1, 1), flops=64, registers=128, reads=operands)
    return KernelWork(**{**columns, **changes})


def largest(cost):
    """Return the name of the term that decides about the first candidate."""
    return max(cost.terms, key=lambda name: cost.terms[name][0])


def test_equation_1_is_a_dot_product_with_an_intercept():
    strides = np.zeros((2, len(STRIDE_FEATURES)))
    strides[1, STRIDE_FEATURES.index("x 2x2")] = 0.5
    strides[1, STRIDE_FEATURES.index("x 16x16")] = 0.25
    np.testing.assert_allclose(thread_latency(strides, path()), [50.0, 50.0 + 5.0 + 25.0])


@pytest.mark.parametrize(
    ("live", "factor"), [(0, 1), (31, 1), (32, 1), (33, 1.5), (64, 1.5), (65, 2.25), (256, 1.5**7)]
)
def test_equation_2_steps_once_the_lines_exceed_the_cache(live, factor):
    assert thrashing(live, 32, 1.5) == pytest.approx(factor)


@pytest.mark.parametrize(("vec4", "waves"), [(6, 30), (12, 24), (24, 12), (96, 3), (1000, 1)])
def test_equation_4_gives_the_waves_of_an_adreno_640(vec4, waves):
    """The register steps that ArchProbe measured on it: 24 and 12 waves."""
    assert occupancy(vec4 * 16, ADRENO) == waves


def test_equation_6_counts_groups_that_fit_a_unit():
    # 12 warps in flight, groups of 4 warps: 3 groups a unit, 6 on two units.
    assert occupancy_groups([6, 7, 12, 13], 4, 12, 2).tolist() == [1, 2, 2, 3]
    # Groups of 5 warps: 2 a unit although 2.4 would divide; printed eq. 6 would give 24 groups a round.
    assert occupancy_groups(24, 5, 12, 2) == 6
    # A group of 16 warps on a unit of 12: two rounds by itself.
    assert occupancy_groups(2, 16, 12, 2) == 2


def test_the_pure_form_is_equation_7():
    device = replace(ADRENO, image=path())
    strides = np.zeros(len(STRIDE_FEATURES))
    strides[STRIDE_FEATURES.index("x 2x2")] = 1.0
    a, b = reads(strides, count=8, reuse=1, warp_share=8), reads(count=4, reuse=4, warp_share=16)
    cost = predict_kernels(work(a, b, items=np.array([64 * 100]), registers=384), device, pure=True)
    live = 8 * 1 + 16 * 4
    thread = 8 * 60.0 + 4 * 50.0
    decay = 1.5 ** np.ceil((live - 32) / 32)
    waves = 294_912 // (64 * 384)
    rounds = np.ceil(100 / (2 * waves))
    assert cost.thread_ns[0] == pytest.approx(thread)
    assert cost.warp_ns[0] == pytest.approx(thread * decay)
    assert (cost.waves[0], cost.groups[0], cost.rounds[0]) == (waves, 100, rounds)
    assert cost.ms[0] == pytest.approx(thread * decay * rounds / 1e6)
    assert list(cost.terms) == ["read latency"]


def test_one_work_item_prefers_blocks_and_many_prefer_rows():
    """The paper's finding (3.2.1): a small reuse distance scales, a blocked order has the lower latency."""
    device = replace(ADRENO, image=path())
    row, block = np.zeros((2, len(STRIDE_FEATURES)))
    row[STRIDE_FEATURES.index("x 16x16")] = 0.5
    for share, preferred in ((1, 1), (64, 0)):
        operand = reads(
            np.stack([row, block]), reuse=np.array([1.0, 4.0]), warp_share=share, image=True, count=16
        )
        both = work(operand, items=np.array([64, 64]))
        assert np.argmin(predict_kernels(both, device, pure=True).ms) == preferred


def test_terms_are_side_by_side_and_launches_are_added():
    columns = {"flops": 1e6, "chains": 64, "items": np.array([2**20])}
    cost = predict_kernels(work(reads(), **columns), ADRENO)
    assert largest(cost) == "arithmetic"
    expected = 2**20 * 1e6 / (889.9 * 1e9) * 1e3
    assert cost.terms["arithmetic"][0] == pytest.approx(expected)
    assert expected <= cost.ms[0] <= 1.05 * expected + ADRENO.launch_us / 1e3


def test_a_copy_is_bound_by_main_memory():
    nbytes = 256 * 2**20
    items = nbytes / 16
    buffer = reads(image=False, count=1, distinct_bytes=nbytes, warp_lines=16, group_bytes=1024)
    cost = predict_kernels(work(buffer, items=np.array([items]), flops=0), ADRENO)
    assert largest(cost) == "main memory"
    assert cost.terms["main memory"][0] == pytest.approx(nbytes / (ADRENO.buffer.main_gb_s * 1e6))


def test_arithmetic_is_as_fast_as_its_vectors():
    device = replace(DEFAULTS["cpu"], gflops=(1.0, 2.0, 4.0, 8.0, 16.0))
    vectors = np.array([1, 4, 16, 64])
    cost = predict_kernels(work(flops=1e6, vector=vectors, chains=1e3, items=64 * np.ones(4)), device)
    ratios = cost.terms["arithmetic"] / cost.terms["arithmetic"][2]
    np.testing.assert_allclose(ratios, [16, 4, 1, 1])


def test_local_memory_limits_the_waves_of_a_unit():
    plenty, scarce = (predict_kernels(work(reads(), local_bytes=n), ADRENO) for n in (1024, 20_000))
    assert plenty.waves[0] > scarce.waves[0] == 1


def test_elements_read_again_come_from_the_cache_that_holds_those_of_all_groups():
    nbytes = 64 * 2**20
    rows = {"image": False, "count": 64, "distinct_bytes": nbytes, "reuse": 0}
    near, far = ADRENO.buffer.lines * ADRENO.buffer.line_bytes / 64, 64 * ADRENO.l2_bytes

    def main(group_bytes, again):
        operands = [
            reads(**rows, group_bytes=group_bytes),
            reads(**rows, group_bytes=group_bytes, again=again),
        ]
        items = np.array([64.0 * nbytes / group_bytes])
        return predict_kernels(work(*operands, items=items), ADRENO).terms["main memory"][0]

    once = nbytes / (ADRENO.buffer.main_gb_s * 1e6)
    assert main(near, True) == pytest.approx(once)
    assert main(near, False) == pytest.approx(2 * once)
    assert once < main(far, True) <= main(far, False)


def test_tiles_of_products_share_what_they_read_of_local_memory():
    device = replace(ADRENO, tile_gb_s=2 * ADRENO.local_gb_s)
    own, shared = work(local_traffic=16e4), work(tile_reads=1e4)
    term = [predict_kernels(w, d).terms["local memory"][0] for w in (own, shared) for d in (ADRENO, device)]
    np.testing.assert_allclose(np.array(term) / term[0], [1, 1, 1, 0.5])


def test_a_launch_takes_the_time_that_its_work_groups_need_to_start():
    device = replace(ADRENO, group_ns=100.0)
    few, many = (predict_kernels(work(group=(n, 1, 1)), device) for n in (64, 1))
    assert few.terms["starts"][0] == pytest.approx(64 * 100.0 / 1e6)
    assert largest(many) == "starts" and many.ms[0] > few.ms[0]


@given(st.floats(1, 1e4), st.integers(0, 8), st.sampled_from([16, 64, 256]), st.floats(1, 64), st.booleans())
def test_more_of_anything_never_costs_less(count, reuse, group, share, image):
    """Reads, live lines, arithmetic and registers: the cost is monotonic in each."""

    def ms(**changes):
        operand = {"count": count, "reuse": reuse, "warp_share": share, "image": image}
        operand |= {key: value for key, value in changes.items() if key in operand}
        whole = {"flops": 1e3, "registers": 64} | {k: v for k, v in changes.items() if k not in operand}
        launch = work(reads(**operand), group=(group, 1, 1), items=np.array([2**16]), **whole)
        assert (predict_reuse(launch, ADRENO) > 0).all()
        cost = predict_kernels(launch, ADRENO)
        assert np.isfinite(cost.ms).all()
        assert cost.ms[0] >= max(term[0] for term in cost.terms.values())
        return cost.ms[0] * (1 + 1e-9)

    base = ms() / (1 + 1e-9)
    assert ms(count=2 * count) >= base
    assert ms(reuse=reuse + 1) >= base
    assert ms(flops=2e3) >= base
    assert ms(registers=4096) >= base
