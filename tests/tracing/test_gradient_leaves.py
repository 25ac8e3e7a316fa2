"""Intermediate tensors that a model makes require gradients: what runs backward, against PyTorch."""

import numpy as np
import pytest
import torch
from oracles.eager_memory import run_training
from oracles.frozen import FROZEN, Frozen
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchedge.ops.gradients import gradient_needs, is_differentiated
from torchedge.prediction.latency.workload import PRODUCT_COLUMNS, count_work
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import capture

TOKENS = torch.zeros(2, 8, dtype=torch.int64)
_LAYERS = {"NativeLayerNormBackward0": "layer_norm", "AddmmBackward0": "linear", "GeluBackward0": "gelu"}


def loss(output):
    return output.sum()


def recorded_by_pytorch(model):
    """The layers that autograd recorded, the last first."""
    first = loss(model(TOKENS)).grad_fn
    waiting, seen, kinds = [first], {first}, []
    while waiting:
        node = max(waiting, key=lambda n: n._sequence_nr())
        waiting.remove(node)
        kinds.append(_LAYERS.get(node.name()))
        children = {child for child, _ in node.next_functions if child is not None}
        waiting += children - seen
        seen |= children
    return [kind for kind in kinds if kind]


def recorded_in(graph):
    """The layers that a graph's backward pass runs, the last first."""
    needs = gradient_needs(graph)
    kinds = [op.kind for op in reversed(graph.ops) if is_differentiated(op, needs)]
    return [kind for kind in kinds if kind in _LAYERS.values()]


@pytest.mark.parametrize("way", FROZEN)
def test_layers_that_run_backward_are_those_of_pytorch(way):
    model = FROZEN[way]()
    graph = capture(model, TOKENS, loss=loss)
    assert graph.captured_by == "trace"
    recorded = recorded_in(graph)
    assert recorded == recorded_by_pytorch(model)
    assert len(recorded) == (3 if way in ("nothing", "not wanted") else 12)


@pytest.mark.parametrize("way", FROZEN)
def test_peak_is_that_of_pytorch(way):
    with torch.device("meta"):
        model = FROZEN[way]()
    tape = write_tape(capture(model, TOKENS, loss=loss), StepSettings(optimizer="sgd", backend="cpu"))
    for batch in (16, 64):
        tokens = torch.empty(batch, 8, dtype=torch.int64, device="meta")
        oracle = run_training(model, lambda t=tokens: ((t,), {}), loss, torch.optim.SGD, steps=1)
        assert int(tape.peak_bytes(np.array([batch]))[0]) == pytest.approx(oracle.peak, rel=0.002)


def test_frozen_layers_below_a_hook_have_input_gradients_alone():
    sums = {}
    for way in ("nothing", "hook"):
        counted = count_work(capture(FROZEN[way](), TOKENS, loss=loss))
        columns = dict(zip(PRODUCT_COLUMNS, counted.products.T, strict=True))
        sums[way] = [(columns["count"] * columns[name]).sum() for name in ("weight_grad", "input_grad")]
    assert sums == {"nothing": [1, 1], "hook": [1, 4]}  # a trained layer norm is below the trained product


def test_what_read_the_tensor_before_is_not_differentiated():
    class Twice(Frozen):
        def forward(self, tokens):
            x = self.embed(tokens)
            before = self.blocks[0](x)
            x.requires_grad_()
            return self.blocks(x) + before

    model = Twice()
    recorded = recorded_in(capture(model, TOKENS, loss=loss))
    assert len(recorded) == 12 and recorded == recorded_by_pytorch(model)


def test_tensors_without_gradients_and_new_ones_become_leaves():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8).requires_grad_(False)
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                x = torch.tanh(x).requires_grad_()
            shift = torch.zeros(8, requires_grad=True)
            return self.head(self.body(x) * (shift + 1))

    graph = capture(Leaves(), torch.zeros(2, 8), loss=loss)
    needs = gradient_needs(graph)
    kinds = [op.kind for op in graph.ops if is_differentiated(op, needs)]
    assert sorted(kinds) == ["add", "linear", "linear", "mul", "sum"]


def test_inference_records_no_leaf():
    assert all(op.kind != "requires_grad" for op in capture(FROZEN["hook"](), TOKENS, mode="infer").ops)


def test_the_model_sees_that_its_tensor_requires_gradients_and_reads_its_values():
    class Reads(Frozen):
        def forward(self, tokens):
            scale = tokens.float().requires_grad_()
            x = super().forward(tokens)
            return x * 2 if scale.requires_grad and bool((scale.detach() < 1).all()) else x

    graph = capture(Reads(), TOKENS, loss=loss)
    assert graph.captured_by == "trace" and any(op.kind == "mul" for op in graph.ops)


def test_reentrant_checkpoints_train_what_is_below_a_hook():
    class Checkpointed(Frozen):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    model = Checkpointed()
    model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())
    graph = capture(model, TOKENS, loss=loss)
    assert {op.region for op in graph.ops} == {0, -1, -2, -3, -4} and not graph.notes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", FROZEN)
def test_an_export_says_what_it_drops(way):
    notes = " ".join(capture(FROZEN[way](), TOKENS, loss=loss, method="export").notes)
    assert ("requires_grad_()" in notes) == (way not in ("nothing", "not wanted"))
