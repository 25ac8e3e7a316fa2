"""The one factor between the time model and this machine."""

import math
from dataclasses import replace

import numpy as np
import torch

from torchedge.devices import Figure, Provenance, find_device
from torchedge.prediction.latency.roofline import COEFFICIENTS, prior_mean
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling.calibration import small_networks, step_time_ratio
from torchedge.tracing.capturing import capture


def with_ratio(ratio):
    device = find_device("rtx-2080ti")
    figure = Figure(ratio, "1", Provenance.MEASURED, "a test")
    return replace(
        device, figures={**device.figures, "step_time_ratio": figure}, fingerprint=f"ratio {ratio}"
    )


def test_a_ratio_scales_every_time():
    plain = find_device("rtx-2080ti")
    moved = prior_mean(with_ratio(3.0)) - prior_mean(plain)
    assert np.allclose(moved, [math.log(3.0) if c.follows else 0.0 for c in COEFFICIENTS])


def test_a_ratio_scales_predicted_steps():
    graph = capture(small_networks()["plain"], input_size=(3, 64, 64))
    one, three = (predict_graph(graph, 8, with_ratio(ratio)).latency.value for ratio in (1.0, 3.0))
    assert 2.9 < three / one < 3.01  # idle lanes' and tiles' own shares do not follow the device


def test_the_ratio_is_measured_without_touching_random_state():
    state = torch.get_rng_state()
    ratio = step_time_ratio(find_device("local-cpu"))
    assert 1e-4 < ratio < 1e4
    assert torch.equal(torch.get_rng_state(), state)
