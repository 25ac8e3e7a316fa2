"""Quantised weights, which a trace holds as one operator each: the same step as of a trace of their parts."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torchedge.tracing import joint_graphs
from torchedge.tracing.quantizing import DEQUANTIZED, QuantizedWeight, quantize
from torchedge.tracing.steps import capture_step


def _model(kind: str) -> nn.Module:
    layers = nn.Sequential(nn.Embedding(7, 12), nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    model = quantize(layers, "int8" if kind == "int8" else "int4", group=4, zero_points=kind == "zero points")
    if kind == "table":
        weights = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
        for weight in weights:
            weight.table = tuple(number / 8 - 1 for number in range(16))
    return model.half() if kind == "half" else model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4", "zero points", "table", "half"])
def test_the_step_is_that_of_the_parts(kind: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = _model(kind), torch.zeros(2, 3, dtype=torch.int64)
    seen = []
    expand = joint_graphs._expand_weights

    def noted(module: torch.fx.GraphModule, table: object) -> None:
        seen.append(len(module.graph.find_nodes(op="call_function", target=DEQUANTIZED)))
        expand(module, table)

    def texts() -> list[str]:
        loss = (lambda outputs: outputs.float().sum()) if gradients else None
        step = capture_step(model, ids, loss=loss, seed=1).step
        return [*map(repr, (step.values, step.ops, step.inputs, step.outputs, step.updates))]

    monkeypatch.setattr(joint_graphs, "_expand_weights", noted)
    whole = texts()
    monkeypatch.setattr(joint_graphs, "whole_weights", nullcontext)
    assert whole == texts()
    assert max(seen) == 3
