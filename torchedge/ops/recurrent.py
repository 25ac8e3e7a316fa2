"""Recurrent layers, each as one operator over the whole sequence."""

from __future__ import annotations

from math import prod

from torchedge.ops.specs import Call, LoadClass, keep, spec

_FLOAT = 4


def recurrent_flops(call: Call) -> int:
    """2 · steps · weights: every weight matrix is applied to every element of batch and sequence."""
    x = call.ins[0] or (1,)
    return 2 * prod(x[:-1]) * sum(prod(s) for s in call.ins[1:] if s is not None and len(s) == 2)


def gate_activations(call: Call) -> tuple[int, ...]:
    """What the fused cell keeps: gate activations and cell state of every step, about six values an output."""
    return (6 * _FLOAT * prod(call.outs[0]),)


OPS = (
    spec("lstm", "input", load=LoadClass.REUSABLE, flops=recurrent_flops, saves=keep(0, -1), aux=gate_activations,
         autocast="lower"),
    spec("gru", "input", "rnn_tanh rnn_relu", load=LoadClass.REUSABLE, flops=recurrent_flops, saves=keep(0, -1),
         aux=gate_activations, autocast="lower"),
    spec("lstm_cell", "input", "gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell", load=LoadClass.REUSABLE,
         flops=recurrent_flops, saves=keep(0, -1), autocast="lower"),
)  # fmt: skip
