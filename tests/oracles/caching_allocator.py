"""PyTorch's CUDA caching allocator written down the slow way, with its documented sizes in bytes.

Requests are rounded up to 512 bytes. Up to 1 MiB they share 2 MiB segments, larger ones share 20 MiB ones;
from 10 MiB on each gets its own segment, rounded up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp).
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass
class Segment:
    small: bool
    blocks: list  # [size, owner or None], in order of address


class AllocatorReference:
    """The allocator written down the slow way: segments as lists of blocks, every search a scan."""

    def __init__(self):
        self.segments: list[Segment] = []
        self.peak = 0

    def malloc(self, owner, request):
        if not request:
            return
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
