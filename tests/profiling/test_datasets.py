"""Dataset folders: what a campaign leaves is read back, packed or not, and damaged files are refused."""

import gzip
import json

import numpy as np
import pytest

from torchedge.errors import ProfileError
from torchedge.profiling import datasets
from torchedge.profiling.campaigns.recording import COLUMNS
from torchedge.profiling.datasets import KINDS, read_dataset
from torchedge.tracing.vision import prepare_torchvision

NODES = [
    {"name": "x", "op": "input"},
    {"name": "conv", "op": "module", "type": "Conv2d",
     "kwargs": {"in_channels": 3, "out_channels": 4, "kernel_size": 3}, "args": [{"node": "x"}]},
    {"name": "mean", "op": "method", "target": "mean", "args": [{"node": "conv"}, [2, 3]]},
    {"name": "y", "op": "output", "args": [{"node": "mean"}]},
]  # fmt: skip
NETWORK = {
    "id": "net-l1-30", "network": "net", "pruning_level": 30.4, "pruning_reached": 30.1, "strategy": "l1",
    "input_size": [3, 16, 16], "optimizer": "adam", "build": {"nodes": NODES},
}  # fmt: skip
ROWS = [
    "net-l1-30,infer,1,1,700.5,10.25,22,1.5,1.4,1.6,14,1980,0,",
    "net-l1-30,train,2,1,710.5,11.25,24,4.5,4.4,4.6,14,1980,0,",
    "net-l1-30,train,4096,0,,,,,,,,,,out of memory",
    'net-l1-30,train,8,,,,,,,,,,,"ValueError: no, not\nthat"',
    "gone,train,2,1,710.5,11.25,24,4.5,4.4,4.6,14,1980,0,",
]
TABLE = "\n".join([",".join(COLUMNS), *ROWS]) + "\n"
LAYERS = {"id": "net-l1-30", "mode": "train", "batch_size": 2, "layers": [["layers.conv", 1.5, 2.5]]}
TIMES = f"id,mode,batch_size,{','.join(KINDS)}\nnet-l1-30,train,2,7,,1,1,1,1\n"


@pytest.fixture
def folder(tmp_path):
    """Write files into a dataset folder; a str is its text, None takes a file away."""

    def make(packed=False, **files):
        given = {"measurements": TABLE, "networks": json.dumps(NETWORK) + "\n", **files}
        names = {"measurements": "measurements.csv", "layer_times": "layer_times.csv"}
        root = tmp_path / ("packed" if packed else "plain")
        root.mkdir(exist_ok=True)
        for name, text in given.items():
            if text is not None:
                file = root / names.get(name, f"{name}.jsonl")
                data = text.encode()
                if packed:
                    file.with_name(file.name + ".gz").write_bytes(gzip.compress(data))
                else:
                    file.write_bytes(data)
        return root

    return make


def test_a_campaigns_folder(folder):
    found = read_dataset(folder())
    assert found.name == "plain" and found.probed and found.modes == ("train", "infer")
    assert found.id.tolist() == ["net-l1-30"] * 4 + ["gone"]
    assert found.mode.tolist() == ["infer", *["train"] * 4]
    assert found.batch.tolist() == [1, 2, 4096, 8, 2]
    assert found.has_graph.tolist() == [True, True, True, True, False]
    nan = np.nan
    np.testing.assert_equal(found["fits"], [1, 1, 0, nan, 1])
    np.testing.assert_equal(found["memory"], [700.5, 710.5, nan, nan, 710.5])
    np.testing.assert_equal(found["allocated"], [10.25, 11.25, nan, nan, 11.25])
    np.testing.assert_equal(found["reserved"], [22, 24, nan, nan, 24])
    np.testing.assert_equal(found["latency"], [1.5, 4.5, nan, nan, 4.5])
    network = found.networks["net-l1-30"]
    assert (network.architecture, network.level, network.strategy) == ("net", 30, "l1")
    assert network.settings.optimizer == "adam" and network.job["build"] == {"nodes": NODES}


def test_graphs_are_captured_once_a_mode(folder):
    found = read_dataset(folder())
    train, infer = (found.graph_of("net-l1-30", mode) for mode in ("train", "infer"))
    assert found.graph_of("net-l1-30", "train") is train
    assert train.loss is not None and infer.loss is None
    assert train.ops[0].kind == "conv2d" and train.values[0].shape[-3:] == (3, 16, 16)


def test_packed_and_plain_are_the_same_dataset(folder):
    files = {"layers": json.dumps(LAYERS) + "\n"}
    one, two = read_dataset(folder(**files)), read_dataset(folder(packed=True, **files))
    assert one.digest == two.digest
    for name in ("id", "mode", "batch"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist()
    for column in datasets.FIGURES:
        np.testing.assert_equal(one[column], two[column])
    np.testing.assert_equal(one.layers, two.layers)
    assert list(one.layers) == [("net-l1-30", "train", 2)]


def test_the_plain_file_stands_before_its_packed_form(folder):
    root = folder()
    (root / "measurements.csv.gz").write_bytes(b"an older one")
    assert len(read_dataset(root).batch) == 5


def test_layers_are_summed_and_sums_read_where_they_are(folder):
    assert read_dataset(folder()).layers == {}
    summed = read_dataset(folder(layers=json.dumps(LAYERS) + "\n")).layers
    assert summed["net-l1-30", "train", 2].tolist() == [1.5, 2.5, 0, 0, 0, 0]
    read = read_dataset(folder(layer_times=TIMES)).layers
    np.testing.assert_equal(read["net-l1-30", "train", 2], [7, np.nan, 1, 1, 1, 1])


CHAIN = [
    ("conv", "Conv2d", {"in_channels": 3, "out_channels": 8, "kernel_size": 3}, 1.0, 0.5),
    ("second", "Conv2d", {"in_channels": 8, "out_channels": 8, "kernel_size": 3}, 2.0, 4.0),
    ("norm", "BatchNorm2d", {"num_features": 8}, 0.25, 0.125),
    ("act", "ReLU6", {}, 0.5, None),
    ("pool", "AdaptiveAvgPool2d", {"output_size": 1}, 0.75, 0.5),
    ("flat", "Flatten", {}, 100.0, 100.0),
    ("head", "Linear", {"in_features": 8, "out_features": 2}, 3.0, 7.0),
]
"""A layer of every kind: name, type, settings, times of both passes."""


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, [6.0, 11.5, 0.0, 0.375, 0.5, 1.25]),
        (8, [4.0, 7.5, 6.0, 0.375, 0.5, 1.25]),
        (2, [np.nan, np.nan, 0.0, 0.375, 0.5, 1.25]),
    ],
    ids=["dense", "depthwise", "grouped"],
)
def test_layers_are_summed_by_kind(folder, groups, expected):
    nodes = [{"name": "x", "op": "input"}]
    for name, kind, settings, *_ in CHAIN:
        given = {**settings, "groups": groups} if name == "second" else settings
        before = [{"node": nodes[-1]["name"]}]
        nodes.append({"name": name, "op": "module", "type": kind, "kwargs": given, "args": before})
    nodes.append({"name": "y", "op": "output", "args": [{"node": "head"}]})
    times = {**LAYERS, "layers": [[f"layers.{name}", *both] for name, _, _, *both in CHAIN]}
    networks = json.dumps({**NETWORK, "build": {"nodes": nodes}}) + "\n"
    found = read_dataset(folder(networks=networks, layers=json.dumps(times) + "\n")).layers
    np.testing.assert_equal(found, {("net-l1-30", "train", 2): np.array(expected)})


def test_the_public_format(folder):
    table = "network,pruning_level,batch_size,memory_fits,gamma_mb,allocated_mb,reserved_mb,phi_ms\n"
    topology = {"network": "net", "pruning_level": 30, "nodes": NODES}
    rows = "net,30,8,1,900,100,200,30\nnet,50,8,0,,,,\n"
    root = folder(measurements=table + rows, networks=None, topologies=json.dumps(topology) + "\n")
    found = read_dataset(root, input_size=(3, 8, 8))
    assert found.id.tolist() == ["net-30", "net-50"] and not found.probed and found.modes == ("train",)
    assert found.has_graph.tolist() == [True, False]
    assert found.graph_of("net-30", "train").values[0].shape[-3:] == (3, 8, 8)
    network = found.networks["net-30"]
    assert (network.strategy, network.settings.optimizer, network.job) == ("random", "sgd-momentum", None)


# damage -----------------------------------------------------------------------------------------------------


def line(**given):
    """The table with one more row, that of the first with other entries."""
    cells = dict(zip(COLUMNS, ROWS[0].split(","), strict=True))
    return TABLE + ",".join({**cells, **given}.values()) + "\n"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (line(mode="test"), "line 8: not a measured point .Invalid enum value 'test' - at `mode`"),
        (line(batch_size="0"), "line 8: .*>= 1 - at `batch_size`"),
        (line(batch_size="-4"), ">= 1 - at `batch_size`"),
        (line(batch_size="2.5"), "line 8: .*Expected `int`, got `str` - at `batch_size`"),
        (line(memory_mib="-3"), ">= 0.0 - at `memory_mib`"),
        (line(latency_ms="inf"), "<= .* - at `latency_ms`"),
        (line(latency_ms="fast"), "line 8: .*got `str` - at `latency_ms`"),
        (TABLE + "net-l1-30,train\n", "line 8: "),
        (TABLE + "net-l1-30,train,2,1,710\n", "line 8: .*got `str` - at `allocated_mib`"),
        (TABLE.replace("memory_mib", "memory"), "column 'memory_mib' is missing; expected id, mode"),
        (TABLE.split("\n")[0] + "\n", "has no rows"),
        ("", "column 'id' is missing"),
        ("a" * 200_000 + TABLE, "column 'id' is missing|field larger than field limit"),
    ],
)
def test_a_wrong_table_says_where(folder, table, said):
    with pytest.raises(ProfileError, match=rf"measurements\.csv.*({said})"):
        read_dataset(folder(measurements=table))


def test_a_table_that_is_no_text(folder):
    root = folder()
    (root / "measurements.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not UTF-8 text"):
        read_dataset(root)


@pytest.mark.parametrize(
    "given",
    [
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"id": "a"}),
        json.dumps({**NETWORK, "input_size": [3, 16]}),
        json.dumps({**NETWORK, "input_size": [3, 16, 1 << 20]}),
        json.dumps({**NETWORK, "build": 3}),
        json.dumps(NETWORK).replace("30.4", "1e999"),
        json.dumps(NETWORK).replace("[3, 16, 16]", "[3, 16, 1e999]"),
    ],
    ids=["torn", "list", "deep", "short", "two sides", "wide", "build", "level", "endless"],
)
def test_a_wrong_network_says_where(folder, given):
    with pytest.raises(
        ProfileError, match=r"networks\.jsonl line 2: .*(expected id, network|JSON|of at most 64 bits)"
    ):
        read_dataset(folder(networks=json.dumps(NETWORK) + "\n" + given + "\n"))


def test_a_network_that_cannot_be_built_is_named_when_asked_for(folder):
    build = {"library": "torchvision", "name": "resnet18", "kwargs": {"depth": 3}}
    prepare_torchvision()
    pytest.importorskip("torchvision")
    found = read_dataset(folder(networks=json.dumps({**NETWORK, "build": build}) + "\n"))
    with pytest.raises(ProfileError, match=r"networks\.jsonl line 1: resnet18 cannot be built"):
        found.graph_of("net-l1-30", "train")


@pytest.mark.parametrize("name", ["measurements.csv", "networks.jsonl"])
def test_missing_files_and_folders(folder, name, tmp_path):
    root = folder()
    (root / name).unlink()
    with pytest.raises(ProfileError, match=f"cannot be read|holds no {name}; .*campaign run"):
        read_dataset(root)
    with pytest.raises(ProfileError, match=r"is no folder; expected one with measurements\.csv"):
        read_dataset(tmp_path / "nowhere")


TOKENS = {"shape": ["batch", 16], "below": 90}
SETTINGS = {
    "id": "gpt2-autocast", "network": "gpt2-tiny", "family": "gpt2", "setting": "autocast", "seq_len": 16,
    "amp": "bfloat16", "optimizer": "adamw", "checkpointing": True, "loss": "model",
    "frozen": {"share": 0.6, "way": "leading"}, "inputs": {"input_ids": TOKENS, "labels": TOKENS},
    "build": {"library": "transformers", "name": "GPT2LMHeadModel", "config": {
        "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 100, "use_cache": False}},
}  # fmt: skip


@pytest.mark.slow
def test_a_transformer_is_captured_as_a_job_trained_it(folder):
    pytest.importorskip("transformers")
    prepare_torchvision()
    tokens = {**TOKENS, "shape": ["batch", 32]}
    inputs = {"input_ids": tokens, "labels": tokens}
    long = {**SETTINGS, "id": "gpt2-32", "seq_len": 32, "inputs": inputs}
    table = ",".join(COLUMNS) + "\ngpt2-autocast,train,2,1,710.5,11.25,24,4.5,4.4,4.6,14,1980,0,\n"
    lines = "".join(json.dumps(job) + "\n" for job in (SETTINGS, long))
    dataset = read_dataset(folder(measurements=table, networks=lines))
    network = dataset.networks["gpt2-autocast"]
    assert (network.architecture, network.setting) == ("gpt2", "autocast")
    assert (network.settings.optimizer, network.settings.amp) == ("adamw", "bfloat16")
    graph = dataset.graph_of("gpt2-autocast", "train")
    assert {value.trainable for value in graph.parameters} == {True, False}
    assert any(op.region for op in graph.ops)
    longer = dataset.graph_of("gpt2-32", "train")
    assert [g.values[g.inputs[0]].shape[1] for g in (graph, longer)] == [16, 32]
