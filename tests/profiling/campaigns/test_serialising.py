"""A network written as nodes and built again runs the same operators, with the same lifetimes."""

import json

import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import InputError
from torchedge.profiling.campaigns.pruning import prune
from torchedge.profiling.topologies import (
    FUNCTIONS,
    LAYERS,
    METHODS,
    build_network,
    build_topology,
    recipe_of,
    serialise,
)
from torchedge.tracing.vision import prepare_torchvision

SIZE = (3, 224, 224)
NETWORKS = (
    *("resnet18", "mobilenet_v2", "googlenet", "shufflenet_v2_x0_5"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("densenet121", "efficientnet_b0")),
)
KWARGS = {"googlenet": {"aux_logits": False, "transform_input": True, "init_weights": False}}


def original(name: str, level: float = 0) -> nn.Module:
    prepare_torchvision()
    pytest.importorskip("torchvision")
    model = build_network(recipe_of(name, KWARGS.get(name, {})))
    if level:
        model = prune(model, SIZE, level).model
    return model


def through_json(nodes):
    return json.loads(json.dumps(nodes))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_same_graph_features_and_memory(name, mode):
    level = 50 if name in ("resnet18", "mobilenet_v2", "googlenet") else 0
    model = original(name, level)
    with torch.device("meta"):
        rebuilt = build_topology(through_json(serialise(model)), name)
    one, two = (torchedge.capture(m, input_size=SIZE, mode=mode) for m in (model, rebuilt))
    assert [(o.kind, o.inputs, o.outputs, o.inplace) for o in one.ops] == [
        (o.kind, o.inputs, o.outputs, o.inplace) for o in two.ops
    ]
    assert [v.shape for v in one.values] == [v.shape for v in two.values]
    assert list(map(sorted, one.releases or ())) == list(map(sorted, two.releases or ()))
    assert torchedge.features(one, 16).values.tolist() == torchedge.features(two, 16).values.tolist()
    for batch in (2, 32):
        found = [torchedge.simulate(graph, batch, mode=mode) for graph in (one, two)]
        assert found[0].live_mib == found[1].live_mib
        assert found[0].allocated_mib == pytest.approx(found[1].allocated_mib, rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["resnet18", "googlenet", "mobilenet_v2"])
def test_same_outputs(name):
    torch.manual_seed(0)
    nodes = through_json(serialise(original(name, 60)))
    ours = build_topology(nodes, name)
    source = nn.Module.to_empty(original(name, 60), device="cpu")
    state = {
        key: torch.rand_like(v) / 10 if v.is_floating_point() else v * 0
        for key, v in source.state_dict().items()
    }
    source.load_state_dict(state)
    x = torch.rand(2, 3, 64, 64)
    outputs = []
    for model in (source, ours):
        keys = model.state_dict().keys()
        model.load_state_dict(dict(zip(keys, state.values(), strict=True)))
        with torch.no_grad():
            outputs.append(model.eval()(x))
    assert torch.equal(outputs[0], outputs[1])


def test_every_layer_function_and_method_of_the_tables_exists():
    assert set(METHODS) <= set(dir(torch.Tensor)) and all(map(callable, FUNCTIONS.values()))
    assert all(isinstance(kind, type) for name, kind in LAYERS.items() if name != "StochasticDepth")


@pytest.mark.parametrize("mode", ["row", "batch"])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_stochastic_depth_is_torchvisions(p, mode):
    prepare_torchvision()
    theirs = pytest.importorskip("torchvision").ops.StochasticDepth(p, mode)
    x, ours = torch.rand(8, 3, 2, 2), LAYERS["StochasticDepth"](p, mode)
    for training in (True, False):
        torch.manual_seed(0)
        expected = theirs.train(training)(x)
        torch.manual_seed(0)
        assert torch.equal(ours.train(training)(x), expected)


class Growing(nn.Module):
    def forward(self, x):
        x += 1
        y = x[:, 0:1] * 2
        return y.reshape(x.shape[0], -1)


def test_in_place_operators_and_slices():
    nodes = serialise(Growing(), input_size=(3, 4, 4))
    assert next(n["target"] for n in nodes if n["op"] == "function") == "iadd"
    x = torch.rand(2, 3, 4, 4)
    expected = Growing()(x.clone())
    assert torch.equal(build_topology(through_json(nodes), "growing")(x), expected)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class TwoFaced(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Unknown(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).real


class Parametric(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Branching(), "torch.fx cannot trace it"),
        (TwoFaced(), "looks at whether it trains"),
        (Unknown(), "fft"),
        (Parametric(), "scale"),
        (TwoInputs(), "several inputs"),
    ],
)
def test_what_the_format_cannot_hold_is_named(model, said):
    with pytest.raises(InputError, match=said):
        serialise(model, input_size=(3, 8, 8))
