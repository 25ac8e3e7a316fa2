"""Single convolutions measured beside a campaign's networks: the workspaces that the device's library takes.

FOLDER/shapes.jsonl holds convolutions near those of the campaign's networks, drawn by a child process

    python -m torchedge.profiling.campaigns.convolutions FOLDER COUNT SEED MOST_BYTES

and FOLDER/convolutions.jsonl gets a row for each, in their order; existing rows stay.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.ops.convolution import conv_shape
from torchedge.profiling.campaigns.expansion import Listener, read_jobs, report_errors, run_child
from torchedge.profiling.campaigns.transports import Transport, explain, row_of
from torchedge.storage.documents import write_bytes
from torchedge.storage.journals import Journal, read_rows

PROBE, CONVOLUTIONS, LEFT = "convolution_probe.py", "convolutions.jsonl", "convolutions-left.jsonl"
SHAPES = "shapes.jsonl"
LEAST, MOST = 1000, 200_000
"""Fewest convolutions worth fitting, and the largest number to measure."""

MOST_BYTES, SHARE = 3.2e9, 1 / 8
"""A convolution's tensors take at most that, and at most that share of the device's memory."""

_FIELDS = ("inputs", "outputs", "groups", "kernel", "stride", "padding", "dilation", "size", "batch")

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


def measure_convolutions(
    folder: Path,
    count: int,
    seed: int,
    environment: Mapping[str, Any],
    transport: Transport,
    hooks: Sequence[Path],
    listener: Listener,
) -> None:
    """Measure the remaining ones of `count` convolutions near those of the folder's networks.

    hooks: the leash and the probe. A convolution that crashes the probe gets a row with the reason, and is
    not tried again. Raises DeviceError where nothing can be measured, InputError for networks without
    convolutions, ProfileError where the folder cannot be used.
    """
    shapes = _shapes(folder, count, seed, environment)
    with Journal(folder / CONVOLUTIONS) as out:
        known = {_key(row) for _, row in out.rows() if _is_row(row)}
        left = [shape for shape in shapes if _key(shape) not in known]
        if not left:
            return
        listener.begin("measuring", len(shapes), len(shapes) - len(left))
        listener.doing("convolutions")
        while left:
            left = left[_attempt(left, out, folder, transport, hooks, listener) :]


def _attempt(
    left: Sequence[Mapping[str, Any]],
    out: Journal,
    folder: Path,
    transport: Transport,
    hooks: Sequence[Path],
    listener: Listener,
) -> int:
    """Run the probe once; return how many of the convolutions have a row now."""
    write_bytes(folder / LEFT, "".join(json.dumps(shape) + "\n" for shape in left).encode())
    transport.put([*hooks, folder / LEFT])
    done = 0
    with transport.start(PROBE, [f"/{LEFT}", "--repeats", "0"]) as run:
        for line in run.lines():
            row = row_of(line, _is_row)
            if row is not None and done < len(left) and _key(row) == _key(left[done]):
                done += 1
                out.append(row)
                listener.step()
        status = run.wait()
    if done < len(left):  # not again: it may have crashed the probe
        out.append({**left[done], "reason": f"the probe ended here with status {status}"})
        listener.step()
        if not done:
            raise DeviceError(
                f"convolutions: the probe ended with status {status}: {explain(run.last_error)}"
            )
    return done + 1


def _shapes(folder: Path, count: int, seed: int, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the convolutions to measure, drawn by a process of its own where the folder has too few."""
    path = folder / SHAPES
    shapes = list(islice(read_rows(path), count))
    if len(shapes) < count:
        total = environment.get("memory_total_mib")
        room = total * 2**20 * SHARE if isinstance(total, (int, float)) else MOST_BYTES
        arguments = [str(folder), str(count), str(seed), str(min(room, MOST_BYTES))]
        run_child("torchedge.profiling.campaigns.convolutions", arguments, lambda row: None)
        shapes = list(islice(read_rows(path), count))
    if not all(_is_shape(shape) for shape in shapes):
        raise ProfileError(f"{path}: is damaged (no {', '.join(_FIELDS)}); delete it and run again")
    return shapes


def _is_shape(row: Mapping[str, Any]) -> bool:
    return all(name in row for name in _FIELDS)


def _is_row(row: Mapping[str, Any]) -> bool:
    return _is_shape(row) and ("reason" in row or "forward_workspace_mib" in row)


def _key(shape: Mapping[str, Any]) -> str:
    return json.dumps([shape[name] for name in _FIELDS])


# shapes -----------------------------------------------------------------------------------------------------


def shapes_of(jobs: Sequence[Mapping[str, Any]]) -> list[Shape]:
    """Return the convolutions of networks, each as often as it runs, batch 0; depthwise ones are omitted."""
    from torchedge.profiling.topologies import build_network
    from torchedge.tracing.capturing import capture

    shapes: list[Shape] = []
    for job in jobs:
        graph = capture(build_network(job["build"]), input_size=tuple(job["input_size"]), mode="infer")
        for op in graph.ops:
            if op.kind == "conv2d":
                x, weight = (graph.values[i].shape for i in op.inputs[:2] if i is not None)
                shapes += _shape(x, weight, op.attrs)
    return shapes


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
    """Return `count` different convolutions near known ones; none is a known one at any batch size.

    The same arguments give the same ones, and a larger count begins with those of a smaller. most_bytes: of
    input, output and weights together. Fewer come back where the known ones leave no room for more.
    """
    generator = random.Random(seed)
    theirs = {_identity({**shape, "batch": 0}) for shape in known}
    drawn: dict[str, Shape] = {}
    for shape in _near(known, count * _TRIES, generator):
        if len(drawn) == count:
            break
        depthwise = shape["groups"] == shape["inputs"] > 1
        new = not depthwise and _identity({**shape, "batch": 0}) not in theirs
        if new and 0 < _bytes(shape) <= most_bytes:
            drawn.setdefault(_identity(shape), shape)
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
    x = (shape["batch"], shape["inputs"], *shape["size"])
    weight = (shape["outputs"], shape["inputs"] // shape["groups"], *shape["kernel"])
    y = conv_shape([x, weight], shape)
    return 0 if y is None else 4 * (prod(x) + prod(weight) + prod(y))


def _identity(shape: Shape) -> str:
    return json.dumps(shape, sort_keys=True)


def _draw(folder: Path, count: int, seed: int, most_bytes: float) -> None:
    known = shapes_of([job for job in read_jobs(folder) if "skipped" not in job])
    if not known:
        raise InputError("the plan's networks have no convolutions; expected some: omit --convolutions")
    drawn = draw_shapes(known, count, seed, most_bytes)
    write_bytes(folder / SHAPES, "".join(json.dumps(s) + "\n" for s in drawn).encode())


def main() -> int:
    """Draw shapes for the folder named on the command line; an error is printed as JSON."""
    folder, count, seed, most_bytes = sys.argv[1:]
    return report_errors(lambda: _draw(Path(folder), int(count), int(seed), float(most_bytes)), folder)


if __name__ == "__main__":
    sys.exit(main())
