"""Small networks drawn by number, for campaigns of a minute: their layers differ as those of real ones do.

A few real networks leave most rates of a device open: a fit to them knows products of their shapes alone.
Each drawn network has two to four blocks of one family (plain and bottleneck convolutions, depthwise ones,
multi-layer perceptrons, transformers), whose widths, windows, strides, activations and images are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DRAWN, LABEL = "drawn:", "drawn-"
"""Before the number of a drawn network: its name in a plan, and the label of its rows."""

CLASSES = 100
_ACTIVATIONS = ("ReLU", "ReLU", "GELU", "SiLU", "Hardswish")
_SIDES = (8, 16, 24, 32, 48, 64)


@dataclass
class _Writer:
    """Writes the nodes of one network in order; methods return the name of the node they wrote."""

    draw: random.Random
    nodes: list[dict[str, Any]] = field(default_factory=lambda: [{"op": "input", "name": "x"}])

    def write(self, op: str, kind: str, *args: object, **kwargs: object) -> str:
        """Write a module, function or method that reads nodes by name (texts) and numbers."""
        name = f"n{len(self.nodes)}"
        read = [{"node": a} if isinstance(a, str) else a for a in args]
        key = "type" if op == "module" else "target"
        self.nodes.append({"op": op, "name": name, key: kind, "args": read, "kwargs": kwargs})
        return name

    def layer(self, kind: str, x: str, **settings: object) -> str:
        return self.write("module", kind, x, **settings)

    def width(self, least: int, most: int) -> int:
        """Draw a width between two, even on a logarithmic scale, a multiple of 8 but for one in eight."""
        width: int = round(least * (most / least) ** self.draw.random())
        return width if self.draw.random() < 1 / 8 else max(8, 8 * round(width / 8))

    def convolution(
        self, x: str, inputs: int, outputs: int, window: int, stride: int = 1, groups: int = 1,
        activation: str | None = None,
    ) -> str:  # fmt: skip
        x = self.layer(
            "Conv2d", x, in_channels=inputs, out_channels=outputs, kernel_size=window, stride=stride,
            padding=window // 2, groups=groups, bias=False,
        )  # fmt: skip
        x = self.layer("BatchNorm2d", x, num_features=outputs)
        return x if activation is None else self.layer(activation, x)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        return self.layer("Linear", x, in_features=inputs, out_features=outputs)

    def classify(self, x: str, width: int) -> None:
        """End with average pooling of an image and a classifier."""
        x = self.layer("AdaptiveAvgPool2d", x, output_size=1)
        self.end(self.linear(self.layer("Flatten", x), width, CLASSES))

    def end(self, x: str) -> None:
        self.nodes.append({"op": "output", "name": "output", "args": [{"node": x}]})


def _plain(w: _Writer, side: int) -> None:
    """Convolutions one behind the other, with poolings or strides between them."""
    act, width, x = w.draw.choice(_ACTIVATIONS), 3, "x"
    for block in range(w.draw.randint(2, 4)):
        wider = w.width(16, 512 if side <= 24 else 256)
        window = w.draw.choice((3, 3, 3, 5, 7)) if wider * width < 16_000 else 3
        stride = 2 if block and side >= 8 and w.draw.random() < 0.5 else 1
        x, width, side = w.convolution(x, width, wider, window, stride, 1, act), wider, side // stride
        if side >= 16 and w.draw.random() < 0.4:
            x, side = w.layer("MaxPool2d", x, kernel_size=2), side // 2
    w.classify(x, width)


def _bottlenecks(w: _Writer, side: int) -> None:
    """Blocks of 1 x 1, 3 x 3 and 1 x 1 convolutions with a sum around them, some in groups."""
    act, width = w.draw.choice(_ACTIVATIONS), w.width(32, 1024 if side <= 24 else 384)
    x = w.convolution("x", 3, width, 3, 2, 1, act)
    for _ in range(w.draw.randint(1, 4)):
        groups = w.draw.choice((1, 1, 1, 2, 8))
        narrow = max(groups, groups * round(width / w.draw.choice((2, 4)) / groups))
        y = w.convolution(x, width, narrow, 1, activation=act)
        y = w.convolution(y, narrow, narrow, 3, groups=groups, activation=act)
        y = w.convolution(y, narrow, width, 1)
        x = w.layer(act, w.write("function", "add", x, y))
    w.classify(x, width)


def _separable(w: _Writer, side: int) -> None:
    """Inverted residuals: 1 x 1, depthwise and 1 x 1 convolutions, some with a gate of channels."""
    act, width = w.draw.choice(_ACTIVATIONS), w.width(16, 128)
    x = w.convolution("x", 3, width, 3, 2, 1, act)
    for _ in range(w.draw.randint(2, 4)):
        wide, window = width * w.draw.choice((2, 4, 6)), w.draw.choice((3, 3, 3, 5, 5, 7))
        y = w.convolution(x, width, wide, 1, activation=act)
        stride = w.draw.choice((1, 1, 2))
        y = w.convolution(y, wide, wide, window, stride, wide, act)
        if w.draw.random() < 0.5:
            gate = w.layer("AdaptiveAvgPool2d", y, output_size=1)
            squeezed = max(8, wide // 16)
            for inputs, outputs, kind in ((wide, squeezed, "ReLU"), (squeezed, wide, "Sigmoid")):
                gate = w.layer("Conv2d", gate, in_channels=inputs, out_channels=outputs, kernel_size=1)
                gate = w.layer(kind, gate)
            y = w.write("function", "mul", y, gate)
        wider = width if stride == 1 else w.width(width, 2 * width)
        y = w.convolution(y, wide, wider, 1)
        x, width = (w.write("function", "add", x, y) if wider == width and stride == 1 else y), wider
    w.classify(x, width)


def _perceptron(w: _Writer, side: int) -> None:
    """Linear layers on all pixels of an image pooled to a few."""
    cells = w.draw.choice((4, 8))
    x = w.layer("Flatten", w.layer("AdaptiveAvgPool2d", "x", output_size=cells))
    width = 3 * cells * cells
    for _ in range(w.draw.randint(2, 4)):
        wider = w.width(512, 6144)
        x = w.layer(w.draw.choice(_ACTIVATIONS), w.linear(x, width, wider))
        width = wider
    w.end(w.linear(x, width, CLASSES))


def _transformer(w: _Writer, side: int) -> None:
    """Blocks of attention and two linear layers on the patches of an image; some end in a wide head."""
    patch = w.draw.choice((2, 4)) if side <= 24 else 4
    tokens, depth = (side // patch) ** 2, w.draw.choice((32, 48, 64))
    heads = w.draw.randint(2, 12)
    width = heads * depth
    x = w.layer("Conv2d", "x", in_channels=3, out_channels=width, kernel_size=patch, stride=patch)
    x = w.write("method", "transpose", w.write("method", "flatten", x, 2), 1, 2)
    act = w.draw.choice(("GELU", "SiLU"))
    for _ in range(w.draw.randint(1, 3)):
        y = w.layer("LayerNorm", x, normalized_shape=width)
        parts = []
        for _ in range(3):
            part = w.write("method", "view", w.linear(y, width, width), -1, tokens, heads, depth)
            parts.append(w.write("method", "transpose", part, 1, 2))
        y = w.write("function", "scaled_dot_product_attention", *parts)
        y = w.write("method", "reshape", w.write("method", "transpose", y, 1, 2), -1, tokens, width)
        x = w.write("function", "add", x, w.linear(y, width, width))
        wide = width * w.draw.choice((2, 3, 4))
        y = w.linear(w.layer("LayerNorm", x, normalized_shape=width), width, wide)
        x = w.write("function", "add", x, w.linear(w.layer(act, y), wide, width))
    x = w.layer("LayerNorm", x, normalized_shape=width)
    if w.draw.random() < 0.5:  # as of a language model
        w.end(w.linear(x, width, w.width(1000, 8000)))
    else:
        w.end(w.linear(w.write("method", "mean", x, 1), width, CLASSES))


_FAMILIES: Sequence[Callable[[_Writer, int], None]] = (
    _plain, _transformer, _separable, _bottlenecks, _perceptron, _separable, _transformer,
)  # fmt: skip
FAMILIES = tuple([family.__name__.strip("_") for family in _FAMILIES])


def drawn_side(number: int) -> int:
    """Return the side of the square images that a drawn network reads."""
    return random.Random(-number).choice(_SIDES)


def drawn_network(number: int) -> list[dict[str, Any]]:
    """Return the nodes of a drawn network: images (3, side, side) to scores. The same ones everywhere."""
    writer = _Writer(random.Random(number))
    _FAMILIES[number % len(_FAMILIES)](writer, drawn_side(number))
    return writer.nodes


def drawn_batch(number: int) -> int:
    """Return the batch size at which a drawn network is measured: smaller ones of larger images."""
    side, largest = drawn_side(number), 32 if drawn_side(number) <= 32 else 8
    if _FAMILIES[number % len(_FAMILIES)] is _transformer:
        largest = min(largest, 512 // (side // 4) ** 2)
    return random.Random(~number).choice([size for size in (1, 2, 4, 8, 16, 32) if size <= largest])
