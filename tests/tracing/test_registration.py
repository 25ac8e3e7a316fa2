"""`torch.compile` finds the backend by the entry point of the installed package, in a process of its own."""

import os
import subprocess
import sys

import pytest

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
    path = os.pathsep.join([str(tmp_path), str(checkout), os.environ.get("PYTHONPATH", "")])
    for code in (f"{KNOWN}; import torchedge; {FOUND}", f"import torchedge; {KNOWN}"):
        process = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert process.returncode == 0, process.stderr
