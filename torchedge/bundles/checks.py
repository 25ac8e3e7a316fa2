"""A bundle's check.json: figures of what each launch wrote on the exporting machine, to find a wrong driver.

Other drivers round in other ways. How much that changes a figure is measured: the step runs again from inputs
and weights that differ a little, and the bound of a figure is a multiple of the largest change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from torchedge.arrays import Array
from torchedge.graphs import RESIDENT_ROLES
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.placement import placed_for
from torchedge.lowering.program_files import MAX_FILE_BYTES
from torchedge.lowering.programs import MAX_ITEMS, Index, Program, StoredTensor
from torchedge.storage.codecs import Codec, Sha256, Text

if TYPE_CHECKING:
    from torchedge.bundles.bundle import Bundle

RUNS = 4
"""Runs from changed numbers."""

FACTOR = 4.0
"""Bound of a figure / its largest change."""

NOISE, NOISE_FACTOR = 1 / 32, 16.0
"""A result that small changes alter by more than this share is rounding noise, such as the gradient of a bias
before a batch norm; its bounds / its size."""

_CHANGES = {"float16": 2.0**-10, "float32": 2.0**-14, "float64": 2.0**-14}
_LEAST = {"float16": 2.0**-8, "float32": 2.0**-16, "float64": 2.0**-16}

Figures = Annotated[tuple[float, ...], Meta(min_length=6, max_length=6)]


@dataclass(frozen=True, slots=True)
class CheckedResult:
    """What a launch wrote to a tensor, an index of the program's list.

    sha256: of the dense array. figures: its sum, sum of absolute values, weighted sum, least and greatest
    number, and count of numbers that are not finite, which the others leave out. Element k weighs
    (k * 2654435761 mod 2^32) / 2^32 - 1/2. bounds: how far each figure may be off.
    """

    launch: Index
    tensor: Index
    sha256: Sha256
    figures: Figures
    bounds: Figures


Results = Annotated[tuple[CheckedResult, ...], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class Check:
    """Results of a batch of check inputs through each program of a bundle, the last one first.

    program: those of the first one. methods: those of the other methods, by name.
    """

    device: Text
    accumulating: Results
    program: Results
    methods: Mapping[Text, Results] = field(default_factory=dict)


CHECKS = Codec(
    Check,
    "Results of a bundle's launches",
    schema="torchedge-check-1",
    remedy="export the model again",
    max_bytes=MAX_FILE_BYTES,
)


def check_input(tensor: StoredTensor, port: int) -> Array:
    """Return what a check feeds: hashes of an element's place; floats from 0 to 1, exact in half."""
    count = int(np.prod(tensor.shape, dtype=np.int64))
    bits = (np.arange(count, dtype=np.uint32) + np.uint32(1 + 40503 * port)) * np.uint32(2654435761)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(2246822519)
    bits ^= bits >> np.uint32(13)
    values: Array
    if np.dtype(tensor.dtype).kind == "f":
        values = (bits >> np.uint32(21)) / np.float64(2048)
    elif tensor.indices is not None and tensor.indices.high > tensor.indices.low:
        values = tensor.indices.low + bits.astype(np.int64) % (tensor.indices.high - tensor.indices.low)
    else:
        values = bits & np.uint32(1)
    return values.astype(tensor.dtype).reshape(tensor.shape)


def figures_of(array: Array) -> tuple[float, ...]:
    """Return the figures of a result, as CheckedResult lists them."""
    values = array.reshape(-1).astype(np.float64)
    finite = np.isfinite(values)
    missing = float(values.size - np.count_nonzero(finite))
    values = np.where(finite, values, 0.0)
    if not values.size:
        return (0.0,) * 6
    weights = (np.arange(values.size, dtype=np.uint32) * np.uint32(2654435761)) / 2.0**32 - 0.5
    sums = (values.sum(), np.abs(values).sum(), (values * weights).sum())
    return (*map(float, (*sums, values.min(), values.max())), missing)


def record_check(bundle: Bundle) -> Check:
    """Run a bundle launch by launch on the default device and return its results with bounds.

    Raises what `Executor` does.
    """
    device, exact = _results(bundle, None)
    changed = [_results(bundle, seed)[1] for seed in range(RUNS)]
    lists = {
        name: tuple(
            _bounded(program, result, [run[number][place].figures for run in changed])
            for place, result in enumerate(exact[number])
        )
        for number, (name, program) in enumerate(bundle.programs.items())
    }
    first = lists.pop(bundle.methods[0])
    return Check(device, lists.pop("accumulating", ()), first, lists)


def _bounded(program: Program, result: CheckedResult, others: Sequence[Figures]) -> CheckedResult:
    """Return a result with its bounds, from the figures of runs that were changed."""
    figures, least = result.figures, _LEAST.get(program.tensors[result.tensor].dtype, 0.0)
    sizes = (*[figures[1]] * 3, *[max(abs(figures[3]), abs(figures[4]))] * 2, 0.0)
    changes = [max(abs(other[k] - figures[k]) for other in others) for k in range(len(figures))]
    noise = any(change > NOISE * size for change, size in zip(changes[:5], sizes, strict=False))
    bounds = []
    for change, size in zip(changes, sizes, strict=True):
        bound = max(FACTOR * change, (NOISE_FACTOR if noise else least) * size)
        bounds.append(float(f"{1.01 * bound:.3g}"))
    rounded = tuple(float(f"{figure:.9g}") for figure in figures)
    return replace(result, figures=rounded, bounds=tuple(bounds))


def _results(bundle: Bundle, seed: int | None) -> tuple[str, list[list[CheckedResult]]]:
    """Return device and results of each program; with a seed, of inputs and weights that are changed."""
    # Reading a bundle needs no OpenCL.
    from torchedge.opencl import open_context
    from torchedge.runtime import Executor

    random = None if seed is None else np.random.default_rng(seed)
    half = any(t.dtype == "float16" for program in bundle.programs.values() for t in program.tensors)
    share = _CHANGES["float16" if half else "float32"]

    def changed(array: Array) -> Array:
        if random is None or array.dtype.kind != "f":
            return array
        return (array * (1 + share * random.uniform(-1, 1, array.shape))).astype(array.dtype)

    device = open_context(None).device
    programs = [placed_for(program, device, ALIGNMENT) for program in bundle.programs.values()]
    executors: list[Executor] = []
    loaded: set[str] = set()
    for program in programs:
        shared = [*executors]
        executor = Executor(program, device, shared=shared, shared_roles=RESIDENT_ROLES, whole_arena=False)
        executors.append(executor)
        names = {t.name for t in program.tensors if t.role in RESIDENT_ROLES} - loaded
        executor.load_packed((name, changed(array)) for name, array in bundle.packed(names))
        loaded |= {t.name for t in program.tensors if t.role in RESIDENT_ROLES}
    results: list[list[CheckedResult]] = [[] for _ in programs]
    for number in reversed(range(len(programs))):
        program, executor = programs[number], executors[number]
        for name, value in bundle.manifest.hyperparameters.items():
            if name in program.hyperparameters:
                executor.set(name, value)
        fed = [index for index in program.inputs if index not in program.hyperparameters.values()]
        for port, index in enumerate(fed):
            tensor = program.tensors[index]
            executor.write(tensor.name, changed(check_input(tensor, port)))

        def observe(
            launch: int, tensor: int, array: Array, own: list[CheckedResult] = results[number]
        ) -> None:
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            own.append(CheckedResult(launch, tensor, digest, figures_of(array), (0.0,) * 6))

        executor.run_observed(observe)
    for executor in reversed(executors):
        executor.close()
    return f"{device.name} ({device.platform})", results
