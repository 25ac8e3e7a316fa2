"""Interpolation, grid sampling and region pooling."""

from __future__ import annotations

from math import prod
from typing import Any

from torchedge.ops.specs import Call, keep, spec


def taps(count: int) -> Any:  # noqa: ANN401 - a FLOPs rule
    """Return a rule: `count` neighbours, a multiplication and an addition each."""
    return lambda call: 2 * count * prod(call.outs[0])


def region_saves(call: Call) -> tuple[int, ...]:
    """Region pooling keeps its boxes."""
    return (1,)


_PARAMS = "input output_size align_corners scale_factors"

OPS = (
    spec(
        "upsample_nearest2d",
        "input output_size scale_factors",
        "upsample_nearest1d upsample_nearest3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
        flops=taps(0),
    ),
    spec(
        "upsample_bilinear2d",
        _PARAMS,
        "upsample_linear1d _upsample_bilinear2d_aa",
        flops=taps(4),
        autocast="keep",
    ),
    spec("upsample_trilinear3d", _PARAMS, flops=taps(8), autocast="keep"),
    spec("upsample_bicubic2d", _PARAMS, "_upsample_bicubic2d_aa", flops=taps(16), autocast="keep"),
    spec(
        "grid_sampler",
        "input grid interpolation_mode padding_mode align_corners",
        "grid_sampler_2d grid_sampler_3d",
        flops=taps(4),
        saves=keep(0, 1),
        autocast="float32",
    ),
    spec("affine_grid_generator", "theta size align_corners", flops=taps(3)),
    spec("roi_align", "input rois", "roi_pool", flops=taps(4), saves=region_saves, grads=("new", "none")),
    spec("deform_conv2d", "input weight offset mask bias", saves=keep(0, 1, 2), autocast="lower"),
)
