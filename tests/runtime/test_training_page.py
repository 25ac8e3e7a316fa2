"""docs/training.md: what it shows runs."""

from __future__ import annotations

import re

import pytest

from torchedge.runtime import backends, trainers

pytest.importorskip("pyopencl")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_its_examples_run(checkout, capsys):
    text = (checkout / "docs" / "training.md").read_text(encoding="utf-8")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(code, "docs/training.md", "exec"), names)
    assert names["outputs"].shape == (8, 4)
    assert "launches" in capsys.readouterr().out
    assert f"the latest {backends.MAX_SHAPES} of a graph" in text and f"up to {trainers.MAX_SHAPES};" in text
