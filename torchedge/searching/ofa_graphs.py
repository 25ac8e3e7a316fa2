"""Graphs of OFA sub-networks without modules: the full network is captured once, blocks are cut out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchedge.graphs import ForwardGraph, GraphFamily, Size
from torchedge.graphs.families import with_shapes, without_operators
from torchedge.searching.ofa_resnet50 import (
    BASE_DEPTHS,
    DEPTHS,
    EXPAND_RATIOS,
    STAGE_WIDTHS,
    STEM_WIDTH,
    WIDTHS,
    Architecture,
    Bottleneck,
    divisible,
)
from torchedge.searching.spaces import Genes, Mode

_SIDES = 6
_STAGE_BLOCKS = tuple(base + max(DEPTHS) for base in BASE_DEPTHS)

SYMBOLS = (
    "stem.middle",
    "stem.outputs",
    *(f"block{k}.middle" for k in range(sum(_STAGE_BLOCKS))),
    *(f"stage{s}.width" for s in range(len(STAGE_WIDTHS))),
    *(f"side{k}" for k in range(_SIDES)),
)
"""What differs between sub-networks of equal depths: channels, and the sides of images and feature maps."""

_MARKERS = (
    1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097, 1103,
    1109, 1117, 1123, 1129, 1151, 1153, 1163,
)  # fmt: skip
"""Channels of the network that is captured: primes, by which each dimension is recognised afterwards."""

_MARKED_SIDE = 2003


def side_lengths(image_size: int) -> list[int]:
    """Return the sides of the image and of the feature maps behind each layer with a stride, (6,)."""
    sides = [image_size]
    while len(sides) < _SIDES:
        sides.append(-(-sides[-1] // 2))
    return sides


def symbol_values(genes: Genes, image_sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the values of `SYMBOLS` for candidates (C, G), a column each; skipped blocks get some too."""
    stages, blocks = len(STAGE_WIDTHS), sum(_STAGE_BLOCKS)
    ratios, widths = genes[:, 1 + stages : 1 + stages + blocks], genes[:, 1 + stages + blocks : -1]
    stage_of = np.repeat(np.arange(stages), _STAGE_BLOCKS)
    stem = [divisible(STEM_WIDTH * w) for w in WIDTHS]
    outputs = [[divisible(base * w) for w in WIDTHS] for base in STAGE_WIDTHS]
    middles = [[[divisible(round(out * e)) for e in EXPAND_RATIOS] for out in row] for row in outputs]
    sides = np.array([side_lengths(size) for size in image_sizes])
    columns = [
        np.array([divisible(width // 2) for width in stem])[widths[:, :1]],
        np.array(stem)[widths[:, 1:2]],
        np.array(middles)[stage_of, widths[:, 2 + stage_of], ratios],
        np.array(outputs)[np.arange(stages), widths[:, 2:]],
        sides[genes[:, -1]],
    ]
    return np.concatenate(columns, axis=1).T.astype(np.int64)


def full_template(classes: int, mode: Mode) -> ForwardGraph:
    """Capture the full network once, its channels and sides being symbols."""
    import torch

    from torchedge.searching.ofa_modules import OFAResNet50
    from torchedge.tracing.capturing import capture

    with torch.device("meta"):
        module = OFAResNet50(_marked(classes))
    graph = capture(module, input_size=(3, _MARKED_SIDE, _MARKED_SIDE), mode=mode, name="ofa-resnet50")
    marked = (*_MARKERS, *side_lengths(_MARKED_SIDE))
    sizes = {m: Size.symbol(name) for m, name in zip(marked, SYMBOLS, strict=True)}
    shapes = {
        index: tuple([sizes.get(d, d) if isinstance(d, int) else d for d in value.shape])
        for index, value in enumerate(graph.values)
    }
    return with_shapes(graph, shapes)


def _marked(classes: int) -> Architecture:
    channels = _MARKERS[1]
    middles, widths = iter(_MARKERS[2:]), _MARKERS[-len(STAGE_WIDTHS) :]
    blocks = []
    for stage, count in enumerate(_STAGE_BLOCKS):
        for block in range(count):
            stride = 2 if block == 0 and stage else 1
            blocks.append(Bottleneck(channels, next(middles), widths[stage], stride, projected=block == 0))
            channels = widths[stage]
    return Architecture(_MARKERS[0], True, _MARKERS[1], tuple(blocks), classes, _MARKED_SIDE)


def cut(template: ForwardGraph, stem_residual: bool, depths: tuple[int, ...]) -> GraphFamily:
    """Return the family of the sub-networks with these depths of the stages and this kind of stem."""
    scopes = [] if stem_residual else ["input_stem.1"]
    first = 0
    for count, base, depth in zip(_STAGE_BLOCKS, BASE_DEPTHS, depths, strict=True):
        scopes += [f"blocks.{first + k}" for k in range(base + depth, count)]
        first += count
    removed: set[int] = set()
    stands_for: dict[int, int] = {}
    for scope in scopes:
        positions = [
            k for k, op in enumerate(template.ops) if op.scope == scope or op.scope.startswith(f"{scope}.")
        ]
        entered = template.ops[positions[0]].inputs[0]
        assert entered is not None
        stands_for[template.ops[positions[-1]].outputs[0]] = entered
        removed.update(positions)
    return GraphFamily(without_operators(template, removed, stands_for), SYMBOLS)
