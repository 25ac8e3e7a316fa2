"""Steps on the lanes of host and device: the walk in closed form, and the timeline of predictions."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.prediction.latency.lanes import walk
from torchedge.prediction.latency.roofline import named, pack, phase_times, prior_mean, work_times
from torchedge.prediction.latency.workload import count_work
from torchedge.tracing.capturing import capture

H200 = torchedge.find_device("nvidia-h200")


def ends(timeline, lane):
    return [(s.start_ms, s.end_ms) for s in timeline.spans if s.lane == lane]


@pytest.mark.parametrize(
    ("phases", "device", "latency", "waits"),
    [
        ([("forward", 4, 1), ("backward", 4, 2)], [(0, 4), (4, 8)], 8, 5 / 8),  # the host sets the pace
        ([("forward", 1, 4), ("backward", 1, 6)], [(0, 4), (4, 10)], 10, 0),  # the device does
        ([("forward", 4, 1), ("backward", 1, 6)], [(0, 4), (4, 10)], 10, 0.3),  # one after the other
        ([("begin", 2, 0), ("forward", 1, 4)], [(2, 6)], 6, 1 / 3),  # nothing to run at first
    ],
)
def test_the_device_follows_the_host_and_its_own_earlier_work(phases, device, latency, waits):
    step = walk(phases, latency)
    assert ends(step, "device") == device
    assert step.waits == pytest.approx(waits)
    twice = walk(phases, 2 * latency)
    assert ends(twice, "device") == [(2 * start, 2 * end) for start, end in device]
    assert twice.waits == step.waits


class Depthwise(nn.Module):
    """Convolutions of both kinds, sums of gradients, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head((x + self.deep(x)).mean((2, 3)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("model", [Depthwise(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())])
def test_phases_add_up_to_the_work_of_the_step(model, mode):
    work = count_work(capture(model, torch.zeros(2, 3, 16, 16), mode=mode))
    p = named(prior_mean(H200))
    rows = pack([work], np.zeros(2, dtype=np.intp), np.array([2.0, 32.0]))
    times = work_times(rows, p)
    names, host, device = zip(*phase_times(rows, times, p), strict=True)
    assert names == (("forward", "backward", "update") if mode == "train" else ("forward",))
    np.testing.assert_allclose(sum(device), times.busy)
    np.testing.assert_allclose(sum(host), times.launch)


def linear(width, depth, size, device, **settings):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    return torchedge.predict(model, size, device, example=torch.zeros(1, width), **settings)


def test_a_step_of_small_layers_waits_for_the_host_and_a_note_says_so(tmp_path):
    small, large = linear(16, 50, 1, H200), linear(8192, 1, 16384, H200)
    for prediction in (small, large):
        lanes = [[s for s in prediction.timeline.spans if s.lane == lane] for lane in ("host", "device")]
        assert max(s.end_ms for lane in lanes for s in lane) == pytest.approx(prediction.latency.value)
        for lane in lanes:
            assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in pairwise(lane))
            assert all(0 <= s.busy_ms <= s.end_ms - s.start_ms + 1e-9 for s in lane)
    assert large.timeline.waits < 0.1 < 0.4 < small.timeline.waits
    assert linear(1024, 20, 64, H200.on_host(20)).timeline.waits > linear(1024, 20, 64, H200).timeline.waits
    assert not any("waits for the host" in note for note in large.notes)
    (note,) = [note for note in small.notes if "waits for the host" in note]
    assert "a larger batch, a fused optimizer, torch.compile or CUDA graphs" in note
    fused = linear(16, 50, 1, H200, mode="infer")
    assert not any("fused" in note for note in fused.notes)
    small.timeline.trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"host", "device"}
    assert sum(e["ph"] == "X" for e in events) == len(small.timeline.spans)
    assert "timeline" not in small.to_dict()
