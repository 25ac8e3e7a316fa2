"""Limits of devices: each is held against what asks for most of it, and named with its source."""

from dataclasses import replace

import pytest
from oracles.opencl_devices import GPU, PHONE
from oracles.small_programs import chain, image_copy, pointwise, program, tensor, vector_add

from torchedge.errors import DeviceError
from torchedge.lowering.limits import check_limits
from torchedge.lowering.targets import Limits, limits_of
from torchedge.textures.layouts import Layout

ADD = vector_add()
GROUPED = replace(vector_add(1024), launches=(replace(vector_add(1024).launches[0], local_size=(64,)),))
IMAGE = image_copy((3, 7, 5, 6), Layout((0, 2, 3, 1), "image", 2))
PITCHED = image_copy((3, 7, 5, 6), Layout((0, 2, 3, 1), "", 2, row_texels=32), storage="image_buffer")


def with_kernel(text="", **changes):
    kernel = ADD.kernels[0]
    return replace(ADD, kernels=(replace(kernel, source=text + kernel.source, **changes),))


def typed(dtype, layout=None):
    held = tensor("z", (8, 4), "output", dtype, layout)
    return program([held], [pointwise("one", "a[i] = 1;", ["write"])], [("one", ["z"], [8])])


BEYOND = [
    (ADD, {"memory_bytes": 11_999}, "program small takes 12000 bytes, box takes at most 11999"),
    (chain(), {"memory_bytes": 16_095}, "program small takes 16096 bytes"),
    (ADD, {"allocation_bytes": 3999}, "input x takes 4000 bytes at once, box takes at most 3999"),
    (chain(), {"allocation_bytes": 8000}, "arena of small takes 8096 bytes at once"),
    (GROUPED, {"work_group": 63}, r"launch 0, kernel add has work-groups of \[64\], box takes at most 63"),
    (GROUPED, {"work_item_sizes": (32, 32, 32)}, r"work-groups of \[64\], box takes at most \(32"),
    (IMAGE, {"image_width": 11}, "input x is an image of 12 x 15 texels, box takes at most 11"),
    (IMAGE, {"image_height": 14}, "image of 12 x 15 texels, box takes at most 14"),
    (PITCHED, {"image_from_buffer": False}, "input x is an image made from a buffer, box takes none"),
    (PITCHED, {"pitch_texels": 64}, "input x has rows of 32 texels, box takes multiples of 64"),
    (PITCHED, {"address_bytes": 2**20}, "begins at byte [0-9]+ of the arena, box takes multiples of 1048576"),
    (chain(), {"offset_bytes": 8192}, "intermediate t1 begins at byte 4096 of the arena"),
    (with_kernel(local_bytes=4352), {"local_bytes": 4000}, "kernel add takes 4352 bytes of local"),
    (with_kernel("#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n"), {"half_arithmetic": False}, "with half"),
    (typed("float64"), {"double": False}, "output z is float64, box takes none"),
    (typed("float16", Layout((0, 1), "image", 1)), {"half_images": False}, "is an image of float16"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "given", "message"), BEYOND)
def test_what_is_beyond_a_limit_is_named(made, given, message):
    check_limits(made, Limits("box"))
    with pytest.raises(DeviceError, match=message):
        check_limits(made, Limits("box", **given))


@pytest.mark.parametrize(("made", "given", "message"), BEYOND)
def test_what_just_fits_is_taken(made, given, message):
    def grown(value):
        return tuple(2 * v for v in value) if isinstance(value, tuple) else value + 4096

    steps = {"pitch_texels": 32, "address_bytes": 4, "offset_bytes": 128}
    wider = {
        name: steps.get(name, True if isinstance(value, bool) else grown(value))
        for name, value in given.items()
    }
    check_limits(made, Limits("box", **wider))


def test_groups_that_do_not_divide_are_refused():
    made = replace(GROUPED, launches=(replace(GROUPED.launches[0], local_size=(7,)),))
    with pytest.raises(DeviceError, match=r"\[1024\] in groups of \[7\], expected multiples"):
        check_limits(made, Limits("box"))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
def test_dtypes_that_the_device_lacks_are_named(dtype):
    made = replace(ADD, tensors=(tensor("x", (1000,), "input", dtype), *ADD.tensors[1:]))
    with pytest.raises(DeviceError, match=f"input x is {dtype}, .*QUALCOMM"):
        check_limits(made, limits_of(PHONE))


def test_every_limit_that_a_driver_reports_is_known():
    assert set(limits_of(PHONE).unknown) == {"memory_bytes", "allocation_bytes", "address_bytes"}
    assert "pitch_texels" in limits_of(GPU).unknown
    assert limits_of(replace(GPU, images=False)).image_width == 0
