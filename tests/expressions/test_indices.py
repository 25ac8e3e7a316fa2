"""The index algebra: what it simplifies stays equal, number by number."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchedge.expressions.indices import ZERO, Axis, Floor, constant, inverse, of, reshape, unflatten

STEPS = st.lists(st.tuples(st.sampled_from("/%+*"), st.sampled_from([1, 2, 3, 4, 6, 8, 12])), max_size=5)


def value_of(index, at):
    total = index.const
    for atom, coefficient in index.terms:
        if isinstance(atom, Axis):
            found = at[atom]
        else:
            inner = value_of(atom.index, at)
            assert inner >= 0  # OpenCL rounds towards zero, an index towards minus infinity
            found = inner // atom.divisor if isinstance(atom, Floor) else inner % atom.divisor
        total += coefficient * found
    return total


def points(axes):
    return [dict(zip(axes, p, strict=True)) for p in itertools.product(*[range(a.extent) for a in axes])]


@settings(max_examples=200)
@given(
    st.tuples(*[st.integers(1, 6)] * 3),
    st.tuples(*[st.sampled_from([0, 1, 2, 3, 4, 6, -1, 12])] * 3),
    st.integers(-5, 8),
    STEPS,
)
def test_simplified_indices_keep_their_values_and_ranges(extents, coefficients, start, steps):
    axes = [Axis(n, e) for n, e in zip("ijk", extents, strict=True)]
    index = constant(start)
    for axis, coefficient in zip(axes, coefficients, strict=True):
        index = index + of(axis) * coefficient
    found = {tuple(p.values()): value_of(index, p) for p in points(axes)}
    for sign, number in steps:
        extra = axes[number % 3]
        index = {
            "/": index // number,
            "%": index % number,
            "*": index * number,
            "+": index + of(extra) * number,
        }[sign]
        for p in points(axes):
            old = found[tuple(p.values())]
            new = {"/": old // number, "%": old % number, "*": old * number, "+": old + p[extra] * number}[
                sign
            ]
            found[tuple(p.values())] = new
    low, high = index.range
    for p in points(axes):
        assert value_of(index, p) == found[tuple(p.values())]
        assert low <= value_of(index, p) <= high


@pytest.mark.parametrize(
    ("old", "new"),
    [((2, 3, 4, 5), (6, 20)), ((6, 20), (2, 3, 4, 5)), ((4, 6), (3, 8)), ((2, 1, 3), (6,)), ((7,), (7, 1))],
)
def test_a_reshape_reads_the_element_at_the_same_place(old, new):
    axes = [Axis(f"a{k}", n) for k, n in enumerate(new)]
    indices = reshape([of(a) for a in axes], old, new)
    for p in points(axes):
        place = 0
        for axis in axes:
            place = place * axis.extent + p[axis]
        got = 0
        for index, size in zip(indices, old, strict=True):
            got = got * size + value_of(index, p)
        assert got == place


def test_equal_indices_are_equal_whatever_way_they_were_made():
    i, j = of(Axis("i", 4)), of(Axis("j", 8))
    assert (i * 8 + j) // 8 == i
    assert (i * 8 + j) % 8 == j
    assert i + j - i == j
    assert i - i == ZERO == 0
    assert hash(i * 2 + j) == hash(j + i + i)


def test_dividing_by_zero_is_refused():
    with pytest.raises(ValueError, match="divided by 0; expected a positive number"):
        of(Axis("i", 4)) // 0


def test_quotients_of_remainders_join_again():
    """What a picture's place in a flat loop becomes: n, h and w of d, put together to an offset."""
    d = of(Axis("d", 8 * 56 * 56))
    n, h, w = d // 3136, d % 3136 // 56, d % 56
    assert n * 301056 + h * 5376 + w * 96 == d * 96


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.permutations(range(4)))
def test_the_inverse_of_reshapes_and_permutations_finds_the_same_point(sizes, order):
    """Windows of an image and heads of attention: digits of the axes in another order."""
    order = [d for d in order if d < len(sizes)]
    permuted = [sizes[d] for d in order]
    whole = Axis("a", math.prod(sizes))
    digits = unflatten(of(whole), permuted)
    indices = [digits[order.index(d)] for d in range(len(sizes))]
    element = [of(Axis(f"e{d}", n)) if n > 1 else ZERO for d, n in enumerate(sizes)]
    moved = inverse(indices, element, [whole])
    assert moved is not None
    assert [i.substitute(moved) for i in indices] == element


def test_a_lane_decides_nothing_about_quotients_by_wider_numbers():
    block, lane = of(Axis("b", 48)), of(Axis("lane", 4))
    assert (block * 4 + lane) // 32 == block // 8
    assert (block * 4 + lane) % 32 == block % 8 * 4 + lane
    assert (block * 4 + lane + 2) // 32 != block // 8  # the lane reaches the next block
