"""Times of layers summed by kind: by hand on a tiny network, to a file and back, damaged files refused."""

import gzip
import json
import math

import numpy as np
import pytest

from torchedge.errors import ProfileError
from torchedge.profiling.datasets import KINDS
from torchedge.profiling.datasets import _read_sums as read_layer_times
from torchedge.profiling.datasets import _sum_layers as sum_layers

NAN = math.nan


def layer(name, kind, previous, **settings):
    node = {"name": name, "op": "module", "type": kind, "kwargs": settings, "args": [{"node": previous}]}
    return node


def recipe(groups):
    """A network with a layer of every kind; its second convolution has so many groups of 8 channels."""
    chain = [
        ("conv", "Conv2d", {"in_channels": 3, "out_channels": 8, "kernel_size": 3}),
        ("second", "Conv2d", {"in_channels": 8, "out_channels": 8, "kernel_size": 3, "groups": groups}),
        ("norm", "BatchNorm2d", {"num_features": 8}),
        ("act", "ReLU6", {}),
        ("pool", "AdaptiveAvgPool2d", {"output_size": 1}),
        ("flat", "Flatten", {}),
        ("head", "Linear", {"in_features": 8, "out_features": 2}),
    ]
    nodes, previous = [{"name": "x", "op": "input"}], "x"
    for name, kind, settings in chain:
        nodes.append(layer(name, kind, previous, **settings))
        previous = name
    return {"nodes": [*nodes, {"name": "y", "op": "output", "args": [{"node": previous}]}]}


RECIPES = {"dense": recipe(1), "depthwise": recipe(8), "grouped": recipe(2)}
LAYERS = [
    ["layers.conv", 1.0, 0.5],
    ["layers.second", 2.0, 4.0],
    ["layers.norm", 0.25, 0.125],
    ["layers.act", 0.5, None],
    ["layers.pool", 0.75, 0.5],
    ["layers.flat", 100.0, 100.0],
    ["layers.head", 3.0, 7.0],
]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(name="dense", layers=LAYERS, **given):
    return {"id": name, "mode": "train", "batch_size": 4, "layers": layers, **given}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", [6.0, 11.5, 0.0, 0.375, 0.5, 1.25]),
        ("depthwise", [4.0, 7.5, 6.0, 0.375, 0.5, 1.25]),
        ("grouped", [NAN, NAN, 0.0, 0.375, 0.5, 1.25]),
    ],
)
def test_sums_by_kind(name, expected, tmp_path):
    sums = sum_layers(write(tmp_path / "layers.jsonl", row(name)), RECIPES)
    assert list(sums) == [(name, "train", 4)]
    np.testing.assert_equal(sums[name, "train", 4], expected)
    assert len(KINDS) == len(expected)


def test_points_without_layers_and_unknown_networks_are_left_out(tmp_path):
    rows = [row(), row(layers=None, batch_size=8), row("another"), row(mode="infer", layers=LAYERS[:1])]
    packed = tmp_path / "layers.jsonl.gz"
    packed.write_bytes(gzip.compress(write(tmp_path / "layers.jsonl", *rows).read_bytes()))
    sums = sum_layers(packed, RECIPES)
    assert list(sums) == [("dense", "train", 4), ("dense", "infer", 4)]
    assert sums["dense", "infer", 4].tolist() == [1.0, 0.5, 0, 0, 0, 0]


def test_layers_of_paths_the_network_has_not_count_nowhere(tmp_path):
    sums = sum_layers(write(tmp_path / "l.jsonl", row(layers=[["nowhere", 1.0, 2.0]])), RECIPES)
    assert not sums["dense", "train", 4].any()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1, 2]",
        json.dumps({"id": "dense", "mode": "train", "batch_size": 4}),
        json.dumps(row(batch_size="many")),
        json.dumps(row(layers=[["layers.conv", 1.0]])),
        json.dumps(row(layers=[["layers.conv", "fast", 1.0]])),
        json.dumps(row(layers=[[["layers.conv"], 1.0, 1.0]])),
        json.dumps(row(layers=3)),
        "[" * 100_000,
    ],
    ids=["torn", "list", "no layers", "batch", "two figures", "text", "path", "number", "deep"],
)
def test_a_wrong_line_of_layers_is_named(line, tmp_path):
    file = write(tmp_path / "layers.jsonl", row())
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ProfileError, match=r"layers\.jsonl line 2: .*(the layers of a point|JSON)"):
        sum_layers(file, RECIPES)


@pytest.mark.parametrize("name", ["layer_times.csv", "layer_times.csv.gz"])
def test_a_table_of_sums_is_read(name, tmp_path):
    text = f"{HEAD}\na-l1-50,train,8,1,0.125,0,1234,0.001234,5e-05\na-l1-50,infer,1,,,1,2,3,4\n"
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    times = read_layer_times(file)
    assert list(times) == [("a-l1-50", "train", 8), ("a-l1-50", "infer", 1)]
    np.testing.assert_equal(times["a-l1-50", "train", 8], [1.0, 0.125, 0.0, 1234.0, 0.001234, 5e-5])
    np.testing.assert_equal(times["a-l1-50", "infer", 1], [NAN, NAN, 1.0, 2.0, 3.0, 4.0])


HEAD = ",".join(("id", "mode", "batch_size", *KINDS))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{HEAD}\na,train,1,1,1,1,1,1,1\na,train,1,fast,1,1,1,1,1\n", 3),
        (f"{HEAD}\na,train,many,1,1,1,1,1,1\n", 2),
        (f"{HEAD}\na,train,1,1,1\n", 2),
    ],
    ids=["text", "batch", "short"],
)
def test_a_wrong_line_of_a_table_is_named(text, line, tmp_path):
    file = tmp_path / "layer_times.csv"
    file.write_text(text)
    with pytest.raises(ProfileError, match=rf"line {line}: not a row of layer times.*expected id, mode"):
        read_layer_times(file)
    file.write_text("id,mode,batch_size,conv\na,train,1,1\n")
    with pytest.raises(ProfileError, match="column 'product_forward' is missing; expected id, mode"):
        read_layer_times(file)
