"""Which values need a gradient: along differentiable inputs only, and not beyond a stop."""

import torch
from torch import nn

import torchedge
from torchedge.ops.gradients import gradient_needs


def needs_by_kind(model, through_stops=False):
    graph = torchedge.capture(model, input_size=(4,))
    needs = gradient_needs(graph, through_stops=through_stops)
    return {op.kind: [needs[i] for i in op.outputs] for op in graph.ops}


def test_gradients_pass_from_parameters_to_the_loss():
    graph = torchedge.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), input_size=(4,))
    needs = gradient_needs(graph)
    assert not any(needs[i] for i, value in enumerate(graph.values) if value.role == "input")
    assert all(needs[i] for i, value in enumerate(graph.values) if value.role == "parameter")
    assert needs[graph.loss]


def test_detaching_ends_them():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                x = torch.relu(self.first(x))
            return torch.sigmoid(self.last(x))

    needs = needs_by_kind(Detached())
    assert needs["relu"] == [False] and needs["sigmoid"] == [True]


def test_operators_without_a_gradient_end_them():
    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last((torch.zeros_like(self.first(x)) + 1) * x)

    needs = needs_by_kind(Rounded())
    assert needs["zeros_like"] == [False] and needs["mul"] == [False] and needs["linear"] == [True]
    assert needs_by_kind(Rounded(), through_stops=True)["mul"] == [True]
