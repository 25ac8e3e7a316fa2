"""The replay of `caching_allocator`, compiled for this machine's processor: for many rows or long steps.

Results are the same to the byte; a kernel that differs on a trial is not used. Without OpenCL, and until
enough was replayed to pay for a kernel, Python does it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import open_context
from torchedge.opencl.sharing import is_fork
from torchedge.prediction.memory import caching_allocator
from torchedge.prediction.memory.caching_allocator import ReplayRows, replay_rows
from torchedge.prediction.memory.tape import ALIGNMENT

_WORTH = 150_000
"""Events that Python replays before a kernel is built: about as long as reading one from the cache takes."""

_FREE_BLOCKS = 1024
"""Free blocks a pool may have in the kernel; Python replays a row that has more."""

_ITEMS = 256
"""Work-items at most, each with memory for one row; they share the rows."""

_LARGEST = 1 << 31
"""Units from which on a storage is too large for the kernel's 32 bits."""

_CONSTANTS = ("SMALL", "SMALL_SEGMENT", "LARGE_SEGMENT", "OWN_SEGMENT", "SEGMENT_STEP")
SOURCE = (
    "\n".join(f"#define {name} {getattr(caching_allocator, name)}u" for name in _CONSTANTS)
    + r"""

#define TAKEN (1ul << 63)

/* The first of n free blocks, in rising order of their keys, whose key is not below `key`. */
uint place_of(__global const uint *list, uint n, __global const ulong *keys, const ulong key) {
  uint low = 0;
  while (n) {
    const uint middle = n / 2;
    if (keys[list[low + middle]] < key) {
      low += middle + 1;
      n -= middle + 1;
    } else {
      n = middle;
    }
  }
  return low;
}

void put(__global uint *list, const uint n, __global ulong *keys, const uint block, const ulong key) {
  const uint place = place_of(list, n, keys, key);
  for (uint i = n; i > place; --i) list[i] = list[i - 1];
  list[place] = block;
  keys[block] = key;
}

void drop(__global uint *list, const uint n, const uint place) {
  for (uint i = place + 1; i < n; ++i) list[i - 1] = list[i];
}

ulong pair(const uint high, const uint low) { return (ulong)high << 32 | low; }

/* Replays a row of sizes: persistent storages first, then the events (+s allocates storage s - 1, -s frees
   it). row: where its events begin and how many there are, the same of its persistent storages, where its
   sizes begin, from which event on the allocated peak counts. Pool 0 holds requests up to 1 MiB, pool 1
   larger ones; lists: the free blocks of each. A block is a number above 0 with its key (width, start; TAKEN
   while a storage has it) and its neighbours in the segment, before and after; `at` has the block of each
   storage, `spare` begins the chain of numbers that no block has any more. out: allocated and reserved peak;
   -1 where a list is full or an address passes 32 bits. */
void replay_row(__global const int *row, __global const int *events, __global const int *persistent,
                __global const uint *units, __global uint *at, __global ulong *keys, __global uint *before,
                __global uint *after, __global uint *lists, const uint room, __global long *out) {
  events += row[0];
  const int event_count = row[1];
  persistent += row[2];
  const int persistent_count = row[3];
  units += row[4];
  const int counted_from = persistent_count + row[5];
  keys[0] = TAKEN;
  uint count[2] = {0, 0};
  uint top = 0, blocks = 1, spare = 0;
  long reserved = 0, allocated = 0, peak = 0;
  for (int k = 0; k < persistent_count + event_count; ++k) {
    before[0] = after[0] = 0;
    if (k == counted_from) peak = allocated;
    const int event = k < persistent_count ? persistent[k] + 1 : events[k - persistent_count];
    const int storage = event > 0 ? event - 1 : -event - 1;
    const uint size = units[storage];
    if (!size) continue;
    const int pool = size > SMALL;
    __global uint *list = lists + pool * room;
    uint n = count[pool];
    if (n >= room) {
      out[0] = -1;
      return;
    }
    if (event > 0) {
      const uint place = place_of(list, n, keys, pair(size, 0));
      uint block, start, wide;
      if (place < n) {
        block = list[place];
        start = (uint)keys[block];
        wide = keys[block] >> 32;
        drop(list, n--, place);
      } else {
        const uint own = (size + SEGMENT_STEP - 1) / SEGMENT_STEP * SEGMENT_STEP;
        wide = !pool ? SMALL_SEGMENT : size < OWN_SEGMENT ? LARGE_SEGMENT : own;
        if (wide >= 0xffffffffu - top || wide >> 31) {
          out[0] = -1;
          return;
        }
        start = top;
        top += wide + 1;
        reserved += wide;
        block = spare ? spare : blocks++;
        spare = after[spare];
        before[block] = after[block] = 0;
      }
      if (wide - size > (pool ? SMALL : 0u)) {
        const uint rest = spare ? spare : blocks++;
        spare = after[spare];
        before[rest] = block;
        after[rest] = after[block];
        before[after[block]] = rest;
        after[block] = rest;
        put(list, n++, keys, rest, pair(wide - size, start + size));
        wide = size;
      }
      keys[block] = TAKEN | pair(wide, start);
      at[storage] = block;
      allocated += wide;
      if (allocated > peak) peak = allocated;
    } else {
      const uint block = at[storage];
      uint start = (uint)keys[block], wide = (keys[block] ^ TAKEN) >> 32;
      allocated -= wide;
      for (int side = 0; side < 2; ++side) {
        const uint other = side ? after[block] : before[block];
        const ulong key = keys[other];
        if (key & TAKEN) continue;
        drop(list, n, place_of(list, n, keys, key));
        --n;
        wide += key >> 32;
        if (side) {
          after[block] = after[other];
          before[after[block]] = block;
        } else {
          start = (uint)key;
          before[block] = before[other];
          after[before[block]] = block;
        }
        after[other] = spare;
        spare = other;
      }
      put(list, n++, keys, block, pair(wide, start));
    }
    count[pool] = n;
  }
  out[0] = peak;
  out[1] = reserved;
}

/* Each work-item replays every so many rows. storages: the most that a row has. */
__kernel void replay(__global const int *rows, __global const int *events, __global const int *persistent,
                     __global const uint *units, __global uint *at, __global ulong *keys,
                     __global uint *before, __global uint *after, __global uint *lists, const uint room,
                     const uint storages, const uint count, __global long *out) {
  const ulong item = get_global_id(0), first = item * (storages + 2 * room + 1);
  for (uint row = item; row < count; row += get_global_size(0)) {
    replay_row(rows + 6 * row, events, persistent, units, at + item * storages, keys + first,
               before + first, after + first, lists + 2 * item * room, room, out + 2 * row);
  }
}
"""
)


Peaks = npt.NDArray[np.int64]


class CpuKernel:
    """The kernel, compiled for this machine's own processor."""

    def __init__(self) -> None:
        self._context = open_context("cpu")
        self._kernel = compile_kernels(self._context, {"replay": SOURCE}).kernel("replay")
        self._lock = threading.Lock()  # a kernel's arguments are part of the kernel

    def run(self, inputs: Sequence[npt.NDArray[np.generic]], storages: int, out: Peaks) -> None:
        """Fill `out`, a row for each of the first input; storages: the most that one has."""
        cl, context, queue = self._context.cl, self._context.context, self._context.queue
        items, blocks = min(len(out), _ITEMS), storages + 2 * _FREE_BLOCKS + 1
        scratch = [items * n for n in (4 * storages, 8 * blocks, 4 * blocks, 4 * blocks, 8 * _FREE_BLOCKS)]
        read = cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
        buffers = [cl.Buffer(context, read, hostbuf=array) for array in inputs]
        buffers += [cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for size in (*scratch, out.nbytes)]
        numbers = [np.uint32(n) for n in (_FREE_BLOCKS, storages, len(out))]
        with self._lock:
            self._kernel(queue, (items,), (1,), *buffers[:-1], *numbers, buffers[-1])
            cl.enqueue_copy(queue, out, buffers[-1])


def replay_all(batches: Sequence[ReplayRows]) -> list[Peaks]:
    """Return for each batch the allocated and reserved peaks of its rows in bytes, (R, 2)."""
    kernel = _kernel(sum(len(batch.units) * len(batch.events) for batch in batches))
    fits = all(int(batch.units.max(initial=0)) < _LARGEST for batch in batches)
    if kernel is None or not fits:
        return [replay_rows(batch) for batch in batches]
    ends = np.cumsum([len(batch.units) for batch in batches])[:-1]
    replayed = np.split(_run(kernel, batches), ends)
    for batch, peaks in zip(batches, replayed, strict=True):
        for row in np.flatnonzero(peaks[:, 0] < 0):
            peaks[row] = replay_rows(batch, slice(row, row + 1))[0]
    return replayed


def _run(kernel: CpuKernel, batches: Sequence[ReplayRows]) -> Peaks:
    """Return both peaks in bytes of all rows of all batches, (R, 2); negative where a list was full."""
    rows, firsts = [], np.zeros(3, dtype=np.int64)
    for batch in batches:
        count, storages = batch.units.shape
        table = np.empty((count, 6), dtype=np.int32)
        table[:, :4] = firsts[0], len(batch.events), firsts[1], len(batch.persistent)
        table[:, 4] = firsts[2] + np.arange(count) * storages
        table[:, 5] = batch.counted_from
        rows.append(table)
        firsts += len(batch.events), len(batch.persistent), batch.units.size
    filler = np.zeros(1, dtype=np.int32)  # no empty buffers
    table = np.concatenate(rows)
    out = np.empty((len(table), 2), dtype=np.int64)
    kernel.run(
        [
            table,
            np.concatenate([*(batch.events for batch in batches), filler]),
            np.concatenate([*(batch.persistent for batch in batches), filler]),
            np.concatenate([*(batch.units.reshape(-1) for batch in batches), filler]).astype(np.uint32),
        ],
        1 + max(batch.units.shape[1] for batch in batches),
        out,
    )
    return out * ALIGNMENT


_asked = 0


def expect_replays() -> None:
    """Let the next replay load the kernel: the caller knows that many follow."""
    global _asked
    _asked = max(_asked, _WORTH)


def _kernel(events: int) -> CpuKernel | None:
    """Return the kernel, if there is one, once enough events were replayed to pay for it."""
    global _asked  # a process's count, so that one short search pays for no compiler
    _asked += events
    if _asked < _WORTH:
        return None
    return None if is_fork() else _compiled()  # the runtime's threads do not survive a fork


@lru_cache(maxsize=1)
def _compiled() -> CpuKernel | None:
    try:
        kernel = CpuKernel()
        return kernel if _passes(kernel) else None
    except Exception:  # a driver may raise anything; Python replays instead
        return None


def _passes(kernel: CpuKernel) -> bool:
    """Whether the kernel replays a random tape as Python does."""
    rng = np.random.default_rng(0)
    alive: list[int] = []
    events: list[int] = []
    persistent, storages = np.arange(20, dtype=np.int32), 200
    for storage in range(len(persistent), storages):
        events.append(storage + 1)
        alive.append(storage)
        if rng.random() < 0.7:
            events.append(-1 - alive.pop(int(rng.integers(len(alive)))))
    sizes = np.exp(rng.uniform(0, np.log(60_000), size=(4, storages))).astype(np.int64)
    order = np.array(events, dtype=np.int32)
    batches = [
        ReplayRows(order, persistent, sizes[:1]),
        ReplayRows(order[:50], persistent[:5], sizes[1:], 20),
    ]
    return np.array_equal(_run(kernel, batches), np.concatenate([replay_rows(batch) for batch in batches]))
