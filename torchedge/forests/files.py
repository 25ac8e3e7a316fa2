"""Forests in safetensors files: several in one file, each under its name as a prefix.

Forest ``gamma`` is the four tensors ``gamma.feature`` (int16, -1 marks a leaf), ``gamma.payload`` (float32),
``gamma.sizes`` (int32, nodes of each tree) and ``gamma.hull`` (float32, 2 x features), with the JSON document
``gamma`` in the metadata for everything else. Six bytes a node; ``trees`` explains a tree's layout.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from torchedge.errors import ProfileError
from torchedge.forests.trees import LEAF, MAX_FEATURES, Forest, build_forest, feature_hash
from torchedge.storage import REBUILD
from torchedge.storage.codecs import DERIVED, Codec
from torchedge.storage.documents import parse_json
from torchedge.storage.tensors import read_tensors, write_tensors

SCHEMA = "torchedge-forests-1"
MAX_BYTES = 64 * 2**20
MAX_FORESTS = 64

_TENSORS = ("feature", "payload", "sizes", "hull")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def write_forests(path: str | Path, forests: Mapping[str, Forest]) -> None:
    """Write forests to one safetensors file, byte for byte the same for the same forests.

    Args:
        path: the file, replaced whole.
        forests: the forests by name (lower case letters, digits, ``_`` and ``-``).

    Raises:
        ProfileError: no forest, too many, or a name that may not stand in a file.
    """
    if not 1 <= len(forests) <= MAX_FORESTS:
        raise ProfileError(
            f"{path}: got {len(forests)} forests to write, expected 1 to {MAX_FORESTS}: split the file"
        )
    tensors: dict[str, NDArray[Any]] = {}
    metadata = {"schema": SCHEMA}
    for name in sorted(forests):
        if not _NAME.fullmatch(name) or name == "schema":
            raise ProfileError(
                f"{path}: got the forest name {name!r}, expected {_NAME.pattern} other than schema: rename it"
            )
        forest = forests[name]
        feature = np.where(forest.step == 0, LEAF, forest.feature.astype(np.int16)).astype(np.int16)
        tensors[f"{name}.feature"] = feature
        tensors[f"{name}.payload"] = forest.payload
        tensors[f"{name}.sizes"] = np.diff(forest.roots).astype(np.int32)
        tensors[f"{name}.hull"] = np.stack([forest.low, forest.high])
        stored = _ForestText(
            forest.learner, tuple(forest.feature_names), forest.scale, forest.offset, forest.metadata
        )
        metadata[name] = json.dumps(_FORESTS.document(stored), sort_keys=True, allow_nan=False)
    write_tensors(path, tensors, metadata)


def read_forests(
    path: str | Path,
    expected: Mapping[str, Sequence[str]] | None = None,
    optional: Mapping[str, Sequence[str]] | None = None,
    *,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Forest]:
    """Read and validate the forests of a file; no content of the file can run code, loop or read outside.

    Args:
        path: a file that ``write_forests`` wrote.
        expected: the forests to read, each with the feature order that the caller computes. Without
            it every forest is read and its features are the caller's business.
        optional: forests to read as well if the file has them, with their feature order.
        max_bytes: the largest file to accept.

    Raises:
        ProfileError: no such file, no forest file, a malformed or missing forest, or another feature order.
    """
    tensors, metadata = read_tensors(path, max_bytes=max_bytes)
    if metadata.get("schema") != SCHEMA:
        raise ProfileError(f"{path}: found schema {metadata.get('schema')!r}, expected {SCHEMA!r}: {REBUILD}")
    present = sorted(set(metadata) - {"schema"})
    if not 1 <= len(present) <= MAX_FORESTS or not all(_NAME.fullmatch(name) for name in present):
        raise ProfileError(
            f"{path}: found {len(present)} forests, expected 1 to {MAX_FORESTS} well-named: {REBUILD}"
        )
    if set(tensors) != {f"{name}.{part}" for name in present for part in _TENSORS}:
        raise ProfileError(
            f"{path}: found {len(tensors)} tensors for the forests {', '.join(present)}, "
            f"expected {', '.join(_TENSORS)} of each: {REBUILD}"
        )
    orders = {n: o for n, o in (optional or {}).items() if n in present} | dict(expected or {})
    wanted = present if expected is None else list(orders)
    forests = {}
    for name in wanted:
        if name not in present:
            raise ProfileError(
                f"{path}: found the forests {', '.join(present)}, expected {name} too: {REBUILD}"
            )
        forest = _forest(f"{path}: forest {name}", name, tensors, metadata[name])
        if name in orders:
            _check_order(f"{path}: forest {name}", forest.feature_names, tuple(orders[name]))
        forests[name] = forest
    return forests


@dataclass(frozen=True, slots=True)
class _ForestText:
    """The metadata of a forest in a file: everything but its arrays."""

    learner: str
    features: Annotated[tuple[str, ...], Meta(max_length=MAX_FEATURES)]
    scale: float
    offset: float
    provenance: Mapping[str, str]

    @property
    def feature_hash(self) -> Annotated[str, DERIVED]:
        """Hash of the features' order."""
        return feature_hash(self.features)


_FORESTS = Codec(_ForestText, "Forest", remedy=REBUILD, error=ProfileError)


def _forest(source: str, name: str, tensors: Mapping[str, NDArray[Any]], text: str) -> Forest:
    stored = _FORESTS.parse(source, parse_json(source, text.encode("utf-8", "surrogatepass")))
    return build_forest(
        learner=stored.learner,
        feature_names=stored.features,
        feature=tensors[f"{name}.feature"],
        payload=tensors[f"{name}.payload"],
        sizes=tensors[f"{name}.sizes"],
        hull=tensors[f"{name}.hull"],
        scale=stored.scale,
        offset=stored.offset,
        metadata=stored.provenance,
        source=source,
    )


def _check_order(source: str, stored: Sequence[str], expected: Sequence[str]) -> None:
    """The stored feature order must be the one that the caller computes."""
    if feature_hash(stored) == feature_hash(expected):
        return
    where = next(
        (i for i, pair in enumerate(zip(stored, expected, strict=False)) if pair[0] != pair[1]), None
    )
    detail = (
        "" if where is None else f" (first difference at {where}: {stored[where]!r}, not {expected[where]!r})"
    )
    raise ProfileError(
        f"{source}: the file has {len(stored)} features with hash {feature_hash(stored)}, "
        f"expected {len(expected)} with hash {feature_hash(expected)}{detail}: {REBUILD}"
    )
