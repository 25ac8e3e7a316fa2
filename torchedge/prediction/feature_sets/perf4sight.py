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

import numpy as np

from torchedge.prediction.feature_sets.convolutions import Amount, Column, Convolutions
from torchedge.prediction.feature_sets.registry import Network, add_feature_set, feature

WINOGRAD = ((4, 3), (3, 2))
"""(q, r): sides of output tile and filter of the Winograd algorithms that cuDNN uses most."""


# Tensors (B.2.1) ----------------------------------------------------------------------------------


@feature("mem_w")
def mem_w(net: Network) -> Amount:
    """Weights."""
    c = net.convolutions
    return c.fixed(c.n * c.e * c.k2)


@feature("mem_w_grad")
def mem_w_grad(net: Network) -> Amount:
    """Gradients of the weights, times the batch size as in the original."""
    c = net.convolutions
    return c.per_sample(c.n * c.e * c.k2)


@feature("mem_ifm_fwd")
def mem_ifm_fwd(net: Network) -> Amount:
    """Input feature maps."""
    c = net.convolutions
    return c.per_sample(c.m * c.ip2)


@feature("mem_ofm_fwd")
def mem_ofm_fwd(net: Network) -> Amount:
    """Output feature maps."""
    c = net.convolutions
    return c.per_sample(c.n * c.op2)


@feature("mem_tensors_fwd")
def mem_tensors_fwd(net: Network) -> Amount:
    """Weights and feature maps."""
    return net["mem_w"] + net["mem_ifm_fwd"] + net["mem_ofm_fwd"]


@feature("mem_ifm")
def mem_ifm(net: Network) -> Amount:
    """Input feature maps and their gradients."""
    return 2 * net["mem_ifm_fwd"]


@feature("mem_ofm")
def mem_ofm(net: Network) -> Amount:
    """Output feature maps and their gradients."""
    return 2 * net["mem_ofm_fwd"]


@feature("mem_tensors")
def mem_tensors(net: Network) -> Amount:
    """All tensors of a training step."""
    return net["mem_w"] + net["mem_w_grad"] + net["mem_ifm"] + net["mem_ofm"]


# Matrix multiplication (B.2.2) --------------------------------------------------------------------


@feature("mem_i2c_fwd_index")
def mem_i2c_fwd_index(net: Network) -> Amount:
    """Indices of the unrolled input."""
    c = net.convolutions
    return c.per_sample(c.op2)


@feature("mem_i2c_fwd_total")
def mem_i2c_fwd_total(net: Network) -> Amount:
    """The unrolled input (im2col)."""
    c = net.convolutions
    return c.per_sample(c.op2 * c.k2 * c.m)


@feature("mem_i2c_bwd_x_index")
def mem_i2c_bwd_x_index(net: Network) -> Amount:
    """Indices of the unrolled output gradient."""
    c = net.convolutions
    return c.per_sample(c.ip2)


@feature("mem_i2c_bwd_x_total")
def mem_i2c_bwd_x_total(net: Network) -> Amount:
    """The unrolled output gradient."""
    c = net.convolutions
    return c.per_sample(c.ip2 * c.k2 * c.m)


@feature("mem_i2c_bwd_w_total")
def mem_i2c_bwd_w_total(net: Network) -> Amount:
    """The unrolled input for the weights' gradient (the paper labels it bwd_x)."""
    c = net.convolutions
    return c.per_sample(c.op2 * c.k2 * c.e)


@feature("mem_i2c_total")
def mem_i2c_total(net: Network) -> Amount:
    """The unrolled matrices of all three passes."""
    return net["mem_i2c_fwd_total"] + net["mem_i2c_bwd_x_total"] + net["mem_i2c_bwd_w_total"]


@feature("mem_i2c_index")
def mem_i2c_index(net: Network) -> Amount:
    """The indices of all three passes; forward and bwd_w use the same."""
    return 2 * net["mem_i2c_fwd_index"] + net["mem_i2c_bwd_x_index"]


@feature("ops_mm_fwd")
def ops_mm_fwd(net: Network) -> Amount:
    """Operations of the forward pass, and of bwd_w."""
    c = net.convolutions
    return c.per_sample(c.n * c.op2 * c.k2 * c.e)


@feature("ops_mm_bwd_x")
def ops_mm_bwd_x(net: Network) -> Amount:
    """Operations of bwd_x, not divided by the groups, as in the original."""
    c = net.convolutions
    return c.per_sample(c.m * c.ip2 * c.k2 * c.n)


@feature("ops_mm")
def ops_mm(net: Network) -> Amount:
    """Operations of all three passes."""
    return 2 * net["ops_mm_fwd"] + net["ops_mm_bwd_x"]


# Fast Fourier transform (B.2.3) -------------------------------------------------------------------


@feature("mem_fft_w_fwd")
def mem_fft_w_fwd(net: Network) -> Amount:
    """Transformed weights, of the input's size."""
    c = net.convolutions
    return c.fixed(c.n * c.e * c.ih * (1 + c.iw))


@feature("mem_fft_ifm_fwd")
def mem_fft_ifm_fwd(net: Network) -> Amount:
    """Transformed input of the forward pass, and of bwd_w."""
    c = net.convolutions
    return c.per_sample(c.m * c.ih * (1 + c.iw))


@feature("mem_fft_ofm_bwd_w")
def mem_fft_ofm_bwd_w(net: Network) -> Amount:
    """Transformed output gradient of bwd_w."""
    c = net.convolutions
    return c.per_sample(c.n * c.ih * (1 + c.iw))


@feature("mem_fft_w_bwd_x")
def mem_fft_w_bwd_x(net: Network) -> Amount:
    """Transformed weights, of the output's size."""
    c = net.convolutions
    return c.fixed(c.n * c.e * c.oh * (1 + c.ow))


@feature("mem_fft_ofm_bwd_x")
def mem_fft_ofm_bwd_x(net: Network) -> Amount:
    """Transformed output gradient of bwd_x."""
    c = net.convolutions
    return c.per_sample(c.n * c.oh * (1 + c.ow))


@feature("mem_fft_fwd")
def mem_fft_fwd(net: Network) -> Amount:
    """Transforms of the forward pass."""
    return net["mem_fft_w_fwd"] + net["mem_fft_ifm_fwd"]


@feature("mem_fft_bwd_x")
def mem_fft_bwd_x(net: Network) -> Amount:
    """Transforms of bwd_x (the paper prints the wrong weights)."""
    return net["mem_fft_w_bwd_x"] + net["mem_fft_ofm_bwd_x"]


@feature("mem_fft_bwd_w")
def mem_fft_bwd_w(net: Network) -> Amount:
    """Transforms of bwd_w."""
    return net["mem_fft_ifm_fwd"] + net["mem_fft_ofm_bwd_w"]


@feature("mem_fft")
def mem_fft(net: Network) -> Amount:
    """Transforms of all three passes."""
    return net["mem_fft_fwd"] + net["mem_fft_bwd_x"] + net["mem_fft_bwd_w"]


def _fft_ops(c: Convolutions, transform: Column, area: Column) -> Amount:
    """Transforms of both feature maps and the weights, `transform` operations a plane, then the products."""
    return c.per_sample(transform * (c.m + c.n) + c.n * c.m * area) + c.fixed(transform * c.n * c.e)


@feature("ops_fft_fwd")
def ops_fft_fwd(net: Network) -> Amount:
    """Operations of the forward pass."""
    c = net.convolutions
    return _fft_ops(c, c.ip2 * np.log2(c.ip), c.ip2)


@feature("ops_fft_bwd_x")
def ops_fft_bwd_x(net: Network) -> Amount:
    """Operations of bwd_x."""
    c = net.convolutions
    return _fft_ops(c, c.op2 * np.log2(c.op), c.op2)


@feature("ops_fft_bwd_w")
def ops_fft_bwd_w(net: Network) -> Amount:
    """Operations of bwd_w, with ip * log2(ip²) for a transform, as in the original."""
    c = net.convolutions
    return _fft_ops(c, c.ip * np.log2(c.ip * c.ip), c.ip2)


@feature("ops_fft")
def ops_fft(net: Network) -> Amount:
    """Operations of all three passes."""
    return net["ops_fft_fwd"] + net["ops_fft_bwd_x"] + net["ops_fft_bwd_w"]


# Winograd (B.2.4) ---------------------------------------------------------------------------------


def _winograd_memory(q: int, r: int) -> tuple[str, ...]:
    """Register the seven memory features of one tiling; return their names in order."""
    tile = (q + r - 1) ** 2
    fwd, bwd_x, bwd_w = (f"mem_wino_{part}_{q}_{r}" for part in ("fwd", "bwd_x", "bwd_w"))

    @feature(fwd)
    def mem_wino_fwd(net: Network) -> Amount:
        c = net.convolutions
        return 3 * tile * c.per_sample(c.n * c.tiles(c.ih, c.iw, q))

    @feature(bwd_x)
    def mem_wino_bwd_x(net: Network) -> Amount:
        c = net.convolutions
        return 3 * tile * c.per_sample(c.m * c.tiles(c.oh, c.ow, q))

    @feature(bwd_w)
    def mem_wino_bwd_w(net: Network) -> Amount:
        c = net.convolutions
        return 3 * tile * c.per_sample(c.n * c.e * c.tiles(c.ih, c.iw, q))

    return _with_sums("mem_wino", q, r)


def _winograd_operations(q: int, r: int) -> tuple[str, ...]:
    """Register the seven operation features of one tiling; return their names in order."""
    tile = (q + r - 1) ** 2
    fwd, bwd_x, bwd_w = (f"ops_wino_{part}_{q}_{r}" for part in ("fwd", "bwd_x", "bwd_w"))

    @feature(fwd)
    def ops_wino_fwd(net: Network) -> Amount:
        c = net.convolutions
        return tile * c.per_sample(c.n * c.e * c.tiles(c.ih, c.iw, q) * c.tiles(c.kh, c.kw, r))

    @feature(bwd_x)
    def ops_wino_bwd_x(net: Network) -> Amount:
        c = net.convolutions
        return tile * c.per_sample(c.m * c.n * c.tiles(c.oh, c.ow, q) * c.tiles(c.kh, c.kw, r))

    @feature(bwd_w)
    def ops_wino_bwd_w(net: Network) -> Amount:
        c = net.convolutions
        return tile * c.per_sample(c.n * c.e * c.tiles(c.ih, c.iw, q) * c.tiles(c.oh, c.ow, r))

    return _with_sums("ops_wino", q, r)


def _with_sums(kind: str, q: int, r: int) -> tuple[str, ...]:
    """Register the four sums of a Winograd feature's three passes; return all seven names in order."""
    passes = {part: f"{kind}_{part}_{q}_{r}" for part in ("fwd", "bwd_x", "bwd_w")}
    names = list(passes.values())
    for parts in (("fwd", "bwd_x"), ("fwd", "bwd_w"), ("bwd_x", "bwd_w"), ("fwd", "bwd_x", "bwd_w")):
        name = f"{kind}_{q}_{r}" if len(parts) == 3 else f"{kind}_{'_'.join(parts)}_{q}_{r}"
        names.append(name)
        addends = tuple(passes[part] for part in parts)

        @feature(name)
        def total(net: Network, addends: tuple[str, ...] = addends) -> Amount:
            return sum((net[addend] for addend in addends), Amount())

    return tuple(names)


_WINOGRAD_MEMORY = tuple(name for q, r in WINOGRAD for name in _winograd_memory(q, r))
_WINOGRAD_OPERATIONS = tuple(name for q, r in WINOGRAD for name in _winograd_operations(q, r))

TRAINING = add_feature_set(
    "perf4sight",
    (
        *("mem_w", "mem_w_grad", "mem_ifm", "mem_ofm", "mem_tensors"),
        *("mem_i2c_fwd_index", "mem_i2c_fwd_total", "mem_i2c_bwd_x_index", "mem_i2c_bwd_x_total"),
        *("mem_i2c_bwd_w_total", "mem_i2c_total", "mem_i2c_index", "ops_mm_fwd", "ops_mm_bwd_x", "ops_mm"),
        *("mem_fft_w_fwd", "mem_fft_ifm_fwd", "mem_fft_ofm_bwd_w", "mem_fft_w_bwd_x", "mem_fft_ofm_bwd_x"),
        *("mem_fft_fwd", "mem_fft_bwd_x", "mem_fft_bwd_w", "mem_fft"),
        *("ops_fft_fwd", "ops_fft_bwd_x", "ops_fft_bwd_w", "ops_fft"),
        *_WINOGRAD_MEMORY,
        *_WINOGRAD_OPERATIONS,
    ),
)
"""56 columns of a training step, in the published tool's order."""

INFERENCE = add_feature_set(
    "perf4sight-infer",
    (
        *("mem_w", "mem_ifm_fwd", "mem_ofm_fwd", "mem_tensors_fwd", "mem_i2c_fwd_index", "mem_i2c_fwd_total"),
        *("ops_mm_fwd", "mem_fft_w_fwd", "mem_fft_ifm_fwd", "mem_fft_fwd", "ops_fft_fwd"),
        *(f"{kind}_wino_fwd_{q}_{r}" for kind in ("mem", "ops") for q, r in WINOGRAD),
    ),
    mode="infer",
)
"""15 columns of the forward pass alone."""
