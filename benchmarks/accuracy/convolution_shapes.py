"""Write convolutions to measure in half precision, in channels_last and in one dimension.

    python benchmarks/accuracy/convolution_shapes.py --count 12000 > shapes.jsonl
    python hooks/convolution_probe.py shapes.jsonl --repeats 0 --out rows.jsonl        # on the GPU
    python benchmarks/accuracy/convolution_shapes.py --times --count 5000 > timed.jsonl
    python hooks/convolution_probe.py timed.jsonl --repeats 3 --seconds 300 --out times.jsonl

Shapes are drawn from those that the H200 campaign measured in float32, none of which is of a measured
network; depthwise ones (which the library computes in channels_last alone) and lines are drawn
around what networks have. The kinds take turns. With `--times` each shape, drawn by form (depthwise, grouped
by width, dense, 1 x 1, first layer), is measured in both dtypes and layouts, to compare their times.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator
from math import prod
from typing import Any

from torchedge.devices import find_device
from torchedge.profiling.campaigns.convolutions import BATCHES, SIDES

Shape = dict[str, Any]

KINDS: tuple[tuple[Shape, tuple[str, ...]], ...] = (
    ({"dtype": "bfloat16"}, ("image", "image", "image", "line")),
    ({"channels_last": True}, ("image", "image", "image", "depthwise")),
    ({"dtype": "bfloat16", "channels_last": True}, ("image", "image", "image", "depthwise")),
    ({}, ("line",)),
)
"""Keys of the probe, and which shapes are measured with them in turn."""

FORMS = ("depthwise", "grouped", "dense", "1x1", "depthwise", "grouped", "dense", "1x1", "first")
_MOST_BYTES, _MOST_TIMED_BYTES = 1.2e9, 6e8
_SIZES = ("groups", "kernel", "stride", "padding", "dilation", "size")


def depthwise(generator: random.Random) -> Shape:
    """Draw a depthwise convolution."""
    channels = generator.choice((1, 1, 8)) * generator.randint(8, 1200)
    channels = min(channels, 2400)
    kernel, stride = generator.choice((3, 3, 3, 5, 7, 9)), generator.choice((1, 1, 2))
    size, padding = max(generator.choice(SIDES), kernel), kernel // 2
    return _shape(channels, channels, channels, [kernel] * 2, [stride] * 2, [padding] * 2, [size] * 2)


def line(generator: random.Random) -> Shape:
    """Draw a convolution in one dimension, which PyTorch runs as one of height 1."""
    kernel = generator.choice((1, 2, 3, 3, 3, 5, 7, 10, 15, 31, 128))
    groups = generator.choice((1, 1, 1, 1, 16)) if kernel != 1 else 1
    inputs, outputs = (
        generator.choice((1, 16, 32, 40, 64, 80, 128, 144, 192, 256, 320, 384, 512, 640, 768, 1024, 1280))
        for _ in range(2)
    )
    inputs, outputs = (max(n // groups, 1) * groups for n in (inputs, outputs))
    padding, stride = generator.choice((0, kernel // 2)), generator.choice((1, 1, 1, 2, 2, 5))
    size = max(round(2 ** generator.uniform(5, 15)), kernel)
    return _shape(inputs, outputs, groups, [1, kernel], [1, stride], [0, padding], [1, size])


def timed(generator: random.Random, form: str) -> Shape:
    """Draw a convolution of a form as networks have them, of any width."""
    wide = round(2 ** generator.uniform(4, 10.5) / 8) * 8
    side = generator.choice((7, 14, 28, 56, 112, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96))
    stride, size = generator.choice((1, 1, 1, 2)), [side, side]
    if form == "depthwise":
        kernel = generator.choice((3, 3, 5, 7, 7, 9))
        channels = max(wide + generator.choice((0, 0, 0, 2, 3, 4)), 8)
        return _shape(channels, channels, channels, *([n] * 2 for n in (kernel, stride, kernel // 2)), size)
    if form == "grouped":
        width = generator.choice((2, 4, 8, 8, 12, 16, 16, 24, 32, 40, 48, 56, 64, 80, 120, 128))
        groups = max(2, round(2 ** generator.uniform(1, 11) / width))
        channels = min(width * groups, 2048 // width * width)
        kernel = generator.choice((3, 3, 3, 1, 5))
        spatial = ([n] * 2 for n in (kernel, stride, kernel // 2))
        return _shape(channels, channels, channels // width, *spatial, size)
    if form == "first":
        kernel, stride = generator.choice(((3, 1), (3, 2), (4, 4), (7, 2), (6, 2), (11, 4), (16, 16)))
        padding = kernel // 2 if kernel % 2 else 0
        size = [generator.choice((96, 128, 160, 192, 224, 256))] * 2
        return _shape(
            generator.choice((3, 3, 3, 1, 4)),
            max(wide // 8, 16),
            1,
            *([n] * 2 for n in (kernel, stride, padding)),
            size,
        )
    kernel = 1 if form == "1x1" else generator.choice((3, 3, 3, 3, 5, 2, 7))
    outputs = round(min(2 ** generator.uniform(4, 11), 2 ** generator.uniform(-2.5, 2.5) * wide) / 8) * 8
    odd = generator.choice((0, 0, 0, 0, 1, 2, 4))
    channels = (max(wide + odd, 8), max(outputs + generator.choice((0, 0, 0, 0, 1, 2, 4)), 8))
    return _shape(*channels, 1, *([n] * 2 for n in (kernel, stride, kernel // 2 if kernel > 2 else 0)), size)


def timed_shapes(count: int, seed: int) -> Iterator[Shape]:
    """Yield `count` convolutions, each in both dtypes and layouts."""
    generator = random.Random(seed)
    for place in range(count):
        while True:
            shape = timed(generator, FORMS[place % len(FORMS)])
            shape["batch"] = generator.choice((4, 8, 16, 32, 32, 64, 64, 128))
            if moderate(shape, most=_MOST_TIMED_BYTES):
                break
        for dtype in ("float32", "bfloat16"):
            for channels_last in (False, True):
                yield {**shape, "dtype": dtype, "channels_last": channels_last}


def _shape(inputs: int, outputs: int, groups: int, *spatial: list[int]) -> Shape:
    kernel, stride, padding, size = spatial
    values = (groups, kernel, stride, padding, [1, 1], size)
    return {"inputs": inputs, "outputs": outputs, **dict(zip(_SIZES, values, strict=True))}


def moderate(shape: Shape, most: float = _MOST_BYTES) -> bool:
    """Whether the tensors of a convolution are small enough, by default for several processes."""
    after = prod(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            *(shape[name] for name in ("size", "padding", "dilation", "kernel", "stride")), strict=True
        )
    )
    pixels = shape["inputs"] * prod(shape["size"]) + shape["outputs"] * after
    return after > 0 and 4 * shape["batch"] * pixels < most


def shapes(count: int, seed: int) -> Iterator[Shape]:
    """Yield `count` convolutions of each kind."""
    generator = random.Random(seed)
    with gzip.open(find_device("nvidia-h200").folder / "campaign" / "convolutions.jsonl.gz", "rt") as lines:
        measured = [json.loads(text) for text in lines]
    for row in measured:
        row["batch"] = int(row["batch"])
    drawn = {"depthwise": depthwise, "line": line}
    for place in range(count):
        for keys, forms in KINDS:
            form = forms[place % len(forms)]
            while True:
                if form == "image":
                    row = generator.choice(measured)
                    shape = {name: row[name] for name in ("inputs", "outputs", *_SIZES, "batch")}
                else:
                    shape = {**drawn[form](generator), "batch": generator.choice(BATCHES)}
                if moderate(shape):
                    break
            yield {**shape, **keys}


def main() -> int:
    """Print shapes, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=12000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--times", action="store_true", help="convolutions to time, in both dtypes and layouts"
    )
    arguments = parser.parse_args()
    draw = timed_shapes if arguments.times else shapes
    for shape in draw(arguments.count, arguments.seed):
        sys.stdout.write(json.dumps(shape) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
