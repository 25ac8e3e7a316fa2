"""Documents: what is written reads back, the hostile is refused in one line, writing is all or nothing."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchedge.errors import InputError, ProfileError
from torchedge.storage import read_json, read_toml, write_json, write_toml
from torchedge.storage.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_VALUES,
    first_repeated,
    parse_json,
    parse_toml,
    read_bytes,
    reading,
    writing,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = (
    TEXT
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(TEXT, VALUES, max_size=4)


@pytest.mark.slow
@given(DOCUMENTS)
def test_toml_and_json_read_back_what_was_written(tmp_path_factory, document):
    folder = tmp_path_factory.mktemp("documents")
    write_toml(folder / "d.toml", document)
    write_json(folder / "d.json", document)
    assert read_toml(folder / "d.toml") == document
    assert read_json(folder / "d.json") == document
    assert sorted(os.listdir(folder)) == ["d.json", "d.toml"]


def test_json_is_packed_where_its_name_says_so(tmp_path):
    write_json(tmp_path / "d.json.gz", {"a": [1] * 1000})
    assert (tmp_path / "d.json.gz").stat().st_size < 200
    assert read_json(tmp_path / "d.json.gz") == {"a": [1] * 1000}
    before = (tmp_path / "d.json.gz").read_bytes()
    write_json(tmp_path / "d.json.gz", {"a": [1] * 1000})
    assert (tmp_path / "d.json.gz").read_bytes() == before


@given(st.binary(max_size=200) | st.text("[]{}=.\"'#\n\\u ab01einf,:", max_size=60).map(str.encode))
def test_any_bytes_give_a_document_or_a_profile_error(data):
    for parse in (parse_toml, parse_json):
        try:
            assert isinstance(parse("hostile", data), dict)
        except ProfileError as error:
            assert str(error).startswith("hostile") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_toml, "a = nan", "finite"),
        (parse_toml, "a = [1, {b = -inf}]", "finite"),
        (parse_toml, "a = 99999999999999999999", "64 bits"),
        (parse_toml, "a = " + "[" * 5000, "nested too deep"),
        (parse_toml, "a = " + "[" * 40 + "]" * 40, "32 deep"),
        (parse_toml, ".".join("a" * 100_000) + " = 1", "dotted key"),
        (parse_toml, "a = 1\na = 2", "not valid TOML"),
        (parse_toml, "\xff".encode("latin-1").decode("latin-1") + "=", "not valid TOML"),
        (parse_json, '{"a": NaN}', "NaN"),
        (parse_json, '{"a": 1e999}', "finite"),
        (parse_json, '{"a": 1, "a": 2}', "twice"),
        (parse_json, "[" * 100_000, "nested too deep"),
        (parse_json, "[1]", "expected a JSON object"),
        (parse_json, '{"a": ' + "9" * 5000 + "}", "f.x"),
    ],
)
def test_hostile_documents_are_refused_in_one_line(parse, text, says):
    with pytest.raises(ProfileError, match=says) as caught:
        parse("f.x", text.encode())
    assert "f.x" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [b"[],", b"{},", b'{"a":1},', b"0,", b"["])
def test_more_values_than_fit_in_memory_are_refused_before_they_are_parsed(value):
    text = b'{"a":[' + value * (MAX_VALUES // sum(map(value.count, b"[{,:")) + 1) + b"0]}"
    with pytest.raises(ProfileError, match=f"values, expected at most {MAX_VALUES}"):
        parse_json("x", text)


def test_the_first_repeated_name_is_found_without_counting_each():
    names = [f"n{number}" for number in range(200_000)]
    assert first_repeated(names) == ""
    assert first_repeated([*names, "n7", "n3"]) == "n7"


def test_files_are_bounded_and_regular(tmp_path):
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * (MAX_DOCUMENT_BYTES + 1))
    with pytest.raises(ProfileError, match="at most"):
        read_toml(big)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ProfileError, match=r"regular|directory"):
        read_bytes(tmp_path)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_bytes("a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="regular"):
        read_bytes(tmp_path / "pipe")


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "d.json"
    write_json(path, {"a": 1})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchedge.storage.documents.os.replace", fail)
    with pytest.raises(ProfileError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["d.json"]


@pytest.mark.parametrize("value", [float("nan"), object(), b"x", {1: 2}, "\ud800", None])
def test_what_toml_cannot_hold_is_refused_and_leaves_nothing(tmp_path, value):
    with pytest.raises(ProfileError, match=r"d\.toml"):
        write_toml(tmp_path / "d.toml", {"a": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("convert", "reason"),
    [
        (lambda: {}["mode"], "no 'mode'"),
        (lambda: int("x"), "invalid literal"),
        (lambda: 1 / 0, "division by zero"),
        (lambda: [].mode, "no attribute"),
    ],
)
def test_a_malformed_part_of_a_file_is_named(convert, reason):
    message = rf"rows line 3: not a row \(.*{reason}.*\); expected id, mode"
    with pytest.raises(ProfileError, match=message), reading("rows line 3", "a row", "id, mode"):
        convert()
    with pytest.raises(InputError, match=r"^as it is$"), reading("rows line 3", "a row", "id, mode"):
        raise InputError("as it is")


def test_a_file_that_cannot_be_written_is_named_with_a_remedy(tmp_path):
    message = r"nowhere: cannot be written \(No such file.*\); choose another"
    with pytest.raises(InputError, match=message), writing("nowhere", "choose another", InputError):
        (tmp_path / "none" / "file").write_text("")
