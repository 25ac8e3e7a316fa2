"""Into how few parts a batch is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.errors import CaptureError, LimitError
from torchedge.graphs import Op, Value
from torchedge.graphs.steps import UPDATES, Step
from torchedge.streaming.repeating import fewest_parts


def step_on(samples, across=False):
    """A step with an input and a weight, which it updates, and what is computed of each sample or of all."""
    shapes = {"weight": (3, 3), "x": (samples, 3), "y": (samples, samples if across else 3), "new": (3, 3)}
    values = tuple(Value(name, shape, "float32") for name, shape in shapes.items())
    return Step(values, (Op("f", (0, 1), (2,)), Op("g", (0, 2), (3,), scope=UPDATES)), (1,), (), ((0, 3),))


@given(st.integers(1, 96), st.integers(0, 100), st.integers(1, 3))
def test_parts_are_equal_and_the_largest_that_fit(samples, room, least):
    """Parts of fewer samples than `least` cannot be captured, as batch norms of single ones."""
    tried = []

    def capture(parts):
        if parts > 1 and samples // parts < least:
            raise CaptureError("too few samples")
        return step_on(samples // parts)

    def attempt(parts):
        tried.append(parts)
        if samples // parts > room:
            raise LimitError(f"{samples // parts} samples", works_bytes=samples // parts)
        return f"plans of {samples // parts}"

    possible = [n for n in range(1, samples + 1) if samples % n == 0 and (n == 1 or samples // n >= least)]
    fitting = [n for n in possible if samples // n <= room]
    if not fitting:
        with pytest.raises(LimitError, match=f"{samples // possible[-1]} samples"):
            fewest_parts(samples, capture, attempt)
        return
    assert fewest_parts(samples, capture, attempt) == (fitting[0], f"plans of {samples // fitting[0]}")
    assert len(tried) == len({*tried}) <= 2 + samples.bit_length()


def test_a_batch_is_not_cut_where_something_is_computed_across_samples():
    def attempt(parts):
        raise LimitError("no plan", works_bytes=8 // parts)

    with pytest.raises(LimitError, match="no plan; the batch of 8 is not cut into parts, as y is") as raised:
        fewest_parts(8, lambda parts: step_on(8 // parts, across=True), attempt)
    assert raised.value.works_bytes == 8
