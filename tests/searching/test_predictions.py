"""Candidates are predicted without modules, many at once, as their modules are, one by one."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.graphs import ForwardGraph, GraphFamily, Op, Value
from torchedge.graphs.sizes import Affine, Size
from torchedge.prediction import families
from torchedge.prediction.families import FamilyAnalysis, FamilyPredictor
from torchedge.prediction.memory import compiled_replay
from torchedge.prediction.memory.peaks import family_peaks, graph_traits, simulate_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.workspaces import PHASES, WORKSPACE_FEATURES, WorkspaceModel
from torchedge.searching.ofa_resnet50 import OFAResNet50Space
from torchedge.searching.pruning_space import PruningSpace
from torchedge.searching.spaces import draw


class Tiny(nn.Module):
    """A branch, a sum, a concatenation and a flattened head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.left, self.right = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 16, 1)
        self.norm = nn.BatchNorm2d(48)
        self.head = nn.Linear(48 * 16, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.cat([self.left(x) + x, self.right(x)], 1)
        return self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(self.norm(x), 4), 1))


SPACES = {
    "ofa": OFAResNet50Space(image_sizes=(96, 128)),
    "pruning": PruningSpace(Tiny(), (3, 64, 64), round_to=1),
}


@pytest.fixture(params=["compiled", "python"])
def replaying(request, monkeypatch):
    monkeypatch.setattr(compiled_replay, "_WORTH", 0 if request.param == "compiled" else 10**9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["jetson-tx2", "rtx-3090"])
@pytest.mark.parametrize(("mode", "batch"), [("train", 24), ("train", 300), ("infer", 1)])
@pytest.mark.parametrize("name", SPACES)
def test_as_predict_says_of_the_module(name, mode, batch, device, replaying):
    space = SPACES[name]
    found_device = torchedge.find_device(device)
    genes = space.canonical(draw(space, np.random.default_rng(batch), 5))
    predictor = FamilyPredictor(found_device, mode)
    memory, latency, required, slow = (np.zeros(len(genes)) for _ in range(4))
    sketch = space.sketch(genes, mode)
    groups, order = [(f, v) for f, v, _ in sketch], [row for _, _, rows in sketch for row in rows]
    memory[order] = predictor.memory(groups, batch)
    latency[order] = predictor.latency(groups, batch)
    required[order] = predictor.memory(groups, batch, 0.95)
    slow[order] = predictor.latency(groups, batch, 0.95)
    for row, kept in enumerate(genes.tolist()):
        encoding = space.decode(kept)
        with torch.device("meta") if name == "ofa" else torch.device("cpu"):
            module = space.build(encoding)
        size = space.sample_size(encoding)
        one = torchedge.predict(module, batch, found_device, mode=mode, input_size=size)
        assert memory[row] == pytest.approx(one.needed.value, rel=1e-9)
        assert latency[row] == pytest.approx(one.latency.value, rel=1e-9)
        assert required[row] == pytest.approx(one.needed_mib(0.95), rel=1e-9)
        assert slow[row] >= latency[row]


class Mlp(nn.Module):
    """No convolution: no workspace, but sums over rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def measured():
    """Forests that say how large the workspaces of convolutions are, of a library that never was."""
    pytest.importorskip("sklearn")
    from torchedge.profiling.forest_fitting import fit_forest

    rng = np.random.default_rng(0)
    rows, ratios = rng.uniform(0, 300, (200, len(WORKSPACE_FEATURES))), rng.uniform(0.5, 2, 200)
    return {phase: fit_forest(rows, ratios, feature_names=WORKSPACE_FEATURES, trees=3) for phase in PHASES}


def family_and_alone(groups, settings, batch):
    """The peaks of all members at once, and of each by itself."""
    tapes = [(FamilyAnalysis(family, settings).tape, values) for family, values in groups]
    found = family_peaks(tapes, batch)
    graphs = [family.graph(column.tolist()) for family, values in groups for column in values.T]
    alone = simulate_peaks(
        [write_tape(graph, settings) for graph in graphs],
        [graph_traits(graph) for graph in graphs],
        np.arange(len(graphs)),
        np.full(len(graphs), float(batch)),
    )
    return [np.stack([peaks.allocated, peaks.reserved]) for peaks in (found, alone)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("units", [0, 82])
@pytest.mark.parametrize("forests", [True, False])
@pytest.mark.parametrize(
    ("mode", "zero_grad"), [("train", "set_to_none"), ("train", "zero"), ("infer", "zero")]
)
def test_workspaces_of_the_devices_library_are_those_of_the_graphs(
    mode, zero_grad, forests, units, measured, replaying
):
    """Workspaces are no polynomials: forests, and a rule for sums over rows, say how large they are."""
    rng, batch = np.random.default_rng(0), 24
    plain = StepSettings(zero_grad=zero_grad)
    settings = dataclasses.replace(plain, workspaces=WorkspaceModel(measured if forests else {}, units))
    for space in SPACES.values():
        genes = space.canonical(draw(space, rng, 4))
        groups = [(family, values) for family, values, _ in space.sketch(genes, mode)]
        found, expected = family_and_alone(groups, settings, batch)
        assert found == pytest.approx(expected, rel=1e-9)
        if forests:
            assert (expected[0] > family_and_alone(groups, plain, batch)[1][0]).any()


@pytest.mark.parametrize("forests", [True, False])
@pytest.mark.parametrize("units", [0, 132])
def test_a_family_without_convolutions_is_replayed_as_its_graphs_are(forests, units, measured, replaying):
    """Where convolutions were measured, the first step is replayed even if the network has none."""
    graph = torchedge.capture(Mlp(), input_size=(64,), mode="train")
    settings = StepSettings(workspaces=WorkspaceModel(measured if forests else {}, units))
    found, expected = family_and_alone([(GraphFamily(graph, ()), np.zeros((0, 1), int))], settings, 3000)
    assert found == pytest.approx(expected, rel=1e-9)


def test_latency_with_confidence_is_the_intervals_end_at_its_level():
    predictor = FamilyPredictor(torchedge.find_device("jetson-tx2"), "train")
    family, values, _ = SPACES["pruning"].sketch(np.zeros((1, 3), dtype=np.int16), "train")[0]
    asked = [predictor.latency([(family, values)], 8, p)[0] for p in (0.5, 0.8, 0.95)]
    assert asked == sorted(asked) and asked[0] < asked[-1]


def test_a_family_whose_rules_depend_on_sizes_is_split_into_its_graphs():
    """A pooling window of a symbolic side is no number: each member is then predicted by itself."""
    width = Size.symbol("width")
    values = (
        Value("x", (Affine(1), width, 8, 8), "float32", "input"),
        Value("y", (Affine(1), width, 8, 8), "float32"),
        Value("z", (Affine(1), width, 4, 4), "float32"),
    )
    ops = (
        Op("relu", (0,), (1,)),
        Op("max_pool2d", (1,), (2,), {"kernel_size": width, "stride": (2, 2), "padding": (0, 0)}),
    )
    family = GraphFamily(ForwardGraph(values, ops, (0,), (2,), training=False), ("width",))
    columns = np.array([[2, 64]])
    predictor = FamilyPredictor(torchedge.find_device("jetson-tx2"), "infer")
    found = predictor.memory([(family, columns)], 4)
    alone = [torchedge.predict(family.graph([w]), 4, "jetson-tx2", mode="infer") for w in (2, 64)]
    assert found == pytest.approx([p.needed.value for p in alone], rel=1e-9)


def test_a_bug_in_a_rule_is_raised_and_not_taken_for_a_slow_family(monkeypatch):
    def broken(graph):
        raise TypeError("a bug in a rule")

    monkeypatch.setattr(families, "count_amounts", broken)
    predictor = FamilyPredictor(torchedge.find_device("jetson-tx2"), "train")
    family, values, _ = SPACES["pruning"].sketch(np.zeros((1, 3), dtype=np.int16), "train")[0]
    with pytest.raises(TypeError, match="a bug in a rule"):
        predictor.memory([(family, values)], 8)
