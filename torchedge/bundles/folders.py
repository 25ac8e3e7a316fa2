"""A folder written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from torchedge.bundles.manifests import MANIFEST
from torchedge.errors import InputError

__all__ = ["check_free", "new_folder"]


def check_free(out: str | Path, force: bool) -> Path:
    """Return the absolute path of a folder that may be written.

    Raises:
        InputError: it is there already (with `force`: and is no bundle), or its own folder is not there.
    """
    target = Path(out).expanduser().absolute()
    if target.is_symlink():
        target = target.resolve()
    if not target.parent.is_dir():
        raise InputError(f"{out}: there is no folder {target.parent}; expected one to write into: make it")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"{out}: {target.parent} is not writable; expected a folder that is: choose another")
    if not os.path.lexists(target):
        return target
    if not target.is_dir():
        raise InputError(f"{out}: is a file; expected the name of a folder to make: choose another")
    if not any(target.iterdir()) or (force and (target / MANIFEST).is_file()):
        return target
    if force:
        raise InputError(f"{out}: is a folder but no bundle, and is not replaced; choose another")
    raise InputError(f"{out}: is there already; expected a new folder: pass force (--force) to replace it")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, which takes the place of `target` once the block is done without an error.

    Raises:
        InputError: the folder cannot be made, filled or put in place.
    """
    stem = f".{target.name[:100]}.{secrets.token_hex(8)}"
    made, old = target.with_name(f"{stem}.tmp"), target.with_name(f"{stem}.old")
    try:
        made.mkdir()
        yield made
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    except OSError as error:
        raise InputError(
            f"{target}: cannot be written ({error.strerror or error}), expected a folder with room; "
            "choose another, or free some space"
        ) from error
    finally:
        for leftover in (made, old):
            shutil.rmtree(leftover, ignore_errors=True)
