"""The JSON schemas: valid themselves, and of one mind with the parsers about keys, bounds and words."""

import json
from dataclasses import replace
from typing import get_args

import pytest
from oracles.exhaustive_plans import best_plan
from oracles.random_instances import CHUNK_BYTES, layer, random_instance, weight

from torchedge.errors import InputError
from torchedge.storage import data_folder
from torchedge.streaming import instances as parsing
from torchedge.streaming.instances import INSTANCES, Instance
from torchedge.streaming.plans import PLANS, ChunkLoad, OverlapPlan, Status


def schema(name):
    return json.loads((data_folder("export") / "schemas" / f"overlap-{name}.schema.json").read_text())


FULL = INSTANCES.document(
    Instance(
        CHUNK_BYTES,
        (layer(1, 2), layer(2, 0)),
        (weight(0, 3, 2, 2),),
        memory_chunks=9,
        residency="weights",
        distance="chunks",
        name="full",
    )
)
PLAN = PLANS.document(
    OverlapPlan("FEASIBLE", 1.0, 0.5, ("w1",), (ChunkLoad("w0", 1, 1, 0),), 1, program="5f" * 32)
)


def objects(name):
    """Each kind of object of a file: its schema, an example, and a function that parses one in its place."""
    top = schema(name)
    if name == "instance":
        yield top, FULL, lambda entry: INSTANCES.parse("x", entry)
        for key in ("layer", "weight"):
            example = FULL[f"{key}s"][0]
            others = FULL[f"{key}s"][1:]
            yield (
                top["$defs"][key.title()],
                example,
                lambda entry, k=f"{key}s", o=others: INSTANCES.parse("x", FULL | {k: [entry, *o]}),
            )
    else:
        yield top, PLAN, lambda entry: PLANS.parse("x", entry)
        yield (
            top["$defs"]["ChunkLoad"],
            PLAN["loads"][0],
            lambda entry: PLANS.parse("x", PLAN | {"loads": [entry]}),
        )


KINDS = [(name, place) for name, count in (("instance", 3), ("plan", 2)) for place in range(count)]


@pytest.mark.parametrize(("name", "place"), KINDS)
def test_the_parsers_know_the_same_keys(name, place):
    said, example, parse = list(objects(name))[place]
    parse(example)
    assert set(said["properties"]) == set(example), "the example has every key"
    assert said["additionalProperties"] is False
    with pytest.raises(InputError, match="unknown key"):
        parse(example | {"more": 1})
    for key in example:
        shorter = {k: v for k, v in example.items() if k != key}
        if key in said["required"]:
            with pytest.raises(InputError, match=f"has no '{key}'"):
                parse(shorter)
        else:
            parse(shorter)


@pytest.mark.parametrize(("name", "place"), KINDS)
def test_the_parsers_keep_the_same_bounds(name, place):
    said, example, parse = list(objects(name))[place]
    top = schema(name)
    for key, entry in said["properties"].items():
        entry = {**top["$defs"].get(entry.get("$ref", "").rpartition("/")[2], {}), **entry}
        choices = entry.get("anyOf", [entry])
        if {"type": "null"} in choices:
            parse(example | {key: None})
        else:
            with pytest.raises(InputError):
                parse(example | {key: None})
        rules = {name: rule for choice in choices for name, rule in choice.items()}
        beyond = [rules["minimum"] - 1] if "minimum" in rules else []
        beyond += [rules["maximum"] + 1] if "maximum" in rules else []
        beyond += ["none of these"] if "enum" in rules else []
        beyond += ["", "x" * (rules["maxLength"] + 1)] if "maxLength" in rules else []
        beyond += [0.5] if {choice.get("type") for choice in choices} <= {"integer", "null"} else []
        for value in beyond:
            with pytest.raises(InputError, match=key):
                parse(example | {key: value})


def test_words_and_numbers_are_those_of_the_code():
    said = schema("instance")
    properties, kinds = said["properties"], said["$defs"]
    assert properties["residency"]["enum"] == sorted(get_args(parsing.Residency))
    assert properties["distance"]["enum"] == sorted(get_args(parsing.Distance))
    assert kinds["Layer"]["properties"]["class"]["enum"] == sorted(get_args(parsing.LoadClassName))
    assert properties["layers"]["maxItems"] == parsing.MAX_LAYERS
    assert properties["weights"]["maxItems"] == parsing.MAX_WEIGHTS
    assert kinds["Layer"]["properties"]["capacity_chunks"]["maximum"] == parsing.MAX_CHUNKS
    assert kinds["Weight"]["properties"]["bytes"]["maximum"] == parsing.MAX_BYTES
    assert schema("plan")["properties"]["status"]["enum"] == sorted(get_args(Status))
    least = {k: v for k, v in FULL.items() if k in said["required"]}
    defaults = INSTANCES.document(INSTANCES.parse("x", least))
    assert defaults == least, "what is left out is the default"
    for key, entry in properties.items():
        if "default" in entry:
            assert key not in INSTANCES.document(INSTANCES.parse("x", least | {key: entry["default"]}))


@pytest.mark.parametrize("name", ["instance", "plan"])
def test_schemas_are_valid_and_accept_what_is_written(name):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator
    said = schema(name)
    validator.check_schema(said)
    for seed in range(50):
        instance = random_instance(seed)
        for made in (instance, replace(instance, name="other", m_peak_chunks=None)):
            document = INSTANCES.document(made) if name == "instance" else PLANS.document(best_plan(made))
            validator(said).validate(document)
    assert list(validator(said).iter_errors({}))
