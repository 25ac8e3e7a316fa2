"""`torchedge bench kernels` and `torchedge explain-kernel`."""

import json

import pytest


def test_a_kernel_is_explained(run):
    out = run("explain-kernel", "MatMul", "64", "64", "64", "--device", "adreno-640")
    assert "MatMul 64 64 64 on adreno-640" in out and "default, " in out and "chosen, " in out
    assert "latency" in out and "launches" in out
    document = json.loads(run("explain-kernel", "SoftMax", "64", "64", "--device", "nvidia-h200", "--json"))
    assert document["chosen"]["ms"] <= document["default"]["ms"]
    assert max(document["default"]["terms_ms"].values()) <= document["default"]["ms"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("Pooling", "3", "3"), "expected one of MatMul"),
        (("MatMul", "3", "3"), "expected 3"),
        (("SoftMax", "100000", "100000"), "at most"),
    ],
)
def test_unknown_kernels_are_refused(words, message, refused):
    assert message in refused("explain-kernel", *words)


def test_unknown_operators_are_refused_before_anything_is_measured(refused, tmp_path):
    command = ["bench", "kernels", "--out", str(tmp_path)]
    assert "expected one of MatMul" in refused(*command, "--operators", "x")
    assert "larger number" in refused(*command, "--gflop", "0")
