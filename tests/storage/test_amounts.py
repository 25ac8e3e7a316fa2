"""Amounts of memory: a number is MiB, a text has its unit, and everything else is refused."""

import numpy as np
import pytest

from torchedge.errors import InputError
from torchedge.storage.amounts import MOST_MIB, bytes_of, mib_of, with_unit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500MiB", 500 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("2kib", 2048),
        ("9B", 9),
        ("1TiB", 2**40),
        ("4G", 2**32),
        ("4g", 2**32),
        ("4GB", 4 * 10**9),
        ("4kB", 4000),
        ("4096", 2**32),
        ("1125899906842623B", 2**50 - 1),
    ],
)
def test_texts_are_read(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("amount", [7, 7.0, "7", "7MiB", np.int32(7), np.float32(7)])
def test_numbers_are_mib(amount):
    assert bytes_of(amount) == 7 * 2**20 and mib_of(amount) == 7
    assert bytes_of(with_unit(12_345)) == 12_345 and with_unit(None) is None


@pytest.mark.parametrize("text", ["", "MiB", "1 XB", "-1", "1e3", "0x10", "1 2", "1,5MiB", "٣MiB", "1" * 40])
@pytest.mark.parametrize("wrap", [str, lambda text: [text]])
def test_anything_else_is_refused(text, wrap):
    with pytest.raises(InputError, match=r"memory_limit is .*; expected a number of MiB such as 4096, or"):
        bytes_of(wrap(text), "memory_limit")


@pytest.mark.parametrize("amount", [0, -1, 0.0, "0MiB", "1025TiB"])
def test_amounts_out_of_bounds_are_refused(amount):
    with pytest.raises(InputError, match="expected 1 byte to 1 PiB"):
        bytes_of(amount)


@pytest.mark.parametrize("amount", [True, None, float("nan"), float("inf"), -float("inf"), 1j])
def test_other_types_are_refused(amount):
    with pytest.raises(InputError, match="expected a number of MiB"):
        bytes_of(amount)


@pytest.mark.parametrize("amount", [8 * 2**30, str(8 * 2**30), MOST_MIB + 1])
def test_numbers_of_bytes_are_not_taken_for_mib(amount):
    assert bytes_of(MOST_MIB) == 2**44
    with pytest.raises(InputError, match=r"numbers are MiB\. For bytes write"):
        bytes_of(amount)
