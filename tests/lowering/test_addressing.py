"""Numbers of 32 bits count elements, loops and work-items; what is larger is refused by name."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchedge.errors import DeviceError, InputError, LoweringError
from torchedge.expressions.indices import Axis, of
from torchedge.expressions.rendering import is_within
from torchedge.lowering.addressing import MOST, beyond_offsets
from torchedge.lowering.inference import capture_inference_step, lower_inference
from torchedge.lowering.limits import check_limits
from torchedge.lowering.program_files import parse_program, program_document
from torchedge.lowering.targets import TARGETS, Limits

HUGE = 2**31 + 4096


class Function(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        """Return what the function returns."""
        return self.function(*tensors)


def lowered(function, *shapes, target="cpu"):
    args = tuple(torch.empty(shape, device="meta") for shape in shapes)
    return lower_inference(capture_inference_step(Function(function), args), TARGETS[target]).program


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize(
    ("function", "shapes", "words"),
    [
        (lambda x: x + 1, [(HUGE,)], rf"tensor \S+ of shape \[{HUGE}\] has {HUGE} elements"),
        (lambda x, w: x @ w, [(45_000, 2), (2, 50_257)], r"\S+ of shape \[45000, 50257\] has 2261565000"),
        (lambda x: x.expand(2**17, 2**17).sum(), [(1,)], "runs through 17179869184 points"),
        (lambda x: (x[:, None] + x[None]).argmax(), [(2**17,)], "places from 0 to 17179869183"),
        (lambda x: x[None].expand(2**16, -1) * 2, [(2**15,)], r"has 2147483648 elements; expected at most"),
        (lambda x: F.pad(x, (2**30, 2**30)).sum(), [(4,)], "runs through 2147483652 points"),
        (lambda x, y: torch.cat([x, y]) + 1, [(2**30,), (2**30,)], r"add of shape \[2147483648\]"),
        (lambda x: F.adaptive_avg_pool1d(x, 2**16), [(1, 1, 2**16 + 1)], "to 65536 through larger products"),
        (
            lambda x, w: F.conv1d(x, w, stride=2**20, padding=2**30),
            [(1, 1, 4), (1, 1, 3)],
            "convolution of the step computes places from -1073741824",
        ),
    ],
)
def test_what_offsets_cannot_address_is_refused_by_name(function, shapes, words, target):
    with pytest.raises(LoweringError, match=words) as error:
        lowered(function, *shapes, target=target)
    assert "smaller batch" in str(error.value)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_large_virtual_tensors_whose_loops_are_counted_apart_are_lowered(target):
    program = lowered(lambda x: (x[:, None] + x[None]).sum(), (2**17,), target=target)
    assert beyond_offsets(program) is None
    program = lowered(lambda x: x.flip(0) * 2, (2**30, 1), target=target)  # minus the stride, plus the end
    assert beyond_offsets(program) is None


def test_partial_sums_count_in_the_order_in_which_they_are_written():
    a, b = of(Axis("a", 2**16)), of(Axis("b", 2**16))
    assert is_within(a * 2**15 - a * 2**15 + b, MOST)
    assert not is_within(a * 2**16, MOST) and is_within(a * (2**15 - 1) + b, MOST)
    assert not is_within(a * 2**16 - b * 2**16, MOST)  # the first product wraps
    assert not is_within((a * 2**16 + b * 3) // (2**17 + 1), MOST)  # before the quotient


def wrapped(program):
    """Return programs that a file could hold, each with one number that wraps."""
    launch = program.launches[0]
    tensor = replace(program.tensors[0], shape=(2**16, 2**16))
    yield replace(program, tensors=(tensor, *program.tensors[1:]))
    for size in ((2**31,), (2**20, 2**12)):
        yield replace(program, launches=(replace(launch, global_size=size, local_size=None),))
    yield replace(program, launches=(replace(launch, sizes=(2**31,)),))


def test_programs_with_wrapped_numbers_are_neither_read_nor_run():
    program = lowered(lambda x: x * 2, (8, 4))
    check_limits(program, Limits("any"))
    for wrong in wrapped(program):
        with pytest.raises(DeviceError, match="expected"):
            check_limits(wrong, Limits("any"))
        with pytest.raises(InputError):
            parse_program("file", program_document(wrong))
