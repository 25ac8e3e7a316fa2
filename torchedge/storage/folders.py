"""Where files lie: the packaged data folders, the user's own folder, names that must stay inside one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, get_args

from torchedge.errors import InputError, ProfileError
from torchedge.storage.documents import file_sha256

DataName = Literal["profiles", "hooks", "export"]
"""The data folders that travel with the package."""

HOME_VARIABLE = "TORCHEDGE_HOME"
CACHE_VARIABLE = "TORCHEDGE_CACHE"
MAX_NAME = 255

_PACKAGE = Path(__file__).resolve().parent.parent


def data_folder(name: DataName) -> Path:
    """Return a folder of packaged data: `torchedge/_data/<name>` installed, else the checkout's `<name>`.

    Raises:
        InputError: `name` is none of profiles, hooks, export.
        ProfileError: the folder is in neither place (a broken installation).
    """
    if name not in get_args(DataName):
        raise InputError(
            f"data folder {name!r}: expected one of {', '.join(get_args(DataName))}; correct the name"
        )
    places = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise ProfileError(
        f"data folder {name}: found neither {places[0]} nor {places[1]}, expected one of them; "
        "reinstall with: pip install --force-reinstall torchedge"
    )


def cache_folder() -> Path:
    """Return the folder for files that can be rebuilt (compiled kernels); it need not exist.

    `$TORCHEDGE_CACHE` where set, else `$XDG_CACHE_HOME/torchedge`, else `~/.cache/torchedge`.
    Raises InputError: neither variable is set and the user has no home folder.
    """
    return _own_folder(CACHE_VARIABLE, "XDG_CACHE_HOME", Path(".cache"), "cache folder")


def user_folder() -> Path:
    """Return the user's own folder (profiles measured here, config.toml); it need not exist.

    `$TORCHEDGE_HOME` where set, else `$XDG_DATA_HOME/torchedge`, else `~/.local/share/torchedge`. An XDG
    variable that is not an absolute path is ignored, as the XDG specification asks.
    Raises InputError: neither variable is set and the user has no home folder.
    """
    return _own_folder(HOME_VARIABLE, "XDG_DATA_HOME", Path(".local", "share"), "user folder")


def _own_folder(variable: str, standard: str, below_home: Path, what: str) -> Path:
    chosen = os.environ.get(variable)
    if chosen:
        return Path(chosen).expanduser().absolute()
    data = os.environ.get(standard, "")
    if os.path.isabs(data):
        return Path(data) / "torchedge"
    try:
        return Path.home() / below_home / "torchedge"
    except RuntimeError as error:
        raise InputError(
            f"{what}: found no home folder ({error}), expected one; set {variable} to a folder"
        ) from error


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`, rejecting any that leads out of it.

    `name` is a plain name or a relative path with `/`; symlinks are followed and must end inside `folder`.
    The file need not exist.
    Raises ProfileError: an empty, absolute, over-long or climbing name, or a symlink that leaves the folder.
    """
    parts = name.split("/")
    plain = all(
        part not in ("", ".", "..") and len(part.encode(errors="replace")) <= MAX_NAME for part in parts
    )
    if (
        not plain
        or len(parts) > 8
        or any(not character.isprintable() or character in "\\:" for character in name)
    ):
        raise ProfileError(
            f"{folder}: got the file name {name[:80]!r}, expected a relative path inside the folder without "
            "'..', '\\', ':' or control characters; rename the file"
        )
    try:
        root = folder.resolve()
        path = (root / name).resolve()
    except (OSError, RuntimeError) as error:
        raise ProfileError(
            f"{folder}/{name}: expected a path that can be followed ({error}); remove the loop"
        ) from error
    if not path.is_relative_to(root):
        raise ProfileError(
            f"{folder}/{name}: leads out of its folder, expected a file inside; replace the link by the file"
        )
    return path


REBUILD = "rebuild the profile with `torchedge fit`"
"""The next step after a damaged file of a profile."""


def profile_file(folder: Path, name: str, digest: object, *, max_bytes: int) -> Path:
    """Return the path of a file in a profile's folder: `name`, or `staged_name` after an interrupted fit.

    Raises ProfileError: the file is missing, larger than `max_bytes`, or its SHA-256 is not `digest`.
    """
    staged = resolve_inside(folder, staged_name(name, str(digest)))
    path = staged if staged.is_file() else resolve_inside(folder, name)
    if file_sha256(path, max_bytes=max_bytes) != digest:
        raise ProfileError(
            f"{path} is not the file that device.toml describes (its sha256 differs); "
            f"restore it, or {REBUILD}"
        )
    return path


def staged_name(name: str, digest: str) -> str:
    """Return the name of a profile's new file until `device.toml` describes it."""
    return f".{name}.{re.sub('[^0-9a-f]', '', digest)[:16]}"
