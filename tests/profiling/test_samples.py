"""Which rows are left out together, and what cross-validation chooses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.profiling.samples import MOST_FOLDS, network_groups

NAMES = st.sets(st.text("abcdef0123456789", min_size=1, max_size=8), min_size=1, max_size=60)


@given(NAMES, st.randoms())
def test_groups_are_a_partition_whatever_the_order(names, random):
    shuffled = list(names)
    random.shuffle(shuffled)
    groups = network_groups(shuffled)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert len(groups) == min(len(names), MOST_FOLDS)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert network_groups(sorted(names)) == groups


def test_few_networks_are_left_out_one_at_a_time_in_order():
    assert network_groups(["c", "a", "b"]) == [["a"], ["b"], ["c"]]


@pytest.mark.slow
def test_the_forest_is_left_out_where_it_only_learns_noise():
    """Memory that is the simulation plus a constant plus noise: the constant predicts best."""
    pytest.importorskip("sklearn")
    from dataclasses import replace

    from public_tables import table_samples

    from torchedge.devices import Provenance, find_device
    from torchedge.prediction.memory.peaks import Peaks
    from torchedge.profiling.memory_fitting import fit_memory
    from torchedge.profiling.samples import NO_FOREST, OWN, DataSource

    random = np.random.default_rng(0)
    count = 120
    reserved = random.uniform(1000, 8000, count)
    linear = np.ones(count, dtype=bool)
    peaks = Peaks(np.full(count, 8.0), 0.9 * reserved, reserved, reserved / 10, linear)
    gamma = (reserved + 900) * np.exp(random.normal(0, 0.05, count))
    groups = [f"family{number % 12}" for number in range(count)]
    source = DataSource("made up", "0" * 64, Provenance.PUBLIC_DATA)
    device = find_device("nvidia-a100")
    samples = table_samples(source, device, groups, groups, peaks.batch, (), gamma=gamma, peaks=peaks)
    every = np.ones(count, dtype=bool)
    assert fit_memory(samples, every, feature_sets=(NO_FOREST, OWN)).forest is None
    # Another law by size: the forest sees it, the constant cannot.
    bent = replace(samples, gamma=gamma * np.where(reserved > 4000, 1.5, 1.0))
    model = fit_memory(bent, every, feature_sets=(NO_FOREST, OWN))
    assert model.forest is not None and 30000 < model.process.capacity < 40000
    beside = fit_memory(samples, every, forest=False).process.beside
    assert beside[0] == beside[1] and abs(beside[0] - 900) < 100


def test_every_level_between_the_first_and_the_last_is_held_out_once_in_all_networks():
    from public_tables import table_samples

    from torchedge.devices import Provenance, find_device
    from torchedge.profiling.accuracy import splits
    from torchedge.profiling.samples import DataSource

    source = DataSource("made up", "0" * 64, Provenance.PUBLIC_DATA)
    names, levels = ["one", "two"] * 6, np.repeat([0, 10, 30, 40, 70, 90], 2)
    samples = table_samples(source, find_device("jetson-tx2"), names, names, np.full(12, 8.0), ())
    from dataclasses import replace

    pairs = list(splits(replace(samples, level=levels), "levels"))
    assert [levels[rows].tolist() for _, rows in pairs] == [[10, 10], [30, 30], [40, 40], [70, 70]]
    assert all((train ^ rows).all() for train, rows in pairs)
