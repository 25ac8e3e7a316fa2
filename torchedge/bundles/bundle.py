"""The Bundle: a folder that was read and checked to the last byte, and what it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from torchedge.bundles.manifests import (
    ACCUMULATING,
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
from torchedge.bundles.weights import KEPT, check_weights, packed_weights, read_header
from torchedge.errors import InputError
from torchedge.lowering.program_files import MAX_FILE_BYTES, MAX_SOURCE, parse_program
from torchedge.lowering.programs import Program
from torchedge.storage import file_sha256, resolve_inside
from torchedge.storage.documents import parse_json, read_bytes
from torchedge.storage.tensors import Header

if TYPE_CHECKING:
    from torchedge.bundles.runners import Runner
    from torchedge.opencl import ClDevice
    from torchedge.streaming.instances import Instance
    from torchedge.streaming.plans import OverlapPlan

__all__ = ["Bundle"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bundle:
    """An exported model: kernels, launches, weights. `open` reads one; `run` and `train_step` execute it.

    path: its folder. manifest: what it says of itself. program: what runs. accumulating: the step that only
    adds up gradients. header: where weights lie in the file.
    """

    path: Path
    manifest: Manifest
    program: Program
    accumulating: Program | None
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
        program = _program(folder, PROGRAM, texts)
        accumulating = _program(folder, ACCUMULATING, texts) if manifest.accumulate > 1 else None
        _check_same(folder, manifest, program, accumulating)
        weights = resolve_inside(folder, WEIGHTS)
        header = read_header(weights)
        check_weights(weights, header, (program,) if accumulating is None else (program, accumulating))
        return cls(folder.resolve(), manifest, program, accumulating, header)

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

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program, and the one that only adds up gradients where there is one."""
        return (self.program,) if self.accumulating is None else (self.program, self.accumulating)

    def place(
        self,
        device: ClDevice | str | int | None = None,
        *,
        profile: bool = False,
        checks: bool = False,
    ) -> Runner:
        """Return a Runner of the bundle on an OpenCL device, with the weights that it was exported with."""
        from torchedge.bundles.runners import Runner

        return Runner(self, device, profile=profile, checks=checks)

    @cached_property
    def runner(self) -> Runner:
        """What `run` and `train_step` use: on the default device, made on first use."""
        return self.place()

    def run(self, *inputs: object) -> list[Array]:
        """Run one batch of arrays in the order of `inputs` and return the outputs; raises what Runner does.

        Raises:
            InputError: too few or many arrays, a wrong shape or dtype.
        """
        return self.runner.step(*inputs)

    def train_step(self, *inputs: object) -> float:
        """Train on one batch and return the loss; weights stay on the device.

        Raises:
            InputError: the bundle is one for inference, or an array does not fit.
        """
        if not self.trains:
            raise InputError(
                f"{self.path}: is a bundle for inference; expected one that trains: export with train=True"
            )
        return float(self.run(*inputs)[0])

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and buffers after the steps run so far, by PyTorch's names."""
        return self.runner.state_dict()

    def weights(self) -> dict[str, Array]:
        """Return what the file holds: parameters, buffers and constants by name, as PyTorch has them."""
        packed = packed_weights(self.path / WEIGHTS, self.header, self.programs)
        return {tensor.name: tensor.layout.unpack(held, tensor.shape) for tensor, held in packed}

    @cached_property
    def plan(self) -> tuple[OverlapPlan, Instance] | None:
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
    known = {PROGRAM, ACCUMULATING, WEIGHTS, ONNX, f"{ONNX}.data", PLAN}
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


def _program(folder: Path, name: str, texts: Mapping[str, str]) -> Program:
    path = resolve_inside(folder, name)
    return parse_program(path, parse_json(path, read_bytes(path, max_bytes=MAX_FILE_BYTES)), texts)


def _check_same(folder: Path, manifest: Manifest, program: Program, accumulating: Program | None) -> None:
    """Check that what the manifest tells is what the programs do, and that both hold the same tensors."""
    programs = (program,) if accumulating is None else (program, accumulating)
    pairs: list[tuple[str, object, object]] = [
        ("hyperparameters", set(manifest.hyperparameters), set(program.hyperparameters)),
        ("memory", manifest.memory, memory_of(programs)),
        (
            "kernels",
            {name for name in manifest.files if name.startswith("kernels/")},
            {kernel_file(kernel.name) for made in programs for kernel in made.kernels},
        ),
    ]
    for made in programs:
        fed = [place for place in made.inputs if place not in made.hyperparameters.values()]
        pairs += [
            ("inputs", manifest.inputs, _ports(made, fed, manifest.inputs)),
            ("outputs", manifest.outputs, _ports(made, made.outputs, manifest.outputs)),
            ("class", manifest.target.device_class, made.target),
        ]
    for what, told, found in pairs:
        if told != found:
            raise InputError(
                f"{folder}: {MANIFEST} and {PROGRAM} tell different {what}; expected the same: export the "
                "model again"
            )
    kept = {tensor.name: tensor for tensor in program.tensors if tensor.role in KEPT}
    for tensor in accumulating.tensors if accumulating is not None else ():
        if tensor.role in KEPT and kept.get(tensor.name, tensor) != tensor:
            raise InputError(
                f"{folder}: {PROGRAM} and {ACCUMULATING} hold {tensor.name} in different ways; expected the "
                "same: export the model again"
            )


def _ports(program: Program, places: Sequence[int], told: tuple[Port, ...]) -> tuple[Port, ...] | None:
    """Return tensors of the program under the names that the manifest gives, None where it gives others."""
    names = [port.name for port in told]
    return ports_of(program, places, names) if len(names) == len(places) else None
