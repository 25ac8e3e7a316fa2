"""NAS-Bench-201's networks as modules: a cell of six edges, repeated in three stages (arXiv 2001.00326).

An architecture is written `|nor_conv_3x3~0|+|none~0|skip_connect~1|+|...|...|...|`: for each of the nodes 1
to 3 the operation on the edge from each earlier node.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from torchedge.errors import ProfileError

__all__ = ["CellNetwork", "cell_function", "parse_architecture", "running_edges"]

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
STEM, STAGES, CELLS, CLASSES = 16, 3, 5, 10

_EDGE = re.compile(r"([a-z0-9_]+)~([0-2])")
Cell = tuple[tuple[str, ...], ...]
"""For each of three nodes the operations on the edges from all earlier nodes."""


def parse_architecture(text: str) -> Cell:
    """Return the cell that a NAS-Bench-201 string describes; raises ProfileError for anything else."""
    nodes = [_EDGE.findall(part) for part in text[:256].split("+")]
    sources = [[int(source) for _, source in node] for node in nodes]
    cell = tuple(tuple(operation for operation, _ in node) for node in nodes)
    if sources != [[0], [0, 1], [0, 1, 2]] or not all(op in OPERATIONS for node in cell for op in node):
        raise ProfileError(
            f"architecture {text[:80]!r} is no NAS-Bench-201 string; expected "
            "|op~0|+|op~0|op~1|+|op~0|op~1|op~2| with op one of " + ", ".join(OPERATIONS)
        )
    return cell


def cell_function(cell: Cell) -> str:
    """Return what a cell computes, the same text for cells that compute the same function.

    Zeros and what follows from them alone fall away, skips are what they skip, and sums have no order.
    """
    values: list[str | None] = ["x"]
    for node in cell:
        terms = sorted(t for t in map(_term, node, values) if t is not None)
        values.append(None if not terms else terms[0] if len(terms) == 1 else f"({'+'.join(terms)})")
    return values[-1] or "0"


def _term(operation: str, value: str | None) -> str | None:
    if value is None or operation == "none":
        return None
    return value if operation == "skip_connect" else f"{operation}[{value}]"


def running_edges(cell: Cell, *, folded: bool = True) -> list[tuple[int, int]]:
    """Return the edges (source, node) that a runtime runs, by node: those that the output depends on.

    folded: what is always zero is left out too; else a node without input is a tensor of zeros that further
    operations run on.
    """
    reached, edges = {0}, []
    for node, operations in enumerate(cell, 1):
        for source, operation in enumerate(operations):
            if operation != "none" and (source in reached or not folded):
                edges.append((source, node))
                reached.add(node)
    needed = {len(cell)}
    for node in range(len(cell), 0, -1):
        if node in needed:
            needed |= {source for source, target in edges if target == node}
    return [(source, node) for source, node in edges if node in needed]


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    padding = kernel // 2
    return nn.Sequential(
        nn.ReLU(inplace=False),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _edge(operation: str, channels: int) -> nn.Module:
    if operation == "skip_connect":
        return nn.Identity()
    if operation == "avg_pool_3x3":
        return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return _convolution(channels, channels, int(operation[-1]))


class _CellModule(nn.Module):
    """One cell, as a runtime that prepares a model runs it; see `running_edges`."""

    def __init__(self, cell: Cell, channels: int, folded: bool) -> None:
        super().__init__()
        self.plan = running_edges(cell, folded=folded)
        self.last = len(cell)
        self.edges = nn.ModuleList(_edge(cell[node - 1][source], channels) for source, node in self.plan)

    def forward(self, x: Tensor) -> Tensor:
        values: dict[int, Tensor] = {0: x}
        for (source, node), edge in zip(self.plan, self.edges, strict=True):
            if source not in values:
                values[source] = x * 0
            term: Tensor = edge(values[source])
            values[node] = values[node] + term if node in values else term
        return values[self.last] if self.last in values else x * 0


class _Reduction(nn.Module):
    """The residual block between stages: twice the channels, half the side."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, 2 * inputs, 3, 2)
        self.second = _convolution(2 * inputs, 2 * inputs, 3)
        self.shortcut = nn.Sequential(nn.AvgPool2d(2, 2), nn.Conv2d(inputs, 2 * inputs, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.shortcut(x) + self.second(self.first(x))
        return found


class CellNetwork(nn.Module):
    """The network of one architecture for images (3, 32, 32): stem, 3 stages of 5 cells, a linear classifier.

    folded: as in `running_edges`.
    """

    def __init__(self, architecture: str, *, folded: bool = True) -> None:
        super().__init__()
        cell = parse_architecture(architecture)
        self.stem = nn.Sequential(nn.Conv2d(3, STEM, 3, padding=1, bias=False), nn.BatchNorm2d(STEM))
        layers: list[nn.Module] = []
        for stage in range(STAGES):
            channels = STEM << stage
            if stage:
                layers.append(_Reduction(channels // 2))
            layers += [_CellModule(cell, channels, folded) for _ in range(CELLS)]
        self.cells = nn.Sequential(*layers)
        width = STEM << (STAGES - 1)
        self.head = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (N, 10) of images (N, 3, 32, 32)."""
        found: Tensor = self.classifier(self.head(self.cells(self.stem(x))))
        return found
