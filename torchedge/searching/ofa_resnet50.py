"""The space of sub-networks of OFA-ResNet50 (Once-for-All, Cai et al., 2020; perf4sight, section 6.4).

Graphs need no modules: the full network is captured once, and skipped blocks are removed from its graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchedge.errors import InputError, check_whole, checked_call
from torchedge.graphs import ForwardGraph, GraphFamily, Mode
from torchedge.graphs.families import with_shapes, without_operators
from torchedge.graphs.sizes import Size
from torchedge.searching.spaces import Genes, SearchSpace, check_keys, choice_of
from torchedge.tracing.capturing import capture

DEPTHS = (0, 1, 2)
EXPAND_RATIOS = (0.2, 0.25, 0.35)
WIDTHS = (0.65, 0.8, 1.0)
BASE_DEPTHS = (2, 2, 4, 2)
STAGE_WIDTHS = (256, 512, 1024, 2048)
STEM_WIDTH = 64
BLOCKS = sum(BASE_DEPTHS) + len(BASE_DEPTHS) * max(DEPTHS)
_DIVISOR = 8
_PARTS = len(STAGE_WIDTHS) + 2

_STAGE_BLOCKS = tuple(base + max(DEPTHS) for base in BASE_DEPTHS)
_RATIOS = slice(len(STAGE_WIDTHS) + 1, len(STAGE_WIDTHS) + 1 + BLOCKS)
_STAGE = np.repeat(np.arange(len(_STAGE_BLOCKS)), _STAGE_BLOCKS)
_PLACE = np.concatenate([np.arange(count) for count in _STAGE_BLOCKS])
_BASE = np.repeat(BASE_DEPTHS, _STAGE_BLOCKS)
"""By block (18): stage, position in the stage, and number of blocks that the stage always has."""

_SIDES = 6

SYMBOLS = (
    "stem.middle",
    "stem.outputs",
    *(f"block{k}.middle" for k in range(sum(_STAGE_BLOCKS))),
    *(f"stage{s}.width" for s in range(len(STAGE_WIDTHS))),
    *(f"side{k}" for k in range(_SIDES)),
)
"""Sizes that differ between sub-networks of equal depths: channels, sides of images and feature maps."""

_MARKERS = (
    1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097, 1103,
    1109, 1117, 1123, 1129, 1151, 1153, 1163,
)  # fmt: skip
"""Channels of the captured network: primes, so that each dimension can be recognised."""

_MARKED_SIDE = 2003

Encoding = Mapping[str, Any]


class OFAResNet50Space(SearchSpace):
    """Sub-networks of OFA-ResNet50 in the published encoding, a dict of four entries.

    "d": 5 depths; the first is of the stem (2: its residual layer runs, 0: it is skipped), the others of
    {0, 1, 2} add blocks to the 2, 2, 4, 2 of the stages. "e": 18 expand ratios of {0.2, 0.25, 0.35},
    one per block, ignored for skipped blocks. "w": 6 indices into the width multipliers
    (0.65, 0.8, 1.0): first stem layer, last stem layer, four stages. "image_size": pixels of a side.
    """

    name = "ofa-resnet50"

    @checked_call()
    def __init__(
        self, image_sizes: int | Sequence[int] = (128, 144, 160, 176, 192, 208, 224), classes: int = 1000
    ) -> None:
        sizes = tuple(sorted({image_sizes} if isinstance(image_sizes, int) else set(image_sizes)))
        if not sizes or not all(type(size) is int and 64 <= size <= 4096 for size in sizes):
            raise InputError(f"image_sizes is {image_sizes!r}; expected whole numbers from 64 to 4096")
        check_whole("classes", classes, 2)
        self.image_sizes = sizes
        self.classes = classes
        self.choices = {
            "d0": (min(DEPTHS), max(DEPTHS)),
            **{f"d{stage + 1}": DEPTHS for stage in range(len(STAGE_WIDTHS))},
            **{f"e{block}": EXPAND_RATIOS for block in range(BLOCKS)},
            **{f"w{part}": tuple(range(len(WIDTHS))) for part in range(_PARTS)},
            "image_size": sizes,
        }
        self._templates: dict[Mode, ForwardGraph] = {}
        self._families: dict[tuple[Mode, tuple[int, ...]], GraphFamily] = {}

    # encodings --------------------------------------------------------------------------------------------

    def largest(self) -> dict[str, Any]:
        """Return the encoding of the full network at the largest image: 48.1 million parameters."""
        return self.decode((self.counts - 1).tolist())

    def smallest(self) -> dict[str, Any]:
        """Return the encoding of the smallest sub-network at the smallest image."""
        return self.decode([0] * len(self.choices))

    def landmarks(self) -> Sequence[Any]:
        """Return the smallest and the largest sub-network."""
        return (self.smallest(), self.largest())

    def decode(self, genes: Sequence[int]) -> dict[str, Any]:
        """Return the published encoding of one row of genes."""
        flat = [options[g] for options, g in zip(self.choices.values(), genes, strict=True)]
        first, second = len(STAGE_WIDTHS) + 1, len(STAGE_WIDTHS) + 1 + BLOCKS
        return {"d": flat[:first], "e": flat[first:second], "w": flat[second:-1], "image_size": flat[-1]}

    def encode(self, encoding: Encoding) -> list[int]:
        """Return the genes of a published encoding; raises InputError for an invalid one."""
        check_keys(encoding, ("d", "e", "w", "image_size"))
        flat: list[object] = []
        for key, count in (("d", len(STAGE_WIDTHS) + 1), ("e", BLOCKS), ("w", _PARTS)):
            if not isinstance(encoding[key], (list, tuple)) or len(encoding[key]) != count:
                raise InputError(
                    f"encoding[{key!r}] is {encoding[key]!r}; expected a list of {count} entries"
                )
            flat += encoding[key]
        flat.append(encoding["image_size"])
        genes = zip(self.choices.items(), flat, strict=True)
        return [choice_of(name, value, options) for (name, options), value in genes]

    def canonical(self, genes: Genes) -> Genes:
        """Return the genes (C, G) with the ratios of skipped blocks set to 0."""
        canonical = genes.copy()
        ratios = canonical[:, _RATIOS]
        ratios[_PLACE[None] >= _BASE[None] + genes[:, 1 + _STAGE]] = 0
        return canonical

    def sample_size(self, encoding: Encoding) -> tuple[int, ...]:
        """Return the shape of one sample, (3, image_size, image_size)."""
        size = self.architecture(encoding).image_size
        return (3, size, size)

    # networks ---------------------------------------------------------------------------------------------

    def architecture(self, encoding: Encoding) -> Architecture:
        """Return the channels and strides of an encoding; raises InputError for an invalid one."""
        genes = np.array([self.encode(encoding)], dtype=np.int16)
        return _assembled(symbol_values(genes, self.image_sizes)[:, 0].tolist(), encoding["d"], self.classes)

    def build(self, encoding: Encoding) -> nn.Module:
        """Build the sub-network as a plain torch.nn.Module with new random weights.

        Parameters have the names of the published sub-networks, so that their state dicts load.
        """
        return OFAResNet50(self.architecture(encoding))

    def graph(self, encoding: Encoding, mode: Mode = "train") -> ForwardGraph:
        """Return the graph of a sub-network: the captured one without skipped blocks, with its sizes."""
        genes = np.array([self.encode(encoding)], dtype=np.int16)
        ((family, values, _),) = self.sketch(genes, mode)
        return family.graph(values[:, 0].tolist(), self.name)

    def sketch(self, genes: Genes, mode: Mode) -> list[tuple[GraphFamily, npt.NDArray[np.int64], list[int]]]:
        """Return the graphs of candidates by families, one for each set of depths."""
        members: dict[tuple[int, ...], list[int]] = {}
        for place, depths in enumerate(genes[:, : 1 + len(STAGE_WIDTHS)].tolist()):
            members.setdefault(tuple(depths), []).append(place)
        values = symbol_values(genes, self.image_sizes)
        return [(self._family(mode, depths), values[:, rows], rows) for depths, rows in members.items()]

    def _family(self, mode: Mode, depths: tuple[int, ...]) -> GraphFamily:
        key = (mode, depths)
        if key not in self._families:
            self._families[key] = cut(self.template(mode), bool(depths[0]), depths[1:])
        return self._families[key]

    def template(self, mode: Mode) -> ForwardGraph:
        """Return the graph of the full network with symbols as channels and sides, captured on first use."""
        if mode not in self._templates:
            self._templates[mode] = full_template(self.classes, mode)
        return self._templates[mode]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the families; the receiver makes those that it needs."""
        return {**self.__dict__, "_families": {}}


# graphs without modules ------------------------------------------------------------------------------------


def side_lengths(image_size: int) -> list[int]:
    """Return the sides of the image and of the feature maps behind each layer with a stride, (6,)."""
    sides = [image_size]
    while len(sides) < _SIDES:
        sides.append(-(-sides[-1] // 2))
    return sides


def symbol_values(genes: Genes, image_sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the values of `SYMBOLS` for candidates (C, G), one column each, skipped blocks included."""
    ratios, widths = genes[:, _RATIOS], genes[:, _RATIOS.stop : -1]
    stem = [divisible(STEM_WIDTH * w) for w in WIDTHS]
    outputs = [[divisible(base * w) for w in WIDTHS] for base in STAGE_WIDTHS]
    middles = [[[divisible(round(out * e)) for e in EXPAND_RATIOS] for out in row] for row in outputs]
    sides = np.array([side_lengths(size) for size in image_sizes])
    columns = [
        np.array([divisible(width // 2) for width in stem])[widths[:, :1]],
        np.array(stem)[widths[:, 1:2]],
        np.array(middles)[_STAGE, widths[:, 2 + _STAGE], ratios],
        np.array(outputs)[np.arange(len(STAGE_WIDTHS)), widths[:, 2:]],
        sides[genes[:, -1]],
    ]
    return np.concatenate(columns, axis=1).T.astype(np.int64)


def full_template(classes: int, mode: Mode) -> ForwardGraph:
    """Capture the full network with symbols as channels and sides."""
    marked = (*_MARKERS, *side_lengths(_MARKED_SIDE))
    with torch.device("meta"):
        module = OFAResNet50(_assembled(marked, [max(DEPTHS)] * (1 + len(STAGE_WIDTHS)), classes))
    graph = capture(module, input_size=(3, _MARKED_SIDE, _MARKED_SIDE), mode=mode, name="ofa-resnet50")
    sizes = {m: Size.symbol(name) for m, name in zip(marked, SYMBOLS, strict=True)}
    shapes = {
        index: tuple([sizes.get(d, d) if isinstance(d, int) else d for d in value.shape])
        for index, value in enumerate(graph.values)
    }
    return with_shapes(graph, shapes)


def _assembled(values: Sequence[int], depths: Sequence[int], classes: int) -> Architecture:
    """Return the channels and strides for values of `SYMBOLS`, and the depths of the stem and the stages."""
    size = dict(zip(SYMBOLS, values, strict=True))
    channels = size["stem.outputs"]
    blocks: list[Bottleneck] = []
    for place, (stage, block) in enumerate(zip(_STAGE.tolist(), _PLACE.tolist(), strict=True)):
        if block < BASE_DEPTHS[stage] + depths[1 + stage]:
            outputs, stride = size[f"stage{stage}.width"], 2 if block == 0 and stage else 1
            blocks.append(Bottleneck(channels, size[f"block{place}.middle"], outputs, stride, block == 0))
            channels = outputs
    stem = size["stem.middle"], bool(depths[0]), size["stem.outputs"]
    return Architecture(*stem, tuple(blocks), classes, size["side0"])


def cut(template: ForwardGraph, stem_residual: bool, depths: tuple[int, ...]) -> GraphFamily:
    """Return the family of the sub-networks with these depths of the stages and this kind of stem."""
    scopes = [] if stem_residual else ["input_stem.1"]
    first = 0
    for count, base, depth in zip(_STAGE_BLOCKS, BASE_DEPTHS, depths, strict=True):
        scopes += [f"blocks.{first + k}" for k in range(base + depth, count)]
        first += count
    removed: set[int] = set()
    replacements: dict[int, int] = {}
    for scope in scopes:
        positions = [
            k for k, op in enumerate(template.ops) if op.scope == scope or op.scope.startswith(f"{scope}.")
        ]
        block_input = template.ops[positions[0]].inputs[0]
        assert block_input is not None
        replacements[template.ops[positions[-1]].outputs[0]] = block_input
        removed.update(positions)
    prefixes = tuple([f"{scope}." for scope in scopes])
    unread = tuple([value for value in template.unread if not value.name.startswith(prefixes)])
    template = replace(template, unread=unread)
    return GraphFamily(without_operators(template, removed, replacements), SYMBOLS)


# encodings -------------------------------------------------------------------------------------------------


def divisible(channels: float) -> int:
    """Round channels to a multiple of 8, not below 90 % of them."""
    rounded = max(_DIVISOR, int(channels + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return rounded + _DIVISOR if rounded < 0.9 * channels else rounded


# modules, named as in the published sub-networks ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One residual block: channels in, in the middle and out, and the stride of its middle convolution.

    `projected` says that the shortcut holds an average pool, a convolution and a batch norm.
    """

    inputs: int
    middle: int
    outputs: int
    stride: int
    projected: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    """One sub-network: channels of the stem, whether its residual layer runs, the blocks, the image."""

    stem_middle: int
    stem_residual: bool
    stem_outputs: int
    blocks: tuple[Bottleneck, ...]
    classes: int
    image_size: int


class OFAResNet50(nn.Module):
    """One sub-network: stem, max pool, bottleneck blocks, global average pool, classifier."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        middle, outputs = architecture.stem_middle, architecture.stem_outputs
        stem: list[nn.Module] = [_convolution(3, middle, 3, stride=2)]
        if architecture.stem_residual:
            stem.append(Residual(_convolution(middle, middle, 3)))
        stem.append(_convolution(middle, outputs, 3))
        self.input_stem = nn.Sequential(*stem)
        self.max_pooling = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(BottleneckBlock(block) for block in architecture.blocks))
        self.global_avg_pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential()
        self.classifier.add_module("linear", nn.Linear(architecture.blocks[-1].outputs, architecture.classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (N, classes) of images (N, 3, H, W)."""
        x = self.max_pooling(self.input_stem(images))
        for block in self.blocks:  # so that no name keeps the pooled images alive
            x = block(x)
        x = self.global_avg_pool(x)
        scores: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return scores


class Residual(nn.Module):
    """A layer with its input added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output plus x."""
        out: torch.Tensor = self.conv(x) + x
        return out


class BottleneckBlock(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut that pools and projects where shapes change."""

    def __init__(self, block: Bottleneck) -> None:
        super().__init__()
        self.conv1 = _convolution(block.inputs, block.middle, 1)
        self.conv2 = _convolution(block.middle, block.middle, 3, stride=block.stride)
        self.conv3 = _convolution(block.middle, block.outputs, 1, activated=False)
        self.downsample: nn.Module = nn.Identity()
        if block.projected:
            self.downsample = nn.Sequential()
            self.downsample.add_module("avg_pool", nn.AvgPool2d(block.stride, block.stride, ceil_mode=True))
            for name, layer in _convolution(block.inputs, block.outputs, 1, activated=False).named_children():
                self.downsample.add_module(name, layer)
        self.final_act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activated sum of both paths."""
        residual = self.downsample(x)
        out: torch.Tensor = self.final_act(self.conv3(self.conv2(self.conv1(x))) + residual)
        return out


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, activated: bool = True
) -> nn.Sequential:
    layers = nn.Sequential()
    layers.add_module("conv", nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False))
    layers.add_module("bn", nn.BatchNorm2d(outputs))
    if activated:
        layers.add_module("act", nn.ReLU(inplace=True))
    return layers
