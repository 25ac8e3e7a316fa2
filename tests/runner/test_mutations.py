"""Bundles changed at random: the runner reads or refuses each, under the sanitizers of compilers."""

import pytest
from runner.conftest import SANITIZERS
from runner.mutants import open_mutants


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inference", "training"])
def test_mutants_are_read_or_refused(build, request, kind, tmp_path):
    """`python benchmarks/native_runner.py --mutants 100000` does this for longer."""
    opener = build(*SANITIZERS).with_name("torchedge-open")
    results = open_mutants(opener, request.getfixturevalue(kind), tmp_path, 300, 0)
    assert results["read"] > 10 and results["refused"] > 100, results
