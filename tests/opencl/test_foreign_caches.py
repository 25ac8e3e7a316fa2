"""Caches of pyopencl and PoCL: nothing is unpickled, and no state of the user's folders breaks a run."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.opencl_devices import with_figures

import torchedge
from torchedge.opencl import choose_device
from torchedge.opencl.foreign_caches import pocl_cache

pytest.importorskip("pyopencl")

RUN = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
import numpy as np
{before}
from torchedge.bundles.bundle import Bundle
print(float(Bundle.open(sys.argv[1]).run(np.ones((2, 3, 8, 8), np.float32))[0].sum()))
assert not seen or {unsafe}, seen
"""

UNSAFE = (
    "import pyopencl; from torchedge.opencl import platforms; platforms.import_pyopencl = lambda: pyopencl"
)
"""pyopencl as it comes: with its cache."""


EVERYTHING = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
import torch, torchedge
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
x, y = torch.ones(2, 4), torch.tensor([0, 1])
torchedge.export(model, x, out=sys.argv[1], device="local-cpu", onnx=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torchedge.Trainer(model, x, y, loss=torch.nn.functional.cross_entropy, optimizer=optimizer) as trainer:
    trainer.step(x, y)
torch.compile(model, backend="torchedge")(x).sum().backward()
assert not seen, seen
"""


def bomb(target):
    """Return what a planted cache holds: unpickled, it makes a file."""
    return f"cbuiltins\nopen\n(V{target}\nVw\ntR.".encode()


def run(bundle, environment, before=""):
    """Run a bundle in a process of its own; return its output and its warnings."""
    return python(RUN.format(before=before, unsafe=before == UNSAFE), bundle, environment)


def python(code, argument, environment):
    unset = {"HOME", "XDG_CACHE_HOME", "POCL_CACHE_DIR", "PYOPENCL_NO_CACHE", "TORCHEDGE_CACHE"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    places = [str(Path(torchedge.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    process = subprocess.run(
        [sys.executable, "-c", code, str(argument)],
        env=inherited | {"PYTHONPATH": os.pathsep.join(filter(None, places))} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("bundle") / "tiny"
    model = torch.nn.Conv2d(3, 2, 1)
    device = with_figures("local-cpu", local_memory_kib=choose_device().local_bytes / 2**10)
    return torchedge.export(model, torch.ones(2, 3, 8, 8), out=folder, device=device, onnx=False).path


@pytest.fixture(scope="module")
def planted(bundle, tmp_path_factory):
    """A home folder in whose cache every entry of pyopencl is a bomb, and what the run before it printed."""
    home = tmp_path_factory.mktemp("home")
    expected, _ = run(bundle, {"HOME": str(home)}, UNSAFE)
    (cache,) = (home / ".cache" / "pytools").glob("*invoker-cache*.sqlite")
    with sqlite3.connect(cache) as database:
        database.execute("UPDATE dict SET key_value = ?", (bomb(home / "executed"),))
    with pytest.raises(AssertionError):
        run(bundle, {"HOME": str(home)}, UNSAFE)
    (home / "executed").unlink()  # the bomb works
    return home, cache, expected


@pytest.fixture(scope="module")
def expected(planted):
    return planted[2]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import pyopencl"])
def test_nothing_of_a_planted_cache_is_executed(bundle, planted, before):
    home, _, expected = planted
    assert run(bundle, {"HOME": str(home)}, before)[0] == expected
    assert not (home / "executed").exists()


@pytest.mark.slow
def test_random_bytes_in_a_cache_change_nothing(bundle, planted):
    home, cache, expected = planted
    cache.write_bytes(bytes(range(256)) * 16)
    assert run(bundle, {"HOME": str(home)})[0] == expected


@pytest.mark.slow
def test_exporting_and_training_unpickle_nothing(tmp_path):
    python(EVERYTHING, tmp_path / "bundle", {"HOME": str(tmp_path)})


@pytest.mark.slow
def test_no_home_is_needed(bundle, expected):
    output, warnings = run(bundle, {})
    assert output == expected
    warned = [line for line in warnings.splitlines() if "Warning:" in line]
    assert all("OpenCL device" in line for line in warned)  # a driver that errs is named wherever it is


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written_is_named_and_replaced(bundle, expected, tmp_path):
    home = tmp_path / "home"
    home.write_text("a file is no home")
    output, warnings = run(bundle, {"HOME": str(home)})
    assert output == expected
    assert f"{home}/.cache/pocl/kcache: cannot be written (Not a directory)" in warnings


def test_the_folder_of_pocl_follows_its_variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("POCL_CACHE_DIR", raising=False)
    assert pocl_cache() == Path("/home/me/.cache/pocl/kcache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert pocl_cache() == Path("/caches/pocl/kcache")
    monkeypatch.setenv("POCL_CACHE_DIR", "/own")
    assert pocl_cache() == Path("/own")
    for name in ("POCL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    assert pocl_cache() is None
