"""The host of a device: how long its thread takes for the calls of eager PyTorch."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from torchedge.errors import DeviceError, checked_call, first_line

_LAYERS, _WIDTH, _BATCH = 16, 16, 4
_STEPS, _ROUNDS = 3, 10
STEP_LAUNCHES = 311.0
"""Launches of a tiny kernel on the campaigns' median host that take as long as this step: the median of 176
rows on another host (the probe's `step_us`, 2,811 us), over 5.48 us times that host's fitted slowness, 1.65
(`torchedge fit kinds`)."""


@checked_call()
def measure_operator_us(device: str | torch.device = "cuda") -> float:
    """Return the microseconds of the host's thread for one tiny operator of eager PyTorch on a device.

    Measured on training steps of 16 tiny layers (forward, backward and update), the median of ten rounds of
    three, about 0.1 s in all: the control that the campaigns' probe writes beside every row as `step_us`. A
    loop of launches alone says less of a host, which also runs Python and autograd.
    `Device.on_host` takes it. Run it on a host that does nothing else.

    Raises:
        DeviceError: PyTorch cannot compute there.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's numbers stay as they are
            layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        model, rounds = nn.Sequential(*layers).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        x = torch.ones(_BATCH, _WIDTH, device=device)
        with torch.enable_grad():
            for _ in range(1 + _ROUNDS):
                begun = time.perf_counter()
                for _ in range(_STEPS):
                    optimizer.zero_grad()
                    loss = model(x).sum()
                    loss.backward()
                    optimizer.step()
                rounds.append(time.perf_counter() - begun)
                loss.item()  # waits for the device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise DeviceError(
            f"PyTorch does not compute on {device!r} ({first_line(error)}); expected a device of this "
            'machine, such as "cuda" or "cpu"'
        ) from error
    return 1e6 * median(rounds[1:]) / _STEPS / STEP_LAUNCHES
