"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# In continuous integration every run draws the same examples; elsewhere each run draws new ones.
settings.register_profile("steady", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("steady")

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data: $TORCHEDGE_DATA, else ../shared/data beside the checkout; absent: skip."""
    given = os.environ.get("TORCHEDGE_DATA")
    folder = Path(given) if given else CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no measured data at {folder}: set TORCHEDGE_DATA to the folder that holds jetson-tx2/")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="write golden texts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Hold a text against tests/golden/NAME, or write it there with --update-golden."""

    def hold(name: str, text: str) -> None:
        path = CHECKOUT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"no golden text {name}: run this test with --update-golden"
        assert text == path.read_text(), (
            f"{name} changed: run this test with --update-golden if that is meant"
        )

    return hold
