"""Sizes: marked numbers become arguments, each role and number one."""

from torchedge.expressions.sizes import as_arguments, as_literals, size

TEXT = f"t0[{size(64, 'a i')} * i + {size(64, 'b')}] = t1[{size(64, 'a i')} * i - {size(7, 'c')}];"


def test_numbers_with_one_role_are_one_argument():
    assert as_arguments(TEXT) == ("t0[n0 * i + n1] = t1[n0 * i - n2];", (64, 64, 7))


def test_other_numbers_give_the_same_text():
    other = TEXT.replace("64", "3").replace("\x017\x02", "\x01-3\x02")
    assert as_arguments(other) == (as_arguments(TEXT)[0], (3, 3, -3))


def test_one_role_with_two_numbers_is_two_arguments():
    assert as_arguments(f"{size(1, 'x')} {size(2, 'x')}") == ("n0 n1", (1, 2))


def test_numbers_may_stay():
    assert as_literals(TEXT) == "t0[64 * i + 64] = t1[64 * i - 7];"


def test_a_role_may_hold_sizes():
    assert as_arguments(size(5, f"{size(2)} + x")) == ("n0", (5,))
