"""docs/training.md: what it shows runs."""

import re

import pytest
import torch

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


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_its_recipe_of_two_optimizers_trains_as_eager_pytorch_does(checkout):
    text = (checkout / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(generator = .*?)^```$", text, re.MULTILINE | re.DOTALL)
    trained = []
    for backend in ("torchedge", "eager"):
        torch.manual_seed(0)
        names = {"torch": torch}
        exec(compile(code.replace("torchedge", backend), "docs/training.md", "exec"), names)
        trained.append(
            {**names["generator"].state_dict(prefix="g."), **names["critic"].state_dict(prefix="c.")}
        )
    for name, tensor in trained[0].items():
        torch.testing.assert_close(tensor, trained[1][name], rtol=1e-3, atol=1e-4)
