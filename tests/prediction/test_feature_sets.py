"""The registry of features, and what `features` takes, returns and refuses."""

import gc
import json
import weakref

import numpy as np
import pytest
from torch import nn

from torchedge.errors import InputError
from torchedge.forests.trees import feature_hash
from torchedge.graphs import ForwardGraph, Op, Value
from torchedge.graphs.sizes import Affine
from torchedge.prediction.feature_sets import (
    INFERENCE,
    TRAINING,
    BatchAmount,
    add_feature_set,
    extraction,
    feature,
    feature_plan,
    features,
    find_feature_set,
    list_feature_sets,
    registry,
)

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
SIZE = (3, 8, 8)


N = Affine(1)


def one_convolution(image=(N, 3, 8, 8), made=(N, 4, 6, 6), **options):
    values = (
        Value("x", image, "float32", "input"),
        Value("w", (4, 3, 3, 3), "float32", "parameter"),
        Value("y", made, "float32"),
    )
    return ForwardGraph(values, (Op("conv2d", (0, 1, None), (2,), {}, "stem"),), (0,), (2,), **options)


@pytest.fixture
def empty_shelf(monkeypatch):
    """Let a test register what it likes."""
    monkeypatch.setattr(registry, "_FEATURES", dict(registry._FEATURES))
    monkeypatch.setattr(registry, "_SETS", dict(registry._SETS))


# What it returns ----------------------------------------------------------------------------------


def test_one_batch_size_gives_one_row():
    found = features(MODEL, 32, input_size=SIZE)
    assert found.names == TRAINING.names
    assert found.values.shape == (56,)
    assert found.values.dtype == np.float64
    assert found["mem_w"] == 4 * 27 + 8
    assert (found.batch_size, found.feature_set) == (32, "perf4sight")


@pytest.mark.parametrize("sizes", [[1, 2, 32], (1, 2, 32), np.array([1, 2, 32]), range(1, 33)])
def test_many_batch_sizes_give_many_rows(sizes):
    graph = one_convolution()
    found = features(graph, sizes)
    assert found.values.shape == (len(sizes), 56)
    assert found["mem_ofm"].tolist() == [2 * size * 4 * 36 for size in sizes]
    assert found.values[-1].tolist() == features(graph, 32).values.tolist()


def test_values_cannot_be_changed():
    graph = one_convolution()
    with pytest.raises(ValueError, match="read-only"):
        features(graph, 4).values[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        features(graph, [4, 5]).values[0, 0] = 1


def test_as_dict_is_plain_data():
    found = features(one_convolution(), 2).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["mem_w"] == 108.0
    assert features(one_convolution(), [2, 3]).as_dict()["mem_w_grad"] == [216.0, 324.0]


def test_text_shows_every_feature_in_a_column():
    lines = str(features(one_convolution(), [1, 64])).splitlines()
    assert lines[0].split() == ["perf4sight", "batch", "1", "batch", "64"]
    assert lines[2].split() == ["mem_w_grad", "108", "6,912"]
    assert len(lines) == 57
    assert len({len(line) for line in lines}) == 1


# What it computes ---------------------------------------------------------------------------------


def test_the_mode_chooses_the_set():
    graph = one_convolution()
    assert features(graph, 1).names == TRAINING.names
    assert features(one_convolution(training=False), 1).names == INFERENCE.names
    assert features(MODEL, 1, input_size=SIZE, mode="infer").names == INFERENCE.names
    assert features(graph, 1, feature_set="perf4sight-infer").names == INFERENCE.names


def test_the_set_chooses_the_mode():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aux = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return (self.main(x), self.aux(x)) if self.training else self.main(x)

    found = features(Heads(), 1, input_size=SIZE, feature_set="perf4sight-infer")
    assert found["mem_w"] == 12
    assert features(Heads(), 1, input_size=SIZE)["mem_w"] == 24


def test_a_graph_is_worked_out_once_and_not_kept_alive():
    graph = one_convolution()
    assert feature_plan(graph) is feature_plan(graph)
    assert graph in extraction._plans
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


def test_a_graph_of_one_batch_size_answers_for_that_one():
    graph = one_convolution((6, 3, 8, 8), made=(6, 4, 6, 6), fixed_batch=6)
    expected = features(one_convolution(), 6).values
    np.testing.assert_allclose(features(graph, 6).values, expected, rtol=1e-14)
    with pytest.raises(InputError, match="captured for 6 only"):
        features(graph, 7)


def test_an_unbatched_convolution_is_one_sample():
    graph = one_convolution((3, 8, 8), made=(4, 6, 6))
    assert features(graph, 9).values.tolist() == features(one_convolution(), 1).values.tolist()


# What it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [0, -1, 2.0, 2.5, "32", None, True, np.float64(2), 2**40, [], [1, 0], [1, "2"], np.ones((2, 2), int)],
)
def test_unusable_batch_sizes_are_named(size):
    with pytest.raises(InputError, match=r"batch_size is .*expected"):
        features(one_convolution(), size)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean perf4sight"):
        features(one_convolution(), 1, feature_set="perf4sigth")
    with pytest.raises(InputError, match="expected one of perf4sight, perf4sight-infer"):
        find_feature_set("nonsense")
    with pytest.raises(InputError, match="did you mean mem_w_grad"):
        _ = features(one_convolution(), 1)["mem_w_grads"]


def test_arguments_that_a_graph_has_settled_are_refused():
    with pytest.raises(InputError, match="input size already"):
        features(one_convolution(), 1, input_size=SIZE)
    with pytest.raises(InputError, match="captured in 'train' mode"):
        features(one_convolution(), 1, mode="infer")
    with pytest.raises(InputError, match="mode is 'test'"):
        features(one_convolution(), 1, mode="test")


def test_planes_that_grow_with_the_batch_are_refused():
    graph = one_convolution((1, 3, Affine(8), 8), made=(1, 4, Affine(8, -2), 6))
    with pytest.raises(InputError, match=r"conv2d at stem reads 1×3×8N×8 .*one fixed batch size"):
        features(graph, 1)


# The registry -------------------------------------------------------------------------------------


def test_the_order_has_a_hash():
    """Pinned: a change makes every stored forest unreadable."""
    assert find_feature_set("perf4sight") is TRAINING
    assert feature_hash(TRAINING.names) == "35322754045863bd"
    assert feature_hash(INFERENCE.names) == "f4d56da67aa9515f"
    assert list_feature_sets()[:2] == (TRAINING, INFERENCE)


@pytest.mark.usefixtures("empty_shelf")
def test_a_feature_is_one_function():
    @feature("parameters")
    def parameters(net):
        return BatchAmount(sum(v.numel[0] for v in net.graph.parameters))

    @feature("twice")
    def twice(net):
        return 2 * net["parameters"] + net["mem_ofm"]

    @feature("steps")
    def steps(net):
        return lambda batch_sizes: np.ceil(batch_sizes / 32)

    chosen = add_feature_set("mine", ("steps", "mem_w", "twice"))
    assert chosen.names == ("steps", "mem_w", "twice")
    found = features(one_convolution(), [32, 33], feature_set="mine")
    assert found.values.tolist() == [[1, 108, 216 + 288 * 32], [2, 108, 216 + 288 * 33]]

    @feature("wrong")
    def wrong(net):
        return net["steps"] + net["mem_w"]

    add_feature_set("adds curves", ("wrong",))
    with pytest.raises(TypeError, match="'steps' is a curve"):
        features(one_convolution(), 1, feature_set="adds curves")


@pytest.mark.usefixtures("empty_shelf")
def test_names_are_taken_once():
    with pytest.raises(InputError, match="'mem_w' is registered already"):
        feature("mem_w")
    with pytest.raises(InputError, match="'perf4sight' is registered already"):
        add_feature_set("perf4sight", ("mem_w",))
    with pytest.raises(InputError, match=r"'nonsense'.*@feature"):
        add_feature_set("mine", ("mem_w", "nonsense"))
    for names in ((), ("mem_w", "mem_w")):
        with pytest.raises(InputError, match="expected each once"):
            add_feature_set("mine", names)
