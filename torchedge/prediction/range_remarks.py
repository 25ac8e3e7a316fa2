"""What it means that a feature of a step lies outside the range that a profile was fitted on, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torchedge.prediction.latency.roofline import KINDS, PHASES

_PHASES = dict(zip(PHASES, ("forward", "backward for inputs", "backward for weights"), strict=True))
_KINDS = dict(
    zip(
        KINDS,
        ("linear layers and 1x1 convolutions", "larger convolutions", "strided convolutions"),
        strict=True,
    )
)
_PASSES = {
    "norm": "normalisation",
    "activation": "activations",
    "binary": "additions and products of tensors",
    "copy": "copies",
    "pool_in": "pooling",
    "pool_window": "pooling windows",
    "bias": "biases",
    "update": "the optimizer's update",
    "fan": "summing gradients of values that are used several times",
}
_OTHERS = {
    "batch": "the batch size",
    "base": "the memory of the whole process",
    "reserved_over_allocated": "how much more memory the allocator reserves than tensors take",
    "allocated": "the memory of the tensors",
    "parameters": "the size of the weights",
    "has_linear": "whether the model has linear layers",
    "share_depthwise": "the share of time in depthwise convolutions",
    "log2_m": "the number of input channels",
    "log2_n": "the number of output channels",
    "log2_op": "the size of the layers' outputs",
    "odd_channels": "channel numbers that are no multiples of eight",
    "log2_batch": "the batch size",
    "log2_busy_over_launch": "how long kernels take beside their launches",
    "log2_busy_a_sample": "the work of one sample",
    "log2_launch": "the number of kernels",
}

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        **{
            f"share_{kind}_{phase}": f"the share of time in {_KINDS[kind]} ({_PHASES[phase]})"
            for kind in KINDS
            for phase in PHASES
        },
        **{f"share_{name}": f"the share of time in {words}" for name, words in _PASSES.items()},
        **_OTHERS,
    }
)
"""Words for each feature of our own forests; the papers' feature sets have counts of layers and tensors."""

_PAPER = "the sizes of layers and tensors"


def range_remark(features: Iterable[str]) -> str:
    """Return one sentence on the features of a step that lie outside the fitted range; "" for none."""
    words = list(dict.fromkeys(_WORDS.get(name, _PAPER) for name in features))
    if not words:
        return ""
    differ = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"no step like this was measured, so the figures are extrapolated: it differs in {differ}"
