"""What recurrent layers take in NVIDIA's cuDNN 9, measured on an H200 (`benchmarks/recurrent_memory.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CudnnLayer:
    """A kind of layer, in values for each step, hidden unit and sample.

    reserve: kept for the backward pass. small, large: workspace for few hidden units (one kernel runs all
    steps) and for many: values of each direction, and in any case; copies of the weights, and of the
    sequence.
    """

    reserve: int
    small: tuple[int, int, int, int]
    large: tuple[int, int, int, int]


LSTM = CudnnLayer(5, (9, 12, 1, 1), (10, -6, 1, 2))
GRU = CudnnLayer(6, (6, 11, 2, 3), (8, -4, 1, 2))
RNN = CudnnLayer(1, (6, 7, 4, 3), (9, -3, 1, 2))
LAYER_BYTES = 8 * 2**20
"""Workspace of each layer and direction, whatever its size."""
FEW_HIDDEN = 128
"""Most hidden units for which cuDNN keeps the weights of a layer on the chip."""
STEP_LAUNCHES = 0.4
"""Launches of products that take as long as one step of one layer and direction: 17 us forward and 23 us
backward."""
