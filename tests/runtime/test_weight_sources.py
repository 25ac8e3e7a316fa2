"""Joined sources: programs that run one after the other as one stream the weights of each."""

import numpy as np
import pytest
from oracles.streaming_programs import data_of, instance_of, packed_data, random_plan, weighted_chain

from torchedge.lowering.joining import join_programs
from torchedge.runtime import Executor
from torchedge.runtime.weight_sources import ArraysSource, JoinedSource
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, make_schedule

pytest.importorskip("pyopencl")

X = np.linspace(-1, 1, 64, dtype=np.float32)
SIZES = ([3, 5000, 70, 20_000], [9000, 12, 9000, 9000, 50], [70, 30_000, 2])


def test_joined_sources_have_the_tensors_of_each():
    arrays = [{"w": np.arange(k, k + 4, dtype=np.uint8)} for k in range(3)]
    source = JoinedSource([ArraysSource(a) for a in arrays])
    into = np.zeros(4, np.uint8)
    for k in range(3):
        address, nbytes = source.places[f"{k + 1}/w"]
        assert nbytes == 4
        source.read(address + 1, 3, into)
        np.testing.assert_array_equal(into[:3], arrays[k]["w"][1:])
    assert list(source.places) == ["1/w", "2/w", "3/w"]


@pytest.mark.parametrize("seed", range(3))
def test_joined_programs_stream_as_one_and_compute_what_each_computes_alone(seed):
    """Weights of the next model are loaded beside launches of the one before, as one plan says."""
    programs = [weighted_chain(sizes) for sizes in SIZES]
    weights = [data_of(program, seed=k) for k, program in enumerate(programs)]
    joined = join_programs(programs)
    instance = instance_of(joined)
    schedule = make_schedule(joined, instance, random_plan(instance, seed), LEAST_STAGING_BYTES)
    begins = np.cumsum([0, *[len(program.launches) for program in programs]])
    ahead = [
        transfer
        for model in (1, 2)
        for transfers in schedule.transfers[: begins[model]]
        for transfer in transfers
        if joined.tensors[transfer.tensor].name.startswith(f"{model + 1}/")
    ]
    assert ahead
    packed = [packed_data(program, data) for program, data in zip(programs, weights, strict=True)]
    source = JoinedSource([ArraysSource(arrays) for arrays in packed])
    with Executor(schedule, source=source, checks=True) as executor:
        for _ in range(2):
            outputs = executor.run(X, X, X)
            for output, program, data in zip(outputs, programs, weights, strict=True):
                with Executor(program) as alone:
                    alone.load(data)
                    np.testing.assert_array_equal(output, alone.run(X)[0])
