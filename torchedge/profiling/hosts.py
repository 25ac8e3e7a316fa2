"""The host of a device: how long its thread takes for a launch of eager PyTorch."""

from __future__ import annotations

import time
from statistics import median

import torch

from torchedge.errors import DeviceError, checked_call, first_line

_LAUNCHES, _ROUNDS = 200, 10


@checked_call()
def measure_operator_us(device: str | torch.device = "cuda") -> float:
    """Return the microseconds of the host's thread for one tiny operator of eager PyTorch on a device.

    The median of ten rounds of 200 launches, about 10 ms in all, after one to warm up: the control that the
    campaigns' probe writes beside every row, without what else the host did in some of the rounds.
    `Device.on_host` takes it. Run it on a host that does nothing else.

    Raises:
        DeviceError: PyTorch cannot compute there.
    """
    try:
        number, rounds = torch.zeros(1, device=device), []
        for _ in range(1 + _ROUNDS):
            begun = time.perf_counter()
            for _ in range(_LAUNCHES):
                number.add_(1.0)
            rounds.append(time.perf_counter() - begun)
            number.item()  # waits for the device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise DeviceError(
            f"PyTorch does not compute on {device!r} ({first_line(error)}); expected a device of this "
            'machine, such as "cuda" or "cpu"'
        ) from error
    return 1e6 * median(rounds[1:]) / _LAUNCHES
