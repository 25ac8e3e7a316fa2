"""Pages about bundles: snippets and commands work; links and the entries they name exist."""

import contextlib
import io
import json
import re
import shlex

import pytest

from torchedge.cli import main
from torchedge.devices import find_device
from torchedge.lowering.limits import profile_limits
from torchedge.storage import data_folder
from torchedge.tracing.vision import prepare_torchvision

pytest.importorskip("pyopencl")

FENCE = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(checkout):
    pages = (checkout / "docs" / f"{page}.md" for page in ("bundles", "bundle-format"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.slow
def test_snippets_and_commands_work(page, tmp_path, monkeypatch):
    prepare_torchvision()
    pytest.importorskip("torchvision")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHEDGE_DEVICE", raising=False)
    kinds = []
    for kind, body in FENCE.findall(page):
        kinds.append(kind)
        with contextlib.redirect_stdout(io.StringIO()):
            if kind == "python":
                names = {}
                exec(compile(body, "docs/bundles.md", "exec"), names)
                assert names["losses"][-1] < names["losses"][0]
                continue
            for line in body.splitlines():
                program, *words = shlex.split(line.removeprefix("$ "))
                assert program == "torchedge" and main(words) == 0, line
    assert kinds == ["python", "console"] and (tmp_path / "trained.safetensors").is_file()


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
