"""Bundles of launches alone, to be timed on a device: no model, no source that they could be proved by."""

from __future__ import annotations

from collections.abc import Mapping
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


def write_launches(
    folder: Path, program: Program, data: Mapping[str, npt.NDArray[Any]] | None = None
) -> Manifest:
    """Write a program as a bundle that the native runner takes; return its manifest.

    folder: empty. data: logical arrays of parameters, buffers and constants. States begin at their fill.
    Python's executor does not take it: it has no source.

    Raises ProfileError where the folder cannot be written.
    """
    files: dict[str, BundleFile] = {}
    (folder / "kernels").mkdir(parents=True)
    for kernel in program.kernels:
        name, text = kernel_file(kernel.name), kernel.source.encode()
        (folder / name).write_bytes(text)
        files[name] = BundleFile(kernel.digest, len(text))
    write_json(folder / PROGRAM, program_document(program, sources=False))
    digest = write_weights(folder / WEIGHTS, [program], data or {})
    for name in (PROGRAM, WEIGHTS):
        size = (folder / name).stat().st_size
        files[name] = BundleFile(
            digest if name == WEIGHTS else file_sha256(folder / name, max_bytes=size), size
        )
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
