"""What tests of rules share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test draws the same random numbers in every run."""
    torch.manual_seed(0)
