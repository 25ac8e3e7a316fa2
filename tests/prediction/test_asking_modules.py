"""Modules that ask for batch size and device, against eager steps of what they run as on CUDA."""

import numpy as np
import pytest
import torch
from oracles.asking_modules import Asking, drawn
from oracles.fake_cpu import run_training_on_fake_cpu

from torchedge.devices import find_device
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.tracing.capturing import CaptureRequest, capture_request

FAST = (2, 10, 16)
DIFFERENT = {
    3: "2.01 % too low at batch 4096",
    48: "2.02 % too high at batch 4096: an autocast around a checkpoint that casts alone",
    70: "18 % too low at batch 16: a checkpoint of casts alone inside of another one",
    79: "5 % too low at batch 4096: a checkpoint inside of another one",
}
"""Seeds that differ by more than the tolerance, with what is in them."""


def seeds():
    for seed in range(100):
        marks = [] if seed in FAST else [pytest.mark.slow]
        if seed in DIFFERENT:
            marks.append(pytest.mark.xfail(reason=DIFFERENT[seed], strict=True))
        yield pytest.param(seed, marks=marks)


WIDTH = 256


def loss(output):
    return output.float().square().sum()


@pytest.mark.parametrize("seed", list(seeds()))
def test_peaks_are_those_of_a_run_on_the_device(seed):
    steps, device = drawn(seed), find_device("nvidia-h200")
    with torch.device("meta"):
        asking, answered = Asking(steps, WIDTH, asks=True), Asking(steps, WIDTH, asks=False)
    for batch in (16, 4096):
        x = torch.empty(batch, WIDTH, device="meta")
        graph = capture_request(CaptureRequest(asking, batch, example=x, loss=loss, device=device))
        tape = write_tape(graph, StepSettings(backend="cpu", attention="math"))
        answered.zero_grad()
        oracle = run_training_on_fake_cpu(
            answered, ((x,), {}), loss, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)
        )
        peak = int(tape.peak_bytes(np.array([batch]))[0])
        assert peak == pytest.approx(oracle.peak, rel=0.02), f"batch {batch}: {steps}"
