"""Bundles that are changed at random, with all hashes computed anew, end no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchedge


@pytest.mark.slow
def test_changed_bundles_are_refused_or_run(checkout, tmp_path):
    pytest.importorskip("pyopencl")
    script = str(checkout / "benchmarks" / "bundle_mutations.py")
    process = subprocess.run(
        [sys.executable, script, "--count", "40", "--children", "1"],
        capture_output=True,
        text=True,
        check=False,
        # With the path of commands: PoCL calls the linker, and aborts without it.
        env={**os.environ, "PYTHONPATH": str(Path(torchedge.__file__).parents[1]), "HOME": str(tmp_path)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "40 mutants of 9 bundles" in process.stdout and ", 0 ended by a signal, 0 hung" in process.stdout
