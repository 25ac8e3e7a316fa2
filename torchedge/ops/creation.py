"""Operators that make tensors out of nothing."""

from __future__ import annotations

from torchedge.ops.specs import no_flops, spec

OPS = (
    spec(
        "zeros",
        targets="ones empty full rand randn randint arange linspace logspace eye tensor scalar_tensor "
        "as_tensor zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
        "new_ones new_empty new_full new_tensor randperm hann_window tril_indices triu_indices "
        "empty_strided _assert_async lift",
        flops=no_flops,
        grads=("none",),
        autocast="keep",
        backward_flops=0.0,
    ),
    spec(
        "fill",
        "input value",
        "zero zero_",
        flops=no_flops,
        grads=("none",),
        autocast="keep",
        backward_flops=0.0,
    ),
)
