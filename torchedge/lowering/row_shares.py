"""How work-items that share rows spread over the loops of a kernel, and how long rows are cut into slices.

Loops are numbered: those over rows first, then those within a row, each from the outermost to the innermost
one. `items` are their rounds, a vector counted once; `rows` is the number of loops over rows; `memory` are
the numbers of all loops, the fastest in memory first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Sizes = tuple[int, ...]

LINE = 8
"""Neighbouring vectors of four floats that fill a cache line."""
ROUNDS = 4
"""Fewest rounds of the loops of a row for a work-item that shares it."""
FEW_ROUNDS, FEW_ITEMS = 2, 4096
"""The same while so few work-items share all rows: each waits for memory alone."""
ALONE = 8
"""The same of the first two that share a row, and of rows in short runs of memory; of a slice, too."""
UNCUT = 48
"""Most rounds for a work-item whose row is not cut into slices: fewer are done before a second kernel is."""
WORTH = 1024
"""Fewest vectors that a launch reads for its rows to be cut into slices."""
LARGE = 256
"""In groups of more work-items, neighbours read half a line of memory so that more members share a row."""
UNLIMITED = 1 << 30


def shares_of(items: Sizes, rows: int, memory: Sizes, members: int, across: int) -> Sizes:
    """Return the work-items of a group along each loop.

    members: that share a row, a power of two; across: rows of a group. Both are upper limits. Neighbouring
    work-items read a cache line together where the limits allow it; then members share the longest loops
    within a row, and rows are those that are neighbours in memory.
    """
    share = line_shares(items, rows, memory, members, across)
    while len(items) > rows and 2 * prod(share[rows:]) <= members:
        longest = max(range(rows, len(items)), key=lambda k: items[k] // share[k])
        if items[longest] < 2 * share[longest]:
            break
        share[longest] *= 2
    for loop in memory:
        left = across // prod(share[:rows])
        if loop < rows and left > 1:
            wanted = min(items[loop], left * share[loop])
            share[loop] = _even(items[loop], range(wanted, max(share[loop], wanted // 2) - 1, -1))
    return tuple(share)


def line_shares(
    items: Sizes, rows: int, memory: Sizes, members: int = UNLIMITED, across: int = UNLIMITED
) -> list[int]:
    """Return the work-items along each loop that read a cache line together.

    Short loops within a row, such as those of windows, are not shared, except the fastest of all loops.
    """
    share, line = [1] * len(items), LINE
    for loop in memory:
        if loop >= rows:
            if items[loop] >= LINE or loop == memory[0]:
                share[loop] = 1 << min(items[loop], line, members // prod(share[rows:])).bit_length() - 1
        else:
            left = across // prod(share[:rows])
            wanted = min(items[loop], line, left)
            share[loop] = _even(items[loop], range(wanted, min(2 * wanted, left + 1)))
        line = -(-line // share[loop])
    return share


def slices_of(items: Sizes, rows: int, share: Sizes, slices: int) -> Sizes:
    """Return the slices of each loop, none empty: about as many as wanted, of the longest loops."""
    cut = [1] * len(items)
    rounds = [-(-n // s) for n, s in zip(items, share, strict=True)]
    for loop in sorted(range(rows, len(items)), key=lambda k: -rounds[k]):
        most = min(-(-slices // prod(cut)), rounds[loop])
        if most > 1:
            cut[loop] = -(-rounds[loop] // -(-rounds[loop] // most))
    return tuple(cut)


def fitting_shares(items: Sizes, rows: int, memory: Sizes, room: int, fill: int, least: int) -> Sizes:
    """Return the work-items of a group along each loop that suit a device.

    room: largest group. fill: work-items that fill the device. least: smallest group.
    """
    whole, count = prod(items[:rows]), prod(items[rows:])
    line = line_shares(items, rows, memory) if room > 1 else [1] * len(items)
    members, across = min(prod(line[rows:]), room), min(prod(line[:rows]), room)
    while members * across > room:
        across //= 2
    narrow = min(across, LINE // 2)
    while whole * members < fill:
        if count // members < 2 * _fewest_rounds(items, rows, memory, members):
            break
        if 2 * members * across <= room:
            members *= 2
        elif across > narrow and room > LARGE:
            across //= 2
        else:
            break
    if members == 1:
        return (1,) * len(items)
    return shares_of(items, rows, memory, members, max(across, least // members))


def _fewest_rounds(items: Sizes, rows: int, memory: Sizes, members: int) -> int:
    """Return the fewest rounds that are left to each member when twice as many share a row."""
    short_runs = len(items) > rows + 1 and memory[0] >= rows  # of which members would idle at the end
    if members == 1 or short_runs:
        return ALONE
    few = prod(items[:rows]) * members < FEW_ITEMS and prod(items[rows:]) >= 4 * ALONE
    return FEW_ROUNDS if few else ROUNDS


def fitting_slices(items: Sizes, rows: int, share: Sizes, fill: int) -> int:
    """Return into how many slices to cut each row for a device that `fill` work-items fill."""
    filled = prod(items[:rows]) * prod(share[rows:])
    left = prod([-(-n // s) for n, s in zip(items[rows:], share[rows:], strict=True)])
    if prod(items) < WORTH or left <= UNCUT:
        return 1
    return max(1, min(-(-fill // filled), left // ALONE))


def _even(whole: int, sizes: Sequence[int]) -> int:
    """Return the first of some sizes that divides a number, the first one of all where none does."""
    return next((n for n in sizes if whole % n == 0), sizes[0])
