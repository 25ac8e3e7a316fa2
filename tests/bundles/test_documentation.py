"""Pages about bundles: links and the entries they name exist; tests/test_readme.py runs their code."""

import json
import re

import pytest

from torchedge.devices import find_device
from torchedge.lowering.limits import profile_limits
from torchedge.storage import data_folder

pytest.importorskip("pyopencl")


@pytest.fixture
def page(checkout):
    pages = (checkout / "docs" / f"{page}.md" for page in ("bundles", "bundle-format"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def test_links_and_limits_exist(page, checkout):
    links = re.findall(r"\]\(([^)#\s]+)", page)
    assert links and all((checkout / "docs" / link).exists() for link in links)
    limits = profile_limits(find_device("adreno"))
    for name in limits.sources:
        assert f"`{name}`" in page


@pytest.mark.parametrize("name", ["program", "bundle-manifest"])
def test_entries_of_the_schemas_are_told(page, name):
    said = json.loads((data_folder("export") / "schemas" / f"{name}.schema.json").read_text())
    silent = {"schema", "name", "model", "versions", "title", "fingerprint", "class", "notes", "target"}
    silent |= {"checks", "source", "in_place", "total_bytes", "onnx", "files", "bytes", "limits", "kernel"}
    silent |= {"device", "arena", "kernels", "launches", "storage"}
    tables = [said, *said["properties"].values(), *said["$defs"].values()]
    for entry in {key for table in tables for key in table.get("properties", {})} - silent:
        assert f"`{entry}`" in page, entry
