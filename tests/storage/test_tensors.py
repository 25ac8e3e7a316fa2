"""Tensors: what is written reads back byte for byte, and no header can make the reader misbehave."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from torchedge.errors import ProfileError
from torchedge.storage.tensors import DTYPES, MAX_HEADER_BYTES, read_tensors, write_tensors

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
ARRAYS = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda code: hnp.arrays(
        code,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        elements={"allow_nan": False, "allow_infinity": False} if "f" in code else None,
    )
)
NAMES = st.text("abc._-é", min_size=1, max_size=5)


def file_of(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(tmp_path, content, says="", **options):
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=says) as caught:
        read_tensors(path, **options)
    assert "t.safetensors" in str(caught.value) and "\n" not in str(caught.value)


@given(st.dictionaries(NAMES, ARRAYS, max_size=4), st.dictionaries(NAMES, st.text(max_size=5), max_size=3))
def test_tensors_read_back_read_only(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("tensors") / "t.safetensors"
    try:
        write_tensors(path, tensors, metadata)
    except ProfileError:
        assert any("\ud800" <= c <= "\udfff" for text in metadata.values() for c in text)
        return
    found, notes = read_tensors(path)
    assert notes == metadata and set(found) == set(tensors)
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert np.array_equal(found[name], array) and not found[name].flags.writeable
    assert {name: array.tobytes() for name, array in load(path.read_bytes()).items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }


def test_the_same_content_gives_the_same_bytes(tmp_path):
    tensors = {name: np.arange(3, dtype=np.int16) for name in "xyz"}
    metadata = {str(index): "v" for index in range(30)}
    write_tensors(tmp_path / "1", tensors, metadata)
    write_tensors(tmp_path / "2", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_files_of_the_format_s_own_writer_are_read(tmp_path):
    (tmp_path / "t").write_bytes(save({"a": np.eye(3, dtype=np.float16)}, {"k": "v"}))
    tensors, metadata = read_tensors(tmp_path / "t")
    assert metadata == {"k": "v"} and np.array_equal(tensors["a"], np.eye(3))


def test_big_endian_and_strided_arrays_are_stored_right(tmp_path):
    array = np.arange(12, dtype=">f4").reshape(3, 4).T[::2]
    write_tensors(tmp_path / "t", {"a": array})
    assert np.array_equal(read_tensors(tmp_path / "t")[0]["a"], array)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header"),
        (struct.pack("<Q", 2**63) + b"{}", "header"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * (MAX_HEADER_BYTES + 2), "header"),
        (file_of(b"{" * 100), "JSON"),
        (file_of(b"[]", b""), "object"),
        (file_of({"__metadata__": [1]}, b""), "metadata"),
        (file_of({"__metadata__": {"a": 1}}, b""), "metadata"),
        (file_of({"a": 1}), "exactly"),
        (file_of({"a": GOOD["a"] | {"more": 1}}), "exactly"),
        (file_of({"a": GOOD["a"] | {"dtype": "PICKLE"}}), "dtype"),
        (file_of({"a": GOOD["a"] | {"dtype": ["F32"]}}), "dtype"),
        (file_of({"a": GOOD["a"] | {"shape": [-2]}}), "shape"),
        (file_of({"a": GOOD["a"] | {"shape": [True]}}), "shape"),
        (file_of({"a": GOOD["a"] | {"shape": [2**62, 2**62]}}), "bytes"),
        (file_of({"a": GOOD["a"] | {"shape": [1] * 17}}), "shape"),
        (file_of({"a": GOOD["a"] | {"data_offsets": [8, 0]}}), "bytes"),
        (file_of({"a": GOOD["a"] | {"data_offsets": [0.0, 8.0]}}), "data_offsets"),
        (file_of({"a": GOOD["a"] | {"data_offsets": [8, 16]}}, b"\0" * 16), "gap"),
        (file_of(GOOD | {"b": GOOD["a"]}), "overlap"),
        (file_of(GOOD, b"\0" * 9), "bytes"),
        (file_of(GOOD, b"\0" * 7), "bytes"),
        (file_of({"": GOOD["a"]}), "name"),
        (file_of({"a\n": GOOD["a"]}), "name"),
        (file_of(b'{"a":' + json.dumps(GOOD["a"]).encode() + b',"a":1}'), "twice"),
        (file_of(GOOD, struct.pack("<ff", 1, float("nan"))), "NaN"),
        (file_of({"a": {"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]}}, b"\7" * 8), "boolean"),
    ],
)
def test_hostile_files_are_refused_in_one_line(tmp_path, content, says):
    refused(tmp_path, content, says)


def test_non_finite_numbers_can_be_asked_for(tmp_path):
    (tmp_path / "t").write_bytes(file_of(GOOD, struct.pack("<ff", 1, float("inf"))))
    assert np.isinf(read_tensors(tmp_path / "t", finite=False)[0]["a"][1])


def test_size_is_bounded(tmp_path):
    refused(tmp_path, file_of(GOOD), "at most 8", max_bytes=8)


@given(st.data())
def test_any_damage_gives_arrays_or_a_profile_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "t.safetensors"
    write_tensors(path, {"a": np.arange(4.0), "b": np.arange(3, dtype=np.int8)}, {"k": "v"})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    try:
        read_tensors(path)
    except ProfileError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": np.zeros(1, dtype=object)},
        {"a": np.zeros(1, dtype=complex)},
        {"": np.zeros(1)},
        {"__metadata__": np.zeros(1)},
        {str(index): np.zeros(0) for index in range(40_000)},
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, tensors):
    with pytest.raises(ProfileError):
        write_tensors(tmp_path / "t", tensors)
    assert not list(tmp_path.iterdir())
