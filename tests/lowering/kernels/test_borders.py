"""Zero padding from the border of an image: the same as by comparing, in every layout."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.node_runs import program_of, run_nodes
from oracles.rule_checks import apply

from torchedge.lowering.targets import TARGETS
from torchedge.textures.layouts import PATTERNS, Layout, image_layouts

pytest.importorskip("pyopencl")
ATEN = torch.ops.aten
SHAPE = (2, 8, 5, 6)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(seed):
    """Return a layout of SHAPE in an image with channels innermost: order, split, pattern, fold."""
    rng = random.Random(seed)
    layout = Layout((*rng.sample([0, 2, 3], 3), 1), "image", pattern=rng.choice(sorted(PATTERNS)))
    return rng.choice(image_layouts(layout, SHAPE, rng.choice([8, 500]), 500))


def padded(shape, layout, monkeypatch, compared):
    """Return what padding an image computes, its kernel, and what PyTorch computes."""
    x, pad = normal(*shape), [2, 1, 1, 3, 0, 0, 1, 1]
    wanted = ATEN.constant_pad_nd(x, pad)
    nodes, data = apply(ATEN.constant_pad_nd.default, (x, pad), {}, [wanted])
    own = {name: layout for name in data}
    with monkeypatch.context() as patch:
        if compared:
            patch.setattr(Layout, "borders", lambda self, shape: frozenset())
        (result,) = run_nodes(nodes, data, "mobile", own=own)
        (kernel,) = program_of(nodes, "mobile", own=own).kernels
    return result, kernel.source, wanted.numpy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_padding_of_an_image_in_any_layout(seed, monkeypatch):
    layout = drawn(seed)
    result, source, wanted = padded(SHAPE, layout, monkeypatch, compared=False)
    compared, with_tests, _ = padded(SHAPE, layout, monkeypatch, compared=True)
    np.testing.assert_array_equal(result, wanted.astype(np.float32))
    np.testing.assert_array_equal(result, compared)
    tests = [text.count(">=") for text in (with_tests, source)]
    assert source.count("<") == with_tests.count("<")  # a slot of the arena can be larger than its image
    assert tests[0] - tests[1] == len({0, 2, 3} & layout.borders(SHAPE))


def test_pictures_by_rows_are_padded_with_half_the_compares(monkeypatch):
    x, w = normal(1, 8, 6, 6), normal(16, 8, 3, 3, seed=1)
    more = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    wanted = ATEN.convolution(x, w, None, *more)
    nodes, data = apply(ATEN.convolution.default, (x, w, None, *more), {}, [wanted])
    own = {name: Layout((0, 2, 3, 1), "image", 2) for name in data if data[name].shape == x.shape}
    sources = []
    for borders in (Layout.borders, lambda self, shape: frozenset()):
        monkeypatch.setattr(Layout, "borders", borders)
        sources.append(program_of(nodes, "mobile", own=own).kernels[0].source)
        (result,) = run_nodes(nodes, data, "mobile", own=own)
        assert np.linalg.norm(result - wanted.numpy()) <= 1e-5 * np.linalg.norm(wanted.numpy())
    without, compared = sources
    assert compared.count(">=") == without.count(">=") + 2 * 4  # four positions of a tile


@pytest.mark.parametrize("width", [32, 16_384])
def test_weights_wider_than_an_image_lie_in_more_lines(width):
    x, w = normal(1, 64, 6, 6), normal(64, 64, 3, 3, seed=1)
    more = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    wanted = ATEN.convolution(x, w, None, *more)
    nodes, data = apply(ATEN.convolution.default, (x, w, None, *more), {}, [wanted])
    target = replace(TARGETS["mobile"], image_width=width)
    weight = next(t for t in program_of(nodes, target).tensors if t.shape == w.shape)
    assert (weight.layout.split, weight.layout.fold) == ((3, 1) if width == 32 else (2, 1))
    (result,) = run_nodes(nodes, data, target)
    assert np.linalg.norm(result - wanted.numpy()) <= 1e-5 * np.linalg.norm(wanted.numpy())
