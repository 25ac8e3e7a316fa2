"""Instances as data and as files: what is written reads back, the meaningless and hostile is refused."""

import gzip
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from oracles.random_instances import CHUNK_BYTES, instances, layer, weight

from torchedge.errors import InputError, ProfileError, TorchedgeError
from torchedge.streaming.instances import (
    INSTANCES,
    MAX_CHUNKS,
    Instance,
    Weight,
    read_instance,
    write_instance,
)

INSTANCE = Instance(
    CHUNK_BYTES,
    (layer(1, 2), layer(2, 0)),
    (weight(0, 3, 2, 2, missing_bytes=1), weight(1, 1, 1, 2)),
    m_peak_chunks=4,
)


def document(**changes):
    return INSTANCES.document(INSTANCE) | changes


def refused(text, tmp_path, error=TorchedgeError, suffix=".json"):
    """Read a file that has to be refused in one line; return the line."""
    path = tmp_path / f"x{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error) as caught:
        read_instance(path)
    line = str(caught.value)
    assert str(path) in line and "\n" not in line and len(line) < 500
    return line


def refused_entry(where, value, tmp_path):
    """Put a value at a path into the document, or remove what is there; return the line that refuses it."""
    made = json.loads(json.dumps(document()))
    *way, last = where
    entry = made
    for step in way:
        entry = entry[step]
    if value is ...:
        del entry[last]
    else:
        entry[last] = value
    return refused(json.dumps(made), tmp_path, InputError)


def entry(name, chunks):
    return {"name": name, "bytes": chunks * CHUNK_BYTES, "chunks": chunks, "first_use": 2, "last_use": 2}


# what is good -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(instances())
def test_what_is_written_reads_back(tmp_path, instance):
    for name in ("i.json", "i.json.gz"):
        write_instance(tmp_path / name, instance)
        assert read_instance(tmp_path / name) == instance


@pytest.mark.parametrize(
    "changes",
    [
        {"m_peak_chunks": None},
        {"m_peak_chunks": 0},
        {"memory_chunks": None},
        {"lambda": 0},
        {"lambda": 1},
        {"weights": []},
        {"weights": [entry("big", 10**7)]},
    ],
)
def test_unusual_and_fine(changes, tmp_path):
    (tmp_path / "i.json").write_text(json.dumps(document(**changes)))
    instance = read_instance(tmp_path / "i.json")
    assert INSTANCES.parse("again", INSTANCES.document(instance)) == instance


# what is not ------------------------------------------------------------------------------------------------

WRONG = {
    "10^7 chunks of no bytes": (("weights", 0, "chunks"), 10**7, "expected 3 chunks"),
    "too few chunks": (("weights", 0, "chunks"), 2, "2 chunks of 1024 bytes for 3071 bytes; expected 3"),
    "used after the last layer": (("weights", 0, "last_use"), 3, "last_use is 3"),
    "last use before the first": (("weights", 0, "last_use"), 1, "last_use 1 comes before first_use 2"),
    "name twice": (("weights", 1, "name"), "w0", "two weights are called 'w0'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_entries_are_named(case, tmp_path):
    where, value, says = WRONG[case]
    line = refused_entry(where, value, tmp_path)
    assert says in line, line
    assert "docs/streaming-files.md" in line


@pytest.mark.parametrize(
    ("data", "says"), [(b"{}", "gzip"), (gzip.compress(b"{}" * 99, mtime=0)[:20], "cut off")]
)
def test_damaged_packed_files(data, says, tmp_path):
    assert says in refused(data, tmp_path, ProfileError, ".json.gz")


HUGE = {
    "nan": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "5000 digits": 10**5000,
    "minus 5000 digits": -(10**5000),
    "long text": "x" * 10**6,
    "long list": [0] * 10**6,
}


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", ["chunk_bytes", "lam", "m_peak_chunks", "memory_chunks"])
def test_values_that_no_file_can_hold(key, value):
    with pytest.raises(InputError) as caught:
        replace(INSTANCE, **{key: HUGE[value]})
    assert len(str(caught.value)) < 200


def test_as_many_chunks_as_allowed():
    fits = Weight("w", MAX_CHUNKS * CHUNK_BYTES, MAX_CHUNKS, 2, 2)
    assert replace(INSTANCE, weights=(fits,)).total_chunks == MAX_CHUNKS
    with pytest.raises(InputError, match="chunks is 2147483649"):
        replace(INSTANCE, weights=(replace(fits, nbytes=fits.nbytes + 1, chunks=MAX_CHUNKS + 1),))


@pytest.mark.parametrize(("key", "entry"), [("layers", layer(1, 1)), ("weights", weight(0, 1, 1, 1))])
def test_too_many_entries(key, entry):
    with pytest.raises(InputError, match=f"{key} is a list of 100001 .* expected .* 100,000 entries"):
        replace(INSTANCE, **{key: (entry,) * 100_001})
