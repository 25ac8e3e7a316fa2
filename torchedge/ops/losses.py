"""Loss functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from torchedge.ops.specs import Call, LoadClass, Sizes, keep, spec


def reduced_shape(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> Sizes | None:
    """A scalar where the loss is averaged (1) or summed (2), as PyTorch numbers reductions."""
    return () if attrs.get("reduction", 1) in (1, 2, "mean", "sum") else None


def input_flops(call: Call) -> int:
    """A few operations for each prediction."""
    return 4 * prod(call.ins[0] or ())


def log_probabilities(call: Call) -> tuple[int, ...]:
    """cross_entropy is log_softmax followed by nll_loss: the log-probabilities are allocated and kept."""
    return (call.in_bytes(0), 4)


def nll_scratch(call: Call) -> tuple[int, ...]:
    """The gradient with respect to the log-probabilities lives while log_softmax runs backward."""
    return (call.in_bytes(0),)


_loss = partial(
    spec, load=LoadClass.HIERARCHICAL, flops=input_flops, autocast="float32", grads=("new", "none")
)

OPS = (
    _loss(
        "cross_entropy_loss",
        "input target weight reduction ignore_index label_smoothing",
        "cross_entropy",
        infer=reduced_shape,
        first_dtype=True,
        aux=log_probabilities,
        saves=keep(1),
        backward_scratch=nll_scratch,
    ),
    _loss(
        "nll_loss_nd",
        "input target weight reduction ignore_index",
        "nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward",
        saves=keep(0, 1),
        aux=lambda c: (4,),
    ),
    _loss("mse_loss", "input target reduction", "l1_loss smooth_l1_loss huber_loss", saves=keep(0, 1)),
    _loss(
        "binary_cross_entropy",
        "input target weight reduction",
        "binary_cross_entropy_with_logits kl_div soft_margin_loss hinge_embedding_loss",
        saves=keep(0, 1),
    ),
    _loss("ctc_loss", "log_probs targets input_lengths target_lengths", "_ctc_loss", saves=keep(0, 1)),
)
