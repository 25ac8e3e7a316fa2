"""The errors: one base, familiar built-in kin, one-line messages."""

import numpy as np
import pytest

from torchedge import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name.endswith("Error")])
def test_every_error_has_the_common_base(name):
    assert issubclass(getattr(errors, name), errors.TorchedgeError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InputError", ValueError),
        ("DeviceError", LookupError),
        ("MissingExtraError", ImportError),
        ("OpenCLError", RuntimeError),
        ("DeviceMemoryError", MemoryError),
    ],
)
def test_callers_that_know_only_builtins_catch_them(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_messages_are_one_printable_line():
    error = errors.InputError("a \x1b[1;31mred\x1b[0m\nname \x1b]0;title\x07of\x00 \u202e\ud800é", 3)
    assert error.args == (r"a red\nname of\x00 \u202e\ud800é", 3)


def test_a_missing_extra_names_the_pip_command():
    error = errors.MissingExtraError.of("scikit-learn", extra="fit", purpose="fitting a profile")
    assert str(error) == (
        "fitting a profile needs scikit-learn, which is not installed; run: pip install 'torchedge[fit]'"
    )


def test_a_failed_import_becomes_a_missing_extra():
    needed = errors.needed("nowhere", extra="plots", purpose="drawing")
    with (
        pytest.raises(errors.MissingExtraError, match=r"drawing needs nowhere, .*'torchedge\[plots\]'"),
        needed,
    ):
        import nowhere_to_be_found  # noqa: F401
    with errors.needed("math", purpose="counting"):
        import math
    assert math.pi > 3


def test_a_damaged_package_is_not_said_to_be_missing():
    damaged = (
        "drawing needs plots, which does not import: cannot import name 'no_such' .*; see: torchedge doctor"
    )
    with (
        pytest.raises(errors.MissingExtraError, match=damaged),
        errors.needed("plots", extra="plots", purpose="drawing"),
    ):
        from math import no_such  # noqa: F401


def test_the_nearest_names_are_suggested():
    known = ("resnet18", "resnet34", "vgg16")
    assert errors.did_you_mean("resnet81", known) == "did you mean resnet18?"
    assert errors.did_you_mean("resnet81", known, most=2) == "did you mean resnet18 or resnet34?"
    assert errors.did_you_mean(17, known, "see the list") == "see the list"


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2)])
def test_whole_numbers_of_any_kind_are_taken(value):
    checked = errors.check_whole("count", value, 2)
    assert checked == 2 and type(checked) is int


@pytest.mark.parametrize("value", [1, 2.0, True, "2", None, np.float64(2)])
def test_other_numbers_are_refused_by_name(value):
    with pytest.raises(errors.InputError, match=r"count is .*; expected a whole number from 2 on"):
        errors.check_whole("count", value, 2)


def test_a_word_is_one_of_the_choices():
    errors.check_choice("mode", "train", ("train", "infer"))
    with pytest.raises(errors.InputError, match="mode is 'test'; expected one of train, infer"):
        errors.check_choice("mode", "test", ("train", "infer"))
