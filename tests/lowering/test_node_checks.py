"""Steps with other shapes than PyTorch's are refused: no kernel reads beyond a tensor, or works for ever."""

import pytest

from torchedge.errors import LoweringError
from torchedge.graphs.steps import GraphBuilder, Ref
from torchedge.lowering.assembly import lower

WRONG = {
    "slice": ((8,), {"dim": 0, "start": 4, "end": 8}, (1000,)),
    "diagonal": ((4, 4), {"offset": 0}, (64,)),
    "unfold": ((8,), {"dimension": 0, "size": 4, "step": 2}, (99, 4)),
    "expand": ((1, 8), {"size": [4, 16]}, (4, 16)),
    "roll": ((8,), {"shifts": [1], "dims": [0]}, (80,)),
}


def step_of(kind, shape, attrs, result):
    builder = GraphBuilder()
    x = builder.add("x", shape, "float32", "input")
    outputs = builder.call(kind, {"input": Ref(x), **attrs}, [(result, "float32")])
    return builder.finish([x], outputs)


@pytest.mark.parametrize("kind", WRONG)
def test_no_kernel_reads_beyond_a_tensor(kind):
    with pytest.raises(LoweringError):
        lower(step_of(kind, *WRONG[kind]))


def test_reads_beyond_a_tensor_are_named():
    with pytest.raises(LoweringError, match=r"shape \[1000\] reads \[.*\] of a tensor of shape \[8\]"):
        lower(step_of("slice", *WRONG["slice"]))


def test_a_window_far_larger_than_its_tensor_is_refused():
    window = {"kernel_size": [2**31, 3], "stride": [1, 1], "padding": [0, 1]}
    with pytest.raises(LoweringError, match=r"takes \d+ steps; expected at most"):
        lower(step_of("avg_pool2d", (1, 3, 8, 8), window, (1, 3, 8, 8)))
    window["kernel_size"] = [3, 3]
    window["padding"] = [1, 1]
    assert lower(step_of("avg_pool2d", (1, 3, 8, 8), window, (1, 3, 8, 8))).launches
