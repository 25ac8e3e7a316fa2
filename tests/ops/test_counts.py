"""What operators compute and move: closed forms, and PyTorch's own counter for forward passes."""

from math import prod
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchedge.graphs.sizes import poly, poly_at
from torchedge.ops import LoadClass, Work, call_of, registry
from torchedge.ops.specs import Autocast, Composite, forward_flops
from torchedge.tracing.capturing import capture
from torchedge.tracing.vision import import_torchvision


def count(module, size, batch, rule):
    """Return a rule's amount for the one known operator of a module."""
    graph = capture(module, input_size=size, mode="infer")
    (op,) = [o for o in graph.ops if registry()[o.kind].load is not LoadClass.FREE]
    spec = registry()[op.kind]
    amount = getattr(spec, rule)(call_of(graph, op))
    return poly_at(poly(int(amount)), batch)


@pytest.mark.parametrize("batch", [1, 3, 128])
@pytest.mark.parametrize(
    ("module", "size", "flops", "elements"),
    [
        (nn.Conv2d(4, 8, 3, padding=1, bias=False), (4, 6, 5), 2 * 8 * 6 * 5 * 4 * 9, (4 + 8) * 30),
        (nn.Conv2d(4, 8, 3, groups=2, bias=False), (4, 6, 5), 2 * 8 * 4 * 3 * 2 * 9, 4 * 30 + 8 * 12),
        (nn.Conv2d(4, 8, 1), (4, 6, 5), 8 * 30 * (2 * 4 + 1), (4 + 8) * 30),
        (nn.Conv1d(2, 3, 5, stride=2, bias=False), (2, 11), 2 * 3 * 4 * 2 * 5, 2 * 11 + 3 * 4),
        (nn.Conv3d(2, 3, 2, bias=False), (2, 4, 4, 4), 2 * 3 * 27 * 2 * 8, 2 * 64 + 3 * 27),
        (nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False), (4, 3, 3), 2 * 36 * 2 * 4, 36 + 2 * 36),
        (nn.Linear(7, 5, bias=False), (7,), 2 * 7 * 5, 7 + 5),
        (nn.Linear(7, 5), (3, 7), 15 * (2 * 7 + 1), 21 + 15),
        (nn.ReLU(), (3, 4), 12, 24),
        (nn.MaxPool2d(2), (3, 4, 4), 3 * 4 * 4, 48 + 12),
    ],
)
def test_closed_forms(module, size, flops, elements, batch):
    parameters = sum(p.numel() for p in module.parameters())
    assert count(module, size, batch, "flops") == flops * batch
    assert count(module, size, batch, "bytes_moved") == 4 * (elements * batch + parameters)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "vit_b_16", "resnext50_32x4d"])
def test_products_agree_with_pytorchs_counter(name):
    with torch.device("meta"):
        model = import_torchvision().models.get_model(name, weights=None).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(2, 3, 224, 224))
    graph = capture(model, input_size=(3, 224, 224), mode="infer")
    ours = 0
    for op in graph.ops:
        if registry()[op.kind].load is LoadClass.REUSABLE:
            bias = 0
            if len(op.inputs) > 2 and op.inputs[2] is not None and op.kind != "scaled_dot_product_attention":
                bias = prod(graph.values[op.outputs[0]].at(2))
            ours += poly_at(poly(int(registry()[op.kind].flops(call_of(graph, op)))), 2) - bias
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert poly_at(forward_flops(graph), 2) >= ours


def test_views_cost_nothing():
    assert count(nn.Sequential(nn.Flatten(), nn.ReLU()), (3, 4), 2, "flops") == 24
    for spec in registry().values():
        assert (spec.load is LoadClass.FREE) == spec.view


def test_entries_are_sound():
    for kind, spec in registry().items():
        assert spec.autocast in get_args(Autocast), kind
        assert spec.composite in get_args(Composite) and isinstance(spec.work, Work), kind
        assert kind in (spec.kind, *spec.targets)
