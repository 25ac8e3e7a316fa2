"""The host of a device: how long its thread takes for the calls of eager PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from types import MappingProxyType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchedge.errors import DeviceError, checked_call, first_line
from torchedge.prediction.latency.workload import CALL_LAUNCHES, CHECKPOINT_LAUNCHES

_LAYERS, _WIDTH, _BATCH = 16, 16, 4
_STEPS, _ROUNDS = 3, 10
STEP_LAUNCHES = 382.0
"""Launches of a tiny kernel that take as long as this step on the median of seven hosts where the probe has
run both (`step_us` over `launch_us`: `benchmarks/accuracy/repeats.py`)."""
_REPEATS, _ROUND_S = 100, 0.05
_TENSORS = 50

ASSUMED_LAUNCHES = MappingProxyType(
    {"view": CALL_LAUNCHES, "module call": CALL_LAUNCHES, "checkpointed region": CHECKPOINT_LAUNCHES}
)
"""What predictions count for units of `measure_host`, in operators."""


@checked_call()
def measure_host(device: str | torch.device = "cuda") -> dict[str, float]:
    """Return the microseconds of the host's thread for each unit of its work in eager PyTorch, in some 5 s.

    On tensors of 16 elements, so that the device hardly computes; on a GPU the host does not wait for it but
    in "value waited for". "operator" is the control that predictions are scaled by (`measure_operator_us`).

    Raises:
        DeviceError: PyTorch cannot compute there.
    """
    control = measure_operator_us(device)
    x, layer = torch.ones(4, 4, device=device), nn.Identity()
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    weights = [torch.ones(4, 4, device=device, requires_grad=True) for _ in range(_TENSORS)]
    for tensor in weights:
        tensor.grad = torch.zeros_like(tensor)
    optimizer = torch.optim.SGD(weights, lr=1e-3, momentum=0.9)

    def chain(region: bool) -> None:
        y = weight
        for _ in range(_TENSORS):
            y = checkpoint(torch.neg, y, use_reentrant=False) if region else torch.neg(y)
        y.sum().backward()

    units: dict[str, tuple[Callable[[], object], int]] = {
        "launch in a loop": (lambda: x.add_(1), 1),
        "view": (lambda: x.view(16), 1),
        "module call": (lambda: layer(x), 1),
        "cast": (lambda: x.to(torch.bfloat16), 1),
        "operator and its gradient": (lambda: chain(False), _TENSORS),
        "checkpointed region": (lambda: chain(True), _TENSORS),
        "update of a tensor": (lambda: optimizer.step(), _TENSORS),
        "value waited for": (lambda: x[0, 0].item(), 1),
    }
    with torch.enable_grad():
        times = {"operator": control} | {n: _microseconds(call) / count for n, (call, count) in units.items()}
    times["checkpointed region"] -= times["operator and its gradient"]
    return times


def _microseconds(call: Callable[[], object]) -> float:
    """Return the median of rounds of the time of a call; the device catches up in between."""
    call()
    rounds = []
    for _ in range(_ROUNDS):
        count, begun = 0, time.perf_counter()
        while count < _REPEATS and time.perf_counter() - begun < _ROUND_S:
            call()
            count += 1
        rounds.append((time.perf_counter() - begun) / count)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return 1e6 * median(rounds)


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
