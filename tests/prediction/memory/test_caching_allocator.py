"""The allocator's replay against a plain reference of its own, and its invariants on random traces."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchedge.prediction.memory.caching_allocator import CachingAllocator, replay
from torchedge.prediction.memory.tape import TapeWriter

MIB = 1 << 20


@dataclass
class Segment:
    small: bool
    blocks: list  # [size, owner or None], in order of address


class Reference:
    """The allocator written down the slow way: segments as lists of blocks, every search a scan."""

    def __init__(self):
        self.segments: list[Segment] = []
        self.peak = 0

    def malloc(self, owner, request):
        size = -(-request // 512) * 512
        small = size <= MIB
        fits = [
            (block[0], number, place)
            for number, segment in enumerate(self.segments)
            if segment.small == small
            for place, block in enumerate(segment.blocks)
            if block[1] is None and block[0] >= size
        ]
        if fits:
            _, number, place = min(fits)
        else:
            width = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append(Segment(small, [[width, None]]))
            number, place = len(self.segments) - 1, 0
        blocks = self.segments[number].blocks
        rest = blocks[place][0] - size
        if rest >= 512 if small else rest > MIB:
            blocks[place : place + 1] = [[size, owner], [rest, None]]
        else:
            blocks[place][1] = owner
        self.peak = max(self.peak, self.allocated)

    def free(self, owner):
        for segment in self.segments:
            for block in segment.blocks:
                if block[1] == owner:
                    block[1] = None
            merged = []
            for block in segment.blocks:
                if merged and merged[-1][1] is None and block[1] is None:
                    merged[-1][0] += block[0]
                else:
                    merged.append(block)
            segment.blocks = merged

    @property
    def allocated(self):
        return sum(b[0] for s in self.segments for b in s.blocks if b[1] is not None)

    @property
    def reserved(self):
        return sum(b[0] for s in self.segments for b in s.blocks)


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
    fast, slow = CachingAllocator(), Reference()
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
    found = replay(tape_of(*requests), 1)
    assert (found.allocated_bytes, found.reserved_bytes) == (allocated, reserved)


def test_steps_reach_a_steady_state_and_empty_cache_gives_back():
    tape = tape_of(3 * MIB, 30 * MIB)
    run = replay(tape, 4, steps=3)
    assert len(set(run.steps)) == 1
    assert replay(tape, 4, steps=3, empty_cache=True).steps[-1] == run.steps[-1]
    allocator = CachingAllocator()
    address, block = [0] * 2, [0] * 2
    allocator.run(tape.event_list, (np.array([3, 30]) * 2048).tolist(), address, block)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.free_from and not allocator.small and not allocator.large
