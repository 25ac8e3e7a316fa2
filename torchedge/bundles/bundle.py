"""The Bundle: a folder that was read and checked to the last byte, and what it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from torchedge.bundles.manifests import (
    MANIFEST,
    ONNX,
    PLAN,
    PROGRAM,
    WEIGHTS,
    Manifest,
    Port,
    kernel_file,
    memory_of,
    ports_of,
    read_manifest,
)
from torchedge.bundles.weights import check_weights, packed_weights, read_header
from torchedge.errors import InputError
from torchedge.lowering.program_files import MAX_FILE_BYTES, MAX_SOURCE, parse_program
from torchedge.lowering.programs import Program
from torchedge.storage import file_sha256, resolve_inside
from torchedge.storage.documents import parse_json, read_bytes
from torchedge.storage.tensors import Header

if TYPE_CHECKING:
    from torchedge.runtime import Executor
    from torchedge.streaming.instances import Instance
    from torchedge.streaming.plans import Plan

__all__ = ["Bundle"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bundle:
    """An exported model: kernels, launches, weights. `open` reads one; `run` and `train_step` execute it.

    path: its folder. manifest: what it says of itself. program: what runs. header: where weights lie in the
    file.
    """

    path: Path
    manifest: Manifest
    program: Program
    header: Header

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Read a bundle and check everything in it: hashes, sizes, schemas, indices, layouts, the arena.

        Raises:
            InputError: it is no bundle, or something in it is missing, changed or out of range.
            ProfileError: a file cannot be read or is damaged, or leads out of the folder.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir() or not (folder / MANIFEST).exists():
            raise InputError(
                f"{path}: is no bundle; expected a folder with a {MANIFEST}, which torchedge.export makes"
            )
        manifest = read_manifest(folder)
        _check_files(folder, manifest)
        kernels = [name for name in manifest.files if name.startswith("kernels/")]
        texts = {name[len("kernels/") : -len(".cl")]: _text(folder, name) for name in kernels}
        place = resolve_inside(folder, PROGRAM)
        document = parse_json(place, read_bytes(place, max_bytes=MAX_FILE_BYTES))
        program = parse_program(place, document, texts)
        _check_same(folder, manifest, program)
        weights = resolve_inside(folder, WEIGHTS)
        header = read_header(weights)
        check_weights(weights, header, program)
        return cls(folder.resolve(), manifest, program, header)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What `run` and `train_step` take, in order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """What `run` returns, in order."""
        return self.manifest.outputs

    @property
    def trains(self) -> bool:
        """Whether a run is a training step."""
        return self.manifest.mode == "train"

    def open_executor(self, device: Any = None, *, profile: bool = False, checks: bool = False) -> Executor:  # noqa: ANN401 - as Executor
        """Return an Executor of the program on an OpenCL device, with the bundle's weights.

        device, profile, checks: as Executor takes them.

        Raises:
            DeviceError: there is no such device, or it does not take what the program needs.
            MissingExtraError: pyopencl is not installed. OpenCLError: the driver fails.
        """
        from torchedge.runtime import Executor

        executor = Executor(self.program, device, profile=profile, checks=checks)
        packed = packed_weights(self.path / WEIGHTS, self.header, self.program)
        executor.load_packed((tensor.name, held) for tensor, held in packed)
        for name, value in self.manifest.hyperparameters.items():
            executor.set(name, value)
        return executor

    @cached_property
    def executor(self) -> Executor:
        """The executor of `run` and `train_step`, on the default device; made on first use."""
        return self.open_executor()

    def run(self, *inputs: object) -> list[Array]:
        """Run one step on arrays in the order of `inputs` and return the outputs.

        Raises:
            InputError: too few or many arrays, a wrong shape or dtype.
            And what `open_executor` raises.
        """
        return self.executor.run(*inputs)

    def train_step(self, *inputs: object) -> float:
        """Run one training step, which updates the weights on the device; return the loss.

        Raises:
            InputError: the bundle is one for inference, or an array does not fit.
        """
        if not self.trains:
            raise InputError(
                f"{self.path}: is a bundle for inference; expected one that trains: export with train=True"
            )
        return float(self.run(*inputs)[0])

    def weights(self) -> dict[str, Array]:
        """Return what the file holds: parameters, buffers and constants by name, as PyTorch has them."""
        packed = packed_weights(self.path / WEIGHTS, self.header, self.program)
        return {tensor.name: tensor.layout.unpack(held, tensor.shape) for tensor, held in packed}

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and buffers as they are on the device, after the steps run so far."""
        kept = [t.name for t in self.program.tensors if t.role in ("parameter", "buffer")]
        return {name: self.executor.read(name) for name in kept}

    @cached_property
    def plan(self) -> tuple[Plan, Instance] | None:
        """The overlap plan for streaming the weights, with the instance that it solves; None without one.

        Raises:
            InputError: the file is not as docs/streaming.md says.
        """
        from torchedge.streaming.instances import parse_instance
        from torchedge.streaming.plans import MAX_FILE_BYTES as MAX_PLAN_BYTES
        from torchedge.streaming.plans import parse_plan

        if PLAN not in self.manifest.files:
            return None
        path = resolve_inside(self.path, PLAN)
        document = parse_json(path, read_bytes(path, max_bytes=MAX_PLAN_BYTES))
        parts = [document.get(key) for key in ("plan", "instance")]
        if not all(isinstance(part, Mapping) for part in parts):
            raise InputError(f"{path}: holds no plan with its instance; expected what StreamingPlan writes")
        return parse_plan(path, parts[0]), parse_instance(path, parts[1])  # type: ignore[arg-type]

    def __str__(self) -> str:
        from torchedge.bundles.descriptions import describe

        return describe(self)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file listed is inside the folder, known, and what was hashed."""
    known = {PROGRAM, WEIGHTS, ONNX, f"{ONNX}.data", PLAN}
    for name, file in manifest.files.items():
        kernel = name.startswith("kernels/") and name.endswith(".cl") and name.count("/") == 1
        if name not in known and not kernel:
            raise InputError(
                f"{folder}: lists the file {name[:80]!r}; expected only those that export writes"
            )
        path = resolve_inside(folder, name)
        if file_sha256(path, max_bytes=file.nbytes) != file.sha256:
            raise InputError(
                f"{path}: has another SHA-256 than {MANIFEST} says: it was changed, or damaged on its way; "
                "copy or export the bundle again"
            )


def _text(folder: Path, name: str) -> str:
    path = resolve_inside(folder, name)
    try:
        return read_bytes(path, max_bytes=4 * MAX_SOURCE).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text, expected OpenCL C; export the model again") from error


def _check_same(folder: Path, manifest: Manifest, program: Program) -> None:
    """Check that what the manifest tells is what the program does."""
    fed = [place for place in program.inputs if place not in program.hyperparameters.values()]
    pairs = (
        ("inputs", manifest.inputs, _ports(program, fed, manifest.inputs)),
        ("outputs", manifest.outputs, _ports(program, program.outputs, manifest.outputs)),
        ("hyperparameters", set(manifest.hyperparameters), set(program.hyperparameters)),
        ("memory", manifest.memory, memory_of(program)),
        ("class", manifest.target.device_class, program.target),
        (
            "kernels",
            {name for name in manifest.files if name.startswith("kernels/")},
            {kernel_file(kernel.name) for kernel in program.kernels},
        ),
    )
    for what, told, found in pairs:
        if told != found:
            raise InputError(
                f"{folder}: {MANIFEST} and {PROGRAM} tell different {what}; expected the same: export the "
                "model again"
            )


def _ports(program: Program, places: Sequence[int], told: tuple[Port, ...]) -> tuple[Port, ...] | None:
    """Return tensors of the program under the names that the manifest gives, None where it gives others."""
    names = [port.name for port in told]
    return ports_of(program, places, names) if len(names) == len(places) else None
