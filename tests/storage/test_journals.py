"""A journal survives a torn last line at any byte, and damage anywhere else is named."""

import json
import os

import pytest

from torchedge.errors import InputError, ProfileError
from torchedge.storage.journals import Journal, read_rows

ROWS = [{"kind": "header"}, {"value": 1.5, "text": "Γ\n"}, {"list": [1, None]}]


@pytest.fixture
def path(tmp_path):
    """A place for a journal."""
    return tmp_path / "journal.jsonl"


@pytest.fixture
def data(path):
    """The bytes of a journal of `ROWS` at that place."""
    with Journal(path) as journal:
        for row in ROWS:
            journal.append(row)
    return path.read_bytes()


def test_rows_come_back_with_their_places(path):
    with Journal(path) as journal:
        places = [journal.append(row) for row in ROWS]
    with Journal(path) as journal:
        assert list(journal.rows()) == list(zip(places, ROWS, strict=True))
        last = journal.append({"kind": "more"})
        assert journal.row_at(places[1]) == ROWS[1] and journal.row_at(last) == {"kind": "more"}
        assert [row for _, row in journal.rows()] == [*ROWS, {"kind": "more"}]


def test_a_line_torn_at_any_byte_is_cut_off(path, data):
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with Journal(path) as journal:
            whole = len(list(journal.rows()))
            assert whole == data[:cut].count(b"\n")
            journal.append(ROWS[-1])
            assert [row for _, row in journal.rows()] == [*ROWS[:whole], ROWS[-1]]


@pytest.mark.parametrize("line", [b"garbage", b"[]", b"\x00", b"", b'{"a":NaN}', b'{"a":1}'])
def test_damage_is_named(path, data, line):
    path.write_bytes(data + line + b"\n" + data)
    with pytest.raises(ProfileError, match="line 4"), Journal(path) as journal:
        list(journal.rows())


@pytest.mark.parametrize("zeros", [b"\0", b"\0" * 20, b'{"a":\0\0\0\n', b"\0\0\n"])
def test_bytes_that_a_loss_of_power_zeroed_are_cut_off(path, data, zeros):
    path.write_bytes(data + zeros)
    assert list(read_rows(path)) == ROWS
    with Journal(path) as journal:
        assert [row for _, row in journal.rows()] == ROWS
    assert path.read_bytes() == data


def test_a_changed_byte_is_named_or_changes_nothing(path, data):
    refused = 0
    for place in range(len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            rows = list(read_rows(path))
        except ProfileError as error:
            refused += 1
            assert "line" in str(error)
        else:  # the word for the checksum of the first line
            assert rows[0].items() >= ROWS[0].items() and rows[1:] == ROWS[1:]
    assert refused == len(data) - 1 - len("crc32")


def test_journals_of_earlier_versions_go_on(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with Journal(path) as journal:
        assert [row for _, row in journal.rows()] == ROWS
        journal.append(ROWS[0])
    assert list(read_rows(path)) == [*ROWS, ROWS[0]]
    path.write_bytes(path.read_bytes() + b'{"row":"without a checksum"}\n')
    with pytest.raises(ProfileError, match="line 5: its checksum"):
        list(read_rows(path))


def test_one_process_at_a_time(path):
    pytest.importorskip("fcntl")
    with Journal(path), pytest.raises(ProfileError, match="another torchedge"), Journal(path):
        pass
    with Journal(path):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        Journal(tmp_path / "missing" / "journal.jsonl", error=InputError).__enter__()


def test_a_full_disk_leaves_whole_lines(path, monkeypatch):
    with Journal(path) as journal:
        journal.append(ROWS[0])

        def full(number):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(ProfileError, match="make room"):
                journal.append(ROWS[1])
        journal.append(ROWS[2])
        assert [row for _, row in journal.rows()] == [ROWS[0], ROWS[2]]


def test_rows_are_read_while_another_writes(path):
    assert list(read_rows(path)) == []
    with Journal(path) as journal:
        journal.append(ROWS[0])
        assert list(read_rows(path)) == ROWS[:1]
    path.write_bytes(path.read_bytes() + b'{"torn')
    assert list(read_rows(path)) == ROWS[:1] and path.read_bytes().endswith(b"torn")


@pytest.mark.parametrize("content", [b"\x00\xff\x80", b"hello", b'{"mine": 1}', b"\x89PNG", "{é".encode()])
def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "mine"
    path.write_bytes(content)
    with Journal(path) as journal, pytest.raises(ProfileError, match="is no journal of torchedge"):
        list(journal.rows())
    assert path.read_bytes() == content
