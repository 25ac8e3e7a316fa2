"""Hold the OFA-ResNet50 space against the published architecture and its extremes."""

import numpy as np
import pytest
import torch
from oracles.graph_checks import digest as digest_of
from oracles.graph_checks import verify

import torchedge
from torchedge.errors import InputError
from torchedge.searching.ofa_resnet50 import OFAResNet50Space, divisible

SPACE = OFAResNet50Space()


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("encoding", "count", "mib"),
    [(SPACE.largest(), 48.1e6, 183.5), (SPACE.smallest(), 6.54e6, 24.9)],
    ids=["largest", "smallest"],
)
def test_the_extremes_are_the_published_ones(encoding, count, mib):
    found = parameters(SPACE.build(encoding))
    assert found == pytest.approx(count, rel=1e-3)
    assert found * 4 / 2**20 == pytest.approx(mib, abs=0.05)


def test_modules_bear_the_published_names():
    names = set(SPACE.build(SPACE.largest()).state_dict())
    published = {
        "input_stem.0.conv.weight",
        "input_stem.1.conv.conv.weight",
        "input_stem.2.bn.running_mean",
        "blocks.0.downsample.conv.weight",
        "blocks.17.conv3.bn.bias",
        "classifier.linear.bias",
    }
    assert published <= names
    assert not any(name.startswith("blocks.18.") for name in names)


@pytest.mark.slow
def test_random_sub_networks_run_and_are_traced_by_fx():
    rng = np.random.default_rng(0)
    for _ in range(3):
        encoding = SPACE.random(rng)
        traced = torch.fx.symbolic_trace(SPACE.build(encoding).eval())
        assert traced(torch.zeros(1, *SPACE.sample_size(encoding))).shape == (1, 1000)


def test_skipped_blocks_take_their_ratio_from_the_published_place():
    encoding = SPACE.smallest()
    encoding["e"][4] = 0.35  # the first block of the second stage
    blocks = SPACE.architecture(encoding).blocks
    assert [b.middle for b in blocks[:4]] == [32, 32, 120, 64]


def test_channels_are_the_published_multiples():
    rng = np.random.default_rng(1)
    for encoding in (SPACE.random(rng) for _ in range(8)):
        multiplier = [(0.65, 0.8, 1.0)[i] for i in encoding["w"]]
        architecture = SPACE.architecture(encoding)
        stem = divisible(64 * multiplier[0]), divisible(64 * multiplier[1])
        assert (architecture.stem_middle, architecture.stem_outputs) == (divisible(stem[0] // 2), stem[1])
        expected, channels, ratios = [], stem[1], iter(encoding["e"])
        for stage, (base, width) in enumerate(zip((2, 2, 4, 2), (256, 512, 1024, 2048), strict=True)):
            outputs = divisible(width * multiplier[2 + stage])
            for block, ratio in enumerate([next(ratios) for _ in range(base + 2)]):
                if block < base + encoding["d"][1 + stage]:
                    expected.append((channels, divisible(round(outputs * ratio)), outputs))
                    channels = outputs
        assert [(b.inputs, b.middle, b.outputs) for b in architecture.blocks] == expected


@pytest.mark.parametrize(
    ("given", "expected"), [(1, 8), (8, 8), (41.6, 40), (166.4, 168), (11, 16), (12, 16)]
)
def test_divisible_rounds_to_eights_but_not_below_nine_tenths(given, expected):
    assert divisible(given) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": [1, 0, 0, 0, 0]}, "d0 is 1; expected one of 0, 2"),
        ({"d": [0, 0, 0, 0]}, "list of 5 entries"),
        ({"e": [0.3] * 18}, "e0 is 0.3"),
        ({"w": [3] * 6}, "w0 is 3"),
        ({"image_size": 100}, "image_size is 100"),
        ({"depth": []}, "expected a dict"),
    ],
)
def test_wrong_encodings_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        SPACE.build({**SPACE.smallest(), **change})


def test_one_image_size_is_enough():
    assert OFAResNet50Space(224).image_sizes == (224,)


@pytest.mark.parametrize("sizes", [(), (0,), (224.0,), 32, ["224"]])
def test_wrong_image_sizes_are_refused(sizes):
    with pytest.raises(InputError, match="image_sizes"):
        OFAResNet50Space(sizes)


def test_random_sub_networks_need_no_module_to_give_the_graph_of_theirs():
    rng = np.random.default_rng(7)
    for encoding in (SPACE.largest(), SPACE.smallest(), *(SPACE.random(rng) for _ in range(6))):
        with torch.device("meta"):
            module = SPACE.build(encoding)
        size = SPACE.sample_size(encoding)
        for mode in ("train", "infer"):
            graph = SPACE.graph(encoding, mode)
            verify(graph)
            captured = torchedge.capture(module, input_size=size, mode=mode)
            assert digest_of(graph) == digest_of(captured)
            assert np.array_equal(torchedge.features(graph, 8).values, torchedge.features(captured, 8).values)


def test_encodings_and_genes_are_the_same_thing():
    rng = np.random.default_rng(3)
    for _ in range(5):
        encoding = SPACE.random(rng)
        assert SPACE.decode(SPACE.encode(encoding)) == encoding


def test_ratios_of_skipped_blocks_mean_nothing():
    encoding = SPACE.smallest()
    other = {**encoding, "e": [0.2] * 2 + [0.35] * 2 + [0.2] * 14}  # blocks 2 and 3 are skipped
    rows = np.array([SPACE.encode(encoding), SPACE.encode(other)], dtype=np.int16)
    assert np.array_equal(*SPACE.canonical(rows))
    rows[:, 1] = 1  # one more block in the first stage: block 2 runs
    assert not np.array_equal(*SPACE.canonical(rows))
