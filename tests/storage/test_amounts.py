"""Amounts of memory: every unit, with and without a blank; anything else is none."""

import pytest

from torchedge.storage.amounts import bytes_of


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("500MiB", 500 * 2**20), (" 1.5 GiB ", 3 * 2**29), ("2kib", 2048), ("9B", 9), ("1TiB", 2**40)],
)
def test_amounts_are_read(text, size):
    assert bytes_of(text) == size


def test_numbers_without_a_unit_count_in_the_one_asked_for():
    assert bytes_of("1.5", unit=2**20) == 3 * 2**19 and bytes_of("3b", unit=2**20) == 3


@pytest.mark.parametrize("text", ["", "MiB", "1 MB", "-1", "1e3", "0x10", "1 2", "1,5MiB", "٣MiB", "1" * 40])
def test_other_texts_are_none(text):
    assert bytes_of(text) is None
