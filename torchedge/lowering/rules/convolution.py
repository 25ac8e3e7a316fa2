"""Convolutions of one to three dimensions and their gradients, transposed ones too, as contractions.

Three products tie an x (channels X) to a y (channels Y): `y_of` (x with the weight: a convolution, or the
gradient of a transposed one), `x_of` (y with the weight: a transposed convolution, or the gradient of one)
and `weight_of` (x with y). A weight has the shape (Y, X / groups, *kernel) in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.expressions.indices import ZERO, Index
from torchedge.expressions.scalars import Bound, Scalar, guarded
from torchedge.lowering.building import contraction, elementwise, pointwise, reduced, reduction, reshaped
from torchedge.lowering.nodes import ContractionRole, Node
from torchedge.lowering.rules.registry import Result, rule
from torchedge.lowering.rules.taps import Phases, Taps


@rule("convolution")
def convolution(
    result: Result,
    input: Node,
    weight: Node,
    bias: Node | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
) -> Node:
    """Convolution of input with weight, plus bias."""
    x_sizes = result.shape[2:] if transposed else input.shape[2:]
    taps = Taps.of(x_sizes, weight.shape[2:], stride, padding, dilation, groups)
    product = x_of(input, weight, taps) if transposed else y_of(input, weight, taps, result.shape[2:])
    if bias is None:
        return product
    across = reshaped(bias, (bias.numel, *[1] * len(x_sizes)))
    return elementwise(lambda a, b: a + b, product, across, dtype=result.dtype)


@rule("convolution_backward")
def convolution_backward(
    result: Result,
    grad_output: Node,
    input: Node,
    weight: Node,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    bias_sizes: Sequence[int] | None = None,
) -> tuple[Node, ...]:
    """Gradients of input, weight and bias: those of them that the mask asks for."""
    x, y = (grad_output, input) if transposed else (input, grad_output)
    taps = Taps.of(x.shape[2:], weight.shape[2:], stride, padding, dilation, groups)
    gradients: list[Node] = []
    if output_mask[0]:
        gradients.append(y_of(x, weight, taps, y.shape[2:]) if transposed else x_of(y, weight, taps))
    if output_mask[1]:
        gradients.append(weight_of(x, y, taps))
    if output_mask[2]:
        gradients.append(reduced("sum", grad_output, (0, *range(2, len(grad_output.shape)))))
    return tuple(gradients)


def y_of(x: Node, weight: Node, taps: Taps, out: Sequence[int]) -> Node:
    """Return y(n, yc, o) = sum of x(n, xc, o·stride + k·dilation - padding) · weight(yc, xc, k)."""
    batch, space = x.shape[0], len(out)
    channels, each = weight.shape[0], weight.shape[1]
    if each == 1 and taps.groups > 1:
        return _depthwise_y(x, weight, taps, out)
    shape, roles = grouped(batch, taps.groups, channels, out)

    def a(at: Sequence[Index], over: Sequence[Index]) -> Scalar:
        places, bounds = taps.under(at[-space:], over[:-1])
        group = at[1] * each if taps.groups > 1 else 0
        return guarded(bounds, x.at(at[0], over[-1] + group, *places))

    def b(at: Sequence[Index], over: Sequence[Index]) -> Scalar:
        return weight.at(_channel(at, taps.groups, channels), over[-1], *over[:-1])

    y = contraction(shape, roles, (*taps.kernel, each), a, b, x.dtype, "convolution")
    return reshaped(y, (batch, channels, *out))


def _channel(at: Sequence[Index], groups: int, channels: int) -> Index:
    """Return the channel that an index of `grouped` stands for."""
    return at[1] if groups == 1 else at[1] * (channels // groups) + at[2]


def _depthwise_y(x: Node, weight: Node, taps: Taps, out: Sequence[int]) -> Node:
    batch, channels, space = x.shape[0], weight.shape[0], len(out)
    multiplier = channels // taps.groups
    domain = (batch, channels, *out, *taps.kernel)

    def product(n: Index, channel: Index, *at: Index) -> Scalar:
        places, bounds = taps.under(at[:space], at[space:])
        value = guarded(bounds, x.at(n, channel // multiplier, *places))
        return value * weight.at(channel, 0, *at[space:])

    return reduction(domain, range(2 + space, 2 + 2 * space), "depthwise", product)


def weight_of(x: Node, y: Node, taps: Taps) -> Node:
    """Return weight(yc, xc, k) = sum of x(n, xc, o·stride + k·dilation - padding) · y(n, yc, o)."""
    groups, channels, space = taps.groups, y.shape[1], len(taps.kernel)
    each = x.shape[1] // groups
    if each == 1 and groups > 1:
        return _depthwise_weight(x, y, taps)
    lead = (channels,) if groups == 1 else (groups, channels // groups)
    shape = (*lead, each, *taps.kernel)
    roles: list[ContractionRole] = [*["batch"] * (groups > 1), "col", "row", *["row"] * space]  # type: ignore[list-item]

    def a(at: Sequence[Index], over: Sequence[Index]) -> Scalar:
        places, bounds = taps.under(over[1:], at[-space:])
        group = at[0] * each if groups > 1 else 0
        return guarded(bounds, x.at(over[0], at[-space - 1] + group, *places))

    def b(at: Sequence[Index], over: Sequence[Index]) -> Scalar:
        channel = at[0] if groups == 1 else at[0] * (channels // groups) + at[1]
        return y.at(over[0], channel, *over[1:])

    weight = contraction(shape, roles, (x.shape[0], *y.shape[2:]), a, b, x.dtype, "convolution_weight")
    return reshaped(weight, (channels, each, *taps.kernel))


def _depthwise_weight(x: Node, y: Node, taps: Taps) -> Node:
    channels, space = y.shape[1], len(taps.kernel)
    multiplier = channels // taps.groups
    domain = (channels, 1, *taps.kernel, x.shape[0], *y.shape[2:])

    def product(channel: Index, _: Index, *at: Index) -> Scalar:
        n, outs = at[space], at[space + 1 :]
        places, bounds = taps.under(outs, at[:space])
        value = guarded(bounds, x.at(n, channel // multiplier, *places))
        return value * y.at(n, channel, *outs)

    return reduction(domain, range(2 + space, len(domain)), "depthwise_weight", product)


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
    x = _dense_x(y, weight, taps, phases)
    if all(p.trivial for p in phases):
        return reshaped(x, (y.shape[0], channels, *taps.sizes))
    split = reshaped(x, (y.shape[0], channels, *[n for p in phases for n in (p.quotients, p.count)]))

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
    """The gradient where each channel of x has its own outputs: each x looks up its phase."""
    multiplier, space = weight.shape[0] // taps.groups, len(phases)
    domain = (y.shape[0], taps.groups, *taps.sizes, multiplier, *[p.most_taps for p in phases])

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

    return reduction(domain, range(2 + space, 3 + 2 * space), "depthwise", product)
