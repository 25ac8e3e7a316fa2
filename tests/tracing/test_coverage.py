"""The coverage page: a few networks of each table by default, all of them in the slow run."""

import os
import re

import pytest
import torch
from tracing.coverage import COMMAND, measure, page
from tracing.zoo import entries

from torchedge.tracing.capturing import capture

FEW = {
    "googlenet", "inception_v3", "swin_t", "mobilenet_v3_small", "deeplabv3_mobilenet_v3_large", "r3d_18",
    "fasterrcnn_mobilenet_v3_large_fpn", "sequencer2d_l", "convmixer_768_32", "GPT2LMHeadModel",
    "WhisperForConditionalGeneration (tiny)", "T5ForConditionalGeneration (small)",
    "BertForSequenceClassification",
}  # fmt: skip


def zoo():
    for package in ("torchvision", "timm", "transformers"):
        pytest.importorskip(package)
    return entries()


@pytest.mark.slow
def test_a_few_networks_of_each_table():
    rows = [measure(entry) for entry in zoo() if entry.name in FEW]
    assert {r.name for r in rows} == FEW
    assert {r.table for r in rows} == {e.table for e in zoo()} - {"torchvision optical flow"}
    assert [r.name for r in rows if r.error or r.unknown or r.modes != ("train", "infer")] == []


def test_the_page_lists_every_network(checkout):
    text = (checkout / "docs" / "tables" / "coverage.md").read_text(encoding="utf-8")
    assert COMMAND in text
    if f"torch {torch.__version__.split('+')[0]};" not in text:
        pytest.skip("the page was written with another version of torch")
    listed = set(re.findall(r"^(?:\| |- )([^|(,]+)", text, flags=re.MULTILINE))
    missing = [e.name for e in zoo() if e.name.split(" (")[0] not in {name.strip() for name in listed}]
    assert not missing, f"rewrite the page: {COMMAND}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "shufflenet_v2_x0_5"])
def test_trainable_parameters_are_those_that_autograd_reaches(name):
    """The oracle is a real backward pass."""
    models = pytest.importorskip("torchvision.models")
    options = {"init_weights": False} if name == "googlenet" else {}
    model = models.get_model(name, weights=None, **options)

    def loss(outputs):
        return sum(t.sum() for t in torch.utils._pytree.tree_flatten(outputs)[0])

    graph = capture(model, torch.zeros(2, 3, 64, 64), loss=loss)
    loss(model(torch.randn(2, 3, 64, 64))).backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {v.name for v in graph.parameters if v.trainable} == reached


@pytest.mark.slow
def test_every_network(checkout):
    """Write the page where TORCHEDGE_UPDATE_COVERAGE is set, else compare with it."""
    rows = [measure(entry) for entry in zoo()]
    made = page(rows)
    path = checkout / "docs" / "tables" / "coverage.md"
    if os.environ.get("TORCHEDGE_UPDATE_COVERAGE"):
        path.write_text(made, encoding="utf-8")
    captured = [r for r in rows if not r.error and not r.unknown]
    assert len(captured) >= 0.97 * len(rows)
    assert len([r for r in captured if r.table == "timm"]) >= 60
    version = re.compile(r"torch [\d.]+")
    written = path.read_text(encoding="utf-8")
    if version.search(written) != version.search(made) and version.findall(written) != version.findall(made):
        pytest.skip("the page was written with another version of torch")
    assert made == written, f"rewrite the page: {COMMAND}"
