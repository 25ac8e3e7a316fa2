"""One factor between the analytic time model and a machine, from real steps of three small networks."""

from __future__ import annotations

import statistics
import time
from math import exp, log

import torch
from torch import nn

from torchedge.devices import Device
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import predict_graph
from torchedge.tracing.capturing import capture

_BATCH, _SIDE, _CLASSES = 8, 64, 10
_STEPS = 5


def _block(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def small_networks() -> dict[str, nn.Module]:
    """Return plain, bottleneck and depthwise convolutional networks for 64 x 64 inputs."""
    plain = [*_block(3, 32, 3, 2), *_block(32, 64, 3), *_block(64, 128, 3, 2), *_block(128, 128, 3)]
    narrow = [*_block(3, 64, 7, 2), *_block(64, 32, 1), *_block(32, 32, 3), *_block(32, 128, 1)]
    deep = [*_block(3, 32, 3, 2), *_block(32, 32, 3, 1, 32), *_block(32, 64, 1), *_block(64, 64, 3, 2, 64)]
    widths = {"plain": (plain, 128), "bottleneck": (narrow, 128), "depthwise": (deep, 64)}
    return {
        name: nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))
        for name, (layers, width) in widths.items()
    }


def step_ms(model: nn.Module) -> float:
    """Return the median time of a training step on this processor (SGD with momentum), ms; one warm-up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(_BATCH, 3, _SIDE, _SIDE), torch.zeros(_BATCH, dtype=torch.long)
    times = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def step_time_ratio(device: Device) -> float:
    """Return measured over analytic step time on this machine, the geometric mean over `small_networks`.

    `device` holds the machine's figures without an earlier ratio. The random state is left as found.
    """
    logs = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, model in small_networks().items():
            graph = capture(model, input_size=(3, _SIDE, _SIDE), name=name)
            estimate = predict_graph(graph, _BATCH, device, StepSettings()).latency.value
            logs.append(log(step_ms(model) / estimate))
    return exp(statistics.mean(logs))
