"""A device's measured convolution workspaces as a file of its profile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torchedge.devices import Device
from torchedge.errors import ProfileError
from torchedge.forests.files import read_forests, write_forests
from torchedge.prediction.memory.workspaces import PHASES, WORKSPACE_FEATURES, WorkspaceModel
from torchedge.storage import file_sha256, resolve_inside

__all__ = ["FILE", "TABLE", "load_workspaces", "write_workspaces"]

TABLE, FILE = "workspaces", "workspaces.safetensors"
"""`[profile.workspaces]` of device.toml, and the file beside it."""

_MOST_BYTES = 8 * 2**20
_REBUILD = "rebuild the profile with `torchedge fit`"


def load_workspaces(device: Device) -> WorkspaceModel | None:
    """Return the workspaces measured on a device, None where nobody did.

    Raises ProfileError for a file that is missing, damaged or made for another version.
    """
    described = device.profile.get(TABLE)
    if not isinstance(described, Mapping):
        return None
    return _loaded(device.folder, str(described.get("sha256")))


@lru_cache(maxsize=16)
def _loaded(folder: Path, digest: str) -> WorkspaceModel:
    path = resolve_inside(folder, FILE)
    if file_sha256(path, max_bytes=_MOST_BYTES) != digest:
        raise ProfileError(
            f"{path} is not the file that device.toml describes (its sha256 differs); "
            f"restore it, or {_REBUILD}"
        )
    expected = dict.fromkeys(PHASES, WORKSPACE_FEATURES)
    return WorkspaceModel(read_forests(path, expected=expected, max_bytes=_MOST_BYTES))


def write_workspaces(folder: Path, model: WorkspaceModel) -> str:
    """Write a device's workspaces into its profile's folder; return the file's sha256."""
    write_forests(folder / FILE, model.forests)
    return file_sha256(folder / FILE, max_bytes=_MOST_BYTES)
