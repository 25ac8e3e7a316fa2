"""perf4sight's appendix B as plain arithmetic, one layer and one formula after the other.

It shares no code with `torchedge.features`, and layers are read with forward hooks, not with the tracer
(`torchedge.testing.conv_layers`): together they are an independent oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torchedge.testing import ConvLayer


def reference_features(
    layers: Sequence[ConvLayer], batch_size: int, *, mode: Literal["train", "infer"] = "train"
) -> dict[str, float]:
    """Return perf4sight's features of some layers, computed the slow and plain way.

    The 56 training columns, or the 15 inference columns with mode="infer", by name in the published order;
    whole numbers are Python integers, so they are exact.
    """
    one_by_one = [_layer_features(layer, batch_size * layer.copies) for layer in layers]
    names = _layer_features(ConvLayer(1, 1, (1, 1), (1, 1), (1, 1)), 1)
    total: dict[str, float] = {name: sum(found[name] for found in one_by_one) for name in names}
    if mode == "train":
        return {name: value for name, value in total.items() if name not in _ONLY_INFERENCE}
    return {name: total[name] for name in _INFERENCE}


_ONLY_INFERENCE = ("mem_ifm_fwd", "mem_ofm_fwd", "mem_tensors_fwd")
_INFERENCE = (
    *("mem_w", "mem_ifm_fwd", "mem_ofm_fwd", "mem_tensors_fwd", "mem_i2c_fwd_index", "mem_i2c_fwd_total"),
    *("ops_mm_fwd", "mem_fft_w_fwd", "mem_fft_ifm_fwd", "mem_fft_fwd", "ops_fft_fwd"),
    *("mem_wino_fwd_4_3", "mem_wino_fwd_3_2", "ops_wino_fwd_4_3", "ops_wino_fwd_3_2"),
)


def _layer_features(layer: ConvLayer, bs: int) -> dict[str, float]:
    """Every column for one layer that sees `bs` samples, in the published order."""
    n, m, e = layer.n, layer.m, layer.m // layer.groups
    k2 = layer.kernel[0] * layer.kernel[1]
    (ih, iw), (oh, ow) = layer.ip, layer.op
    f: dict[str, float] = {}
    f["mem_w"] = n * e * k2
    f["mem_w_grad"] = bs * n * e * k2
    f["mem_ifm"] = 2 * bs * m * ih * iw
    f["mem_ofm"] = 2 * bs * n * oh * ow
    f["mem_tensors"] = f["mem_w"] + f["mem_w_grad"] + f["mem_ifm"] + f["mem_ofm"]
    f["mem_i2c_fwd_index"] = bs * oh * ow
    f["mem_i2c_fwd_total"] = bs * oh * ow * k2 * m
    f["mem_i2c_bwd_x_index"] = bs * ih * iw
    f["mem_i2c_bwd_x_total"] = bs * ih * iw * k2 * m
    f["mem_i2c_bwd_w_total"] = bs * oh * ow * k2 * e
    f["mem_i2c_total"] = f["mem_i2c_fwd_total"] + f["mem_i2c_bwd_x_total"] + f["mem_i2c_bwd_w_total"]
    f["mem_i2c_index"] = 2 * f["mem_i2c_fwd_index"] + f["mem_i2c_bwd_x_index"]
    f["ops_mm_fwd"] = bs * n * oh * ow * k2 * e
    f["ops_mm_bwd_x"] = bs * m * ih * iw * k2 * n
    f["ops_mm"] = 2 * f["ops_mm_fwd"] + f["ops_mm_bwd_x"]
    f["mem_fft_w_fwd"] = n * e * ih * (1 + iw)
    f["mem_fft_ifm_fwd"] = bs * m * ih * (1 + iw)
    f["mem_fft_ofm_bwd_w"] = bs * n * ih * (1 + iw)
    f["mem_fft_w_bwd_x"] = n * e * oh * (1 + ow)
    f["mem_fft_ofm_bwd_x"] = bs * n * oh * (1 + ow)
    f["mem_fft_fwd"] = f["mem_fft_w_fwd"] + f["mem_fft_ifm_fwd"]
    f["mem_fft_bwd_x"] = f["mem_fft_w_bwd_x"] + f["mem_fft_ofm_bwd_x"]
    f["mem_fft_bwd_w"] = f["mem_fft_ifm_fwd"] + f["mem_fft_ofm_bwd_w"]
    f["mem_fft"] = f["mem_fft_fwd"] + f["mem_fft_bwd_x"] + f["mem_fft_bwd_w"]
    planes = bs * (m + n) + n * e
    log_ip, log_op = math.log2(ih * iw) / 2, math.log2(oh * ow) / 2
    f["ops_fft_fwd"] = ih * iw * log_ip * planes + bs * n * m * ih * iw
    f["ops_fft_bwd_x"] = oh * ow * log_op * planes + bs * n * m * oh * ow
    f["ops_fft_bwd_w"] = math.sqrt(ih * iw) * math.log2(ih * iw) * planes + bs * n * m * ih * iw
    f["ops_fft"] = f["ops_fft_fwd"] + f["ops_fft_bwd_x"] + f["ops_fft_bwd_w"]
    for q, r in ((4, 3), (3, 2)):
        f.update(_winograd_memory(layer, bs, q, r))
    for q, r in ((4, 3), (3, 2)):
        f.update(_winograd_operations(layer, bs, q, r))
    f["mem_ifm_fwd"] = bs * m * ih * iw
    f["mem_ofm_fwd"] = bs * n * oh * ow
    f["mem_tensors_fwd"] = f["mem_w"] + f["mem_ifm_fwd"] + f["mem_ofm_fwd"]
    return f


def _winograd_memory(layer: ConvLayer, bs: int, q: int, r: int) -> dict[str, float]:
    tile = (q + r - 1) * (q + r - 1)
    over_ip = math.ceil(layer.ip[0] / q) * math.ceil(layer.ip[1] / q)
    over_op = math.ceil(layer.op[0] / q) * math.ceil(layer.op[1] / q)
    fwd = 3 * bs * layer.n * tile * over_ip
    bwd_x = 3 * bs * layer.m * tile * over_op
    bwd_w = 3 * bs * layer.n * (layer.m // layer.groups) * tile * over_ip
    return _seven("mem_wino", f"{q}_{r}", fwd, bwd_x, bwd_w)


def _winograd_operations(layer: ConvLayer, bs: int, q: int, r: int) -> dict[str, float]:
    tile = (q + r - 1) * (q + r - 1)
    over_ip = math.ceil(layer.ip[0] / q) * math.ceil(layer.ip[1] / q)
    over_op = math.ceil(layer.op[0] / q) * math.ceil(layer.op[1] / q)
    filters = math.ceil(layer.kernel[0] / r) * math.ceil(layer.kernel[1] / r)
    gradients = math.ceil(layer.op[0] / r) * math.ceil(layer.op[1] / r)
    e = layer.m // layer.groups
    fwd = bs * layer.n * e * over_ip * filters * tile
    bwd_x = bs * layer.m * layer.n * over_op * filters * tile
    bwd_w = bs * layer.n * e * over_ip * gradients * tile
    return _seven("ops_wino", f"{q}_{r}", fwd, bwd_x, bwd_w)


def _seven(kind: str, tiling: str, fwd: int, bwd_x: int, bwd_w: int) -> dict[str, float]:
    return {
        f"{kind}_fwd_{tiling}": fwd,
        f"{kind}_bwd_x_{tiling}": bwd_x,
        f"{kind}_bwd_w_{tiling}": bwd_w,
        f"{kind}_fwd_bwd_x_{tiling}": fwd + bwd_x,
        f"{kind}_fwd_bwd_w_{tiling}": fwd + bwd_w,
        f"{kind}_bwd_x_bwd_w_{tiling}": bwd_x + bwd_w,
        f"{kind}_{tiling}": fwd + bwd_x + bwd_w,
    }
