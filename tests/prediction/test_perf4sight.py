"""perf4sight's features: closed forms worked out by hand, laws, whole networks against a reference."""

import importlib.util
import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.perf4sight_features import reference_features
from torch import nn

from torchedge.graphs import ForwardGraph, Op, Value
from torchedge.graphs.sizes import Affine
from torchedge.prediction.feature_sets import features
from torchedge.testing import ConvLayer, conv_layers
from torchedge.tracing.capturing import capture
from torchedge.tracing.vision import import_torchvision

FFT_OPERATIONS = {"ops_fft_fwd", "ops_fft_bwd_x", "ops_fft_bwd_w", "ops_fft"}  # logarithms: not whole numbers


def conv(n=1, m=1, **options):
    return nn.Conv2d(m, n, bias=False, **options)


def agree(found, expected):
    """Whole numbers exactly (up to 2**53, where float64 stops holding them), logarithms to 1e-12."""
    assert list(found.names) == list(expected)
    for name, value in expected.items():
        whole = name not in FFT_OPERATIONS and value < 2**53
        assert found[name] == value if whole else math.isclose(found[name], value, rel_tol=1e-12), name


def graph_of(layers: list[ConvLayer], kind: str = "conv2d") -> ForwardGraph:
    """A graph that calls these layers side by side."""
    values, ops, inputs = [], [], []
    for number, layer in enumerate(layers):
        first = len(values)
        copies = Affine(layer.copies)
        values += [
            Value(f"x{number}", (copies, layer.m, *layer.ip), "float32", "input"),
            Value(f"w{number}", (layer.n, layer.m // layer.groups, *layer.kernel), "float32", "parameter"),
            Value(f"y{number}", (copies, layer.n, *layer.op), "float32"),
        ]
        ops.append(Op(kind, (first, first + 1, None), (first + 2,), {"groups": layer.groups}))
        inputs.append(first)
    return ForwardGraph(tuple(values), tuple(ops), tuple(inputs), ())


# Closed forms -------------------------------------------------------------------------------------


def test_all_56_of_a_one_by_one_layer():
    """n = 2, m = 3, k = 1, a plane of 4 x 4 (log2 = 2), batch 5: each number worked out on paper."""
    expected = [
        *(6, 30, 480, 320, 836),  # w, w_grad, ifm = 2*5*3*16, ofm = 2*5*2*16, tensors
        *(80, 240, 80, 240, 240, 720, 240),  # i2c: 5*16 indices, 5*16*1*3 each
        *(480, 480, 1440),  # 5*2*16*3 each
        *(120, 300, 200, 120, 200),  # fft planes of 4*5 = 20: 6*20, 5*3*20, 5*2*20
        *(420, 320, 500, 1240),
        *(1472, 1472, 976, 3920),  # 16*2*(5*5 + 6) + 480 twice, 4*4*31 + 480
        *(
            1080,
            1620,
            3240,
            2700,
            4320,
            4860,
            5940,
        ),  # 36 elements a tile, one tile: 3*5*2*36, 3*5*3*36, 3*5*6*36
        *(1920, 2880, 5760, 4800, 7680, 8640, 10560),  # 16 elements a tile, 2*2 tiles
        *(1080, 1080, 4320, 2160, 5400, 5400, 6480),  # 5*6*36, and 2*2 tiles of r = 3 over op for bwd_w
        *(1920, 1920, 7680, 3840, 9600, 9600, 11520),  # 5*6*4*16, and 2*2 tiles of r = 2 over op
    ]
    found = features(conv(2, 3, kernel_size=1), 5, input_size=(3, 4, 4))
    assert found.values.tolist() == expected


# Laws ---------------------------------------------------------------------------------------------


@st.composite
def layers(draw):
    groups = draw(st.integers(1, 4))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    ip = draw(st.tuples(st.integers(5, 300), st.integers(5, 300)))
    stride = draw(st.integers(1, 3))
    op = tuple((side - k) // stride + 1 for side, k in zip(ip, kernel, strict=True))
    n, m = (groups * draw(st.integers(1, 512)) for _ in range(2))
    return ConvLayer(n, m, kernel, ip, op, groups, draw(st.integers(1, 3)))


@given(st.lists(layers(), min_size=1, max_size=6), st.integers(1, 2048))
@settings(max_examples=80)
def test_any_layers_agree_with_the_reference(chosen, batch):
    graph = graph_of(chosen)
    agree(features(graph, batch, mode="train"), reference_features(chosen, batch))
    found = features(graph, batch, feature_set="perf4sight-infer")
    agree(found, reference_features(chosen, batch, mode="infer"))


def test_sums_beyond_float64_are_rounded_once():
    """Weights' gradients of Winograd on planes of 4096²: 2**53 is passed before the batch size comes in."""
    huge = [
        ConvLayer(2047, 2047, (3, 3), (4095, 4093), (4095, 4093)),
        ConvLayer(3, 1, (1, 1), (3, 5), (3, 5)),
    ]
    expected = reference_features(huge, 1)
    assert expected["ops_wino_bwd_w_3_2"] > 2**64
    found = features(graph_of(huge), 1)
    for name in set(expected) - FFT_OPERATIONS:
        assert found[name] == float(expected[name])


# Which layers count -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = conv(4, 4, kernel_size=3, padding=1)

    def forward(self, x):
        return self.conv(self.conv(x) + self.conv(x))


def test_a_layer_counts_each_time_it_is_called():
    once = features(Tied().conv, 4, input_size=(4, 8, 8)).values
    assert features(Tied(), 4, input_size=(4, 8, 8)).values.tolist() == (3 * once).tolist()


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (nn.Linear(8, 8), (8,)),
        (nn.ConvTranspose2d(2, 2, 3), (2, 8, 8)),
        (nn.Conv3d(2, 2, 3), (2, 8, 8, 8)),
        (nn.Conv1d(2, 2, 3), (2, 8)),
    ],
    ids=lambda item: type(item).__name__,
)
def test_other_layers_do_not_count(model, size):
    assert not features(model, 4, input_size=size).values.any()


def test_calls_of_aten_convolution_count_unless_transposed():
    layer = ConvLayer(4, 2, (3, 3), (8, 8), (6, 6))
    plain = graph_of([layer], "convolution")
    agree(features(plain, 3), reference_features([layer], 3))
    op = plain.ops[0]
    turned = ForwardGraph(plain.values, (Op(op.kind, op.inputs, op.outputs, {"transposed": True}),), (0,), ())
    assert not features(turned, 3).values.any()


def test_samples_folded_into_the_batch_count():
    class Crops(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv(4, 3, kernel_size=3)

        def forward(self, x):
            return self.conv(torch.cat([x, x.flip(-1)]))

    agree(
        features(Crops(), 5, input_size=(3, 8, 8)),
        reference_features([ConvLayer(4, 3, (3, 3), (8, 8), (6, 6), copies=2)], 5),
    )


def test_samples_folded_into_channels_count():
    """As in conditional convolutions: one call whose groups are the samples."""
    values = (
        Value("x", (1, Affine(6), 8, 8), "float32", "input"),
        Value("w", (Affine(4), 3, 3, 3), "float32", "parameter"),
        Value("y", (1, Affine(4), 6, 6), "float32"),
    )
    graph = ForwardGraph(values, (Op("conv2d", (0, 1, None), (2,), {"groups": Affine(2)}),), (0,), ())
    agree(features(graph, 5), reference_features([ConvLayer(4, 6, (3, 3), (8, 8), (6, 6), groups=2)], 5))


# Whole networks -----------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "mobilenet_v2", "squeezenet1_0", "mnasnet1_0", "googlenet", "alexnet"]
)
def test_whole_networks_agree_with_the_reference(name, mode):
    options = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model = getattr(import_torchvision().models, name)(weights=None, **options)
    layers = conv_layers(model, (3, 224, 224), mode=mode)
    graph = capture(model, input_size=(3, 224, 224), mode=mode)
    for batch in (1, 2, 32, 256):
        agree(features(graph, batch), reference_features(layers, batch, mode=mode))


def test_known_totals_of_resnet18():
    """Parameters of its convolutions and multiply-adds at batch 1, as published many times over."""
    model = import_torchvision().models.resnet18()
    found = features(model, 1, input_size=(3, 224, 224))
    assert found["mem_w"] == sum(p.numel() for p in model.parameters() if p.dim() == 4) == 11_166_912
    assert found["ops_mm_fwd"] == 1_813_561_344


@pytest.mark.slow
def test_pruned_networks_measured_on_a_jetson(shared_data):
    folder = shared_data / "jetson-tx2"
    spec = importlib.util.spec_from_file_location("jetson_rebuild", folder / "rebuild.py")
    rebuild = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rebuild)
    wanted = {("mobilenetv2", 50), ("googlenet", 30)}
    with (folder / "topologies.jsonl").open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if (row["network"], row["pruning_level"]) in wanted]
    assert len(rows) == len(wanted)
    for row in rows:
        with torch.device("meta"):
            model = rebuild.rebuild(row)
        layers = conv_layers(model, (3, 224, 224))
        found = features(model, [2, 64], input_size=(3, 224, 224))
        for batch, values in zip((2, 64), found.values, strict=True):
            expected = reference_features(layers, batch)
            np.testing.assert_allclose(values, list(expected.values()), rtol=1e-12)
        assert all(a < b for a, b in pairwise(found["mem_ifm"]))
