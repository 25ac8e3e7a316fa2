"""perf4sight's features (section 5.2, appendix B): sums over 2-D convolutions of sizes and operation counts.

The paper prints 42 formulas with several slips; these are the ones its published tool computes: 28 features,
then 14 of Winograd convolution for output tiles of q = 4 and filters of r = 3, and for q = 3 and r = 2.
Units are tensor elements (mem_*) and multiply-adds (ops_*).

Names: w weights, ifm and ofm input and output feature maps; fwd the forward pass, bwd_x and bwd_w the
gradients of input and weights; n and m output and input channels, e = m / groups; k, ip, op the sides of
kernel, input and output. Sides are the real ones (so dilation counts in op); of unequal sides the product
takes the place of the square, ip * (1 + ip) becomes ih * (1 + iw), and a side that stands alone is their
geometric mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from torchedge.prediction.feature_sets.convolutions import BatchAmount, Column, Convolutions
from torchedge.prediction.feature_sets.registry import FeatureInputs, add_feature_set, feature

WINOGRAD = ((4, 3), (3, 2))
"""(q, r): sides of output tile and filter of the Winograd algorithms that cuDNN uses most."""


def _fft(c: Convolutions, transform: Column, area: Column) -> BatchAmount:
    """Transforms of both feature maps and the weights, `transform` operations a plane, then the products."""
    return c.per_sample(transform * (c.m + c.n) + c.n * c.m * area) + c.fixed(transform * c.n * c.e)


_SUMS: dict[str, Callable[[Convolutions], BatchAmount]] = {
    # tensors (B.2.1)
    "mem_w": lambda c: c.fixed(c.n * c.e * c.k2),
    "mem_w_grad": lambda c: c.per_sample(c.n * c.e * c.k2),  # times the batch size, as in the original
    "mem_ifm_fwd": lambda c: c.per_sample(c.m * c.ip2),
    "mem_ofm_fwd": lambda c: c.per_sample(c.n * c.op2),
    # matrix multiplication of unrolled inputs, im2col (B.2.2)
    "mem_i2c_fwd_index": lambda c: c.per_sample(c.op2),
    "mem_i2c_fwd_total": lambda c: c.per_sample(c.op2 * c.k2 * c.m),
    "mem_i2c_bwd_x_index": lambda c: c.per_sample(c.ip2),
    "mem_i2c_bwd_x_total": lambda c: c.per_sample(c.ip2 * c.k2 * c.m),
    "mem_i2c_bwd_w_total": lambda c: c.per_sample(c.op2 * c.k2 * c.e),  # labelled bwd_x in the paper
    "ops_mm_fwd": lambda c: c.per_sample(c.n * c.op2 * c.k2 * c.e),  # of bwd_w, too
    "ops_mm_bwd_x": lambda c: c.per_sample(c.m * c.ip2 * c.k2 * c.n),  # not divided by the groups
    # fast Fourier transform (B.2.3)
    "mem_fft_w_fwd": lambda c: c.fixed(c.n * c.e * c.ih * (1 + c.iw)),
    "mem_fft_ifm_fwd": lambda c: c.per_sample(c.m * c.ih * (1 + c.iw)),  # of bwd_w, too
    "mem_fft_ofm_bwd_w": lambda c: c.per_sample(c.n * c.ih * (1 + c.iw)),
    "mem_fft_w_bwd_x": lambda c: c.fixed(c.n * c.e * c.oh * (1 + c.ow)),
    "mem_fft_ofm_bwd_x": lambda c: c.per_sample(c.n * c.oh * (1 + c.ow)),
    "ops_fft_fwd": lambda c: _fft(c, c.ip2 * np.log2(c.ip), c.ip2),
    "ops_fft_bwd_x": lambda c: _fft(c, c.op2 * np.log2(c.op), c.op2),
    "ops_fft_bwd_w": lambda c: _fft(c, c.ip * np.log2(c.ip * c.ip), c.ip2),  # ip, as in the original
}
"""Features that are sums over the convolutions."""

_TOTALS: dict[str, tuple[str, ...]] = {
    "mem_tensors_fwd": ("mem_w", "mem_ifm_fwd", "mem_ofm_fwd"),
    "mem_ifm": ("mem_ifm_fwd", "mem_ifm_fwd"),  # and its gradient
    "mem_ofm": ("mem_ofm_fwd", "mem_ofm_fwd"),
    "mem_tensors": ("mem_w", "mem_w_grad", "mem_ifm", "mem_ofm"),
    "mem_i2c_total": ("mem_i2c_fwd_total", "mem_i2c_bwd_x_total", "mem_i2c_bwd_w_total"),
    "mem_i2c_index": ("mem_i2c_fwd_index", "mem_i2c_fwd_index", "mem_i2c_bwd_x_index"),
    "ops_mm": ("ops_mm_fwd", "ops_mm_fwd", "ops_mm_bwd_x"),
    "mem_fft_fwd": ("mem_fft_w_fwd", "mem_fft_ifm_fwd"),
    "mem_fft_bwd_x": ("mem_fft_w_bwd_x", "mem_fft_ofm_bwd_x"),  # the paper prints the wrong weights
    "mem_fft_bwd_w": ("mem_fft_ifm_fwd", "mem_fft_ofm_bwd_w"),
    "mem_fft": ("mem_fft_fwd", "mem_fft_bwd_x", "mem_fft_bwd_w"),
    "ops_fft": ("ops_fft_fwd", "ops_fft_bwd_x", "ops_fft_bwd_w"),
}
"""Features that are sums of other features."""


def _add_winograd(q: int, r: int) -> None:
    """Add Winograd convolution (B.2.4) for output tiles of q and filters of r to both tables."""
    tile = (q + r - 1) ** 2
    passes: dict[str, Callable[[Convolutions], BatchAmount]] = {
        "mem_fwd": lambda c: 3 * tile * c.per_sample(c.n * c.tiles(c.ih, c.iw, q)),
        "mem_bwd_x": lambda c: 3 * tile * c.per_sample(c.m * c.tiles(c.oh, c.ow, q)),
        "mem_bwd_w": lambda c: 3 * tile * c.per_sample(c.n * c.e * c.tiles(c.ih, c.iw, q)),
        "ops_fwd": lambda c: tile * c.per_sample(c.n * c.e * c.tiles(c.ih, c.iw, q) * c.tiles(c.kh, c.kw, r)),
        "ops_bwd_x": lambda c: (
            tile * c.per_sample(c.m * c.n * c.tiles(c.oh, c.ow, q) * c.tiles(c.kh, c.kw, r))
        ),
        "ops_bwd_w": lambda c: (
            tile * c.per_sample(c.n * c.e * c.tiles(c.ih, c.iw, q) * c.tiles(c.oh, c.ow, r))
        ),
    }
    for name, amount in passes.items():
        kind, _, phase = name.partition("_")
        _SUMS[f"{kind}_wino_{phase}_{q}_{r}"] = amount
    for kind in ("mem", "ops"):
        for phases in _WINOGRAD_PHASES[3:]:
            parts = [part for part in _WINOGRAD_PHASES[:3] if part in (phases or part)]
            _TOTALS[_winograd(kind, phases, q, r)] = tuple(_winograd(kind, part, q, r) for part in parts)


_WINOGRAD_PHASES = ("fwd", "bwd_x", "bwd_w", "fwd_bwd_x", "fwd_bwd_w", "bwd_x_bwd_w", "")
"""The three passes, each two of them together, and all."""


def _winograd(kind: str, phases: str, q: int, r: int) -> str:
    return "_".join(filter(None, (kind, "wino", phases, str(q), str(r))))


def _sum(net: FeatureInputs, amount: Callable[[Convolutions], BatchAmount]) -> BatchAmount:
    return amount(net.convolutions)


def _total(net: FeatureInputs, addends: tuple[str, ...]) -> BatchAmount:
    return sum((net[addend] for addend in addends), BatchAmount())


for _q, _r in WINOGRAD:
    _add_winograd(_q, _r)
for _name, _amount in _SUMS.items():
    feature(_name)(partial(_sum, amount=_amount))
for _name, _addends in _TOTALS.items():
    feature(_name)(partial(_total, addends=_addends))

TRAINING = add_feature_set(
    "perf4sight",
    (
        *("mem_w", "mem_w_grad", "mem_ifm", "mem_ofm", "mem_tensors"),
        *("mem_i2c_fwd_index", "mem_i2c_fwd_total", "mem_i2c_bwd_x_index", "mem_i2c_bwd_x_total"),
        *("mem_i2c_bwd_w_total", "mem_i2c_total", "mem_i2c_index", "ops_mm_fwd", "ops_mm_bwd_x", "ops_mm"),
        *("mem_fft_w_fwd", "mem_fft_ifm_fwd", "mem_fft_ofm_bwd_w", "mem_fft_w_bwd_x", "mem_fft_ofm_bwd_x"),
        *("mem_fft_fwd", "mem_fft_bwd_x", "mem_fft_bwd_w", "mem_fft"),
        *("ops_fft_fwd", "ops_fft_bwd_x", "ops_fft_bwd_w", "ops_fft"),
        *(
            _winograd(kind, phases, q, r)
            for kind in ("mem", "ops")
            for q, r in WINOGRAD
            for phases in _WINOGRAD_PHASES
        ),
    ),
)
"""56 columns of a training step, in the published tool's order."""

INFERENCE = add_feature_set(
    "perf4sight-infer",
    (
        *("mem_w", "mem_ifm_fwd", "mem_ofm_fwd", "mem_tensors_fwd", "mem_i2c_fwd_index", "mem_i2c_fwd_total"),
        *("ops_mm_fwd", "mem_fft_w_fwd", "mem_fft_ifm_fwd", "mem_fft_fwd", "ops_fft_fwd"),
        *(_winograd(kind, "fwd", q, r) for kind in ("mem", "ops") for q, r in WINOGRAD),
    ),
    mode="infer",
)
"""15 columns of the forward pass alone."""
