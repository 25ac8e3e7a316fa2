"""Sizes: marked numbers become arguments, each role and number one."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.expressions.sizes import argument, as_arguments, as_literals, digits, quotient, size

TEXT = f"t0[{size(64, 'a i')} * i + {size(64, 'b')}] = t1[{size(64, 'a i')} * i - {size(7, 'c')}];"


def test_numbers_with_one_role_are_one_argument():
    assert as_arguments(TEXT) == ("t0[n0 * i + n1] = t1[n0 * i - n2];", (64, 64, 7))


def test_other_numbers_give_the_same_text():
    other = TEXT.replace("64", "3").replace("\x017\x02", "\x01-3\x02")
    assert as_arguments(other) == (as_arguments(TEXT)[0], (3, 3, -3))


def test_one_role_with_two_numbers_is_two_arguments():
    assert as_arguments(f"{size(10, 'x')} {size(20, 'x')}") == ("n0 n1", (10, 20))


def test_numbers_may_stay():
    assert as_literals(TEXT) == "t0[64 * i + 64] = t1[64 * i - 7];"


def test_a_role_may_hold_sizes():
    assert as_arguments(size(5, f"{size(20)} + x")) == ("n0", (5,))


def test_small_numbers_stay_unless_asked():
    assert as_arguments(f"{size(4)} {argument(4, '')}") == ("4 n0", (4,))


def value(text, numbers):
    """Compute a C expression of unsigned ints by Python's own arithmetic."""
    names = {f"n{k}": number for k, number in enumerate(numbers)} | {"x": numbers[-1]}
    python = text.replace("(uint)", "").replace("(int)", "").replace(" / ", " // ")
    return eval(python, {"mul_hi": lambda a, b: a * (b % 2**32) >> 32}, names)


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_a_quotient_is_exact(number, divisor):
    text, sizes = as_arguments(quotient("x", divisor))
    assert value(text, (*sizes, number)) == number // divisor


@pytest.mark.parametrize("divisor", [1, 4, 5, 7, 16, 17, 2**16, 2**16 + 1, 2**30 + 1, 2**31 - 1])
@pytest.mark.parametrize("number", [0, 1, 2**31 - 1])
def test_quotients_at_the_ends(number, divisor):
    for dividend in {number, min(2**31 - 1, number * divisor), max(0, number // divisor * divisor - 1)}:
        text, sizes = as_arguments(quotient("x", divisor))
        assert value(text, (*sizes, dividend)) == dividend // divisor


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0))
def test_digits_of_a_mixed_radix(extents, number):
    number %= prod(extents)
    names = {"x": number, "mul_hi": lambda a, b: a * (b % 2**32) >> 32}
    for name, text in digits("x", [(f"d{k}", n) for k, n in enumerate(extents)]):
        plain = as_literals(text).replace("(uint)", "").replace("(int)", "").replace(" / ", " // ")
        names[name] = eval(plain, dict(names))
    for k, extent in enumerate(extents):
        assert names[f"d{k}"] == number % extent
        number //= extent
