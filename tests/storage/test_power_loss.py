"""After a loss of power at any moment nothing is half, and nothing is lost that was acknowledged."""

import numpy as np
import pytest
from oracles.power_loss import Disk

from torchedge.opencl.binary_caches import BinaryCache
from torchedge.searching.evolution import SearchJournal
from torchedge.storage.documents import read_json, write_bytes, write_json
from torchedge.storage.journals import Journal, read_rows

ROWS = [{"kind": "header"}, {"value": 1.5, "text": "Γ" * 40}, {"list": [1, None]}]


@pytest.fixture
def disk(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    return Disk(root)


def test_the_oracle_finds_what_is_not_synchronised(disk, tmp_path):
    with disk.recording():
        (disk.root / "file").write_bytes(b"new")
        disk.acknowledged = True
    left = [
        (folder / "file").read_bytes() if (folder / "file").exists() else None
        for folder, acknowledged in disk.crashes(tmp_path / "left")
        if acknowledged
    ]
    assert {None, b"", b"\0\0\0", b"new"} == set(left)


def test_journals(disk, tmp_path):
    with disk.recording(), Journal(disk.root / "rows.jsonl") as journal:
        for count, row in enumerate(ROWS, 1):
            journal.append(row)
            disk.acknowledged = count
    states = 0
    for folder, acknowledged in disk.crashes(tmp_path / "left"):
        with Journal(folder / "rows.jsonl") as journal:
            rows = [row for _, row in journal.rows()]
            journal.append({"more": 1})
        assert rows == ROWS[: len(rows)] and len(rows) >= (acknowledged or 0)
        assert list(read_rows(folder / "rows.jsonl")) == [*rows, {"more": 1}]
        states += 1
    assert states > 10


def test_journals_of_searches_in_folders_of_their_own(disk, tmp_path):
    header = {"figures": ["latency"], "genes": 2}
    with disk.recording(), SearchJournal(disk.root / "a" / "b" / "search.jsonl", header) as journal:
        for count in range(1, 4):
            journal.add(np.full((1, 2), count), np.ones((1, 1)), np.ones(1))
            disk.acknowledged = count
    for folder, acknowledged in disk.crashes(tmp_path / "left"):
        with SearchJournal(folder / "a" / "b" / "search.jsonl", header) as journal:
            assert len(journal.records) >= (acknowledged or 0)


def test_documents_are_the_old_or_the_new(disk, tmp_path):
    write_json(disk.root / "plan.json", {"version": 0})
    with disk.recording():
        for version in (1, 2):
            write_json(disk.root / "plan.json", {"version": version})
            disk.acknowledged = version
    seen = set()
    for folder, acknowledged in disk.crashes(tmp_path / "left"):
        version = read_json(folder / "plan.json")["version"]
        assert version in (acknowledged or 0, (acknowledged or 0) + 1)
        seen.add(version)
    assert seen == {0, 1, 2}


def test_entries_of_caches_are_whole_or_absent(disk, tmp_path):
    contents = {"a" * 64: b"first" * 100, "b" * 64: b"second"}
    with disk.recording():
        cache = BinaryCache(disk.root / "cache")
        for key, content in contents.items():
            cache.write(key, content)
        cache.write("a" * 64, b"again")
    for folder, _ in disk.crashes(tmp_path / "left"):
        (folder / "cache").exists() and (folder / "cache").chmod(0o700)
        cache = BinaryCache(folder / "cache")
        assert cache.read("a" * 64) in (None, contents["a" * 64], b"again")
        assert cache.read("b" * 64) in (None, contents["b" * 64])
        write_bytes(folder / "more", b"")
