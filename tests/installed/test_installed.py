"""What must work in the checkout and from the installed wheel alike.

It needs pytest and the `vision` extra only. The continuous integration copies this folder out of
the checkout and runs it against the wheel.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

import torchedge


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchedge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_version_is_that_of_the_distribution():
    assert torchedge.__version__ == metadata.version("torchedge")


@pytest.mark.parametrize("name", ["profiles", "hooks", "export"])
def test_data_folder_is_found(name):
    from torchedge.storage.folders import data_folder

    assert (data_folder(name) / "README.md").is_file()


def test_typing_marker_is_installed():
    from importlib.resources import files

    assert (files("torchedge") / "py.typed").is_file()


@pytest.mark.parametrize("name", [n for n in torchedge.__all__ if not n.startswith("_")])
def test_public_name_resolves(name):
    assert getattr(torchedge, name) is not None


def test_pytorch_finds_the_backend():
    (entry,) = metadata.entry_points(group="torch_dynamo_backends", name="torchedge")
    assert callable(entry.load())


def test_devices_are_listed():
    result = run_cli("devices")
    assert result.returncode == 0, result.stderr
    assert "jetson-tx2" in result.stdout


@pytest.mark.slow
def test_a_prediction_from_the_shell():
    result = run_cli("predict", "resnet18", "--batch-size", "8", "--device", "jetson-tx2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["memory"]["value"] > 0
    assert document["latency"]["value"] > 0


@pytest.mark.slow
def test_an_unknown_device_is_refused_in_one_line():
    result = run_cli("predict", "resnet18", "--batch-size", "8", "--device", "no-such-device")
    assert result.returncode == 2
    assert "no-such-device" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
