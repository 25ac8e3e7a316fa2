"""Bundles changed at random, all hashes computed anew: each is refused or runs, and ends no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner.conftest import SANITIZERS

import torchedge


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True], ids=["Python", "native, under sanitizers"])
def test_changed_bundles_are_refused_or_run(native, request, checkout, tmp_path):
    """`python benchmarks/bundle_mutations.py --ran 5000 [--native FILE]` does this for longer."""
    pytest.importorskip("pyopencl")
    script = checkout / "benchmarks" / "bundle_mutations.py"
    words = [sys.executable, script, "--count", "60" if native else "40", "--children", "1"]
    if native:
        words += ["--native", request.getfixturevalue("build")(*SANITIZERS).with_name("torchedge-open")]
    process = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        # With the path of commands: PoCL calls the linker, and aborts without it.
        env={**os.environ, "PYTHONPATH": str(Path(torchedge.__file__).parents[1]), "HOME": str(tmp_path)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "0 mutants of 11 bundles" in process.stdout and ", 0 ended by a signal, 0 hung" in process.stdout
    ran = int(process.stdout.split(" refused, ")[1].split()[0])
    assert 10 < ran < 55, process.stdout
