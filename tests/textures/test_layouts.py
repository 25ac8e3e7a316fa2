"""Patterns and layouts: each texel has one place, and what was packed comes back."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.errors import DeviceError
from torchedge.textures.layouts import PATTERNS, Layout, channels_last, fitted, image_layouts, row_major

sizes = st.integers(1, 40)


@pytest.mark.parametrize("name", sorted(PATTERNS))
@given(steps=sizes, lines=sizes)
def test_each_texel_has_its_own_place_within_the_extent(name, steps, lines):
    pattern = PATTERNS[name]
    width, height = pattern.extent(steps, lines)
    places = {pattern.place(step, line) for step in range(steps) for line in range(lines)}
    assert len(places) == steps * lines
    assert all(0 <= x < width and 0 <= y < height for x, y in places)
    rows = int(name.partition("-")[2] or 1)
    assert width * height < steps * lines + rows * lines


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_arrays_are_placed_as_numbers_are(name):
    step, line = np.meshgrid(np.arange(19), np.arange(5))
    x, y = PATTERNS[name].place(step, line)
    assert all(
        PATTERNS[name].place(s, n) == (i, j)
        for s, n, i, j in zip(step.flat, line.flat, x.flat, y.flat, strict=True)
    )


def test_block_4_is_listing_1():
    # (int2)(r_idx / 4, w_idx * 4 + r_idx % 4)
    assert [PATTERNS["block-4"].place(r, 3) for r in (0, 3, 4, 9)] == [(0, 12), (0, 15), (1, 12), (2, 13)]


@st.composite
def layouts(draw):
    rank = draw(st.integers(0, 5))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank)))
    storage = draw(st.sampled_from(["buffer", "image", "image_buffer"]))
    return shape, Layout(
        tuple(draw(st.permutations(range(rank)))),
        storage,
        draw(st.integers(0, rank)),
        draw(st.sampled_from(sorted(PATTERNS))),
        draw(st.integers(1, 5)),
    )


@given(layouts(), st.sampled_from(["float32", "float16", "int64", "bool"]))
def test_what_was_packed_comes_back(case, dtype):
    shape, layout = case
    array = (np.arange(1, 1 + np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)
    held = layout.pack(array)
    assert held.flags.c_contiguous and held.dtype == array.dtype
    if layout.storage != "buffer":
        width, height = layout.extent(shape)
        assert held.shape == (height, width, 4)
        assert held.nbytes == layout.nbytes(shape, dtype)
        assert np.count_nonzero(held) == np.count_nonzero(array)  # the rest is zero
    back = layout.unpack(held, shape)
    assert back.shape == shape and back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_buffer_lies_as_its_strides_say():
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    layout = channels_last(4)
    strides = layout.strides(array.shape)
    held = layout.pack(array)
    for index in np.ndindex(array.shape):
        assert held[np.dot(index, strides)] == array[index]
    np.testing.assert_array_equal(row_major(4).pack(array), array.reshape(-1))


def test_an_image_lies_as_its_places_say():
    shape = (3, 2, 5)  # lines by dimension 0, steps by dimension 1 and groups of four of dimension 2
    array = np.arange(30).reshape(shape)
    layout = Layout((0, 1, 2), "image", 1, "block-2", 2)
    held = layout.pack(array)
    for n, h, c in np.ndindex(shape):
        x, y = layout.place(h * 2 + c // 4, n, shape)
        assert held[y, x, c % 4] == array[n, h, c]


@pytest.mark.slow
@given(layouts(), st.integers(1, 30), st.integers(1, 60))
def test_fitted_takes_the_least_fold_that_fits(case, max_width, max_height):
    shape, layout = case
    fits = [
        fold
        for fold in range(1, 4000)
        if all(
            size <= most
            for size, most in zip(
                replace(layout, fold=fold).extent(shape), (max_width, max_height), strict=True
            )
        )
    ]
    if layout.storage == "buffer":
        assert fitted(layout, shape, max_width, max_height) == layout
    elif fits:
        assert fitted(layout, shape, max_width, max_height).fold == fits[0]
    else:
        with pytest.raises(DeviceError, match="choose another pattern"):
            fitted(layout, shape, max_width, max_height)


@given(layouts(), st.data())
def test_numbers_beyond_a_border_lead_outside_the_image(case, data):
    shape, layout = case
    if 0 in shape or layout.storage == "buffer" or not shape:
        return
    width, height = layout.extent(shape)
    borders = layout.borders(shape)
    place = [data.draw(st.integers(0, size - 1)) for size in shape]
    for d in borders:
        place[d] = data.draw(st.integers(-9, shape[d] + 9))
    x, y, _ = layout.texel(place, shape)
    outside = [d for d in borders if not 0 <= place[d] < shape[d]]
    assert bool(outside) == (not (0 <= x < width and 0 <= y < height))


def test_rows_and_columns_of_a_picture_are_borders_where_nothing_else_shares_their_coordinate():
    order = (0, 2, 3, 1)
    for pattern in ("row", "column"):
        picture = Layout(order, "image", 2, pattern)
        assert picture.borders((1, 8, 5, 6)) == {2, 3}
        assert picture.borders((4, 8, 5, 6)) == {0, 3}  # the pictures of a batch share y with the rows
        assert replace(picture, split=1).borders((4, 8, 5, 6)) == {0, 2}
        assert replace(picture, order=(2, 0, 3, 1)).borders((4, 8, 5, 6)) == {2, 3}
    assert Layout(order, "image", 2, "block-4").borders((1, 8, 5, 6)) == {2}
    assert Layout(order, "image", 2, "row", 2).borders((1, 8, 5, 6)) == {2}
    assert channels_last(4).borders((1, 8, 5, 6)) == set()


def test_a_large_weight_gets_more_lines_instead_of_a_fold():
    order, shape = (2, 3, 1, 0), (512, 512, 3, 3)
    weight = Layout(order, "image")
    assert replace(weight, split=2).extent(shape) == (65_536, 9)
    first, *others = image_layouts(weight, shape, 16_384, 16_384)
    assert (first.split, first.fold, first.extent(shape)) == (3, 1, (128, 4608))
    assert [(image.split, image.fold) for image in others] == [(2, 4), (1, 12)]
    small = image_layouts(weight, (64, 64, 3, 3), 16_384, 16_384)
    assert [image.split for image in small] == [2, 3, 1]  # nine lines first, as they fit
    assert [image.split for image in image_layouts(weight, (64, 512, 1, 1), 16_384, 16_384)] == [3, 1]


@given(layouts(), st.integers(1, 30), st.integers(1, 60))
def test_images_of_all_splits_fit_and_differ(case, max_width, max_height):
    shape, layout = case
    if 0 in shape or layout.storage == "buffer":
        return
    images = image_layouts(layout, shape, max_width, max_height)
    extents = [image.extent(shape) for image in images]
    assert all(width <= max_width and height <= max_height for width, height in extents)
    assert [image.fold for image in images] == sorted(image.fold for image in images)
    texels = {(image.texels(shape)) for image in images}
    assert len(texels) == len(images)
