"""What a bundle launches, and bundles of launches alone, to be timed: no model, no source to prove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchedge.bundles.manifests import (
    MANIFESTS,
    PROGRAM,
    WEIGHTS,
    BundleFile,
    BundleTarget,
    Manifest,
    digest_of,
    kernel_file,
    memory_of,
    ports_of,
    write_manifest,
)
from torchedge.bundles.weights import write_weights
from torchedge.lowering.program_files import program_document
from torchedge.lowering.programs import Program
from torchedge.storage import file_sha256, write_json


def write_programs(
    folder: Path,
    programs: Mapping[str, Program],
    data: Mapping[str, npt.NDArray[Any]],
    order: Sequence[str] = (),
) -> dict[str, BundleFile]:
    """Write kernels, programs by their files, and weights; return them with their hashes.

    folder: empty, or without these. data, order: as in `write_weights`.
    """
    files = {}
    (folder / "kernels").mkdir(parents=True)
    for kernel in {kernel.name: kernel for each in programs.values() for kernel in each.kernels}.values():
        name, text = kernel_file(kernel.name), kernel.source.encode()
        (folder / name).write_bytes(text)
        files[name] = BundleFile(kernel.digest, len(text))
    for name, program in programs.items():
        write_json(folder / name, program_document(program, sources=False))
        files[name] = file_of(folder / name)
    digest = write_weights(folder / WEIGHTS, [*programs.values()], data, order)
    files[WEIGHTS] = BundleFile(digest, (folder / WEIGHTS).stat().st_size)
    return files


def file_of(path: Path) -> BundleFile:
    """Return what a manifest says of a file."""
    size = path.stat().st_size
    return BundleFile(file_sha256(path, max_bytes=size), size)


def write_launches(
    folder: Path, program: Program, data: Mapping[str, npt.NDArray[Any]] | None = None
) -> Manifest:
    """Write a program as a bundle that the native runner takes; return its manifest.

    folder: empty. data: logical arrays of parameters, buffers and constants. States begin at their fill.
    Python's executor does not take it: it has no source.

    Raises ProfileError where the folder cannot be written.
    """
    files = write_programs(folder, {PROGRAM: program}, data or {})
    names = [program.tensors[place].name for place in program.inputs]
    manifest = Manifest(
        model=program.name,
        mode="infer",
        accumulation=1,
        versions={"numpy": np.__version__},
        target=BundleTarget("any", "any", "0" * 64, program.target),
        inputs=ports_of(program, program.inputs, names),
        outputs=(),
        hyperparameters={},
        memory=memory_of([program]),
        onnx={},
        notes=(),
        files=files,
        sha256="",
    )
    write_manifest(folder, manifest)
    return replace(manifest, sha256=digest_of(MANIFESTS.document(manifest)))
