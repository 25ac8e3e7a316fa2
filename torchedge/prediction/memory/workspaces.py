"""Workspaces: memory that a device's libraries take beside the tensors of a convolution or of a sum.

Libraries choose an algorithm by shape, and some algorithms need the operands in another layout or partial
sums: a workspace of about the size of the tensors, or none. Forests predict it from the shape; they are
fitted to measured workspaces of single convolutions (`hooks/convolution_probe.py`) and stored in the profile.
A sum over rows, as that of a bias's gradient, keeps partial sums of many blocks by a rule of PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from torchedge.arrays import FloatArray, IntArray
from torchedge.devices import Device
from torchedge.forests.trees import Forest, evaluate, read_forests, write_forests
from torchedge.storage import file_sha256, profile_file

PHASES = ("forward", "backward_x", "backward_w")
"""Forward, the gradient of the input, the gradient of the weights."""

KINDS = ("", "half-", "last-", "half-last-", "line-", "half-line-")
"""Kinds of convolutions: in half precision, in channels_last, in one dimension."""

SUM = "sum"
NAMES = (*[kind + phase for kind in KINDS for phase in PHASES], SUM)
"""Workspaces that a device's libraries take; `PHASES` are those of plain convolutions in float32."""

GEOMETRY = (
    "batch", "inputs", "outputs", "groups", "kernel", "stride", "padding", "input_positions",
    "output_positions",
)  # fmt: skip
"""Columns of a convolution: channels, products over the spatial dimensions, the sum of the paddings."""

_ALIGNED = (("inputs", 4), ("outputs", 4), ("inputs", 8), ("outputs", 8), ("inputs", 32), ("outputs", 32))
WORKSPACE_FEATURES = (
    *GEOMETRY, "columns", "log_columns", "log_rows", "log_input", "log_output", "log_weights",
    "output_over_input", *(f"{name}_by_{number}" for name, number in _ALIGNED), "input_positions_by_4",
    "output_positions_by_4",
)  # fmt: skip
_FLOAT_BYTES = 4

RESIDENT = 2048
"""Threads that a multiprocessor runs at once (CUDA programming guide)."""
_FEWER_RESIDENT = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
"""The same by compute capability, where they are fewer."""


@dataclass(frozen=True, eq=False)
class WorkspaceModel:
    """Workspaces of one device: of convolutions a forest that gives workspace over tensors in float32.

    A name without forest takes none. units: multiprocessors, for sums; 0: unknown. resident: threads that one
    of them runs at once. Compared by identity, so that it can be part of settings.
    """

    forests: Mapping[str, Forest]
    units: int = 0
    resident: int = RESIDENT

    def bytes_of(self, name: str, geometry: FloatArray) -> IntArray:
        """Return (R,) bytes of convolutions (R, 9), columns as `GEOMETRY`, or of sums: rows and columns."""
        if name == SUM:
            sums = [sum_bytes(int(g[0]), int(g[1]), self.units, self.resident) for g in geometry]
            return np.array(sums, dtype=np.int64)
        forest = self.forests.get(name)
        if forest is None or not len(geometry):
            return np.zeros(len(geometry), dtype=np.int64)
        ratio = np.maximum(evaluate(forest, workspace_features(geometry)), 0.0)
        wanted = np.where(ratio < _LEAST_RATIO, 0.0, ratio) * tensor_bytes(geometry)
        return np.asarray(wanted, dtype=np.int64)


_LEAST_RATIO = 0.02
"""Below this a forest's average of none and some means none."""


_THREADS = 512
"""The most threads of a block that sums."""


def sum_bytes(rows: int, columns: int, units: int, resident: int = RESIDENT) -> int:
    """Return the bytes in which a sum over the rows of (rows, columns) elements keeps partial sums.

    PyTorch's `setReduceConfig` (Reduce.cuh) gives a thread some columns, and divides long sums among blocks
    of threads, each of which writes its sums in float32.
    """
    wide = next(w for w in (4, 2, 1) if columns % w == 0)
    most = _THREADS // wide
    across, down = (min(most, 1 << max(n, 1).bit_length() - 1) for n in (columns // wide, rows))
    width = min(across, 32)
    height = min(down, most // width)
    width = min(across, most // height)
    values = -(-rows // height)
    if rows < min(16 * height, 256) or values < 256 or not units:
        return 0
    grid, target = -(-columns // (wide * width)), units * (resident // (width * height))
    if grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * columns * blocks * width * wide if blocks > 1 else 0


def tensor_bytes(geometry: FloatArray) -> FloatArray:
    """Return (R,) bytes of input, output and weights of convolutions (R, 9) in float32."""
    x, y, w = _tensors(geometry)
    return np.asarray(x + y + w)


def _tensors(geometry: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    batch, inputs, outputs, groups, kernel, _, _, before, after = geometry.T
    return (
        _FLOAT_BYTES * batch * inputs * before,
        _FLOAT_BYTES * batch * outputs * after,
        _FLOAT_BYTES * outputs * inputs / groups * kernel,
    )


def workspace_features(geometry: FloatArray) -> FloatArray:
    """Return (R, F) the features of convolutions (R, 9) for the forests."""
    batch, inputs, outputs, groups, kernel, _, _, before, after = geometry.T
    x, y, w = _tensors(geometry)
    logs = [np.log2(a + 1.0) for a in (batch * after, inputs / groups * kernel, x, y, w)]
    channels = {"inputs": inputs, "outputs": outputs}
    padded = [np.ceil(channels[name] / by) * by / channels[name] for name, by in _ALIGNED]
    rest = [(positions % 4 == 0).astype(float) for positions in (before, after)]
    return np.stack([*geometry.T, batch * after, *logs, y / x, *padded, *rest], axis=1)


@dataclass(frozen=True, eq=False)
class Scratch:
    """Storages of a tape whose size the device's library decides.

    storages, names: (W,), the latter an index into `NAMES`. geometry: (W, 9, 3) coefficients of 1, N, N².
    """

    model: WorkspaceModel
    storages: IntArray
    names: IntArray
    geometry: FloatArray

    def bytes_at(self, batch_sizes: Sequence[int]) -> IntArray:
        """Return (W, B) bytes at batch sizes (B,)."""
        n = np.array(batch_sizes, dtype=float)
        geometry = np.moveaxis(self.geometry @ np.stack([np.ones_like(n), n, n * n]), 2, 0)
        return known_bytes(self.model, self.names, geometry).T


_known: WeakKeyDictionary[WorkspaceModel, dict[bytes, int]] = WeakKeyDictionary()
_REMEMBERED = 1 << 16
"""Convolutions of a model whose workspaces stay, but for those of one call: about 16 MiB."""


def known_bytes(model: WorkspaceModel, names: IntArray, geometry: FloatArray) -> IntArray:
    """Return (R, W) bytes of workspaces of convolutions (R, W, 9); each different one is evaluated once."""
    known = _known.setdefault(model, {})
    if len(known) > _REMEMBERED:
        known = _known[model] = {}  # another thread may still read the old one
    lines = np.concatenate([geometry, np.broadcast_to(names[:, None], (*geometry.shape[:2], 1))], axis=2)
    lines = np.ascontiguousarray(lines.reshape(-1, lines.shape[-1]))
    keys, first, which = np.unique(
        lines.view(np.dtype((np.void, lines.dtype.itemsize * lines.shape[1])))[:, 0],
        return_index=True,
        return_inverse=True,
    )
    wanted = [key.tobytes() for key in keys]
    missing = np.array([place for place, line in enumerate(wanted) if line not in known], dtype=np.intp)
    rows = lines[first[missing]]
    for index in np.unique(rows[:, -1]).astype(int).tolist():
        chosen = rows[:, -1] == index
        sizes = model.bytes_of(NAMES[index], rows[chosen, :-1]).tolist()
        known.update(zip([wanted[place] for place in missing[chosen]], sizes, strict=True))
    return np.array([known[line] for line in wanted], dtype=np.int64)[which].reshape(geometry.shape[:2])


def convolution_kind(dimensions: int, dtype: str, channels_last: bool) -> str:
    """Return the one of `KINDS` of a convolution over so many spatial dimensions."""
    half = "half-" if dtype in ("bfloat16", "float16") else ""
    return half + ("line-" if dimensions == 1 else "last-" if channels_last else "")


def convolution_geometry(
    shapes: Sequence[Any], groups: int, stride: Sequence[int], padding: Sequence[int], kind: str
) -> tuple[Any, ...] | None:
    """Return a convolution's entries of `GEOMETRY` from the shapes of input, weights and output.

    None for depthwise convolutions, which PyTorch computes with kernels of its own that take none, but for
    those of images in channels_last.
    """
    x, w, y = shapes
    if groups > 1 and w[1] == 1 and not kind.endswith("last-"):
        return None
    kernel, steps, before, after = (_product(sides) for sides in (w[2:], stride, x[2:], y[2:]))
    return (x[0], x[1], y[1], groups, kernel, steps, sum(padding), before, after)


def sum_geometry(part: Sequence[Any], whole: Sequence[Any], fastest: int) -> tuple[Any, ...] | None:
    """Return rows and columns, filled up to `GEOMETRY`, of a sum of a shape to that of a part of it.

    fastest: the dimension of the whole whose elements lie side by side. None where nothing or it is summed,
    and where the part is no such part.
    """
    sides = [*[1] * (len(whole) - len(part)), *part]
    if not whole or len(sides) != len(whole):
        return None
    pairs = [*zip(whole, sides, strict=True)]
    summed = [side for side, kept in pairs if kept == 1]
    if sides[fastest] == 1 or not summed or any(kept not in (1, side) for side, kept in pairs):
        return None
    return (_product(summed), _product(sides), *[0] * (len(GEOMETRY) - 2))


def _product(sides: Sequence[Any]) -> Any:  # noqa: ANN401 - an int or a Size
    product: Any = 1
    for side in sides:
        product = product * side
    return product


# files -----------------------------------------------------------------------------------------------


TABLE, FILE = "workspaces", "workspaces.safetensors"
"""`[profile.workspaces]` of device.toml, and the file beside it."""

_MOST_BYTES = 8 * 2**20


def load_workspaces(device: Device) -> WorkspaceModel | None:
    """Return the workspaces of a device's libraries: those of convolutions where they were measured.

    None for a device that runs no CUDA kernels of today, or has neither such measurements nor figures.

    Raises ProfileError for a file that is missing, damaged or made for another version.
    """
    described = device.profile.get(TABLE)
    digest = str(described.get("sha256")) if isinstance(described, Mapping) else ""
    units, resident = _multiprocessors(device)
    return _loaded(device.folder, digest, units, resident) if digest or units else None


def workspaces_on(device: Device, model: WorkspaceModel) -> WorkspaceModel:
    """Return measured workspaces with a device's figures."""
    units, resident = _multiprocessors(device)
    return replace(model, units=units, resident=resident)


def _multiprocessors(device: Device) -> tuple[int, int]:
    """Return how many a device has and the threads each runs at once; 0 for what is no NVIDIA card."""
    units, capability = (device.figures.get(name) for name in ("compute_units", "compute_capability"))
    if units is None or device.vendor != "NVIDIA" or device.kind != "gpu" or device.memory != "dedicated":
        return 0, 0
    version = divmod(round(10 * capability.value), 10) if capability is not None else (0, 0)
    return int(units.value), _FEWER_RESIDENT.get(version, RESIDENT)


@lru_cache(maxsize=64)
def _loaded(folder: Path, digest: str, units: int, resident: int) -> WorkspaceModel:
    if not digest:
        return WorkspaceModel({}, units, resident)
    path = profile_file(folder, FILE, digest, max_bytes=_MOST_BYTES)
    expected, optional = (dict.fromkeys(names, WORKSPACE_FEATURES) for names in (PHASES, NAMES[:-1]))
    return WorkspaceModel(read_forests(path, expected, optional, max_bytes=_MOST_BYTES), units, resident)


def write_workspaces(folder: Path, model: WorkspaceModel) -> str:
    """Write a device's workspaces into its profile's folder; return the file's sha256."""
    write_forests(folder / FILE, model.forests)
    return file_sha256(folder / FILE, max_bytes=_MOST_BYTES)
