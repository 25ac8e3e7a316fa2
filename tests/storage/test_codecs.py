"""Codecs: documents of nested declarations come back equal, and an error names the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import pytest
from msgspec import Meta

from torchedge.errors import InputError, ProfileError
from torchedge.storage.codecs import DERIVED, OUTSIDE, REQUIRED, Codec, Key, Text
from torchedge.storage.documents import MAX_DEPTH, parse_json


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Leaf:
    size: Annotated[int, Meta(ge=0)]
    colour: Colour = Colour.RED

    @property
    def double(self) -> Annotated[int, DERIVED]:
        return 2 * self.size


@dataclass(frozen=True)
class Tree:
    first: Leaf
    label: Annotated[str, OUTSIDE]
    leaf: Leaf | None = None
    leaves: Annotated[tuple[Leaf, ...], Key("all")] = ()
    pair: tuple[int, Leaf] | None = None
    by_name: Mapping[str, Leaf] = field(default_factory=dict)
    by_number: Annotated[Mapping[int, Leaf], REQUIRED] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    free: Mapping[str, object] = field(default_factory=dict)
    code: Text = "a"
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    exact: bool = False


CODEC = Codec(Tree, "Tree")
SMALL = {"size": 1, "double": 2}
FULL = {
    "first": SMALL,
    "leaf": {"size": 2, "colour": "blue", "double": 4},
    "all": [SMALL, {"size": 0, "double": 0}],
    "pair": [3, SMALL],
    "by_name": {"a": SMALL},
    "by_number": [[7, SMALL]],
    "sizes": [1, 2],
    "free": {"x": [1, {"y": None}]},
}


def test_a_document_becomes_nouns_and_comes_back():
    tree = CODEC.parse("x", FULL, label="outside")
    assert tree.leaf == Leaf(2, Colour.BLUE) and tree.leaves == (Leaf(1), Leaf(0))
    assert tree.pair == (3, Leaf(1)) and tree.by_name == {"a": Leaf(1)} and tree.by_number == {7: Leaf(1)}
    assert tree.label == "outside" and tree.sizes == (1, 2)
    assert CODEC.document(tree) == FULL


def test_defaults_are_omitted_where_they_are_not_required():
    assert CODEC.document(Tree(Leaf(1), "")) == {"first": SMALL, "by_number": []}
    assert CODEC.parse("x", {"first": SMALL, "by_number": []}, label="") == Tree(Leaf(1), "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": {"size": 1, "double": 3}}, r"x: first\.double is 3; expected 2"),
        ({"all": [SMALL, {"size": 1, "double": 3}]}, r"x: all\[1\]\.double is 3"),
        ({"pair": [3, {"size": 1, "double": 3}]}, r"x: pair\[1\]\.double is 3"),
        ({"by_name": {"a": {"size": 1, "double": 3}}}, r"x: by_name\.a\.double is 3"),
        ({"by_number": [[7, {"size": 1, "double": 3}]]}, r"x: by_number\[0\]\.double is 3"),
        ({"by_number": [[7, SMALL], [7, SMALL]]}, "x: by_number names a number twice"),
        ({"leaf": {"size": -1, "double": -2}}, r"x: leaf\.size is -1; expected a whole number of at least 0"),
        ({"leaf": {**SMALL, "size": 1.0}}, r"x: leaf\.size is 1.0; expected a whole number of at least 0"),
        ({"leaf": {**SMALL, "size": True}}, r"x: leaf\.size is True; expected a whole number"),
        ({"leaf": {}}, "x: leaf has no 'size'; expected size, double"),
        ({"leaf": {**SMALL, "colour": "green"}}, r"x: leaf\.colour is 'green'; expected one of red, blue"),
        ({"leaf": 3}, "x: leaf is 3; expected an object with the keys size, colour, double"),
        ({"all": {}}, r"x: all is \{\}; expected a list"),
        ({"pair": [3]}, r"x: pair is \[3\]; expected a list of 2 entries"),
        ({"by_name": []}, r"x: by_name is \[\]; expected an object"),
        ({"code": "a\nb"}, r"x: code is 'a\\nb'; expected printable text of 1 to 1000 characters"),
        ({"share": 1.5}, "x: share is 1.5; expected a number from 0 to 1"),
        ({"exact": 1}, "x: exact is 1; expected true or false"),
        ({"size": 1}, "x: the tree has the unknown key 'size'; expected 'sizes'"),
        ({"fi\x1brst": 1}, r"x: the tree has the unknown key 'fi\\x1brst'; expected 'first'"),
    ],
)
def test_an_error_names_the_place(change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        CODEC.parse("x", {**FULL, **change}, label="")


@pytest.mark.parametrize("number", ["1e999", "-1e999", str(2**63), "NaN"])
@pytest.mark.parametrize("place", ["%s", "[%s]", '{"b": [0, %s]}'])
def test_numbers_of_json_are_finite_and_fit_64_bits(number, place):
    with pytest.raises(ProfileError, match=r"finite number of at most 64 bits|not a number of JSON"):
        parse_json("x", f'{{"a": {place % number}}}'.encode())


def test_json_is_nested_up_to_a_limit():
    deep = lambda levels: b'{"a": ' + b"[" * levels + b"]" * levels + b"}"  # noqa: E731
    parse_json("x", deep(MAX_DEPTH))
    with pytest.raises(ProfileError, match=f"nested over {MAX_DEPTH} deep"):
        parse_json("x", deep(MAX_DEPTH + 1))
