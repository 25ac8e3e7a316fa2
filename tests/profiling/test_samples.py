"""Which rows are left out together, and what cross-validation chooses."""

import numpy as np
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
