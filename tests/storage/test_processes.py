"""Tests for the environment of processes in torchedge.storage.processes."""

import os

from torchedge.storage.processes import child_environment, variable_set

_NAME = "TORCHEDGE_TEST_VARIABLE"


def test_a_variable_is_back_after_the_block(monkeypatch):
    monkeypatch.setenv(_NAME, "before")
    with variable_set(_NAME, "inside"):
        assert os.environ[_NAME] == "inside"
    assert os.environ[_NAME] == "before"


def test_a_variable_that_was_not_set_is_gone_after_the_block(monkeypatch):
    monkeypatch.delenv(_NAME, raising=False)
    with variable_set(_NAME, "inside"):
        assert os.environ[_NAME] == "inside"
    assert _NAME not in os.environ


def test_children_find_the_packages_of_this_process():
    parts = child_environment()["PYTHONPATH"].split(os.pathsep)
    assert any(os.path.isdir(os.path.join(part, "torchedge")) for part in parts)
