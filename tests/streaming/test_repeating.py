"""Into how few parts a batch is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.errors import LimitError
from torchedge.streaming.repeating import fewest_parts


@given(st.integers(1, 96), st.integers(0, 100))
def test_parts_are_equal_and_the_largest_that_fit(samples, room):
    tried = []

    def attempt(parts):
        tried.append(parts)
        if samples // parts > room:
            raise LimitError(f"{samples // parts} samples", works_bytes=samples // parts)
        return f"in {parts}"

    if not room:
        with pytest.raises(LimitError, match="1 samples"):
            fewest_parts(samples, attempt)
        return
    parts, made = fewest_parts(samples, attempt)
    fitting = [n for n in range(1, samples + 1) if samples % n == 0 and samples // n <= room]
    assert parts == min(fitting) and made == f"in {parts}"
    assert len(tried) == len({*tried}) <= 2 + samples.bit_length()
