"""Convolutions near those of a campaign's networks, drawn at random, in a process that gives back its memory.

    python -m torchedge.profiling.campaigns.convolution_shapes FOLDER COUNT SEED MOST_BYTES

writes FOLDER/shapes.jsonl, one convolution a line, as hooks/convolution_probe.py reads them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchedge.errors import InputError, ProfileError, TorchedgeError
from torchedge.profiling.campaigns.expansion import read_jobs
from torchedge.storage.documents import write_bytes

__all__ = ["SHAPES", "draw_shapes", "shapes_of"]

SHAPES = "shapes.jsonl"
Shape = dict[str, Any]

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 100, 128, 160, 192, 200, 224, 256)
SIDES = (
    *(1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 21, 22, 24, 26, 27, 28, 32, 36, 40, 44, 48, 52),
    *(54, 56, 64, 72, 80, 96, 104, 112, 128, 160, 192, 224),
)
NEARBY = (0.6, 1.5)
"""Channels are those of a network times a number between these."""

_NEAR_SIDES = (0.6, 1.6)
_MULTIPLES = (1, 1, 1, 1, 8, 8, 4, 32)
_IMAGE_CHANNELS = 4
_TRIES = 50


def shapes_of(jobs: Sequence[Mapping[str, Any]]) -> list[Shape]:
    """Return the convolutions of networks, each as often as it runs, batch 0; depthwise ones are left out."""
    from torchedge.profiling.campaigns.networks import build_network
    from torchedge.tracing.capturing import capture

    found: list[Shape] = []
    for job in jobs:
        graph = capture(build_network(job["build"]), input_size=tuple(job["input_size"]), mode="infer")
        for op in graph.ops:
            if op.kind == "conv2d":
                x, weight = (graph.values[i].shape for i in op.inputs[:2] if i is not None)
                found += _shape(x, weight, op.attrs)
    return found


def _shape(x: Sequence[Any], weight: Sequence[Any], attrs: Mapping[str, Any]) -> list[Shape]:
    """Return the convolution, none where it is depthwise, padded unevenly or of no fixed size."""
    from torchedge.ops.convolution import explicit_padding, spread

    before, after = explicit_padding(attrs, tuple(weight[2:]))
    groups, size = attrs.get("groups", 1), list(x[2:])
    depthwise = groups > 1 and weight[1] == 1
    if depthwise or before != after or not all(isinstance(n, int) for n in (*size, *weight)):
        return []
    stride, dilation = (list(spread(attrs.get(name, 1), 2)) for name in ("stride", "dilation"))
    channels = {"inputs": weight[1] * groups, "outputs": weight[0], "groups": groups}
    spatial = {"kernel": list(weight[2:]), "stride": stride, "padding": list(before), "dilation": dilation}
    return [{**channels, **spatial, "size": size, "batch": 0}]


def draw_shapes(known: Sequence[Shape], count: int, seed: int, most_bytes: float) -> list[Shape]:
    """Return so many convolutions near known ones, none of them theirs at any batch size, none twice.

    The same arguments give the same ones, and a larger count begins with those of a smaller. most_bytes: of
    input, output and weights together. Fewer come back where the known ones leave no room for more.
    """
    generator = random.Random(seed)
    theirs = {_key({**shape, "batch": 0}) for shape in known}
    drawn: dict[str, Shape] = {}
    for shape in _near(known, count * _TRIES, generator):
        if len(drawn) == count:
            break
        depthwise = shape["groups"] == shape["inputs"] > 1
        new = not depthwise and _key({**shape, "batch": 0}) not in theirs
        if new and 0 < _bytes(shape) <= most_bytes:
            drawn.setdefault(_key(shape), shape)
    return list(drawn.values())


def _near(known: Sequence[Shape], tries: int, generator: random.Random) -> Iterator[Shape]:
    """Yield convolutions with channels, sides and batch size moved."""
    for _ in range(tries):
        shape = dict(generator.choice(known))
        multiple, batch = generator.choice(_MULTIPLES), generator.choice(BATCHES)
        for name in ("inputs", "outputs"):
            scale, step = generator.uniform(*NEARBY), shape["groups"]
            if step == 1 and shape[name] > _IMAGE_CHANNELS:
                step = multiple
            if shape[name] > _IMAGE_CHANNELS:
                shape[name] = max(round(shape[name] * scale / step), 1) * step
        low, high = (shape["size"][0] * bound for bound in _NEAR_SIDES)
        sides = [side for side in SIDES if low <= side <= high]
        if generator.random() < 0.5 and sides:
            shape["size"] = [generator.choice(sides)] * 2
        yield {**shape, "batch": batch}


def _bytes(shape: Shape) -> int:
    """Return the bytes of input, output and weights in float32, 0 where the output is empty."""
    names = ("size", "kernel", "stride", "padding", "dilation")
    after = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, k, s, p, d in zip(*(shape[name] for name in names), strict=True)
    ]
    if min(after) < 1:
        return 0
    (height, width), (tall, wide) = shape["size"], shape["kernel"]
    x = shape["batch"] * shape["inputs"] * height * width
    y = shape["batch"] * shape["outputs"] * after[0] * after[1]
    return 4 * int(x + y + shape["outputs"] * shape["inputs"] // shape["groups"] * tall * wide)


def _key(shape: Shape) -> str:
    return json.dumps(shape, sort_keys=True)


def main() -> int:
    """Draw for the folder named on the command line; an error is printed as JSON."""
    folder, count, seed, most_bytes = sys.argv[1:]
    try:
        known = shapes_of([job for job in read_jobs(Path(folder)) if "skipped" not in job])
        if not known:
            raise InputError(
                "the plan's networks have no convolutions; expected some: leave --convolutions out"
            )
        drawn = draw_shapes(known, int(count), int(seed), float(most_bytes))
        write_bytes(Path(folder) / SHAPES, "".join(json.dumps(s) + "\n" for s in drawn).encode())
    except TorchedgeError as error:
        print(json.dumps({"error": str(error), "input": not isinstance(error, ProfileError)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
