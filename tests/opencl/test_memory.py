"""Buffers and images: what a device refuses, and what comes back from it."""

from dataclasses import replace

import numpy as np
import pytest

from torchedge.errors import DeviceError, DeviceMemoryError
from torchedge.opencl import open_context
from torchedge.opencl.memory import (
    CHANNEL_TYPES,
    Transposer,
    allocate_buffer,
    allocate_image,
    download,
    fill,
    image_over_buffer,
    sub_buffer,
    upload,
)

pytest.importorskip("pyopencl")


def comes_back(allocate, held, *sizes):
    """Copy an array to new memory and back."""
    context = open_context()
    memory = allocate(context, *sizes, "test")
    upload(context, context.queue, memory, held)
    found = np.empty_like(held)
    download(context, context.queue, memory, found)
    np.testing.assert_array_equal(found, held)


@pytest.mark.parametrize("dtype", [*CHANNEL_TYPES, "float64", "int64"])
def test_what_is_copied_to_a_buffer_comes_back(dtype):
    held = np.arange(24).astype(dtype)
    comes_back(allocate_buffer, held, held.nbytes)


@pytest.mark.parametrize("dtype", CHANNEL_TYPES)
def test_what_is_copied_to_an_image_or_its_corner_comes_back(dtype):
    held = np.arange(5 * 7 * 4).reshape(5, 7, 4).astype(dtype)
    for sizes in ((7, 5), (9, 9)):
        comes_back(allocate_image, held, *sizes, dtype)


def test_parts_of_a_buffer_lie_where_they_were_asked():
    context = open_context()
    step = context.device.base_alignment
    whole = allocate_buffer(context, 3 * step, "test")
    fill(context, context.queue, whole, 0xFF)
    upload(context, context.queue, sub_buffer(context, whole, step, 8, "part"), np.array([5, 6], np.int32))
    found = np.empty(3 * step, np.uint8)
    download(context, context.queue, whole, found)
    assert found[step : step + 8].view(np.int32).tolist() == [5, 6]
    assert (np.delete(found, range(step, step + 8)) == 0xFF).all()


def test_images_that_a_device_lacks_are_refused():
    context = open_context()
    width = context.device.image_width + 1
    with pytest.raises(DeviceError, match=f"weight: an image of {width} x 1 texels, .* fold it"):
        allocate_image(context, width, 1, "float32", "weight")
    with pytest.raises(DeviceError, match="no images of int64; use a buffer"):
        allocate_image(context, 4, 4, "int64", "weight")
    without = replace(context, device=replace(context.device, images=False))
    with pytest.raises(DeviceError, match="has no images; lower the program for it with buffers"):
        allocate_image(without, 4, 4, "float32", "weight")
    no_half = replace(context, device=replace(context.device, half_images=False))
    with pytest.raises(DeviceError, match="no images of float16"):
        allocate_image(no_half, 4, 4, "float16", "weight")
    little = replace(context, device=replace(context.device, allocation_bytes=255))
    with pytest.raises(DeviceMemoryError, match=r"weight needs 256 bytes, .* at most 255 in one allocation"):
        allocate_image(little, 4, 4, "float32", "weight")
    buffer = allocate_buffer(context, 4096, "weight")
    from_none = replace(context, device=replace(context.device, image_from_buffer=False))
    with pytest.raises(DeviceError, match="makes no images from buffers"):
        image_over_buffer(from_none, buffer, 16, 4, 0, "float32", "weight")
    aligned = replace(context, device=replace(context.device, image_from_buffer=True, pitch_alignment=64))
    with pytest.raises(DeviceError, match=r"rows of 16 texels, .* takes multiples of 64"):
        image_over_buffer(aligned, buffer, 16, 4, 0, "float32", "weight")


def test_an_image_over_a_buffer_shares_its_bytes():
    context = open_context()
    if not context.device.image_from_buffer:
        pytest.skip("this device makes no images from buffers")
    row = max(context.device.pitch_alignment, 64)
    buffer = allocate_buffer(context, 4 * row * 16, "test")
    image = image_over_buffer(context, buffer, 10, 4, row, "float32", "test")
    held = np.arange(4 * 10 * 4, dtype=np.float32).reshape(4, 10, 4)
    upload(context, context.queue, image, held)
    found = np.empty((4, row, 4), np.float32)
    download(context, context.queue, buffer, found.reshape(-1))
    np.testing.assert_array_equal(found[:, :10], held)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_nothing_is_transposed_without_a_launch(sizes):
    context = open_context()
    target = allocate_buffer(context, 4, "a target")
    upload(context, context.queue, target, np.array([7.0], np.float32))
    Transposer(context, context.queue).transpose(target, target, sizes, 4)
    kept = np.zeros(1, np.float32)
    download(context, context.queue, target, kept)
    assert kept.tolist() == [7.0]
