"""`torch.compile` finds the backend by the entry point of the installed package, in a process of its own."""

import os

import pytest
from oracles.children import PATH, python

FOUND = (
    "from torch._dynamo.backends.registry import lookup_backend; assert callable(lookup_backend('torchedge'))"
)
KNOWN = f"import torch; {FOUND}; assert 'torchedge' in torch._dynamo.list_backends()"


@pytest.mark.slow
def test_an_installed_package_needs_no_import_and_bears_one(checkout, tmp_path):
    lines = (checkout / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    entry = lines[lines.index("[project.entry-points.torch_dynamo_backends]") + 1].replace('"', "")
    package = tmp_path / "announced-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: announced\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{entry}\n")
    for code in (f"{KNOWN}; import torchedge; {FOUND}", f"import torchedge; {KNOWN}"):
        python("-c", code, PYTHONPATH=os.pathsep.join([str(tmp_path), PATH]))
