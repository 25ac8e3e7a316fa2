"""Bundles changed at random, all hashes computed anew: each is refused or runs, and ends no process."""

import pytest
from oracles.children import python
from runner.conftest import SANITIZERS


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True], ids=["Python", "native, under sanitizers"])
def test_changed_bundles_are_refused_or_run(native, request, checkout, tmp_path):
    """`python benchmarks/bundle_mutations.py --ran 5000 [--native FILE]` does this for longer."""
    pytest.importorskip("pyopencl")
    script = checkout / "benchmarks" / "bundle_mutations.py"
    words = [script, "--count", "60" if native else "40", "--children", "1"]
    if native:
        words += ["--native", request.getfixturevalue("build")(*SANITIZERS).with_name("torchedge-open")]
    process = python(*words, HOME=str(tmp_path))
    assert "0 mutants of 11 bundles" in process.stdout and ", 0 ended by a signal, 0 hung" in process.stdout
    ran = int(process.stdout.split(" refused, ")[1].split()[0])
    assert 10 < ran < 55, process.stdout
