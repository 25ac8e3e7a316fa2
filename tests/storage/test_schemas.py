"""Documents by their schemas: export/schemas is what the declarations give; readers refuse what it refuses.

--update-golden writes the schemas.
"""

import contextlib
import copy
import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.random_instances import CHUNK_BYTES, layer, weight
from oracles.small_programs import image_copy

from torchedge.bundles.checks import CHECKS
from torchedge.bundles.manifests import MANIFESTS
from torchedge.bundles.plan_files import PLAN_FILES
from torchedge.bundles.sources import SOURCES
from torchedge.devices.device import DEVICES
from torchedge.errors import ProfileError
from torchedge.lowering.program_files import PROGRAMS, program_document, program_schema
from torchedge.profiling.campaigns.plans import CAMPAIGN_PLANS
from torchedge.storage import data_folder
from torchedge.streaming.instances import INSTANCES, Instance
from torchedge.streaming.plans import PLANS, ChunkLoad, OverlapPlan
from torchedge.textures.coefficients import CODEC as COEFFICIENTS
from torchedge.textures.coefficients import DEFAULTS
from torchedge.textures.layouts import Layout

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
FIGURE = {"value": 8000, "unit": "MiB", "provenance": "published", "source": "data sheet"}
DEVICE = {
    "name": "my-board", "title": "My board", "kind": "gpu", "vendor": "Me", "memory": "unified",
    "aliases": ["MB1"], "figures": {"memory_mib": FIGURE},
    "facts": {"half_arithmetic": {"value": True, "provenance": "assumed", "source": "a guess"}},
    "software": {"pytorch": "2.0"}, "runtime": {"zero_grad": "zero"}, "profile": {"forests": {"error": 0.5}},
}  # fmt: skip
NETWORK = {
    "name": "resnet18", "label": "r", "input_sizes": [[3, 8, 8]], "levels": [0, 50], "strategies": ["l1"],
    "train_batch_sizes": [1, 2], "infer_batch_sizes": [1],
}  # fmt: skip
IMAGE = Layout((0, 2, 3, 1), "image", 2, "block-4")
CAMPAIGN = {"networks": [NETWORK], "optimizer": "adam", "seed": 1, "round_to": 8, "scope": "uniform"}
EXAMPLES = {
    "overlap-instance": (INSTANCES, INSTANCES.document(INSTANCE), {}),
    "overlap-plan": (PLANS, PLANS.document(PLAN), {}),
    "program": (PROGRAMS, program_document(image_copy((3, 7, 5, 6), IMAGE)), {}),
    "device": (DEVICES, DEVICE, {"folder": Path("x"), "fingerprint": ""}),
    "coefficients": (COEFFICIENTS, COEFFICIENTS.document(DEFAULTS["mobile"]), {}),
    "campaign": (CAMPAIGN_PLANS, CAMPAIGN, {"name": "x", "text": ""}),
}
"""Codecs, documents that have every key, and no whole number where another may stand; outside fields."""
FREE = ("solver", "profile", "kwargs")
"""Entries of free content."""
MOST = 700
"""Mutants of one document."""


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


WHOLE, MORE = object(), object()
"""Replaces a whole number n by n.0, which is whole for JSON schemas, not for us; adds a key."""


# readers ----------------------------------------------------------------------------------------------------


def places(document, above=""):
    """Yield (container, key, nearest key that is a text) of every entry that has a schema."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        name = key if isinstance(key, str) else above
        yield document, key, name
        if isinstance(value, (dict, list)) and key not in FREE:
            yield from places(value, name)


def numbers_of(rules):
    """Return the bounds of numbers in a schema."""
    found = [v for k, v in rules.items() if k in ("minimum", "maximum") and not isinstance(v, dict)]
    return {*found, *(n for rule in rules.values() if isinstance(rule, dict) for n in numbers_of(rule)),
            *(n for rule in rules.get("anyOf", ()) for n in numbers_of(rule))}  # fmt: skip


def mutants(document, rules):
    """Yield (name, value, document) with one entry removed, added, or replaced by a wrong one."""
    bounds = sorted(numbers_of(rules))
    beyond = [b + sign for b in bounds for sign in (-1, 1)]
    wrong = [None, True, 0.5, 10**18, -0.1, 1.1, "", "x" * 1001, "a\x1b[2J", "\ud800", [], {}, [1], {"a": 1}]
    kinds = [
        (at, value) for at, _ in enumerate(places(document)) for value in (..., MORE, WHOLE, *wrong, *beyond)
    ]
    for at, value in random.Random(0).sample(kinds, min(MOST, len(kinds))):
        made = copy.deepcopy(document)
        container, key, name = list(places(made))[at]
        if value is ...:
            del container[key]
        elif value is WHOLE and type(container[key]) is int:
            container[key] = float(container[key])
        elif value is MORE and isinstance(container[key], dict) and key not in FREE:
            container[key][name := "more"] = 1
        elif value not in (WHOLE, MORE):
            container[key] = value
        yield name, value, made
    yield "more", MORE, document | {"more": 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_readers_refuse_what_the_schema_refuses_and_name_the_entry(name):
    """The jsonschema package is the oracle. Rules across entries may refuse more, but nothing optional."""
    jsonschema = pytest.importorskip("jsonschema")
    codec, document, outside = EXAMPLES[name]
    validator = jsonschema.Draft202012Validator(codec.schema())
    document = json.loads(json.dumps(document))
    validator.validate(document)
    assert codec.document(codec.parse("x", document, **outside)) == document
    refused = 0
    for key, value, made in mutants(document, codec.schema()):
        if (value is WHOLE and made != document) or not validator.is_valid(made):
            with pytest.raises(codec.error) as caught:
                codec.parse("x.json", made, **outside)
            line = str(caught.value)
            assert key in line and "x.json" in line and "\n" not in line and len(line) < 1500
            refused += 1
        else:
            with contextlib.suppress(codec.error):
                codec.parse("x", made, **outside)
    assert refused > 150


@pytest.mark.parametrize("name", ["overlap-instance", "overlap-plan", "program"])
def test_files_read_back_and_are_bounded(name, tmp_path):
    codec, document, outside = EXAMPLES[name]
    noun = codec.parse("x", document, **outside)
    for file in ("a.json", "b.json", "c.json.gz"):
        codec.write(tmp_path / file, noun)
        assert codec.document(codec.read(tmp_path / file)) == document
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    for text, says in ((b"[]", "holds a list"), (b" " * (codec.max_bytes + 1), "unpacks to more than")):
        (tmp_path / "c.json.gz").write_bytes(gzip.compress(text))
        with pytest.raises(ProfileError, match=rf"c\.json\.gz.*{says}"):
            codec.read(tmp_path / "c.json.gz")


def test_defaults_are_omitted():
    least = replace(INSTANCE, memory_chunks=None, residency="chunks", distance="layers", name="instance")
    assert set(INSTANCES.document(least)) == {"chunk_bytes", "layers", "weights", "m_peak_chunks", "lambda"}
    assert set(PLANS.document(PLAN)) - set(PLANS.document(replace(PLAN, program=""))) == {"program"}
