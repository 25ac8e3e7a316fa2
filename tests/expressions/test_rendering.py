"""Scalar expressions as OpenCL C: vectors of neighbours, guards that touch nothing outside."""

import numpy as np
import pytest

from torchedge.errors import InputError
from torchedge.expressions.dialect import Site, literal
from torchedge.expressions.indices import Axis, Fetched, constant, of
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Position, Read, apply, cast, factored, guarded, substitute, where
from torchedge.expressions.sizes import as_literals
from torchedge.textures.layouts import Layout, row_major

N, C = Axis("n", 6), Axis("c", 16)


def rendered(scalar, width=1, **layouts):
    """Return the statements; tensors are called by the names they are given as."""

    def site_of(name):
        shape, dtype = SHAPES[name]
        return Site(name, shape, dtype, layouts.get(name, row_major(len(shape))))

    renderer = Renderer(site_of, C if width > 1 else None, width)
    result = renderer.value(scalar)
    return as_literals("\n".join([*renderer.lines, result]))


# fmt: off
SHAPES = {
    "x": ((6, 16), "float32"), "b": ((16,), "float32"), "h": ((6, 16), "float16"), "m": ((6, 16), "bool"),
    "w": ((6, 32), "float32"), "o": ((33,), "float32"), "t": ((16, 6), "float32"), "i": ((6,), "int64"),
    "k": ((16,), "int64"),
}
# fmt: on


def load(name, *indices):
    return Read(name, tuple([constant(i) if isinstance(i, int) else i for i in indices]), SHAPES[name][1])


def test_neighbours_are_read_as_an_aligned_vector_and_what_all_share_once():
    text = rendered(load("x", of(N), of(C)) * load("x", of(N), 0), 4)
    assert "*(__global const float4*)(x + 4 * c + 16 * n)" in text
    assert "x[16 * n]" in text


def test_neighbours_that_lie_apart_are_gathered():
    text = rendered(load("t", of(C), of(N)), 4)
    assert text.count("t[") == 4


@pytest.mark.parametrize(
    ("name", "place", "part"),
    [("w", 0, "02"), ("w", 1, "13"), ("w", 2, None), ("o", 0, None), ("o", 1, None)],
)
def test_every_other_neighbour_is_picked_of_two_whole_vectors(name, place, part):
    index = of(C) * 2 + place
    text = rendered(load(name, *([of(N)] if name == "w" else []), index), 4)
    if part is None:  # they begin between vectors, or would end behind the tensor
        assert text.count(f"{name}[") == 4
    else:
        assert text.count(f"*(__global const float4*)({name} + ") == 2
        picked = ", ".join(f"{vector}.s{place}" for vector in ("v1", "v2") for place in part)
        assert f"(float4)({picked})" in text and "- " not in text


def test_an_unaligned_vector_goes_through_the_macro_for_any_address():
    text = rendered(load("b", of(C) + (-1)), 4)
    assert "te_load_float4(b + 4 * c - 1)" in text


def test_halves_and_masks_are_converted_where_they_are_read():
    assert "te_half4(h + " in rendered(load("h", of(N), of(C)), 4)
    assert "convert_int4" in rendered(load("m", of(N), of(C)), 4)


def test_a_guard_keeps_the_address_inside():
    text = rendered(guarded([(of(N) + (-1), 0, 6)], load("x", of(N) + (-1), of(C))))
    assert "? c + 16 * n - 16 : 0" in text
    assert "n - 1 >= 0" in text
    assert "< 6" not in text  # always holds: not asked


def test_bounds_that_always_hold_vanish_and_those_that_never_do_leave_the_other_value():
    inside, value = load("b", of(C)), load("b", of(C))
    assert guarded([(of(C), 0, 16)], value) == inside
    assert guarded([(of(C), 16, 20)], value, 7.0).value == 7.0


def test_a_fetched_index_is_an_index_into_another_tensor():
    row = Fetched(load("i", of(N)), 0, 5)
    assert "x[c + 16 * ((int)" in rendered(load("x", of(row), of(C)))


def test_positions_differ_between_lanes():
    assert rendered(Position(of(C), "int32"), 4).endswith(
        "(int4)((int)(4 * c), (int)(4 * c + 1), (int)(4 * c + 2), (int)(4 * c + 3))"
    )


def test_texels_are_read_whole_where_the_lanes_are_their_channels():
    image = Layout((0, 1), "image", split=1)
    text = rendered(load("x", of(N), of(C)), 4, x=image)
    assert "read_imagef(x, te_sampler, (int2)(c, n))" in text
    single = rendered(load("x", of(N), of(C)), 1, x=image)
    assert "te_lane(" in single


def test_choices_and_casts_of_masks():
    text = rendered(where(load("m", of(N), of(C)), load("x", of(N), of(C)), 0), 4)
    assert "? " in text
    assert "convert_float4((-" in rendered(cast(load("m", of(N), of(C)), "float32"), 4)
    # A mask widened to 64 bits is compared with zero: rusticl 22.3 loses its sign, which `?:` reads.
    assert "!= (long4)(0L)) ? " in rendered(where(load("m", of(N), of(C)), load("k", of(C)), 0), 4)


def test_a_product_with_zero_is_none():
    """A driver that folds it loses NaN and infinities."""
    x = load("x", of(N), of(C))
    for product in (x * 0, apply("mul", 0, x)):
        assert " * 0" not in rendered(product).split("\n", 1)[1] and "copysign" in rendered(product)
    assert "copysign" not in rendered(load("i", of(N)) * 0)


def test_factors_that_all_products_of_a_sum_share_are_taken_out():
    x, y, scale = load("x", of(N), of(C)), load("w", of(N), of(C)), load("b", of(C))
    assert factored(x * scale + y * (scale * 2)) == (x + y * 2) * scale
    for total in (x * scale, x * scale + y, x + y):
        assert factored(total) is total


@pytest.mark.parametrize(("place", "text"), [(0, "i[n]"), (1, "(v1 >> 4L)")])
def test_numbers_that_substitution_makes_known_are_computed(place, text):
    low = apply("maximum", Position(of(C) * 4, "int64"), 0)
    shift = where(low < 0, apply("minimum", low, 63), low)
    shifted = substitute(apply("shift_right", load("i", of(N)), shift), {C: constant(place)})
    assert text in rendered(shifted) and "max" not in rendered(shifted)


def test_no_text_contains_a_fused_multiply_add_by_name():
    assert "fma" not in rendered(load("x", of(N), of(C)) * 2 + 1)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1, "float32", "1.0f"),
        (float("inf"), "float32", "(INFINITY)"),
        (float("-inf"), "float32", "(-INFINITY)"),
        (float("nan"), "float32", "NAN"),
        (1e300, "float32", "INFINITY"),
        (3.0, "int64", "3L"),
        (-(2**31), "int32", "(-2147483647 - 1)"),
    ],
)
def test_literals(value, dtype, text):
    assert literal(value, dtype) == text


@pytest.mark.parametrize("value", [1e-20, 0.1, 123456.789, 3.4e38, 2.0**-149])
def test_a_literal_is_the_nearest_single(value):
    assert np.float32(literal(value, "float32").removesuffix("f")) == np.float32(value)


def test_an_unknown_function_is_refused_by_name():
    with pytest.raises(InputError, match="apply 'sine'; expected one of"):
        apply("sine", load("b", of(C)))


def test_guards_of_single_lanes_stand_within_the_guard_around_them():
    inner = guarded([(of(C), 0, 9)], load("x", of(N), of(C)), 0)
    text = rendered(guarded([(of(N), 0, 3)], inner, 0), 4)
    reads = [line for line in text.splitlines() if "x[" in line]
    assert len(reads) == 4
    outer = next(line.split(" = ")[0].split()[-1] for line in text.splitlines() if "n < 3" in line)
    assert all(f"x[({outer} && " in line for line in reads)
