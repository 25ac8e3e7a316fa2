"""Forests of regression trees as flat arrays, evaluated with numpy alone (perf4sight's learner).

A tree is laid out breadth first, so the k-th inner node of a tree has its children at positions 2k+1 and 2k+2
of that tree. The layout needs no child pointers, and a child always lies after its parent: whatever a file
contains, a walk from the root moves forward and ends. ``build_forest`` is the one gate where trees enter.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from torchedge.errors import InputError, ProfileError
from torchedge.storage import REBUILD
from torchedge.storage.codecs import DERIVED, Codec
from torchedge.storage.documents import parse_json
from torchedge.storage.tensors import read_tensors, write_tensors

LEAF = -1  # in the arrays given to build_forest and stored on disk
MAX_DEPTH = 256
MAX_FEATURES = 4096
MAX_TREES = 4096
MAX_NODES = 4_000_000
MAX_NAME = 128

_ROW_BLOCK = 2048  # rows whose features stay in the second-level cache together
_PAIRS = 16384  # (tree, row) pairs that walk one level together

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Array = TypeVar("Array", bound=NDArray[Any])


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Regression trees over named features: ``offset + scale * (sum of the reached leaves)``.

    Make one with ``build_forest``, which validates; the arrays are read-only.
    Shapes below: ``n`` nodes, ``t`` trees, ``f`` features.

    Attributes:
        learner: the learner of the trees, for instance ``extra_trees``.
        feature_names: the names of the ``f`` columns, in order.
        feature: (n,) the column a node compares; ``f`` (a column of minus infinity) marks a leaf.
        payload: (n,) float32, the threshold of an inner node or the value of a leaf.
        step: (n,) how many nodes ahead the left child lies (the right one is its neighbour); 0 for a leaf.
        roots: (t + 1,) where each tree begins, and the number of nodes.
        depths: (t,) the longest walk of each tree.
        scale: weight of every tree: 1 / t for an average, the learning rate for boosting.
        offset: the value of a forest without trees.
        low: (f,) float32, the smallest training value of each feature.
        high: (f,) float32, the largest.
        metadata: provenance: dataset, date, versions, command, cross-validation figures.
    """

    learner: str
    feature_names: tuple[str, ...]
    feature: NDArray[np.unsignedinteger[Any]]
    payload: Float32
    step: NDArray[np.unsignedinteger[Any]]
    roots: NDArray[np.int64]
    depths: NDArray[np.int64]
    scale: float
    offset: float
    low: Float32
    high: Float32
    metadata: Mapping[str, str]

    @property
    def n_features(self) -> int:
        """How many columns a row has."""
        return len(self.feature_names)

    @property
    def n_trees(self) -> int:
        """How many trees."""
        return len(self.depths)

    def __repr__(self) -> str:
        """One line: learner and sizes."""
        return (
            f"Forest({self.learner}, {self.n_trees} trees, {len(self.payload)} nodes, "
            f"{self.n_features} features)"
        )


def feature_hash(names: Sequence[str]) -> str:
    """Hash of a feature order: equal only for the same names in the same order (16 hexadecimal digits)."""
    digest = hashlib.sha256()
    for name in names:
        encoded = name.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()[:16]


def build_forest(
    *,
    learner: str,
    feature_names: Sequence[str],
    feature: NDArray[Any],
    payload: NDArray[Any],
    sizes: NDArray[Any],
    hull: NDArray[Any],
    scale: float,
    offset: float = 0.0,
    metadata: Mapping[str, str] | None = None,
    source: str = "forest",
) -> Forest:
    """Return a ``Forest`` of checked breadth-first trees, which can neither loop nor read out of bounds.

    Args:
        learner: the learner of the trees.
        feature_names: the names of the ``f`` columns.
        feature: (n,) int16, the compared column of each node, -1 for a leaf.
        payload: (n,) float32, thresholds and leaf values.
        sizes: (t,) int32, the number of nodes of each tree, in order.
        hull: (2, f) float32, smallest and largest training value of each feature.
        scale: weight of each tree.
        offset: value without trees.
        metadata: provenance.
        source: named in errors: the file, or the builder of the trees.

    Raises:
        ProfileError: a wrong type, shape, number or tree.
    """
    names = tuple(feature_names)
    columns = len(names)
    if not 1 <= columns <= MAX_FEATURES or len(set(names)) != columns:
        raise _bad(
            source,
            f"{columns} feature names ({len(set(names))} different)",
            f"1 to {MAX_FEATURES} different ones",
        )
    if not all(text.isprintable() and 0 < len(text) <= MAX_NAME for text in (learner, *names)):
        raise _bad(
            source, "an empty, long or unprintable learner or feature name", f"up to {MAX_NAME} characters"
        )
    nodes = len(payload) if payload.ndim == 1 else 0
    _check_array(source, "feature", feature, np.int16, (nodes,))
    _check_array(source, "payload", payload, np.float32, (nodes,))
    _check_array(source, "sizes", sizes, np.int32, (len(sizes) if sizes.ndim == 1 else 0,))
    _check_array(source, "hull", hull, np.float32, (2, columns))
    if not 1 <= len(sizes) <= MAX_TREES or not 1 <= nodes <= MAX_NODES:
        expected = f"1 to {MAX_TREES} trees and 1 to {MAX_NODES} nodes (raise min_samples_leaf)"
        raise _bad(source, f"{len(sizes)} trees with {nodes} nodes", expected)
    for name, numbers in (
        ("payload", payload),
        ("hull", hull),
        ("scale and offset", np.array([scale, offset])),
    ):
        if not np.isfinite(numbers).all():
            raise _bad(source, f"a number in {name} that is not finite", "finite numbers only")
    if (hull[0] > hull[1]).any():
        raise _bad(source, "a training range whose low end is above its high end", "low <= high")
    if feature.min() < LEAF or feature.max() >= columns:
        raise _bad(
            source, f"feature indices {feature.min()} to {feature.max()}", f"-1 (leaf) to {columns - 1}"
        )
    roots, step, depths = _grow(source, feature >= 0, sizes.astype(np.int64))
    columns_used = np.where(feature < 0, columns, feature)
    return Forest(
        learner=learner,
        feature_names=names,
        feature=_frozen(columns_used.astype(np.min_scalar_type(columns))),
        payload=_frozen(payload.copy()),
        step=_frozen(step.astype(np.min_scalar_type(int(step.max()) + 1))),
        roots=_frozen(roots),
        depths=_frozen(depths),
        scale=float(scale),
        offset=float(offset),
        low=_frozen(hull[0].copy()),
        high=_frozen(hull[1].copy()),
        metadata=dict(metadata or {}),
    )


def evaluate(forest: Forest, rows: ArrayLike) -> Float64:
    """Predict each row; a row's figure does not depend, to the last bit, on the rows it comes with.

    Args:
        forest: the trees.
        rows: (r, f) numbers, columns in the order of ``forest.feature_names``.

    Returns:
        (r,) float64.

    Raises:
        InputError: a wrong shape, or a number that is not finite in float32.
    """
    checked = _check_rows(forest, rows)
    sums = np.zeros(len(checked))
    for start in range(0, len(checked), _ROW_BLOCK):
        block = checked[start : start + _ROW_BLOCK]
        total = sums[start : start + len(block)]
        for leaves in _walk(forest, block):
            # cumsum adds strictly in tree order; sum would change its order with the number of rows
            total[:] = np.cumsum(np.concatenate([total[None], leaves]), axis=0)[-1]
    sums *= forest.scale
    sums += forest.offset
    return sums


def outside_hull(forest: Forest, rows: ArrayLike) -> NDArray[np.bool_]:
    """Whether each row has a feature outside its training range: (r,) of bool.

    Raises:
        InputError: a wrong shape, or a number that is not finite in float32.
    """
    checked = _check_rows(forest, rows)
    outside: NDArray[np.bool_] = np.any((checked < forest.low) | (checked > forest.high), axis=1)
    return outside


def features_outside(forest: Forest, rows: ArrayLike) -> tuple[str, ...]:
    """The features that leave their training range in any of the rows, in feature order.

    Raises:
        InputError: a wrong shape, or a number that is not finite in float32.
    """
    checked = _check_rows(forest, rows)
    outside = np.any((checked < forest.low) | (checked > forest.high), axis=0)
    return tuple(forest.feature_names[i] for i in np.flatnonzero(outside))


def _walk(forest: Forest, block: Float32) -> Iterator[Float32]:
    """Walk all rows through some trees at a time, level by level; yield (trees, rows) leaf values."""
    rows, columns = block.shape
    extended = np.empty((rows, columns + 1), np.float32)
    extended[:, :-1] = block
    extended[:, -1] = -np.inf  # leaves compare this column: never above their payload, so they stay
    values = extended.ravel()
    together = min(forest.n_trees, max(1, _PAIRS // rows))
    pairs = together * rows
    row_base = np.tile(np.arange(0, rows * (columns + 1), columns + 1), together)
    node_buffer, index_buffer = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    feature_buffer, step_buffer = np.empty(pairs, forest.feature.dtype), np.empty(pairs, forest.step.dtype)
    payload_buffer, value_buffer = np.empty(pairs, np.float32), np.empty(pairs, np.float32)
    right_buffer = np.empty(pairs, np.bool_)
    for first in range(0, forest.n_trees, together):
        roots = forest.roots[first : first + together + 1]
        trees, begin, end = len(roots) - 1, roots[0], roots[-1]
        feature, payload, step = forest.feature[begin:end], forest.payload[begin:end], forest.step[begin:end]
        used = slice(0, trees * rows)
        node, index, base, right = node_buffer[used], index_buffer[used], row_base[used], right_buffer[used]
        columns_here, steps = feature_buffer[used], step_buffer[used]
        thresholds, compared = payload_buffer[used], value_buffer[used]
        node.reshape(trees, rows)[:] = (roots[:-1] - begin)[:, None]
        # mode="clip" lets take write straight into out; every index is valid by construction
        for _ in range(int(forest.depths[first : first + together].max())):
            feature.take(node, out=columns_here, mode="clip")
            np.add(base, columns_here, out=index)
            values.take(index, out=compared, mode="clip")
            payload.take(node, out=thresholds, mode="clip")
            np.greater(compared, thresholds, out=right)
            step.take(node, out=steps, mode="clip")
            np.add(steps, right, out=steps)  # before the node: narrow numbers add faster
            np.add(node, steps, out=node)
        yield payload.take(node).reshape(trees, rows)


def _grow(
    source: str, inner: NDArray[np.bool_], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Roots, steps to the left child and depths of breadth-first trees, all trees at once, level by level."""
    if sizes.min() < 1 or sizes.sum() != len(inner):
        raise _bad(
            source,
            f"tree sizes of {sizes.min()} and more, {sizes.sum()} in all",
            f"{len(inner)} nodes in all",
        )
    roots = np.concatenate([[0], np.cumsum(sizes)])
    inner_before = np.concatenate([[0], np.cumsum(inner)])
    at_root = inner_before[roots[:-1]]
    if (sizes != 2 * (inner_before[roots[1:]] - at_root) + 1).any():
        raise _bad(source, "a tree with missing or spare nodes", "two children for each inner node")
    level_end, depths = roots[:-1] + 1, np.zeros(len(sizes), np.int64)
    while (unfinished := level_end < roots[1:]).any():
        next_end = roots[:-1] + 1 + 2 * (inner_before[level_end] - at_root)
        if (next_end[unfinished] == level_end[unfinished]).any():
            raise _bad(source, "nodes that no walk from the root reaches", "trees laid out breadth first")
        level_end, depths = next_end, depths + unfinished
        if depths.max() > MAX_DEPTH:
            raise _bad(source, f"a tree deeper than {MAX_DEPTH} levels", "less (raise min_samples_leaf)")
    tree = np.repeat(np.arange(len(sizes)), sizes)
    left = roots[tree] + 1 + 2 * (inner_before[:-1] - at_root[tree])
    step = np.where(inner, left - np.arange(len(inner)), 0)
    return roots, step, depths


def _check_rows(forest: Forest, rows: ArrayLike) -> Float32:
    """The rows as float32, as in the trees' training."""
    try:
        with np.errstate(over="ignore"):
            checked = np.asarray(rows).astype(np.float32, copy=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"got rows that are no table of numbers ({error}), expected (rows, features)"
        ) from error
    if checked.ndim != 2 or checked.shape[1] != forest.n_features:
        raise InputError(
            f"got rows of shape {checked.shape}, expected (rows, {forest.n_features}): "
            f"give one column for each of {forest.feature_names[0]} .. {forest.feature_names[-1]}"
        )
    finite = np.isfinite(checked)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise InputError(
            f"feature {forest.feature_names[column]} of row {row} is {checked[row, column]} in float32, "
            "expected a finite number: check the layer sizes and the batch size it was computed from"
        )
    return checked


def _check_array(
    source: str, name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    if array.dtype != dtype or array.shape != shape or 0 in shape:
        raise _bad(source, f"{name} of {array.dtype} {array.shape}", f"{np.dtype(dtype)} {shape}, not empty")


def _bad(source: str, found: str, expected: str) -> ProfileError:
    return ProfileError(f"{source}: found {found}, expected {expected}: {REBUILD}")


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


# files ------------------------------------------------------------------------------------------------------
#
# Several forests lie in one safetensors file, each under its name as a prefix. Forest ``gamma`` is the
# tensors ``gamma.feature`` (int16, -1 marks a leaf), ``gamma.payload`` (float32), ``gamma.sizes`` (int32,
# nodes of each tree) and ``gamma.hull`` (float32, 2 x features), with the JSON document ``gamma`` in the
# metadata for all else: six bytes a node.

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
