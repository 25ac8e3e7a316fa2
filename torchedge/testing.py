"""Help for your own pytest suite: check prediction features on any CPU, without a device.

`conv_layers` reads a model's layers with forward hooks, not with the tracer that `torchedge.features` uses;
`reference_features` returns the features of such layers, or of layers that you write down yourself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchedge.errors import InputError
from torchedge.graphs import ForwardGraph, Mode

if TYPE_CHECKING:
    import torch

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
    model: torch.nn.Module, input_size: tuple[int, ...], *, mode: Mode = "train"
) -> list[ConvLayer]:
    """Return the calls of a model's `nn.Conv2d` layers in order, as forward hooks see them on a meta copy.

    input_size: shape of one sample, without the batch. The model itself is neither run nor changed. Not seen
    are `torch.nn.functional.conv2d` and what a layer pads inside its own forward.
    Raises InputError for a layer that does not see a whole number of samples for each of the network's.
    """
    import torch

    twin = _meta_copy(model).train(mode == "train")
    layers: list[ConvLayer] = []

    def note(layer: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        assert isinstance(layer, torch.nn.Conv2d)
        image = args[0]
        kernel, sides = (layer.kernel_size[0], layer.kernel_size[1]), (image.shape[-2], image.shape[-1])
        written = (output.shape[-2], output.shape[-1])
        copies, remainder = divmod(image.shape[0], _SAMPLES)
        if remainder or image.dim() != 4:
            raise InputError(
                f"a convolution reads {tuple(image.shape)} when the batch is {_SAMPLES}; "
                "expected a multiple of the batch first; write its ConvLayer by hand"
            )
        layers.append(
            ConvLayer(layer.out_channels, layer.in_channels, kernel, sides, written, layer.groups, copies)
        )

    for module in twin.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        twin(torch.empty((_SAMPLES, *input_size), device="meta"))
    return layers


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
    layers: Sequence[ConvLayer], batch_size: int, *, mode: Mode = "train"
) -> dict[str, float]:
    """Return perf4sight's features of some layers, without a model.

    The 56 training columns, or the 15 inference columns with mode="infer", by name in the published order;
    whole numbers are Python integers, so they are exact.
    """
    from torchedge.prediction.feature_sets import (
        INFERENCE,
        TRAINING,
        BatchAmount,
        ConvolutionCall,
        FeatureInputs,
    )

    calls = [
        ConvolutionCall(
            layer.copies, 0, layer.n, layer.m, layer.m // layer.groups, *layer.kernel, *layer.ip, *layer.op
        )
        for layer in layers
    ]
    net = FeatureInputs(ForwardGraph((), (), (), ()), calls, exact=True)
    names = (TRAINING if mode == "train" else INFERENCE).names
    amounts: list[BatchAmount] = [net[name] for name in names]
    return {
        name: amount.const + amount.slope * batch_size for name, amount in zip(names, amounts, strict=True)
    }


def assert_features(
    model: torch.nn.Module | ForwardGraph,
    batch_size: int,
    expected: Mapping[str, float],
    *,
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    mode: Mode | None = None,
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
    computed = features(
        model, batch_size, feature_set=feature_set, input_size=input_size, example=example, mode=mode
    )
    wrong = [
        f"  {name}: expected {value:,}, computed {computed[name]:,}"
        for name, value in expected.items()
        if not abs(computed[name] - value) <= rtol * abs(value)
    ]
    if wrong:
        more = [f"  and {len(wrong) - _REPORTED} more"] if len(wrong) > _REPORTED else []
        head = f"{len(wrong)} of {len(expected)} features differ at batch size {batch_size}:"
        raise AssertionError("\n".join([head, *wrong[:_REPORTED], *more]))
