"""export/schemas: the JSON schemas that the declarations of documents give; --update-golden writes them."""

import json

import pytest

from torchedge.bundles.checks import CHECKS
from torchedge.bundles.manifests import MANIFESTS
from torchedge.bundles.plan_files import PLAN_FILES
from torchedge.bundles.sources import SOURCES
from torchedge.lowering.program_files import program_schema
from torchedge.storage import data_folder
from torchedge.streaming.instances import INSTANCES
from torchedge.streaming.plans import PLANS

SCHEMAS = {
    "bundle-check": CHECKS.schema,
    "bundle-manifest": MANIFESTS.schema,
    "bundle-plan": PLAN_FILES.schema,
    "overlap-instance": INSTANCES.schema,
    "overlap-plan": PLANS.schema,
    "program": program_schema,
    "source": SOURCES.schema,
}


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
