"""Loss functions."""

from __future__ import annotations

from math import prod

from torchedge.ops.specs import Call, LoadClass, keep, spec


def input_flops(call: Call) -> int:
    """A few operations for each prediction."""
    return 4 * prod(call.ins[0] or ())


def log_probabilities(call: Call) -> tuple[int, ...]:
    """cross_entropy is log_softmax followed by nll_loss: the log-probabilities are allocated and kept."""
    return (call.in_bytes(0), 4)


def nll_scratch(call: Call) -> tuple[int, ...]:
    """The gradient with respect to the log-probabilities lives while log_softmax runs backward."""
    return (call.in_bytes(0),)


_LOSS = {
    "load": LoadClass.HIERARCHICAL,
    "flops": input_flops,
    "autocast": "float32",
    "grads": ("new", "none"),
}

OPS = (
    spec(
        "cross_entropy_loss", "input target weight reduction ignore_index label_smoothing", "cross_entropy",
        aux=log_probabilities, saves=keep(1), backward_scratch=nll_scratch, **_LOSS,
    ),
    spec(
        "nll_loss_nd", "input target weight reduction ignore_index", "nll_loss nll_loss2d nll_loss_forward "
        "nll_loss2d_forward", saves=keep(0, 1), aux=lambda c: (4,), **_LOSS,
    ),
    spec("mse_loss", "input target reduction", "l1_loss smooth_l1_loss huber_loss", saves=keep(0, 1), **_LOSS),
    spec(
        "binary_cross_entropy", "input target weight reduction", "binary_cross_entropy_with_logits "
        "kl_div soft_margin_loss hinge_embedding_loss", saves=keep(0, 1), **_LOSS,
    ),
    spec("ctc_loss", "log_probs targets input_lengths target_lengths", "_ctc_loss", saves=keep(0, 1), **_LOSS),
)  # fmt: skip
