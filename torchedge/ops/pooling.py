"""Pooling, interpolation, grid sampling and region pooling."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from torchedge.ops.kernels import kernel
from torchedge.ops.rows import reduced_flops
from torchedge.ops.specs import Call, LoadClass, Work, spec
from torchedge.ops.strides import as_image


def window_flops(call: Call) -> int:
    """One operation for each element of each window."""
    kernel = call.attrs.get("kernel_size", 1)
    volume = kernel if isinstance(kernel, int) else prod(kernel)
    rank = max(len(call.outs[0]) - 2, 1)
    return prod(call.outs[0]) * (volume**rank if isinstance(kernel, int) else volume)


_MAX = "input kernel_size stride padding dilation ceil_mode return_indices"
_AVG = "input kernel_size stride padding ceil_mode count_include_pad divisor_override"
_pool = partial(spec, load=LoadClass.HIERARCHICAL, work=Work.POOLING, autocast="keep", strides=as_image)


def taps(count: int) -> Any:  # noqa: ANN401 - a FLOPs rule
    """Return a rule: `count` neighbours, a multiplication and an addition each."""
    return lambda call: 2 * count * prod(call.outs[0])


_PARAMS = "input output_size align_corners scale_factors"
_resample = partial(spec, work=Work.COPY)
_interpolated = partial(_resample, autocast="float32_on_cuda", strides=as_image)

OPS = (
    _pool("max_pool2d", _MAX, flops=window_flops),
    _pool("max_pool1d", _MAX, "max_pool3d", flops=window_flops),
    _pool(
        "max_pool2d_with_indices", _MAX, "max_pool1d_with_indices max_pool3d_with_indices", flops=window_flops
    ),
    _pool("avg_pool2d", _AVG, flops=window_flops),
    _pool("avg_pool1d", _AVG, "avg_pool3d", flops=window_flops),
    _pool(
        "adaptive_avg_pool2d",
        "input output_size",
        "_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool3d _adaptive_avg_pool3d",
        flops=reduced_flops,
    ),
    _pool(
        "adaptive_max_pool2d",
        "input output_size",
        "adaptive_max_pool1d adaptive_max_pool3d",
        flops=reduced_flops,
    ),
    _pool("lp_pool2d", flops=window_flops),
    _pool("fractional_max_pool2d", "input kernel_size", flops=window_flops),
    _interpolated(
        "upsample_nearest2d",
        "input output_size scale_factors",
        "upsample_nearest1d upsample_nearest3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
        flops=taps(0),
    ),
    _interpolated("upsample_bilinear2d", _PARAMS, "upsample_linear1d _upsample_bilinear2d_aa", flops=taps(4)),
    _interpolated("upsample_trilinear3d", _PARAMS, flops=taps(8)),
    _interpolated("upsample_bicubic2d", _PARAMS, "_upsample_bicubic2d_aa", flops=taps(16)),
    _resample(
        "grid_sampler",
        "input grid interpolation_mode padding_mode align_corners",
        "grid_sampler_2d grid_sampler_3d",
        flops=taps(4),
        autocast="float32",
    ),
    _resample("affine_grid_generator", "theta size align_corners", flops=taps(3)),
    _resample(
        "roi_align",
        "input rois",
        "roi_pool",
        flops=taps(4),
        stops=range(1, 8),
        memory=lambda call: kernel(call, (1,)),
    ),
    _resample("deform_conv2d", "input weight offset mask bias", autocast="lower"),
)
