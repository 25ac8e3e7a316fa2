"""Evaluation against a plain tree walk, round trips through files, and files made to harm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchedge.errors import InputError, ProfileError
from torchedge.forests import trees as forests_module
from torchedge.forests.trees import (
    Forest,
    build_forest,
    evaluate,
    feature_hash,
    features_outside,
    outside_hull,
    read_forests,
    write_forests,
)
from torchedge.storage.tensors import read_tensors, write_tensors

NAMES = ("a", "b", "c")


def random_parts(seed: int, trees: int = 3, depth: int = 6) -> dict[str, Any]:
    """Arguments of build_forest for random trees, breadth first."""
    rng = np.random.default_rng(seed)
    feature, sizes = [], []
    for _ in range(trees):
        level, before = 1, len(feature)
        for below in range(depth, -1, -1):
            inner = rng.random(level) < 0.75 if below else np.zeros(level, bool)
            feature += np.where(inner, rng.integers(0, 3, level), -1).tolist()
            level = 2 * int(inner.sum())
            if not level:
                break
        sizes.append(len(feature) - before)
    return {
        "learner": "random",
        "feature_names": NAMES,
        "feature": np.array(feature, np.int16),
        "payload": rng.normal(size=len(feature)).astype(np.float32),
        "sizes": np.array(sizes, np.int32),
        "hull": np.array([[-1, -1, -1], [1, 1, 1]], np.float32),
        "scale": 1 / trees,
        "offset": 0.5,
        "metadata": {"dataset": "random", "date": "2026-11-21"},
    }


def walk(parts: dict[str, Any], row: np.ndarray) -> list[np.float32]:
    """The oracle: one row down each tree, finding children by counting inner nodes."""
    leaves, start = [], 0
    for size in parts["sizes"]:
        feature, payload = parts["feature"][start : start + size], parts["payload"][start : start + size]
        node = 0
        while feature[node] >= 0:
            right = np.float32(row[feature[node]]) > payload[node]
            node = 2 * int((feature[:node] >= 0).sum()) + 1 + int(right)
        leaves.append(payload[node])
        start += size
    return leaves


@given(seed=st.integers(0, 2**31), trees=st.integers(1, 5), depth=st.integers(0, 9), rows=st.integers(0, 7))
@settings(max_examples=60)
def test_evaluates_as_a_plain_walk(seed: int, trees: int, depth: int, rows: int) -> None:
    parts = random_parts(seed, trees, depth)
    forest = build_forest(**parts)
    X = np.random.default_rng(seed).normal(size=(rows, 3))
    expected = np.array([walk(parts, row) for row in X], np.float32).reshape(rows, trees)
    np.testing.assert_allclose(
        evaluate(forest, X), 0.5 + expected.astype(float).sum(axis=1) / trees, rtol=1e-9, atol=1e-12
    )  # the sums run in another order


def test_a_row_does_not_depend_on_its_company() -> None:
    """Blocks of rows and of trees change with the number of rows; not one bit of the result may."""
    parts = random_parts(1, trees=200, depth=5)
    parts["payload"] = (parts["payload"] * 10.0 ** np.linspace(-15, 15, len(parts["payload"]))).astype(
        np.float32
    )
    forest = build_forest(**parts)
    X = np.random.default_rng(0).normal(size=(9001, 3))
    together = evaluate(forest, X)
    for start, stop in ((0, 1), (7, 8), (0, 100), (4095, 4097), (8000, 9001)):
        assert np.array_equal(evaluate(forest, X[start:stop]), together[start:stop])


def test_hull() -> None:
    forest = build_forest(**random_parts(2))
    rows = np.array([[0, 0, 0], [1, -1, 1], [0, 1.001, 0], [-9, 0, 9]])
    assert outside_hull(forest, rows).tolist() == [False, False, True, True]
    assert features_outside(forest, rows[:2]) == ()
    assert features_outside(forest, rows[2:3]) == ("b",)
    assert features_outside(forest, rows) == ("a", "b", "c")


@pytest.mark.parametrize(
    "rows",
    [np.zeros(3), np.zeros((2, 4)), [[0, 0, np.nan]], [[0, 0, 1e39]], [["x", "y", "z"]], [[0], [0, 1]]],
)
@pytest.mark.parametrize("verb", [evaluate, outside_hull, features_outside])
def test_bad_rows_are_named(verb: Any, rows: Any) -> None:
    with pytest.raises(InputError, match="expected") as caught:
        verb(build_forest(**random_parts(2)), rows)
    assert "\n" not in str(caught.value)


def test_the_noun_is_read_only_and_small() -> None:
    forest = build_forest(**random_parts(3, trees=50, depth=9))
    with pytest.raises(AttributeError):
        forest.scale = 2.0  # type: ignore[misc]
    for array in (forest.feature, forest.payload, forest.step, forest.roots, forest.low):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    fields = ("feature", "payload", "step", "roots", "depths", "low", "high")
    nodes = len(forest.payload)
    assert sum(getattr(forest, name).nbytes for name in fields) <= 7 * nodes + 1100
    assert repr(forest) == f"Forest(random, 50 trees, {nodes} nodes, 3 features)"


def same(first: Forest, second: Forest) -> bool:
    X = np.random.default_rng(0).normal(size=(50, 3))
    return (
        np.array_equal(evaluate(first, X), evaluate(second, X))
        and (first.learner, first.feature_names, first.metadata, first.scale, first.offset)
        == (second.learner, second.feature_names, second.metadata, second.scale, second.offset)
        and np.array_equal(first.low, second.low)
        and np.array_equal(first.high, second.high)
    )


def test_round_trip_of_several_forests(tmp_path: Path) -> None:
    grown = {"gamma": build_forest(**random_parts(4)), "phi": build_forest(**random_parts(5, trees=9))}
    write_forests(tmp_path / "a.safetensors", grown)
    read = read_forests(tmp_path / "a.safetensors", {"gamma": NAMES, "phi": NAMES})
    assert list(read) == ["gamma", "phi"]
    assert all(same(read[name], grown[name]) for name in grown)
    write_forests(tmp_path / "b.safetensors", dict(reversed(read.items())))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert list(read_forests(tmp_path / "a.safetensors", {"phi": NAMES})) == ["phi"]
    assert sorted(read_forests(tmp_path / "a.safetensors")) == ["gamma", "phi"]
    optional = {"phi": NAMES, "absent": NAMES}
    assert sorted(read_forests(tmp_path / "a.safetensors", {"gamma": NAMES}, optional)) == ["gamma", "phi"]
    with pytest.raises(ProfileError, match="first difference at 0"):
        read_forests(tmp_path / "a.safetensors", {"gamma": NAMES}, {"phi": NAMES[::-1]})


def test_wide_rows_and_large_trees_keep_their_indices(tmp_path: Path) -> None:
    """More than 255 features and steps beyond 16 bits take wider arrays, and come back the same."""
    names = [f"f{i}" for i in range(300)]
    inner = 2**17 - 1
    feature = np.concatenate([np.full(inner, 299), np.full(inner + 1, -1)]).astype(np.int16)
    payload = np.arange(2 * inner + 1, dtype=np.float32)
    payload[:inner] = 0
    forest = build_forest(
        learner="wide",
        feature_names=names,
        feature=feature,
        payload=payload,
        sizes=np.array([2 * inner + 1], np.int32),
        hull=np.stack([np.zeros(300), np.ones(300)]).astype(np.float32),
        scale=1.0,
    )
    write_forests(tmp_path / "w.safetensors", {"w": forest})
    read = read_forests(tmp_path / "w.safetensors")["w"]
    rows = np.zeros((2, 300))
    rows[1, 299] = 1
    assert evaluate(read, rows).tolist() == [float(inner), float(2 * inner)]


def test_write_refuses_bad_names(tmp_path: Path) -> None:
    forest = build_forest(**random_parts(4))
    for bad in ({}, {"schema": forest}, {"../x": forest}, {"Gamma": forest}, {"": forest}):
        with pytest.raises(ProfileError, match="expected"):
            write_forests(tmp_path / "a.safetensors", bad)
    assert not list(tmp_path.iterdir())


def refused(path: Path, expected: Any = None) -> str:
    """The message of the ProfileError that reading must give: one line, the file, and the way out."""
    with pytest.raises(ProfileError) as caught:
        read_forests(path, expected)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 1000
    return message


def test_feature_order_mismatch_names_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write_forests(path, {"phi": build_forest(**random_parts(6))})
    message = refused(path, {"phi": ("a", "c", "b")})
    assert "first difference at 1: 'b', not 'c'" in message and "torchedge fit" in message
    assert "expected 4" in refused(path, {"phi": (*NAMES, "d")})
    assert "expected gamma" in refused(path, {"gamma": NAMES})


def chain(depth: int) -> dict[str, Any]:
    """A tree that goes one node deeper at every level."""
    parts = random_parts(0, trees=1)
    feature = np.array([0] + [0, -1] * (depth - 1) + [-1, -1], np.int16)
    sizes = np.array([len(feature)], np.int32)
    return {**parts, "feature": feature, "payload": np.zeros(len(feature), np.float32), "sizes": sizes}


def test_depth_is_bounded() -> None:
    bound = forests_module.MAX_DEPTH
    assert build_forest(**chain(bound)).depths.tolist() == [bound]
    with pytest.raises(ProfileError, match="deeper than"):
        build_forest(**chain(bound + 1))


def small(feature: list[int]) -> dict[str, np.ndarray]:
    """Tensors of one tree with these features."""
    size = len(feature)
    return {
        "feature": np.array(feature, np.int16),
        "payload": np.zeros(size, np.float32),
        "sizes": np.array([size], np.int32),
    }


HOSTILE_TENSORS: dict[str, dict[str, np.ndarray]] = {
    "feature index beyond the features": small([3, -1, -1]),
    "feature index of int16's end": small([32767, -1, -1]),
    "negative feature index": small([-2, -1, -1]),
    "children missing": small([0, 0, -1]),
    "no leaf at all": small([0, 0, 0]),
    "nodes that nothing reaches (a loop among themselves)": small([-1, 0, -1]),
    "unreached and cut off later": small([0, -1, -1, 0, -1]),
    "even number of nodes": small([0, -1, -1, -1]),
    "children of another tree": {**small([0, -1, -1]), "sizes": np.array([1, 2], np.int32)},
    "two trees, borders shifted": {**small([0, -1, -1, 0, -1, -1]), "sizes": np.array([5, 1], np.int32)},
    "empty tree": {**small([0, -1, -1]), "sizes": np.array([0, 3], np.int32)},
    "negative tree": {**small([0, -1, -1]), "sizes": np.array([-1, 4], np.int32)},
    "sizes that overflow": {**small([0, -1, -1]), "sizes": np.full(4, 2**31 - 1, np.int32)},
    "sizes beyond the nodes": {**small([0, -1, -1]), "sizes": np.array([2_000_000_001], np.int32)},
    "no trees": {**small([0, -1, -1]), "sizes": np.zeros(0, np.int32)},
    "too many trees": {**small([-1] * 5000), "sizes": np.ones(5000, np.int32)},
    "no nodes": small([]),
    "payload shorter": {"payload": np.zeros(2, np.float32)},
    "payload NaN": {**small([0, -1, -1]), "payload": np.array([0, np.nan, 0], np.float32)},
    "payload infinite": {**small([0, -1, -1]), "payload": np.array([np.inf, 0, 0], np.float32)},
    "payload float64": {**small([-1]), "payload": np.zeros(1)},
    "payload two-dimensional": {**small([-1]), "payload": np.zeros((1, 1), np.float32)},
    "feature int64": {**small([-1]), "feature": np.array([-1])},
    "feature float32": {**small([-1]), "feature": np.array([-1], np.float32)},
    "feature a scalar": {**small([-1]), "feature": np.array(-1, np.int16)},
    "sizes a scalar": {**small([-1]), "sizes": np.array(1, np.int32)},
    "hull of another width": {"hull": np.zeros((2, 4), np.float32)},
    "hull of one row": {"hull": np.zeros((1, 3), np.float32)},
    "hull NaN": {"hull": np.full((2, 3), np.nan, np.float32)},
    "hull turned round": {"hull": np.array([[1, 1, 1], [0, 0, 0]], np.float32)},
}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray], dict[str, str]]:
    """A good file with its tensors and metadata, to spoil."""
    path = tmp_path / "f.safetensors"
    write_forests(path, {"phi": build_forest(**random_parts(7))})
    return path, *read_tensors(path, max_bytes=10**6)


@pytest.mark.parametrize("what", HOSTILE_TENSORS)
def test_hostile_tensors(what: str, stored: Any) -> None:
    path, tensors, metadata = stored
    spoiled = {f"phi.{name}": array for name, array in HOSTILE_TENSORS[what].items()}
    write_tensors(path, {**tensors, **spoiled}, metadata)
    refused(path)


HOSTILE_DOCUMENTS: dict[str, dict[str, Any]] = {
    "other feature count": {"features": ["a", "b"], "feature_hash": feature_hash(["a", "b"])},
    "no features": {"features": [], "feature_hash": feature_hash([])},
    "same feature twice": {"features": ["a", "b", "b"], "feature_hash": feature_hash(["a", "b", "b"])},
    "features renamed without the hash": {"features": ["a", "b", "z"]},
    "features not text": {"features": [1, 2, 3]},
    "features unprintable": {"features": ["a\n", "b", "c"], "feature_hash": feature_hash(["a\n", "b", "c"])},
    "features half a character": {"features": ["\ud800", "b", "c"], "feature_hash": "0"},
    "features a text": {"features": "abc"},
    "hash of another type": {"feature_hash": 7},
    "scale NaN": {"scale": float("nan")},
    "scale infinite": {"scale": float("inf")},
    "scale a text": {"scale": "1"},
    "scale missing": {"scale": None},
    "offset huge": {"offset": 10**400},
    "learner a list": {"learner": []},
    "learner empty": {"learner": ""},
    "provenance nested": {"provenance": {"a": {"b": "c"}}},
    "provenance a text": {"provenance": "me"},
}


@pytest.mark.parametrize("what", HOSTILE_DOCUMENTS)
def test_hostile_documents(what: str, stored: Any) -> None:
    path, tensors, metadata = stored
    document = {**json.loads(metadata["phi"]), **HOSTILE_DOCUMENTS[what]}
    write_tensors(path, tensors, {**metadata, "phi": json.dumps(document)})
    refused(path)


def test_files_that_are_no_forests(stored: Any) -> None:
    path, tensors, metadata = stored
    for changed_tensors, changed_metadata in (
        (tensors, {}),
        (tensors, {**metadata, "schema": "torchedge-forests-99"}),
        (tensors, {"schema": metadata["schema"]}),
        (tensors, {**metadata, "gamma": metadata["phi"]}),
        (tensors, {**metadata, "../phi": metadata["phi"]}),
        ({**tensors, "spare": np.zeros(1)}, metadata),
        ({name: array for name, array in tensors.items() if name != "phi.hull"}, metadata),
    ):
        write_tensors(path, changed_tensors, changed_metadata)
        refused(path)
    refused(path.with_name("absent.safetensors"))
