"""Fixtures that every test may use."""

from __future__ import annotations

import os
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
