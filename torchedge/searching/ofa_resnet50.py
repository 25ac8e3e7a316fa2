"""The space of sub-networks of OFA-ResNet50 (Once-for-All, Cai et al., 2020; perf4sight, section 6.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchedge.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

DEPTHS = (0, 1, 2)
EXPAND_RATIOS = (0.2, 0.25, 0.35)
WIDTHS = (0.65, 0.8, 1.0)
BASE_DEPTHS = (2, 2, 4, 2)
STAGE_WIDTHS = (256, 512, 1024, 2048)
STEM_WIDTH = 64
BLOCKS = sum(BASE_DEPTHS) + len(BASE_DEPTHS) * max(DEPTHS)
_DIVISOR = 8

Encoding = Mapping[str, Any]


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
    """What an encoding says: channels of the stem, whether its residual layer runs, the blocks, the image."""

    stem_middle: int
    stem_residual: bool
    stem_outputs: int
    blocks: tuple[Bottleneck, ...]
    classes: int
    image_size: int


class OFAResNet50Space:
    """Sub-networks of OFA-ResNet50 in the published encoding, a dict of four entries.

    "d": 5 depths; the first is of the stem (2: its residual layer runs, 0: it is skipped), the others of
    {0, 1, 2} say how many blocks a stage has beyond 2, 2, 4, 2. "e": 18 expand ratios of {0.2, 0.25, 0.35},
    one a block; those of skipped blocks mean nothing. "w": 6 indices into the width multipliers
    (0.65, 0.8, 1.0): first stem layer, last stem layer, four stages. "image_size": pixels of a side.
    """

    name = "ofa-resnet50"

    def __init__(
        self, image_sizes: Sequence[int] = (128, 144, 160, 176, 192, 208, 224), classes: int = 1000
    ) -> None:
        sizes = tuple(sorted(set(image_sizes)))
        if not sizes or not all(_whole(size) and 32 <= size <= 4096 for size in sizes):
            raise InputError(f"image_sizes is {image_sizes!r}; expected whole numbers from 32 to 4096")
        if not _whole(classes) or classes < 1:
            raise InputError(f"classes is {classes!r}; expected a whole number from 1 on")
        self.image_sizes = sizes
        self.classes = classes

    def largest(self) -> dict[str, Any]:
        """Return the encoding of the full network at the largest image: 48.1 million parameters."""
        stages = len(STAGE_WIDTHS)
        return {
            "d": [max(DEPTHS)] * (stages + 1),
            "e": [max(EXPAND_RATIOS)] * BLOCKS,
            "w": [len(WIDTHS) - 1] * (stages + 2),
            "image_size": self.image_sizes[-1],
        }

    def smallest(self) -> dict[str, Any]:
        """Return the encoding of the smallest sub-network at the smallest image."""
        stages = len(STAGE_WIDTHS)
        return {
            "d": [min(DEPTHS)] * (stages + 1),
            "e": [min(EXPAND_RATIOS)] * BLOCKS,
            "w": [0] * (stages + 2),
            "image_size": self.image_sizes[0],
        }

    def random(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw an encoding: every entry uniformly of its choices."""
        stages = len(STAGE_WIDTHS)
        stem = (min(DEPTHS), max(DEPTHS))[int(rng.integers(2))]
        return {
            "d": [stem, *(DEPTHS[i] for i in rng.integers(len(DEPTHS), size=stages))],
            "e": [EXPAND_RATIOS[i] for i in rng.integers(len(EXPAND_RATIOS), size=BLOCKS)],
            "w": rng.integers(len(WIDTHS), size=stages + 2).tolist(),
            "image_size": self.image_sizes[int(rng.integers(len(self.image_sizes)))],
        }

    def input_size(self, encoding: Encoding) -> tuple[int, int, int]:
        """Return the shape of one sample, (3, image_size, image_size)."""
        size = self.architecture(encoding).image_size
        return (3, size, size)

    def architecture(self, encoding: Encoding) -> Architecture:
        """Return the channels and strides an encoding stands for; raises InputError if it is none."""
        _check(encoding, self.image_sizes)
        widths = [WIDTHS[i] for i in encoding["w"]]
        middle = divisible(divisible(STEM_WIDTH * widths[0]) // 2)
        channels = stem = divisible(STEM_WIDTH * widths[1])
        blocks: list[Bottleneck] = []
        first = 0
        for stage, (base, depth) in enumerate(zip(BASE_DEPTHS, encoding["d"][1:], strict=True)):
            outputs = divisible(STAGE_WIDTHS[stage] * widths[stage + 2])
            for block in range(base + depth):
                inner = divisible(round(outputs * encoding["e"][first + block]))
                stride = 2 if block == 0 and stage else 1
                blocks.append(Bottleneck(channels, inner, outputs, stride, projected=block == 0))
                channels = outputs
            first += base + max(DEPTHS)
        return Architecture(
            middle, encoding["d"][0] == max(DEPTHS), stem, tuple(blocks), self.classes, encoding["image_size"]
        )

    def build(self, encoding: Encoding) -> nn.Module:
        """Build the sub-network as a plain torch.nn.Module with new random weights.

        Its parameters bear the names of the published sub-networks, whose state dict it loads.
        """
        from torchedge.searching.ofa_modules import OFAResNet50

        return OFAResNet50(self.architecture(encoding))


def divisible(channels: float) -> int:
    """Round channels to a multiple of 8, not below 90 % of them."""
    rounded = max(_DIVISOR, int(channels + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return rounded + _DIVISOR if rounded < 0.9 * channels else rounded


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _check(encoding: object, image_sizes: tuple[int, ...]) -> None:
    """Raise InputError naming the first entry of an encoding that is not one of the space."""
    if not isinstance(encoding, Mapping) or set(encoding) != {"d", "e", "w", "image_size"}:
        found = sorted(encoding) if isinstance(encoding, Mapping) else type(encoding).__name__
        raise InputError(f"encoding holds {found}; expected a dict of 'd', 'e', 'w' and 'image_size'")
    stages = len(STAGE_WIDTHS)
    _check_entries("d", encoding["d"], stages + 1, DEPTHS)
    _check_entries("e", encoding["e"], BLOCKS, EXPAND_RATIOS)
    _check_entries("w", encoding["w"], stages + 2, tuple(range(len(WIDTHS))))
    if encoding["d"][0] not in (min(DEPTHS), max(DEPTHS)):
        raise InputError(f"the stem's depth is {encoding['d'][0]}; expected 0 (skipped) or 2")
    if encoding["image_size"] not in image_sizes:
        raise InputError(
            f"image_size is {encoding['image_size']!r}; expected one of {', '.join(map(str, image_sizes))}"
        )


def _check_entries(key: str, entries: Any, count: int, choices: tuple[float, ...]) -> None:  # noqa: ANN401
    if not isinstance(entries, (list, tuple)) or len(entries) != count:
        raise InputError(f"encoding[{key!r}] is {entries!r}; expected a list of {count} entries")
    wrong = [entry for entry in entries if entry not in choices]
    if wrong:
        raise InputError(f"encoding[{key!r}] holds {wrong[0]!r}; expected values of {choices}")
