"""Recurrent layers, each as one operator over the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torchedge.ops.specs import Call, LoadClass, Sizes, keep, spec

_FLOAT = 4


def recurrent_flops(call: Call) -> int:
    """2 · steps · weights: every weight matrix is applied to every element of batch and sequence."""
    x = call.ins[0] or (1,)
    return 2 * prod(x[:-1]) * sum(prod(s) for s in call.ins[1:] if s is not None and len(s) == 2)


def gate_activations(call: Call) -> tuple[int, ...]:
    """The fused cell keeps gate activations and the cell state of every step, about six values an output."""
    return (6 * _FLOAT * prod(call.outs[0]),)


def recurrent_shapes(ins: list[Sizes | None], attrs: Mapping[str, Any]) -> tuple[Sizes, ...] | None:
    """X (L, N, m) or (N, L, m), states (layers · directions, N, h) -> outputs of every step, last states.

    None for packed sequences, whose inputs are two-dimensional.
    """
    x, h = ins[0], ins[1] if len(ins) > 1 else None
    if x is None or h is None or len(x) != 3 or len(h) != 3 or "batch_first" not in attrs:
        return None
    width = h[-1] * (2 if attrs.get("bidirectional") else 1)
    states = [s for s in ins[1:3] if s is not None and len(s) == 3]
    return ((*x[:2], width), *states)


_PARAMS = "input hx params has_biases num_layers dropout train bidirectional batch_first"

OPS = (
    spec(
        "lstm",
        _PARAMS,
        infer_many=recurrent_shapes,
        load=LoadClass.REUSABLE,
        flops=recurrent_flops,
        saves=keep(0, -1),
        aux=gate_activations,
        autocast="lower",
    ),
    spec(
        "gru",
        _PARAMS,
        "rnn_tanh rnn_relu",
        infer_many=recurrent_shapes,
        load=LoadClass.REUSABLE,
        flops=recurrent_flops,
        saves=keep(0, -1),
        aux=gate_activations,
        autocast="lower",
    ),
    spec(
        "lstm_cell",
        "input",
        "gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell",
        load=LoadClass.REUSABLE,
        flops=recurrent_flops,
        saves=keep(0, -1),
        autocast="lower",
    ),
)
