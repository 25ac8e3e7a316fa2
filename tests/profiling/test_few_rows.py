"""Campaigns that are small, or stay far from a device's limits: what their fits may conclude."""

from dataclasses import replace

import numpy as np
import pytest
from oracles.small_datasets import write_small_dataset

from torchedge import find_device
from torchedge.prediction.memory.model import UNLIMITED
from torchedge.profiling.datasets import read_dataset
from torchedge.profiling.latency_fitting import fit_latency
from torchedge.profiling.memory_fitting import fit_memory
from torchedge.profiling.samples import cross_validate, prepare

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = write_small_dataset(tmp_path_factory.mktemp("few") / "jetson-tx2")
    return prepare(read_dataset(folder), find_device("jetson-tx2"))


@pytest.mark.slow
def test_twelve_points_of_two_networks_are_fitted_and_judged(samples):
    few = np.isin(samples.level, (0, 50)) & np.isin(samples.batch, (2, 16, 128))
    judged = []
    for fit in (fit_memory, fit_latency):
        fit(samples, few, judge=judged.append)
    assert int(few.sum()) == 12 and all(0 < held_out.percent < 40 for held_out in judged)
    assert all(held_out.worst in ("one", "two") for held_out in judged)


def test_the_largest_run_is_no_limit_unless_one_did_not_fit(samples):
    def process(rows, **device):
        changed = replace(rows, device=replace(samples.device, **device))
        return fit_memory(changed, samples.usable("memory"), errors=False, forest=False).process

    assert process(samples).ceiling < UNLIMITED and process(samples).floor[0] > 0  # 512 did not fit
    small = replace(samples, fits=np.ones(len(samples.fits)), gamma=samples.gamma / 4)
    assert process(small).ceiling == UNLIMITED
    assert process(small).capacity > 5000  # of 7,859 MiB
    processor = process(samples, kind="cpu")
    assert processor.ceiling == UNLIMITED and processor.floor == (0, 0)


@pytest.mark.parametrize(
    ("quantity", "noise", "expected"),
    [("memory", 0.2, 0), ("memory", 0.0, 1), ("latency", 0.2, 1), ("latency", 0.0, 1)],
)
def test_memory_takes_another_candidate_only_where_it_is_clearly_better(samples, quantity, noise, expected):
    """The second candidate is 1 % better in the mean; `noise` is how much the first one's folds differ."""
    measured = samples.measured(quantity)
    sign = iter([1, -1] * 20)

    def predict(training, left_out):
        first = 0.3 + next(sign) * noise
        return [measured[left_out] * np.exp(e) for e in (first, 0.29)], np.ones(int(left_out.sum()))

    used = samples.usable(quantity)
    held_out = cross_validate(samples, quantity, used, predict, levels=True, networks=True)
    assert held_out.best == expected
