"""The tape: every allocation and release of a step in order, independent of the batch size.

Storages are numbered; event +s allocates storage s - 1, event -s frees it. Sizes are polynomials of the batch
size, so that one tape serves every batch size and many of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from torchedge.errors import CaptureError, InputError
from torchedge.graphs.sizes import Poly
from torchedge.prediction.memory.workspaces import Scratch, WorkspaceModel
from torchedge.storage.locks import cached_property

ALIGNMENT = 512
"""PyTorch's CUDA allocator rounds every request up to a multiple of this many bytes."""

_MOST_BYTES = 2.0**61
"""Sums of sizes are 64-bit numbers."""

CATEGORIES = (
    "weights", "gradients", "optimizer_state", "inputs", "saved_activations", "temporaries", "workspace"
)  # fmt: skip


@dataclass(frozen=True)
class Tape:
    """Allocations and releases of one step.

    sizes: (S, 3) int64, coefficients of 1, N and N² of each storage's bytes. category: (S,) index into
    `CATEGORIES`. labels: of each storage. events: (E,) int32, see the module. owners: (E,) int32, the
    operator an event belongs to, counted through forward and backward. phases: (E,) int8, 0 forward, 1
    backward, 2 optimizer. operators: kind and module path of each operator an event may belong to.
    persistent: storages alive before the first event. remaining: storages alive after the last, in the order
    in which the next steady-state step lists them as persistent. scratch: storages whose size follows from
    the device's library instead of `sizes`. from_start: the very first step and then this one, where this
    step's peaks depend on it; counted_from: the event from which on its peaks count. scales: the allocated
    and the reserved peak of the step as it runs over those of these events (`compiled_steps`).
    """

    sizes: npt.NDArray[np.int64]
    category: npt.NDArray[np.int8]
    labels: tuple[str, ...]
    events: npt.NDArray[np.int32]
    owners: npt.NDArray[np.int32]
    phases: npt.NDArray[np.int8]
    persistent: npt.NDArray[np.int32]
    remaining: npt.NDArray[np.int32]
    operators: tuple[tuple[str, str], ...] = ()
    scratch: Scratch | None = None
    from_start: Tape | None = None
    counted_from: int = 0
    scales: tuple[float, float] = (1.0, 1.0)

    def bytes_at(self, batch_sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return (S, B) int64: each storage's size, rounded up as the allocator does, per batch size."""
        n = np.asarray(batch_sizes, dtype=np.int64)
        largest = float(n.max(initial=0))
        if self._amounts @ (1.0, largest, largest * largest) > _MOST_BYTES:
            raise InputError(
                f"a step at batch size {int(largest)} handles more than 2 EiB; expected a smaller batch size"
            )
        raw = self.sizes[:, :1] + self.sizes[:, 1:2] * n
        if self._quadratic.size:
            raw[self._quadratic] += self.sizes[self._quadratic, 2:] * n * n
        if self.scratch is not None:
            raw[self.scratch.storages] = self.scratch.bytes_at(n.tolist())
        if raw.min(initial=0) < 0:
            raise CaptureError(
                "a tensor has a negative size at this batch size: the model has a size near 1,000,000,007, "
                "which stands for the batch during capture; capture it for one batch size with batch_size="
            )
        return np.asarray((raw + (ALIGNMENT - 1)) & -ALIGNMENT)

    @cached_property
    def _amounts(self) -> npt.NDArray[np.float64]:
        """The sum (3,) of all storages' coefficients of 1, N, N²."""
        return np.asarray(np.abs(self.sizes).sum(axis=0, dtype=float))

    @cached_property
    def _quadratic(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.sizes[:, 2])

    @cached_property
    def replayed(self) -> dict[int, tuple[int, int]]:
        """Allocated and reserved peaks in bytes by batch size, as far as they were replayed."""
        return {}

    @cached_property
    def ratios(self) -> dict[int, tuple[float, float]]:
        """Both replayed peaks over the peak of live tensors."""
        return {}

    @cached_property
    def event_list(self) -> list[int]:
        """The events as plain numbers, for replays."""
        events: list[int] = self.events.tolist()
        return events

    @cached_property
    def _storages(self) -> npt.NDArray[np.int32]:
        return np.asarray(np.abs(self.events) - 1, dtype=np.int32)

    @cached_property
    def _signs(self) -> npt.NDArray[np.int64]:
        return np.sign(self.events).astype(np.int64)[:, None]

    def live_of(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return (E, B) int64: bytes alive after each event, for sizes (S, B) of storages."""
        start = sizes[self.persistent].sum(axis=0)
        return np.asarray(np.cumsum(sizes[self._storages] * self._signs, axis=0) + start)

    def live_by_category(self, batch_size: int) -> npt.NDArray[np.int64]:
        """Return (E, C) int64: bytes alive after each event, by category."""
        sizes = self.bytes_at(np.array([batch_size]))[:, 0]
        changes = np.zeros((len(self.events), len(CATEGORIES)), dtype=np.int64)
        changes[np.arange(len(self.events)), self.category[self._storages]] = (
            sizes[self._storages] * self._signs[:, 0]
        )
        start = np.zeros(len(CATEGORIES), dtype=np.int64)
        np.add.at(start, self.category[self.persistent], sizes[self.persistent])
        return np.asarray(np.cumsum(changes, axis=0) + start)

    def peak_bytes(self, batch_sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return (B,) int64: the most bytes alive at once."""
        sizes = self.bytes_at(batch_sizes)
        start = sizes[self.persistent].sum(axis=0)
        if not len(self.events):
            return np.asarray(start)
        return np.asarray(
            np.maximum(np.cumsum(sizes[self._storages] * self._signs, axis=0).max(axis=0), 0) + start
        )

    @cached_property
    def without_scratch(self) -> Tape:
        """The same tape, with workspaces of no bytes: its live peak never exceeds this tape's."""
        return replace(self, scratch=None)

    @cached_property
    def rises(self) -> bool:
        """Whether no storage, apart from workspaces, gets smaller as the batch size grows."""
        _, slope, square = self.sizes.T
        return bool((square >= 0).all() and (slope + 3 * square >= 0).all())

    def peak_at(self, batch_size: int) -> tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return the event of the live peak (-1: before the first), alive storages (S,), all sizes (S,)."""
        sizes = self.bytes_at(np.array([batch_size]))
        live, start = self.live_of(sizes)[:, 0], int(sizes[self.persistent].sum())
        event = int(live.argmax()) if len(live) and int(live.max()) > start else -1
        return event, self.alive_after(event), sizes[:, 0]

    def alive_after(self, event: int) -> npt.NDArray[np.bool_]:
        """Return (S,) bool: which storages are alive after an event."""
        count = np.zeros(len(self.sizes), dtype=np.int32)
        count[self.persistent] = 1
        np.add.at(count, self._storages[: event + 1], np.sign(self.events[: event + 1]))
        return np.asarray(count > 0)


PERSISTENT = 1 << 29
"""References to a storage that outlives the step; those of its views come on top."""


class TapeWriter:
    """Builds a tape: storages with reference counts, whose last reference books the release."""

    def __init__(self) -> None:
        self.sizes: list[Poly] = []
        self.category: list[int] = []
        self.labels: list[str] = []
        self.counts: list[int] = []
        self.events: list[int] = []
        self.owners: list[int] = []
        self.phases: list[int] = []
        self.persistent: list[int] = []
        self.scratch: list[tuple[int, int, tuple[Poly, ...]]] = []
        self.counted_from = 0
        self.owner = 0
        self.phase = 0

    def new(self, size: Poly, category: int, label: str) -> int:
        """Allocate a storage with one reference; return its number."""
        storage = len(self.sizes)
        self.sizes.append(size)
        self.category.append(category)
        self.labels.append(label)
        self.counts.append(1)
        self.events.append(storage + 1)
        self.owners.append(self.owner)
        self.phases.append(self.phase)
        return storage

    def keep(self, size: Poly, category: int, label: str) -> int:
        """Add a storage that is there before the step and after it."""
        storage = len(self.sizes)
        self.sizes.append(size)
        self.category.append(category)
        self.labels.append(label)
        self.counts.append(PERSISTENT)
        self.persistent.append(storage)
        return storage

    def take(self, name: int, geometry: tuple[Poly, ...], category: int, label: str) -> None:
        """Allocate and free a workspace whose size the device's library decides (`workspaces`)."""
        storage = self.new((0, 0, 0), category, label)
        self.scratch.append((storage, name, geometry))
        self.drop(storage)

    def hold(self, storage: int) -> None:
        """Add a reference."""
        self.counts[storage] += 1

    def drop(self, storage: int) -> None:
        """Remove a reference; the last one frees the storage."""
        count = self.counts[storage] - 1
        self.counts[storage] = count
        if count == 0:
            self.events.append(-storage - 1)
            self.owners.append(self.owner)
            self.phases.append(self.phase)

    def close(self, remaining: list[int]) -> None:
        """Free storages that are still referenced (the loss, outputs), all but `remaining`."""
        alive = set(remaining)
        for storage, count in enumerate(self.counts):
            if 0 < count < PERSISTENT // 2 and storage not in alive:
                self.counts[storage] = 1
                self.drop(storage)

    def after(self, first: TapeWriter, left: list[int]) -> TapeWriter:
        """Return what a first step wrote, and then this one; left: storages of the first that it begins with.

        Both are closed.
        """
        places = dict(zip(self.persistent, left, strict=True))
        moved = [places.get(storage, storage + len(first.sizes)) for storage in range(len(self.sizes))]
        whole = TapeWriter()
        for name in ("sizes", "category", "labels", "owners", "phases"):
            setattr(whole, name, getattr(first, name) + getattr(self, name))
        later = [moved[event - 1] + 1 if event > 0 else -moved[-event - 1] - 1 for event in self.events]
        whole.events, whole.counted_from = first.events + later, len(first.events)
        whole.persistent = first.persistent
        whole.scratch = first.scratch + [(moved[s], name, entries) for s, name, entries in self.scratch]
        return whole

    def finish(
        self,
        remaining: list[int],
        operators: tuple[tuple[str, str], ...],
        workspaces: WorkspaceModel | None = None,
    ) -> Tape:
        """Return the tape; `remaining` is alive at its end, events belong to `operators`."""
        scratch = None
        if workspaces is not None and self.scratch:
            storages, names, geometry = zip(*self.scratch, strict=True)
            scratch = Scratch(
                workspaces, np.array(storages), np.array(names), np.array(geometry, dtype=float)
            )
        self.close(remaining)
        return Tape(
            np.fromiter(chain.from_iterable(self.sizes), np.int64).reshape(-1, 3),
            np.array(self.category, dtype=np.int8),
            tuple(self.labels),
            np.array(self.events, dtype=np.int32),
            np.array(self.owners, dtype=np.int32),
            np.array(self.phases, dtype=np.int8),
            np.array(self.persistent, dtype=np.int32),
            np.array(remaining, dtype=np.int32),
            operators,
            scratch,
            counted_from=self.counted_from,
        )
