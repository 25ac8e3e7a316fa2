"""Elements of pictures and volumes at the places of a grid, by operators that have gradients and kernels."""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import and_, mul

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
LINEAR, NEAREST = 0, 1
ZEROS, REFLECTION = 0, 2
SHARPNESS = -0.75
"""Of PyTorch's cubic convolution."""


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Compute `F.grid_sample`, which refuses what it does not know."""
    if mode not in MODES[: 7 - input.dim()] or padding_mode not in PADDINGS or grid.dim() != input.dim():
        return F.grid_sample(input, grid, mode, padding_mode, align_corners)
    return grid_sampler(input, grid, MODES.index(mode), PADDINGS.index(padding_mode), bool(align_corners))


def grid_sampler(
    source: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Return (N, C, *places) from a source (N, C, *sizes) and the places' coordinates (N, *places, x y z).

    The elements beside each place are read by one lookup. As in PyTorch's kernels, one outside is 0 and not
    read, whatever its weight; a place that is NaN lies at 0 where places are clipped.
    """
    sizes = source.shape[2:]
    axes: list[list[tuple[Tensor, Tensor]]] = []
    for ratio, size in zip(grid.unbind(-1)[::-1], sizes, strict=True):
        place = (ratio + 1) / 2 * (size - 1) if align_corners else ((ratio + 1) * size - 1) / 2
        if interpolation_mode == LINEAR:
            place = _inside(place, size, padding_mode, align_corners)
            low = place.floor()
            axes.append([(low, low + 1 - place), (low + 1, place - low)])
        elif interpolation_mode == NEAREST:
            place = _inside(place, size, padding_mode, align_corners)
            no_slope = place.nan_to_num(0.0, 0.0, 0.0) * 0 + 1  # a gradient of zeros, as eager's, not none
            axes.append([(place.round(), no_slope)])
        else:
            low = place.floor()
            shares = _cubic(place - low)
            taps = [_inside(low + k - 1, size, padding_mode, align_corners) for k in range(4)]
            axes.append(list(zip(taps, shares, strict=True)))
    corners = list(product(*axes))
    places = [torch.stack([corner[d][0] for corner in corners]) for d in range(len(sizes))]
    held = reduce(and_, [(p >= 0) & (p < size) for p, size in zip(places, sizes, strict=True)])
    batch = torch.arange(len(source), device=source.device).view(-1, *[1] * len(sizes))
    index = (batch, *[torch.where(held, p, 0).long() for p in places])
    values = torch.where(held.unsqueeze(-1), source.movedim(1, -1)[index], 0)
    weights = torch.stack([reduce(mul, [share for _, share in corner]) for corner in corners])
    return (values * weights.unsqueeze(-1)).sum(0).movedim(-1, 1)


def _inside(place: Tensor, size: int, padding_mode: int, align_corners: bool) -> Tensor:
    """Return places as they are, or clipped to the picture, after reflection at its borders."""
    if padding_mode == ZEROS:
        return place
    if padding_mode == REFLECTION:
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if span == 0:
            return torch.zeros_like(place)
        distance = (place - low).abs()
        rest, turns = torch.fmod(distance, span), (distance / span).floor()
        place = torch.where(torch.fmod(turns, 2) == 0, rest, span - rest) + low
    place = torch.where(place > 0, place, 0)
    return torch.where(place < size - 1, place, size - 1)


def _cubic(t: Tensor) -> list[Tensor]:
    """Return the shares of the four elements around a place, t behind the second one."""

    def near(x: Tensor) -> Tensor:
        return ((SHARPNESS + 2) * x - (SHARPNESS + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return SHARPNESS * (((x - 5) * x + 8) * x - 4)

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]
