"""Activation checkpoints in both ways of capture, however they are called; values read from the example."""

from functools import partial

import pytest
import torch
from oracles.checkpointed import Checkpointed, stores_convolutions
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchedge.errors import CaptureError
from torchedge.tracing.capturing import capture

IMAGES = torch.zeros(2, 3, 16, 16, device="meta")


def regions_of(graph):
    """The kinds of operators of each region, in order."""
    regions = {}
    for op in graph.ops:
        if op.region:
            regions.setdefault(op.region, []).append(op.kind)
    return regions


@pytest.mark.parametrize("reentrant", [True, False])
def test_export_keeps_the_regions_of_tracing(reentrant):
    model = Checkpointed(reentrant, width=4, depth=2)
    traced, exported = (capture(model, IMAGES, method=method) for method in ("trace", "export"))
    signs = {-1, -2} if reentrant else {1, 2}
    assert set(regions_of(traced)) == set(regions_of(exported)) == signs
    for number in signs:
        kinds = [k for k in regions_of(traced)[number] if k in ("conv2d", "batch_norm", "relu")]
        assert kinds == [k for k in regions_of(exported)[number] if k in ("conv2d", "batch_norm", "relu")]
    assert all(op.grad for op in exported.ops if op.region)


class Nested(nn.Module):
    """A checkpoint in the middle of another one; reentrant: the inner one."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.reentrant = reentrant

    def outer(self, x):
        inner = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=self.reentrant)
        return self.layers[2](inner)

    def forward(self, x):
        return checkpoint(self.outer, x, use_reentrant=False)


@pytest.mark.parametrize("method", ["trace", "export"])
def test_regions_name_those_around_them(method):
    graph = capture(Nested(), torch.zeros(2, 8), method=method)
    paths = [(*op.outer, op.region) for op in graph.ops if op.kind == "linear"]
    assert paths == [(1,), (1, 2), (1,)]


def test_a_reentrant_checkpoint_inside_of_another_one_is_noted():
    graph = capture(Nested(reentrant=True), torch.zeros(2, 8))
    assert any("memory may be off" in note for note in graph.notes)


@pytest.mark.parametrize("method", ["trace", "export"])
def test_selective_checkpoints_store_what_their_policy_says(method):
    contexts = partial(create_selective_checkpoint_contexts, stores_convolutions)
    graph = capture(Checkpointed(False, width=4, depth=2, context_fn=contexts), IMAGES, method=method)
    assert {op.kind for op in graph.ops if op.stored} == {"conv2d"}
    assert all(op.stored == (op.kind == "conv2d") for op in graph.ops if op.region)


def test_a_list_of_operators_is_a_policy():
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)

    graph = capture(Linear(), torch.zeros(2, 8))
    assert [op.stored for op in graph.ops if op.kind == "linear"] == [True, False]


def test_reentrant_checkpoints_train_nothing_below_frozen_inputs():
    model = Checkpointed(True, width=4, depth=1)
    model.stem.requires_grad_(False)
    graph = capture(model, IMAGES)
    assert not regions_of(graph)
    assert any("use_reentrant=False" in note for note in graph.notes)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_transformers(reentrant):
    from torchedge.tracing.vision import import_torchvision

    import_torchvision()  # transformers imports it
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=50,
        num_key_value_heads=2, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    example = {name: torch.ones(2, 16, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    graph = capture(model, example)
    assert graph.captured_by == "trace"
    assert set(regions_of(graph)) == ({-1, -2, -3} if reentrant else {1, 2, 3})
    assert all("scaled_dot_product_attention" in kinds for kinds in regions_of(graph).values())


class Masked(nn.Module):
    """Ignores a mask without padding, as the language models of the transformers library do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.body(x)
        positions = torch.arange(mask.shape[1]).expand(mask.shape[0], -1)
        unbroken = ((positions[:, 1:] - positions[:, :-1]) == 1).all()
        if torch.compiler.is_exporting() or not (unbroken and mask.bool().all()):
            x = x.tanh()
        return x


@pytest.mark.parametrize(("padding", "kind"), [(1, None), (0, "tanh")])
def test_values_are_read_from_the_example(padding, kind):
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[2, 0] = padding
    graph = capture(Masked(), (torch.zeros(3, 8), mask), method="trace")
    assert ("tanh" in {op.kind for op in graph.ops}) == (kind == "tanh")
    assert any("reads values" in note for note in graph.notes)


def test_values_that_no_example_gives_leave_a_note():
    example = (torch.zeros(3, 8), torch.ones(3, 8, dtype=torch.int64, device="meta"))
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(Masked(), example, method="trace")
    graph = capture(Masked(), example)
    assert graph.captured_by == "export"
    assert any("torch.export" in note and "reads the value" in note for note in graph.notes)


def test_overwritten_values_are_not_read_from_the_example():
    class Overwritten(nn.Module):
        def forward(self, x, mask):
            mask = mask.clone()
            first = mask[0]
            mask.zero_()
            return x if first.all() else x.tanh()

    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture(
            Overwritten(), (torch.zeros(3, 8), torch.ones(3, 8, dtype=torch.int64)), method="trace", loss=None
        )
