"""Tests for the environment of processes in torchedge.storage.processes."""

import os

import pytest

from torchedge.storage.processes import child_environment, variable_set

_NAME = "TORCHEDGE_TEST_VARIABLE"


@pytest.mark.parametrize("before", ["before", None])
def test_a_variable_is_after_the_block_as_it_was_before(monkeypatch, before):
    monkeypatch.setenv(_NAME, "other")
    monkeypatch.delenv(_NAME) if before is None else monkeypatch.setenv(_NAME, before)
    with variable_set(_NAME, "inside"):
        assert os.environ[_NAME] == "inside"
    assert os.environ.get(_NAME) == before


def test_children_find_the_packages_of_this_process():
    parts = child_environment()["PYTHONPATH"].split(os.pathsep)
    assert any(os.path.isdir(os.path.join(part, "torchedge")) for part in parts)
