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

_LIST_BYTES = 1 << 28
"""Of all lists of free blocks; for very many rows they are shorter."""

_LARGEST = 1 << 31
"""Units from which on a storage is too large for the kernel's 32 bits."""

_CONSTANTS = ("SMALL", "SMALL_SEGMENT", "LARGE_SEGMENT", "OWN_SEGMENT", "SEGMENT_STEP")
SOURCE = (
    "\n".join(f"#define {name} {getattr(caching_allocator, name)}u" for name in _CONSTANTS)
    + r"""

/* The first of n rising keys that is not below `key`. */
uint place_of(__global const ulong *keys, uint n, const ulong key) {
  uint low = 0;
  while (n) {
    const uint middle = n / 2;
    if (keys[low + middle] < key) {
      low += middle + 1;
      n -= middle + 1;
    } else {
      n = middle;
    }
  }
  return low;
}

void put(__global ulong *keys, const uint n, const uint place, const ulong key) {
  for (uint i = n; i > place; --i) keys[i] = keys[i - 1];
  keys[place] = key;
}

void drop(__global ulong *keys, const uint n, const uint place) {
  for (uint i = place + 1; i < n; ++i) keys[i - 1] = keys[i];
}

ulong pair(const uint high, const uint low) { return (ulong)high << 32 | low; }

void put_size(__global ulong *keys, const uint n, const ulong key) {
  put(keys, n, place_of(keys, n, key), key);
}

/* One work-item replays one row of sizes: persistent storages first, then the events (+s allocates storage
   s - 1, -s frees it). rows: for each where its events begin and how many there are, the same of its
   persistent storages, where its sizes begin, from which event on the allocated peak counts. Pool 0 holds
   requests up to 1 MiB, pool 1 larger ones. lists: of each pool the free blocks by (width, start), then by
   (start, width). out: allocated and reserved peak; -1 where a list is full or an address passes 32 bits. */
__kernel void replay(__global const int *rows, __global const int *events, __global const int *persistent,
                     __global const uint *units, __global uint *at, __global uint *width,
                     __global ulong *lists, const uint room, __global long *out) {
  const long row = get_global_id(0);
  events += rows[6 * row];
  const int event_count = rows[6 * row + 1];
  persistent += rows[6 * row + 2];
  const int persistent_count = rows[6 * row + 3];
  const int first = rows[6 * row + 4];
  const int counted_from = persistent_count + rows[6 * row + 5];
  units += first;
  at += first;
  width += first;
  uint count[2] = {0, 0};
  uint top = 0;
  long reserved = 0, allocated = 0, peak = 0;
  out += 2 * row;
  for (int k = 0; k < persistent_count + event_count; ++k) {
    if (k == counted_from) peak = allocated;
    const int event = k < persistent_count ? persistent[k] + 1 : events[k - persistent_count];
    const int storage = event > 0 ? event - 1 : -event - 1;
    const uint size = units[storage];
    if (!size) continue;
    const int pool = size > SMALL;
    __global ulong *by_size = lists + (4 * row + 2 * pool) * room;
    __global ulong *by_start = by_size + room;
    uint n = count[pool];
    if (n >= room) {
      out[0] = -1;
      return;
    }
    if (event > 0) {
      const uint best = place_of(by_size, n, pair(size, 0));
      uint start, wide, place = n;
      if (best < n) {
        wide = by_size[best] >> 32;
        start = (uint)by_size[best];
        drop(by_size, n, best);
        place = place_of(by_start, n, pair(start, 0));
        drop(by_start, n--, place);
      } else {
        const uint own = (size + SEGMENT_STEP - 1) / SEGMENT_STEP * SEGMENT_STEP;
        wide = !pool ? SMALL_SEGMENT : size < OWN_SEGMENT ? LARGE_SEGMENT : own;
        if (wide >= 0xffffffffu - top) {
          out[0] = -1;
          return;
        }
        start = top;
        top += wide + 1;
        reserved += wide;
      }
      if (wide - size > (pool ? SMALL : 0u)) {
        put_size(by_size, n, pair(wide - size, start + size));
        put(by_start, n++, place, pair(start + size, wide - size));
        wide = size;
      }
      at[storage] = start;
      width[storage] = wide;
      allocated += wide;
      if (allocated > peak) peak = allocated;
    } else {
      uint start = at[storage], end = start + width[storage], place = place_of(by_start, n, pair(start, 0));
      allocated -= width[storage];
      if (place < n && by_start[place] >> 32 == end) {
        const uint wide = (uint)by_start[place];
        drop(by_size, n, place_of(by_size, n, pair(wide, end)));
        drop(by_start, n--, place);
        end += wide;
      }
      if (place) {
        const uint before = by_start[place - 1] >> 32, wide = (uint)by_start[place - 1];
        if (before + wide == start) {
          drop(by_size, n, place_of(by_size, n, pair(wide, before)));
          drop(by_start, n--, --place);
          start = before;
        }
      }
      put_size(by_size, n, pair(end - start, start));
      put(by_start, n++, place, pair(start, end - start));
    }
    count[pool] = n;
  }
  out[0] = peak;
  out[1] = reserved;
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

    def run(
        self, inputs: Sequence[npt.NDArray[np.generic]], scratch: Sequence[int], room: int, out: Peaks
    ) -> None:
        """Fill `out`, one work-item for each row; scratch: bytes of buffers behind the inputs."""
        cl, context, queue = self._context.cl, self._context.context, self._context.queue
        read = cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
        buffers = [cl.Buffer(context, read, hostbuf=array) for array in inputs]
        buffers += [cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for size in (*scratch, out.nbytes)]
        with self._lock:
            self._kernel(queue, (len(out),), (1,), *buffers[:-1], np.uint32(room), buffers[-1])
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
    blocks, room = 4 * (int(firsts[2]) + 1), min(_FREE_BLOCKS, _LIST_BYTES // (32 * len(table)))
    kernel.run(
        [
            table,
            np.concatenate([*(batch.events for batch in batches), filler]),
            np.concatenate([*(batch.persistent for batch in batches), filler]),
            np.concatenate([*(batch.units.reshape(-1) for batch in batches), filler]).astype(np.uint32),
        ],
        [blocks, blocks, 32 * len(table) * room],
        room,
        out,
    )
    return out * ALIGNMENT


_asked = 0


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
