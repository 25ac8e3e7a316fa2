"""From a convolution's output back to its input: gradients of convolutions, and transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import ZERO, Index
from torchedge.expressions.scalars import Bound, Scalar, guarded
from torchedge.lowering.building import RowBuilder, contraction, pointwise, reshaped
from torchedge.lowering.nodes import ContractionRole, Node
from torchedge.lowering.rules.taps import Phases, Taps


def x_of(y: Node, weight: Node, taps: Taps) -> Node:
    """Return x(n, xc, i) = sum of y(n, yc, o) · weight(yc, xc, k) over yc and all o and k that meet i.

    With strides, phase by phase (see `Phases`), so that no product with a hole is computed.
    """
    phases = [
        Phases(*sizes)
        for sizes in zip(taps.sizes, taps.kernel, taps.stride, taps.padding, taps.dilation, strict=True)
    ]
    channels = weight.shape[1] * taps.groups
    if weight.shape[1] == 1 and taps.groups > 1:
        return _depthwise_x(y, weight, taps, phases)
    made = _dense_x(y, weight, taps, phases)
    if all(p.trivial for p in phases):
        return reshaped(made, (y.shape[0], channels, *taps.sizes))
    split = reshaped(made, (y.shape[0], channels, *[n for p in phases for n in (p.quotients, p.count)]))

    def element(n: Index, channel: Index, *places: Index) -> Scalar:
        at: list[Index] = []
        bounds: list[Bound] = []
        for phase, place in zip(phases, places, strict=True):
            quotient, first, needed = phase.split(place)
            at += [quotient, first]
            bounds += needed
        return guarded(bounds, split.at(n, channel, *at))

    return pointwise((y.shape[0], channels, *taps.sizes), y.dtype, element)


def grouped(
    batch: int, groups: int, channels: int, space: Sequence[int]
) -> tuple[tuple[int, ...], list[ContractionRole]]:
    """Return (n, [group,] channel, *space) and the roles of these dimensions."""
    rows: list[ContractionRole] = ["row"] * len(space)
    if groups == 1:
        return (batch, channels, *space), ["row", "col", *rows]
    return (batch, groups, channels // groups, *space), ["row", "batch", "col", *rows]


def _phased(phases: Sequence[Phases]) -> tuple[tuple[int, ...], list[ContractionRole]]:
    """Return the dimensions that x's space splits into, quotient and phase of each, and their roles."""
    sizes: list[int] = []
    roles: list[ContractionRole] = []
    for phase in phases:
        sizes += [phase.quotients] if phase.trivial else [phase.quotients, phase.count]
        roles += ["row"] if phase.trivial else ["row", "batch"]
    return tuple(sizes), roles


def _meetings(
    phases: Sequence[Phases], out: Sequence[int], at: Sequence[Index], turns: Sequence[Index]
) -> tuple[list[Index], list[Bound], list[Index], list[Bound]]:
    """Return outputs and taps that meet, each with the bounds within which they are."""
    outs: list[Index] = []
    taps: list[Index] = []
    places = iter(at)
    for phase, turn in zip(phases, turns, strict=True):
        quotient = next(places)
        first = ZERO if phase.trivial else next(places)
        outs.append(phase.output(quotient, first, turn))
        taps.append(first + turn * phase.step)
    inside: list[Bound] = [(o, 0, n) for o, n in zip(outs, out, strict=True)]
    within: list[Bound] = [(k, 0, p.kernel) for k, p in zip(taps, phases, strict=True)]
    return outs, inside, taps, within


def _dense_x(y: Node, weight: Node, taps: Taps, phases: Sequence[Phases]) -> Node:
    groups, each = taps.groups, weight.shape[1]
    inner = weight.shape[0] // groups
    space, space_roles = _phased(phases)
    shape, roles = grouped(y.shape[0], groups, each * groups, space)
    roles[-len(space) :] = space_roles

    def channel(at: Sequence[Index], over: Sequence[Index]) -> Index:
        return over[-1] + at[1] * inner if groups > 1 else over[-1]

    def a(at: Sequence[Index], over: Sequence[Index]) -> Scalar:
        outs, inside, _, _ = _meetings(phases, y.shape[2:], at[-len(space) :], over[:-1])
        return guarded(inside, y.at(at[0], channel(at, over), *outs))

    def b(at: Sequence[Index], over: Sequence[Index]) -> Scalar:
        _, _, places, within = _meetings(phases, y.shape[2:], at[-len(space) :], over[:-1])
        return guarded(within, weight.at(channel(at, over), at[1 if groups == 1 else 2], *places))

    turns = [p.most_taps for p in phases]
    return contraction(shape, roles, (*turns, inner), a, b, y.dtype, "deconvolution")


def _depthwise_x(y: Node, weight: Node, taps: Taps, phases: Sequence[Phases]) -> Node:
    """The same where each channel of x has outputs of its own: each x looks up its phase."""
    multiplier, space = weight.shape[0] // taps.groups, len(phases)
    shape = (y.shape[0], taps.groups, *taps.sizes)
    builder = RowBuilder(
        (*shape, multiplier, *[p.most_taps for p in phases]), range(2 + space, 3 + 2 * space), "depthwise"
    )

    def product(n: Index, group: Index, *at: Index) -> Scalar:
        places: list[Index] = []
        needed: list[Bound] = []
        for phase, place in zip(phases, at, strict=False):
            quotient, first, bounds = phase.split(place)
            places += [quotient] if phase.trivial else [quotient, first]
            needed += bounds
        outs, inside, tapped, within = _meetings(phases, y.shape[2:], places, at[space + 1 :])
        channel = group * multiplier + at[space]
        value = y.at(n, channel, *outs) * weight.at(channel, 0, *tapped)
        return guarded([*needed, *inside, *within], value)

    total = builder.reduce("sum", product)
    made = builder.row(lambda *_: total)
    builder.close()
    return made
