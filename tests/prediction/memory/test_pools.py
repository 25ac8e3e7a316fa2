"""The peaks of the two pools replayed apart are, to the byte, those of the whole allocator's replay."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.networks import NETWORKS

import torchedge
from torchedge.prediction.memory.caching_allocator import replay
from torchedge.prediction.memory.pools import replay_peaks
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.step_tapes import write_tape
from torchedge.prediction.memory.tape import TapeWriter

MIB = 1 << 20
sizes = st.one_of(
    st.just(0), st.integers(1, 2 * MIB), st.integers(MIB - 1024, MIB + 1024), st.integers(1, 40 * MIB)
)


def both(tape, batches):
    runs = [replay(tape, batch, steps=1) for batch in batches]
    return [(run.allocated_bytes, run.reserved_bytes) for run in runs]


@given(
    st.lists(st.tuples(sizes, sizes), max_size=8),
    st.lists(st.tuples(sizes, sizes, st.booleans()), max_size=40),
    st.lists(st.sampled_from([1, 2, 5, 16]), min_size=1, max_size=3, unique=True),
)
def test_random_tapes(kept, steps, batches):
    writer = TapeWriter()
    for const, slope in kept:
        writer.keep((const, slope, 0), 0, "kept")
    held = []
    for const, slope, frees in steps:
        if frees and held:
            writer.drop(held.pop(const % len(held)))
        else:
            held.append(writer.new((const, slope, 0), 5, "made"))
    tape = writer.finish([], ())
    assert replay_peaks(tape, batches) == both(tape, batches)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "densenet121"])
def test_networks(name, mode):
    with torch.device("meta"):
        module = NETWORKS[name].build()
    graph = torchedge.capture(module, input_size=(3, 96, 96), mode=mode)
    for settings in (StepSettings(), StepSettings(zero_grad="zero", foreach=False, winograd_tile=2)):
        tape = write_tape(graph, settings)
        assert replay_peaks(tape, [4, 16, 64]) == both(tape, [4, 16, 64])


def test_a_tape_without_events():
    writer = TapeWriter()
    writer.keep((100, 0, 0), 0, "kept")
    tape = writer.finish([], ())
    assert replay_peaks(tape, [3]) == [(512, 2 * MIB)] == both(tape, [3])
    assert np.array_equal(tape.persistent, [0])
