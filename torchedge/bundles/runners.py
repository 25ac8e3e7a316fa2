"""A bundle on an OpenCL device: its programs with their weights, one call a batch."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from torchedge.bundles.manifests import WEIGHTS
from torchedge.bundles.weights import packed_weights
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.shared_images import part_images
from torchedge.opencl import ClDevice, open_context
from torchedge.runtime import Executor, LaunchTime

if TYPE_CHECKING:
    from torchedge.bundles.bundle import Bundle

Array = npt.NDArray[Any]


class Runner:
    """Runs a bundle; weights and optimizer state stay on the device from step to step.

    Where the device makes no images of buffers, every image gets memory of its own.

    device, profile, checks: as Executor takes them.

    Raises:
        DeviceError: there is no such device, or it does not take what the program needs.
        MissingExtraError: pyopencl is not installed. OpenCLError: the driver fails.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: ClDevice | str | int | None = None,
        *,
        profile: bool = False,
        checks: bool = False,
    ) -> None:
        self.bundle = bundle
        self.batches = 0
        context = open_context(device)
        programs = bundle.programs
        if not context.device.image_from_buffer:
            programs = tuple([part_images(program, ALIGNMENT) for program in programs])
        self.executor = Executor(programs[0], context.device, profile=profile, checks=checks)
        self.executor.load_packed(self._packed(self.executor, set()))
        self.accumulating: Executor | None = None
        if len(programs) > 1:
            self.accumulating = Executor(programs[1], shared=self.executor, checks=checks)
            loaded = {t.name for t in bundle.program.tensors if t.role in ("parameter", "buffer", "state")}
            self.accumulating.load_packed(self._packed(self.accumulating, loaded))
        self._last = self.executor
        for name, value in bundle.manifest.hyperparameters.items():
            self.set(name, value)

    def _packed(self, executor: Executor, loaded: set[str]) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of the weights file that a program keeps and no other has loaded."""
        kept = {tensor.name for tensor in executor.program.tensors} - loaded
        path = self.bundle.path / WEIGHTS
        for tensor, held in packed_weights(path, self.bundle.header, self.bundle.programs):
            if tensor.name in kept:
                yield tensor.name, held

    def step(self, *inputs: object) -> list[Array]:
        """Run one batch and return the outputs; in training, each `accumulate`-th batch updates the weights.

        Raises:
            InputError: too few or many arrays, a wrong shape or dtype. OpenCLError: the driver fails.
        """
        completes = (self.batches + 1) % self.bundle.manifest.accumulate == 0
        accumulating = None if completes else self.accumulating
        self._last = accumulating or self.executor
        outputs = self._last.step(*inputs)
        self.batches += 1
        return outputs

    def set(self, name: str, value: float) -> None:
        """Set a hyperparameter, which keeps its value until it is set again."""
        self.executor.set(name, value)
        if self.accumulating is not None and name in self.accumulating.program.hyperparameters:
            self.accumulating.set(name, value)

    def read(self, name: str) -> Array:
        """Return what a parameter, buffer or state holds now."""
        return self.executor.read(name)

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and buffers as they are now, by PyTorch's names."""
        kept = [t.name for t in self.bundle.program.tensors if t.role in ("parameter", "buffer")]
        return {name: self.executor.read(name) for name in kept}

    def timings(self) -> list[LaunchTime]:
        """Return when each launch of the last step ran; raises InputError without `profile`."""
        return self._last.timings()

    def close(self) -> None:
        """Give the device's memory back."""
        self.executor.close()
        if self.accumulating is not None:
            self.accumulating.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
