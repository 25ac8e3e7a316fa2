"""The allocator's replay against a plain reference of its own, and its invariants on random traces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.caching_allocator import AllocatorReference

from torchedge.prediction.memory.caching_allocator import CachingAllocator, ReplayRows, replay, replay_rows
from torchedge.prediction.memory.tape import TapeWriter

MIB = 1 << 20


sizes = st.one_of(
    st.integers(1, 2 * MIB),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(1, 40 * MIB),
    st.integers(10 * MIB - 2048, 10 * MIB + 2048),
)


@st.composite
def traces(draw):
    """Sizes and events; what is alive at the end is freed."""
    count = draw(st.integers(1, 40))
    found = [draw(sizes) for _ in range(count)]
    events, alive = [], []
    for storage in range(count):
        events.append(storage + 1)
        alive.append(storage)
        for _ in range(draw(st.integers(0, 2))):
            if alive:
                events.append(-alive.pop(draw(st.integers(0, len(alive) - 1))) - 1)
    return found, events


@given(traces())
@settings(max_examples=150)
def test_agrees_with_the_reference(trace):
    found, events = trace
    units = [-(-s // 512) for s in found]
    fast, slow = CachingAllocator(), AllocatorReference()
    address, block = [0] * len(found), [0] * len(found)
    for event in events:
        fast.run([event], units, address, block)
        if event > 0:
            slow.malloc(event, found[event - 1])
        else:
            slow.free(-event)
        assert fast.allocated * 512 == slow.allocated
        assert fast.reserved * 512 == slow.reserved
    assert fast.peak * 512 == slow.peak


@given(traces())
@settings(max_examples=150)
def test_blocks_tile_their_segments(trace):
    found, events = trace
    units = [-(-s // 512) for s in found]
    allocator = CachingAllocator()
    address, block = [0] * len(found), [0] * len(found)
    alive = set()
    for event in events:
        allocator.run([event], units, address, block)
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
        spans = sorted(
            [(address[s], address[s] + block[s], False) for s in alive]
            + [(start, start + width, True) for start, width in allocator.free_from.items()]
        )
        inside = {start: start + width for start, width in allocator.segments.items()}
        position, ends = None, None
        for start, end, free in spans:
            if start in inside:
                assert position == ends, "a segment is not filled to its end"
                ends, before_free = inside[start], False
            else:
                assert start == position, "blocks overlap or leave a gap"
                assert not (free and before_free), "two free neighbours were not merged"
            position, before_free = end, free
        assert position == ends
        assert sum(e - s for s, e, _ in spans) == allocator.reserved
        assert (
            len(allocator.small) + len(allocator.large) == len(allocator.free_from) == len(allocator.free_to)
        )
        assert allocator.small == sorted(allocator.small) and allocator.large == sorted(allocator.large)


def tape_of(*requests):
    """A tape that allocates the requests one after the other and frees them in the same order."""
    writer = TapeWriter()
    made = [writer.new((size, 0, 0), 5, "t") for size in requests]
    for storage in made:
        writer.drop(storage)
    return writer.finish([], (("op", ""),))


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ((1,), 512, 2 * MIB),
        ((MIB,), MIB, 2 * MIB),
        ((MIB + 1,), MIB + 512, 20 * MIB),
        ((10 * MIB - 512,), 10 * MIB - 512, 20 * MIB),
        ((10 * MIB,), 10 * MIB, 10 * MIB),
        ((11 * MIB,), 12 * MIB, 12 * MIB),  # 1 MiB remains: not split
        ((21 * MIB - 512,), 21 * MIB - 512, 22 * MIB),  # more than 1 MiB remains
        ((MIB, MIB, MIB), 3 * MIB, 4 * MIB),
        ((), 0, 0),
    ],
)
def test_known_requests(requests, allocated, reserved):
    found = replay(tape_of(*requests), 1)[-1]
    assert (found.allocated_mib * MIB, found.reserved_mib * MIB) == (allocated, reserved)


def test_steps_reach_a_steady_state_and_empty_cache_gives_back():
    tape = tape_of(3 * MIB, 30 * MIB)
    run = replay(tape, 4, steps=3)
    assert len(set(run)) == 1
    assert replay(tape, 4, steps=3, empty_cache=True)[-1] == run[-1]
    allocator = CachingAllocator()
    address, block = [0] * 2, [0] * 2
    allocator.run(tape.event_list, (np.array([3, 30]) * 2048).tolist(), address, block)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.free_from and not allocator.small and not allocator.large


@given(
    st.lists(st.one_of(st.just(0), sizes), min_size=1, max_size=8),
    st.lists(st.tuples(st.one_of(st.just(0), sizes), st.booleans()), max_size=40),
    st.integers(0, 40),
)
def test_rows_agree_with_the_reference(persistent, steps, counted_from):
    requests, events, alive = list(persistent), [], []
    for size, frees in steps:
        if frees and alive:
            events.append(-1 - alive.pop(size % len(alive)))
        else:
            alive.append(len(requests))
            requests.append(size)
            events.append(len(requests))
    counted_from = min(counted_from, len(events))
    slow = AllocatorReference()
    for storage in range(len(persistent)):
        slow.malloc(storage, requests[storage])
    for place, event in enumerate(events):
        if place == counted_from:
            slow.peak = slow.allocated
        if event > 0:
            slow.malloc(event - 1, requests[event - 1])
        else:
            slow.free(-1 - event)
    if counted_from == len(events):
        slow.peak = slow.allocated
    units = np.array([[-(-size // 512) for size in requests]])
    rows = ReplayRows(
        np.array(events, dtype=np.int32), np.arange(len(persistent), dtype=np.int32), units, counted_from
    )
    assert replay_rows(rows).tolist() == [[slow.peak, slow.reserved]]
