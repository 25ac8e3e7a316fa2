"""The largest batch size that fits, against a scan; the memory that runs need on boards that saturate."""

import numpy as np
import pytest
from torch import nn

import torchedge
from torchedge.prediction.analysis import analyse
from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.peaks import peaks_mib
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.predictor import device_settings

MOST = 40


def random_net(seed):
    """Convolutions with random widths, kernels and strides: their workspaces leap with the batch size."""
    rng = np.random.default_rng(seed)
    layers, width = [], 3
    for _ in range(int(rng.integers(2, 6))):
        wider = int(rng.choice([16, 24, 64, 96, 160]))
        kernel = int(rng.choice([1, 3, 3, 5]))
        layers += [nn.Conv2d(width, wider, kernel, int(rng.choice([1, 1, 2])), kernel // 2), nn.ReLU()]
        width = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return torchedge.capture(nn.Sequential(*layers), input_size=(3, *[int(rng.choice([56, 64, 112]))] * 2))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("device", ["nvidia-h200", "jetson-tx2", "nvidia-a100"])
@pytest.mark.parametrize("seed", range(4))
def test_the_largest_batch_size_is_that_of_a_scan(device, seed):
    graph = random_net(seed)
    predictor = torchedge.Predictor(device)
    needs = np.array([predictor.predict(graph, n).needed_mib() for n in range(1, MOST + 1)])
    first = predictor.predict(graph, 1)
    for limit in [1.0, *np.quantile(needs, [0, 0.1, 0.3, 0.5, 0.8, 1]).tolist()]:
        fitting = np.flatnonzero(needs <= limit)
        expected = int(fitting[-1]) + 1 if len(fitting) else 0
        largest = first.max_batch_size(limit, largest=MOST)
        assert largest == expected
        assert not largest or predictor.predict(graph, largest).fits(limit)


def test_workspaces_that_leap_do_not_hide_the_batch_sizes_beyond():
    predictor = torchedge.Predictor("nvidia-h200")
    fits = [predictor.predict("vgg16", n).fits(4096) for n in range(1, 11)]
    assert not all(fits) and fits[9]
    assert predictor.predict("vgg16").max_batch_size(4096) >= 10


def test_bounds_of_the_search_for_the_largest_batch_size():
    first = torchedge.predict(random_net(0), 1, "jetson-tx2")
    assert first.max_batch_size(1e6, largest=7) == 7
    with pytest.raises(torchedge.InputError, match="largest is 0; expected a whole number"):
        first.max_batch_size(4096, largest=0)
    fixed = torchedge.capture(nn.Linear(4, 2), input_size=(4,), batch_size=8)
    with pytest.raises(torchedge.InputError, match="captured for 8 only"):
        torchedge.predict(fixed, 8, "jetson-tx2").max_batch_size(4096)


def test_batch_sizes_replayed_together_are_each_replayed():
    device = torchedge.Predictor("nvidia-h200").device
    settings = device_settings(device, StepSettings())
    graph = random_net(1)
    tape, start = analyse(graph).tape(settings), write_tape(graph, settings, first=True)
    assert tape.from_start is not None and tape.scratch is not None
    sizes = np.array([1, 5, 6, 33])
    allocated, reserved = peaks_mib(tape, sizes)
    runs = [replay(tape, int(n), first=start, steps=1)[-1] for n in sizes]
    assert allocated.tolist() == [run.allocated_mib for run in runs]
    assert reserved.tolist() == [run.reserved_mib for run in runs]


def test_needed_is_gamma_until_a_board_saturates():
    predictor = torchedge.Predictor("jetson-tx2")
    small, large = predictor.predict("resnet50", 32), predictor.predict("resnet50", 256)
    assert not small.saturates and small.needed == small.memory
    assert large.saturates and large.needed.value > large.reserved.value > 4 * large.memory.value
    assert large.needed.low < large.needed.value < large.needed.high
    for found in (small, large):
        assert sum(found.breakdown.values()) == pytest.approx(found.needed.value, rel=1e-9)
        assert found.breakdown["weights"] == pytest.approx(97.7, abs=0.1)
        assert found.needed_mib(0.5) >= found.needed.value
    many = predictor.predict_many(["resnet50"], [32, 256])
    assert many.needed[0].tolist() == pytest.approx([small.needed.value, large.needed.value], rel=1e-9)


def test_a_search_is_judged_by_the_memory_that_candidates_need():
    wide = nn.Sequential(
        nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 64, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    search = torchedge.search(
        torchedge.PruningSpace(wide, input_size=(3, 224, 224)),
        {"training_memory": 6500},
        lambda encodings: [float(sum(e.values())) for e in encodings],
        device="jetson-tx2",
        batch_size=32,
        population=8,
        iterations=2,
    )
    assert search.best is not None
    prediction = search.predictions["train"]
    assert prediction.needed.value <= 6500
    assert search.best.figures["training_memory"] == pytest.approx(prediction.needed.value)
    whole = torchedge.predict(wide, 32, "jetson-tx2", input_size=(3, 224, 224))
    assert whole.needed.value > 6500 > whole.memory.value
