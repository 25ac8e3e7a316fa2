"""Fixtures of tests that compile models."""

import pytest
import torch


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled before, and nothing stays."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs(monkeypatch):
    """Every graph that is compiled during the test."""
    from torchedge.runtime import backends

    made = []
    original = backends.GraphRun.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(backends.GraphRun, "__init__", init)
    return made
