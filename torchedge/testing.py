"""Help for your own pytest suite: check prediction features on any CPU, without a device.

`reference_features` is the plain arithmetic of perf4sight's appendix B, one layer and one formula after the
other. It shares no code with `torchedge.features`, and `conv_layers` reads a model's layers with forward
hooks, not with the tracer: together they are an independent oracle.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torchedge.errors import InputError

if TYPE_CHECKING:
    import torch

    from torchedge.graphs import ForwardGraph

__all__ = ["ConvLayer", "assert_features", "conv_layers", "reference_features"]

_SAMPLES = 2  # the fewest with which batch normalisation trains
_REPORTED = 20


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """Dimensions of one call of a 2-D convolution.

    n, m: output and input channels; groups; kernel, ip, op: (height, width) of kernel, input and output;
    copies: how many samples it sees for each sample of the network (above 1 where a model stacks crops into
    the batch).
    """

    n: int
    m: int
    kernel: tuple[int, int]
    ip: tuple[int, int]
    op: tuple[int, int]
    groups: int = 1
    copies: int = 1


def conv_layers(
    model: torch.nn.Module, input_size: tuple[int, ...], *, mode: Literal["train", "infer"] = "train"
) -> list[ConvLayer]:
    """Return the calls of a model's `nn.Conv2d` layers in order, as forward hooks see them on a meta copy.

    input_size: shape of one sample, without the batch. The model itself is neither run nor changed. Not seen
    are `torch.nn.functional.conv2d` and what a layer pads inside its own forward.
    Raises InputError for a layer that does not see a whole number of samples for each of the network's.
    """
    import torch

    twin = _meta_copy(model).train(mode == "train")
    found: list[ConvLayer] = []

    def note(layer: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        assert isinstance(layer, torch.nn.Conv2d)
        image = args[0]
        kernel, sides = (layer.kernel_size[0], layer.kernel_size[1]), (image.shape[-2], image.shape[-1])
        made = (output.shape[-2], output.shape[-1])
        copies, rest = divmod(image.shape[0], _SAMPLES)
        if rest or image.dim() != 4:
            raise InputError(
                f"a convolution reads {tuple(image.shape)} when the batch is {_SAMPLES}; "
                "expected a multiple of the batch first; write its ConvLayer by hand"
            )
        found.append(
            ConvLayer(layer.out_channels, layer.in_channels, kernel, sides, made, layer.groups, copies)
        )

    for module in twin.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        twin(torch.empty((_SAMPLES, *input_size), device="meta"))
    return found


def _meta_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy whose parameters and buffers have shapes but no data."""
    import torch

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


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


def assert_features(
    model: torch.nn.Module | ForwardGraph,
    batch_size: int,
    expected: Mapping[str, float],
    *,
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    mode: Literal["train", "infer"] | None = None,
    feature_set: str | None = None,
    rtol: float = 0.0,
) -> None:
    """Assert that the features named in `expected` have these values, up to the relative tolerance `rtol`.

    The other arguments are those of `torchedge.features`. An AssertionError lists every feature that
    differs; an unknown name raises InputError.
    """
    from torchedge.prediction.feature_sets import features

    if isinstance(batch_size, Sequence):
        raise InputError("assert_features takes one batch size; call it once for each")
    found = features(
        model, batch_size, feature_set=feature_set, input_size=input_size, example=example, mode=mode
    )
    wrong = [
        f"  {name}: expected {value:,}, computed {found[name]:,}"
        for name, value in expected.items()
        if not abs(found[name] - value) <= rtol * abs(value)
    ]
    if wrong:
        more = [f"  and {len(wrong) - _REPORTED} more"] if len(wrong) > _REPORTED else []
        head = f"{len(wrong)} of {len(expected)} features differ at batch size {batch_size}:"
        raise AssertionError("\n".join([head, *wrong[:_REPORTED], *more]))
