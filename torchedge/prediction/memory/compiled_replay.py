"""The replay of `caching_allocator`, compiled for this machine's processor: for thousands of candidates.

Results are the same to the byte; a kernel that differs on a trial is not used. Without OpenCL, and for a few
rows, Python replays them.
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

_WORTH = 400
"""Rows that Python replays before a kernel is compiled, which takes about as long."""

_FREE_BLOCKS = 256
"""Free blocks a pool may have in the kernel; Python replays a row that has more."""

_LARGEST = 1 << 24
"""Units of a storage, and storages of a row, up to which the kernel's 32 bits suffice."""

_CONSTANTS = ("SMALL", "SMALL_SEGMENT", "LARGE_SEGMENT", "OWN_SEGMENT", "SEGMENT_STEP")
SOURCE = (
    "\n".join(f"#define {name} {getattr(caching_allocator, name)}u" for name in _CONSTANTS)
    + r"""

/* One work-item replays one row of sizes: persistent storages first, then the events (+s allocates storage
   s - 1, -s frees it). rows: for each where its events begin and how many there are, the same of its
   persistent storages, where its sizes begin, from which event on the allocated peak counts. Pool 0 holds
   requests up to 1 MiB, pool 1 larger ones. free_at and free_width list the free blocks of both pools in no
   order. out: allocated and reserved peak; -1 where a list is full. */
__kernel void replay(__global const int *rows, __global const int *events, __global const int *persistent,
                     __global const uint *units, __global uint *at, __global uint *width,
                     __global uint *free_at, __global uint *free_width, const int room,
                     __global long *out) {
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
  int count[2] = {0, 0};
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
    __global uint *starts = free_at + (2 * row + pool) * room;
    __global uint *widths = free_width + (2 * row + pool) * room;
    int n = count[pool];
    if (event > 0) {
      int best = -1;
      uint best_width = 0xffffffffu, start = 0xffffffffu;
      for (int i = 0; i < n; ++i) {
        const uint w = widths[i];
        if (w >= size && (w < best_width || (w == best_width && starts[i] < start))) {
          best = i;
          best_width = w;
          start = starts[i];
        }
      }
      if (best < 0) {
        const uint own = (size + SEGMENT_STEP - 1) / SEGMENT_STEP * SEGMENT_STEP;
        best_width = !pool ? SMALL_SEGMENT : size < OWN_SEGMENT ? LARGE_SEGMENT : own;
        start = top;
        top += best_width + 1;
        reserved += best_width;
        if (n >= room) {
          out[0] = -1;
          return;
        }
        best = n++;
      }
      if (best_width - size > (pool ? SMALL : 0u)) {
        starts[best] = start + size;
        widths[best] = best_width - size;
        best_width = size;
      } else {
        --n;
        starts[best] = starts[n];
        widths[best] = widths[n];
      }
      at[storage] = start;
      width[storage] = best_width;
      allocated += best_width;
      if (allocated > peak) peak = allocated;
    } else {
      const uint start = at[storage], end = start + width[storage];
      allocated -= width[storage];
      int left = -1, right = -1;
      for (int i = 0; i < n; ++i) {
        if (starts[i] + widths[i] == start) left = i;
        if (starts[i] == end) right = i;
      }
      if (left < 0 && right < 0) {
        if (n >= room) {
          out[0] = -1;
          return;
        }
        starts[n] = start;
        widths[n++] = end - start;
      } else if (right < 0) {
        widths[left] = end - starts[left];
      } else {
        const uint from = left < 0 ? start : starts[left];
        widths[right] += end - from;
        starts[right] = from;
        if (left >= 0) {
          --n;
          starts[left] = starts[n];
          widths[left] = widths[n];
        }
      }
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

    def run(self, inputs: Sequence[npt.NDArray[np.generic]], scratch: Sequence[int], out: Peaks) -> None:
        """Fill `out`, one work-item for each row; scratch: bytes of buffers behind the inputs."""
        cl, context, queue = self._context.cl, self._context.context, self._context.queue
        read = cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
        buffers = [cl.Buffer(context, read, hostbuf=array) for array in inputs]
        buffers += [cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for size in (*scratch, out.nbytes)]
        with self._lock:
            self._kernel(queue, (len(out),), (1,), *buffers[:-1], np.int32(_FREE_BLOCKS), buffers[-1])
            cl.enqueue_copy(queue, out, buffers[-1])


def replay_all(batches: Sequence[ReplayRows]) -> list[Peaks]:
    """Return for each batch the allocated and reserved peaks of its rows in bytes, (R, 2)."""
    kernel = _kernel(sum(len(batch.units) for batch in batches))
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
    blocks, lists = 4 * (int(firsts[2]) + 1), 8 * len(table) * _FREE_BLOCKS
    kernel.run(
        [
            table,
            np.concatenate([*(batch.events for batch in batches), filler]),
            np.concatenate([*(batch.persistent for batch in batches), filler]),
            np.concatenate([*(batch.units.reshape(-1) for batch in batches), filler]).astype(np.uint32),
        ],
        [blocks, blocks, lists, lists],
        out,
    )
    return out * ALIGNMENT


_asked = 0


def _kernel(rows: int) -> CpuKernel | None:
    """Return the kernel, if there is one, once enough rows were replayed to pay for its compilation."""
    global _asked  # a process's count, so that one short search pays for no compiler
    _asked += rows
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
