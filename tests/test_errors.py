"""The errors: one base, familiar built-in kin, one-line messages."""

from __future__ import annotations

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
