"""What a program asks, held against devices that have less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.opencl_devices import GPU, PHONE
from oracles.small_programs import chain, tensor, vector_add

from torchedge.errors import DeviceError
from torchedge.runtime.limits import check_limits, limits_of


def test_what_fits_passes():
    check_limits(chain(), GPU if GPU.base_alignment <= 128 else PHONE)


def test_offsets_have_the_device_s_alignment():
    with pytest.raises(DeviceError, match=r"QUALCOMM.* takes multiples of 8192"):
        check_limits(chain(), replace(PHONE, base_alignment=8192))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
def test_dtypes_that_the_device_lacks_are_named(dtype):
    made = vector_add()
    made = replace(made, tensors=(tensor("x", (1000,), "input", dtype), *made.tensors[1:]))
    with pytest.raises(DeviceError, match=f"input x is {dtype}, .*QUALCOMM"):
        check_limits(made, PHONE)


@pytest.mark.parametrize(
    ("size", "local", "message"),
    [
        ((2048,), (2048,), "takes at most 1024"),
        ((1, 1, 128), (1, 1, 128), r"at most \(1024, 1024, 64\)"),
        ((1000,), (64,), r"\[1000\].*\[64\]"),
    ],
)
def test_work_groups_that_the_device_does_not_take(size, local, message):
    made = vector_add()
    made = replace(made, launches=(replace(made.launches[0], global_size=size, local_size=local),))
    with pytest.raises(DeviceError, match=f"launch 0, kernel add.*{message}"):
        check_limits(made, PHONE)


def test_every_limit_that_a_driver_reports_is_known():
    assert set(limits_of(PHONE).unknown) == {"memory_bytes", "allocation_bytes", "address_bytes"}
    assert "pitch_texels" in limits_of(GPU).unknown
    assert limits_of(replace(GPU, images=False)).image_width is None
