"""Bundles whose files were changed get all hashes anew, so that what is left to refuse is the change."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchedge.bundles.manifests import MANIFEST, digest_of


def seal(folder: Path, *, kernels: bool = True) -> None:
    """Write the hashes of kernels into programs, of files into the manifest, and that of the manifest.

    Entries that are not what they should be stay as they are. kernels: also of texts that programs name.
    """
    for path in folder.glob("*.json") if kernels else ():
        document = json.loads(path.read_text())
        for kernel, text in _files(folder, document, "kernels"):
            kernel["sha256"] = hashlib.sha256(text).hexdigest()
        path.write_text(json.dumps(document))
    manifest = json.loads((folder / MANIFEST).read_text())
    for file, content in _files(folder, manifest, "files"):
        file.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


def _files(folder: Path, document: Any, key: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the entries of a document that name a file, each with its content."""
    entries = document.get(key) if isinstance(document, dict) else None
    if isinstance(entries, list):
        entries = {f"kernels/{e.get('name')}.cl": e for e in entries if isinstance(e, dict)}
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        with contextlib.suppress(OSError, ValueError):  # no name of a file
            if isinstance(entry, dict) and (folder / name).is_file():
                yield entry, (folder / name).read_bytes()
