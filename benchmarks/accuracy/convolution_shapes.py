"""Write convolutions to measure in half precision, in channels_last and in one dimension.

    python benchmarks/accuracy/convolution_shapes.py --count 12000 > shapes.jsonl
    python hooks/convolution_probe.py shapes.jsonl --repeats 0 --out rows.jsonl        # on the GPU

Shapes are drawn from those that the H200 campaign measured in float32, none of which is of a measured
network; depthwise ones (which the library computes in channels_last alone) and lines are drawn
around what networks have. The kinds take turns.
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

_MOST_BYTES = 1.2e9
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


def _shape(inputs: int, outputs: int, groups: int, *spatial: list[int]) -> Shape:
    kernel, stride, padding, size = spatial
    values = (groups, kernel, stride, padding, [1, 1], size)
    return {"inputs": inputs, "outputs": outputs, **dict(zip(_SIZES, values, strict=True))}


def moderate(shape: Shape) -> bool:
    """Whether the tensors of a convolution are small enough for several processes."""
    after = prod(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            *(shape[name] for name in ("size", "padding", "dilation", "kernel", "stride")), strict=True
        )
    )
    pixels = shape["inputs"] * prod(shape["size"]) + shape["outputs"] * after
    return after > 0 and 4 * shape["batch"] * pixels < _MOST_BYTES


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
    arguments = parser.parse_args()
    for shape in shapes(arguments.count, arguments.seed):
        sys.stdout.write(json.dumps(shape) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
