"""Bundles changed at random: the runner refuses or runs each, under the sanitizers of compilers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner.conftest import SANITIZERS

import torchedge


@pytest.mark.slow
def test_changed_bundles_are_refused_or_run_natively(build, checkout, tmp_path):
    """`python benchmarks/bundle_mutations.py --ran 5000 --native FILE` does this for longer."""
    pytest.importorskip("pyopencl")
    opener = build(*SANITIZERS).with_name("torchedge-open")
    script = checkout / "benchmarks" / "bundle_mutations.py"
    process = subprocess.run(
        [sys.executable, script, "--count", "60", "--children", "1", "--native", opener],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(torchedge.__file__).parents[1]), "HOME": str(tmp_path)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "60 mutants of 9 bundles" in process.stdout and ", 0 ended by a signal, 0 hung" in process.stdout
    ran = int(process.stdout.split(" refused, ")[1].split()[0])
    assert 10 < ran < 55, process.stdout
