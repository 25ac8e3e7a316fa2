"""Documents by their schemas: export/schemas is what the declarations give; readers refuse what it refuses.

--update-golden writes the schemas.
"""

import copy
import gzip
import json
from dataclasses import replace

import pytest
from oracles.random_instances import CHUNK_BYTES, layer, weight

from torchedge.bundles.checks import CHECKS
from torchedge.bundles.manifests import MANIFESTS
from torchedge.bundles.plan_files import PLAN_FILES
from torchedge.bundles.sources import SOURCES
from torchedge.errors import InputError, ProfileError
from torchedge.lowering.program_files import program_schema
from torchedge.storage import data_folder
from torchedge.streaming.instances import INSTANCES, Instance
from torchedge.streaming.plans import PLANS, ChunkLoad, OverlapPlan

SCHEMAS = {
    "bundle-check": CHECKS.schema,
    "bundle-manifest": MANIFESTS.schema,
    "bundle-plan": PLAN_FILES.schema,
    "overlap-instance": INSTANCES.schema,
    "overlap-plan": PLANS.schema,
    "program": program_schema,
    "source": SOURCES.schema,
}
INSTANCE = Instance(
    CHUNK_BYTES, (layer(1, 2), layer(2, 0)), (weight(0, 3, 2, 2),), memory_chunks=9, residency="weights",
    distance="chunks", name="full",
)  # fmt: skip
PLAN = OverlapPlan("FEASIBLE", 1.5, 0.5, ("w1",), (ChunkLoad("w0", 1, 1, 0),), 1, {"a": 1}, "5f" * 32)
EXAMPLES = {"overlap-instance": (INSTANCES, INSTANCE), "overlap-plan": (PLANS, PLAN)}
"""Documents that have every key, and no whole number where another may stand."""


def schema(name):
    return json.loads((data_folder("export") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_those_of_the_declarations(name, request):
    path = data_folder("export") / "schemas" / f"{name}.schema.json"
    text = json.dumps(SCHEMAS[name](), indent=2, ensure_ascii=False) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_valid_and_refuse_what_is_empty(name):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(SCHEMAS[name]())
    assert list(validator(SCHEMAS[name]()).iter_errors({}))


def test_every_schema_is_generated():
    files = {path.name for path in (data_folder("export") / "schemas").iterdir()}
    assert files == {f"{name}.schema.json" for name in SCHEMAS}


WHOLE = object()
"""Replaces a whole number n by n.0, which is whole in the words of JSON schemas, and not in ours."""


# readers ----------------------------------------------------------------------------------------------------


def places(document, free=("solver",)):
    """Yield (container, key) of every entry of a document; entries with free content hold none."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield document, key
        if isinstance(value, (dict, list)) and key not in free:
            yield from places(value)


def numbers_of(rules):
    """Return the bounds of numbers in a schema."""
    found = [v for k, v in rules.items() if k in ("minimum", "maximum") and not isinstance(v, dict)]
    return {*found, *(n for rule in rules.values() if isinstance(rule, dict) for n in numbers_of(rule)),
            *(n for rule in rules.get("anyOf", ()) for n in numbers_of(rule))}  # fmt: skip


def mutants(document, rules):
    """Yield (key, value, document) with one entry removed, added, or replaced by a wrong one."""
    bounds = numbers_of(rules)
    beyond = [b + sign for b in bounds for sign in (-1, 1)]
    wrong = [None, True, 0.5, 10**18, -0.1, 1.1, "", "x" * 1001, "a\x1b[2J", "\ud800", [], {}, [1], {"a": 1}]
    for at, (container, key) in enumerate(places(document)):
        for value in (..., *wrong, *beyond, *([WHOLE] if type(container[key]) is int else [])):
            made = copy.deepcopy(document)
            entry, key = list(places(made))[at]
            if value is ...:
                del entry[key]
            else:
                entry[key] = float(entry[key]) if value is WHOLE else value
            yield key, value, made
        made = copy.deepcopy(document)
        entry = list(places(made))[at][0][key]
        if isinstance(entry, dict) and key != "solver":
            entry["more"] = 1
            yield "more", ..., made
    yield "more", ..., document | {"more": 1}


@pytest.mark.parametrize("name", EXAMPLES)
def test_readers_refuse_what_the_schema_refuses_and_name_the_entry(name):
    """The jsonschema package is the oracle. Rules across entries may refuse more, but nothing optional."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema(name))
    codec, noun = EXAMPLES[name]
    document = json.loads(json.dumps(codec.document(noun)))
    validator.validate(document)
    assert codec.parse("x", document) == noun and len(document) == len(schema(name)["properties"])
    refused = 0
    for key, value, made in mutants(document, schema(name)):
        if value is WHOLE or not validator.is_valid(made):
            with pytest.raises(InputError) as caught:
                codec.parse("x.json", made)
            line = str(caught.value)
            assert str(key) in line and "x.json" in line and "\n" not in line and len(line) < 500
            refused += 1
        elif (value is ... or value is None) and isinstance(key, str):
            codec.parse("x", made)
    assert refused > 150


@pytest.mark.parametrize("name", EXAMPLES)
def test_files_read_back_and_are_bounded(name, tmp_path):
    codec, noun = EXAMPLES[name]
    for file in ("a.json", "b.json", "c.json.gz"):
        codec.write(tmp_path / file, noun)
        assert codec.read(tmp_path / file) == noun
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    for text, says in ((b"[]", "expected an object"), (b" " * (codec.max_bytes + 1), "unpacks to more than")):
        (tmp_path / "c.json.gz").write_bytes(gzip.compress(text))
        with pytest.raises(ProfileError, match=rf"c\.json\.gz.*{says}"):
            codec.read(tmp_path / "c.json.gz")


def test_defaults_are_omitted():
    least = replace(INSTANCE, memory_chunks=None, residency="chunks", distance="layers", name="instance")
    assert set(INSTANCES.document(least)) == {"chunk_bytes", "layers", "weights", "m_peak_chunks", "lambda"}
    assert set(PLANS.document(PLAN)) - set(PLANS.document(replace(PLAN, program=""))) == {"program"}
