"""Kernels under loads, copies and the disk of a device without Python: rows like those of `load_measuring`.

The launches of `load_measuring` run as bundles by the native runner: a kernel alone and with its loading
slot, loading kernels, and many launches that do nothing. The runner also reads a bundle's weights past the
page cache: that is the disk. It has one queue and no thread beside the one that launches, so that ways of
loading are not compared and the host's time of a transfer is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
import torch

from torchedge.devices import Device
from torchedge.errors import LoweringError, clipped
from torchedge.lowering.inference import capture_inference_step, lower_inference, target_of_device
from torchedge.lowering.kernel_texts import text_of
from torchedge.lowering.kernels.loading import (
    destination_of,
    loading_kernel,
    loading_size,
    slot_numbers,
    with_slot,
)
from torchedge.lowering.programs import Arena, Kernel, Launch, Program, StoredTensor
from torchedge.profiling import load_measuring
from torchedge.profiling.load_measuring import LoadedOperator, rounded
from torchedge.profiling.remote_devices import RemoteDevice
from torchedge.profiling.remote_runs import RemoteRunner, RunError
from torchedge.storage.journals import Row
from torchedge.streaming.schedules import works_of
from torchedge.textures.layouts import PAGE_BYTES, Layout, row_major

PROBE = "torchedge-run streaming 1"
_POOL_BYTES, _FILE_BYTES = 64 << 20, 64 << 20
_COPIES = (1 << 20, 4 << 20, 16 << 20)
_STEPS, _LAUNCHES = 9, 200


@dataclass(frozen=True)
class RemoteLoads:
    """A device behind the runner, its profile, and the memory that is filled from a pool of bytes."""

    remote: RemoteRunner
    there: RemoteDevice
    device: Device
    pool_bytes: int = _POOL_BYTES

    def __post_init__(self) -> None:
        limits = self.there.limits
        most = min(self.pool_bytes, limits.allocation_bytes // 2)
        if self._image:
            most = min(most, limits.image_height * PAGE_BYTES)
        object.__setattr__(self, "pool_bytes", most // PAGE_BYTES * PAGE_BYTES)

    @property
    def _image(self) -> bool:
        limits = self.there.limits
        return self.target.storage == "image" and limits.image_width * 16 >= PAGE_BYTES

    @property
    def target(self) -> Any:  # noqa: ANN401 - a Target
        """What kernels are lowered for."""
        return target_of_device(self.device)

    @property
    def pool(self) -> StoredTensor:
        """The bytes to load."""
        return StoredTensor("pool", (self.pool_bytes // 4,), "float32", "state", row_major(1))

    @property
    def filled(self) -> StoredTensor:
        """The memory of a loaded weight."""
        shape = self.pool_bytes // PAGE_BYTES, PAGE_BYTES // 4
        layout = Layout((0, 1), "image", 1) if self._image else row_major(2)
        return StoredTensor("the loaded weight", shape, "float32", "state", layout)

    def environment(self, command: str, quick: bool) -> Row:
        """Return the first row of a journal."""
        limits = self.there.limits
        return {
            "row": "environment", "probe": PROBE, "quick": quick, "device": limits.name,
            "vendor": limits.vendor, "platform": limits.platform, "opencl": limits.opencl,
            "driver": self.there.driver, "target": self.target.name,
            "texture": "image2d" if self._image else "buffer", "pool_bytes": self.pool_bytes,
            "command": command + " --quick" * quick, "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        }  # fmt: skip

    def tasks(self, quick: bool) -> Iterator[tuple[tuple[str, tuple[int, ...]], Callable[[], Row]]]:
        """Yield the key of each row and its measurement."""
        for case in load_measuring.cases(quick=quick):
            yield (case.kernel, case.size), partial(self.case_row, case, quick=quick)
        for size in sorted({min(nbytes, self.pool_bytes) for nbytes in _COPIES}):
            yield ("copy by kernel", (size,)), partial(self.copy_row, size)
        yield ("disk", ()), self.disk_row
        yield ("launch", ()), self.launch_row

    def case_row(self, case: LoadedOperator, *, quick: bool) -> Row:
        """Return the row of a kernel; where it does not run there, a row with the reason."""
        row: dict[str, Any] = {"kernel": case.kernel, "size": list(case.size)}
        try:
            inputs = tuple([torch.zeros(shape) for shape in case.inputs])
            program = lower_inference(capture_inference_step(case.make(), inputs), self.target).program
            return {**row, **self._loads(program, quick)}
        except (LoweringError, RunError) as error:
            return {**row, "reason": clipped(str(error))}

    def _loads(self, program: Program, quick: bool) -> Row:
        works = works_of(program)
        place = max(range(len(works)), key=lambda k: (works[k].flops, works[k].bytes_moved))
        work, launch = works[place], program.launches[place]
        plain = program.kernels[launch.kernel]
        loaded = _sizes_last(plain, with_slot(plain, destination_of(self.filled), self.target.name))
        own = [
            replace(
                program.tensors[index],
                name=f"{number} {program.tensors[index].name}",
                role="state",
                indices=None,
            )
            for number, index in enumerate(launch.tensors)
        ]
        tensors = (*own, self.pool, self.filled)
        loads = load_measuring.loads_under(work, self.pool_bytes, quick=quick)
        launches, first = [], 0
        for nbytes in loads:
            if not nbytes:
                launches.append(replace(launch, kernel=0, tensors=tuple(range(len(own)))))
                continue
            first = 0 if first + nbytes > self.pool_bytes else first
            sizes = (*launch.sizes, *slot_numbers(self.filled, 0, nbytes, first))
            first += nbytes
            launches.append(replace(launch, kernel=1, tensors=tuple(range(len(tensors))), sizes=sizes))
        times = self._times(tensors, (plain, loaded), launches)
        runs, spread = [[ms] for ms in times], (launch.global_size, launch.local_size)
        return {**load_measuring.row_of_loads(work, spread, loads, runs), "runs": _STEPS}

    def copy_row(self, nbytes: int) -> Row:
        """Return the row of a load by a loading kernel, without a kernel beside it."""
        sizes = loading_size(nbytes, self.target.name, self.target.largest_group)
        launches = [self._loading(nbytes, first) for first in range(0, self.pool_bytes - nbytes + 1, nbytes)][
            :4
        ]
        ms = min(self._times((self.pool, self.filled), (self._loader,), launches))
        return {
            "kernel": "copy", "way": "kernel", "size": [nbytes], "local": list(sizes[1]), "ms": rounded(ms),
            "least_ms": rounded(ms), "runs": _STEPS,
        }  # fmt: skip

    def disk_row(self) -> Row:
        """Return the row of the disk: the runner reads its weights file past the page cache."""
        weight = StoredTensor("weights", (_FILE_BYTES // 4,), "float32", "constant", row_major(1))
        content = np.random.default_rng(0).standard_normal(_FILE_BYTES // 4, dtype=np.float32)
        tensors, data = (self.pool, self.filled, weight), {"weights": content}
        best: Mapping[str, Any] = {"bytes": 1, "ms": float("inf")}
        for _ in range(3):
            figures = self._figures(tensors, (self._loader,), [self._loading(0, 0)], ["--times", "1"], data)
            best = min(best, figures["disk"], key=lambda disk: disk["ms"] or float("inf"))
        return {"row": "disk", "bytes": best["bytes"], "ms": rounded(best["ms"])}

    def launch_row(self) -> Row:
        """Return the row of the time of one of many launches that do nothing."""
        launches = [self._loading(0, 0)] * _LAUNCHES
        figures = self._figures((self.pool, self.filled), (self._loader,), launches, ["--steps", "5"], {})
        return {"row": "launch", "us": rounded(1e3 * figures["lower_quartile_step_ms"] / _LAUNCHES)}

    @property
    def _loader(self) -> Kernel:
        kernel = loading_kernel(destination_of(self.filled), self.target.name)
        return replace(kernel, access=("read", "update"), sizes=len(slot_numbers(self.filled, 0, 0, 0)))

    def _loading(self, nbytes: int, first: int) -> Launch:
        sizes = loading_size(nbytes, self.target.name, self.target.largest_group)
        return Launch(0, (0, 1), *sizes, sizes=slot_numbers(self.filled, 0, nbytes, first))

    def _times(
        self, tensors: Sequence[StoredTensor], kernels: Sequence[Kernel], launches: Sequence[Launch]
    ) -> list[float]:
        """Return the shortest time of each launch, of several steps that run them in turn, ms."""
        words = ["--times", "1", "--steps", str(_STEPS)]
        return [ns / 1e6 for ns in self._figures(tensors, kernels, launches, words, {})["launch_ns"]]

    def _figures(
        self,
        tensors: Sequence[StoredTensor],
        kernels: Sequence[Kernel],
        launches: Sequence[Launch],
        words: Sequence[str],
        data: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        parts = tuple(tensors), tuple(kernels), tuple(launches)
        program = Program("loads", *parts, (), (), Arena(0), target=self.target.name)
        return self.remote.measure_program(program, ["--figures", *words], data)


def _sizes_last(plain: Kernel, loaded: Kernel) -> Kernel:
    """Return a kernel with a slot whose tensors stand before all numbers, as those of programs do."""
    text = text_of(loaded)
    assert text is not None
    tensors = len(plain.access)
    own, sizes = text.parameters[:tensors], text.parameters[tensors : tensors + plain.sizes]
    source, target, *numbers = text.parameters[tensors + plain.sizes :]
    moved = replace(text, parameters=(*own, source, target, *sizes, *numbers))
    access = (*plain.access, "read", "update")
    return replace(loaded, source=moved.source, access=access, sizes=plain.sizes + len(numbers))
