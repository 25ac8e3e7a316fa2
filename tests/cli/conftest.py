"""How commands are run, and a profile and a dataset small enough to fit and damage in a test."""

import numpy as np
import pytest
from oracles.small_datasets import write_small_dataset

from torchedge.cli import main


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A folder to work in, with the user's profiles below it; one date."""
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    for name in ("TORCHEDGE_DEVICE", "TORCHEDGE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def refused(capsys):
    """Run a command that has to be refused in one line, with exit status 2 and no output; return the line."""

    def call(*words):
        capsys.readouterr()
        status = main(words)
        out, err = capsys.readouterr()
        lines = [line for line in err.strip().splitlines() if line.startswith("torchedge: ")]
        lines = [line for line in lines if "is of another build than PyTorch" not in line]  # once a process
        assert (status, out) == (2, "") and "Traceback" not in err, (status, out, err)
        assert len(lines) == 1 and lines[0].startswith("torchedge: error: "), err
        return lines[0]

    return call


@pytest.fixture
def run(capsys):
    """Run a command that has to work; return its output."""

    def call(*words, status=0):
        capsys.readouterr()
        assert main(words) == status, capsys.readouterr().err
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="session")
def fitted(tmp_path_factory):
    """A profile folder with small forests, fitted on made-up numbers."""
    from torchedge.devices import Provenance, find_device, write_device
    from torchedge.prediction.intervals import DistanceScale, assumed_errors
    from torchedge.prediction.latency.model import SHARE_NAMES, LatencyModel
    from torchedge.prediction.latency.roofline import prior_mean
    from torchedge.prediction.memory.model import MEMORY_FEATURES, MemoryModel, Process
    from torchedge.prediction.profiles import FittedModels, write_models
    from torchedge.profiling.forest_fitting import fit_forest
    from torchedge.storage import read_toml

    folder = tmp_path_factory.mktemp("profiles") / "made-up"
    folder.mkdir()
    device, errors = find_device("jetson-tx2"), assumed_errors(0.1)
    random = np.random.default_rng(0)

    def forest(names):
        rows = random.random((30, len(names)))
        return fit_forest(rows, rows[:, 0] / 10, feature_names=names, trees=3)

    process = Process((1400.0, 1400.0), (1500.0, 1600.0), 6300.0, 5000.0)
    memory = MemoryModel(process, errors, errors, errors, forest(MEMORY_FEATURES))
    count = len(SHARE_NAMES)
    scale = DistanceScale(1.0, 0.1, np.zeros(count), np.ones(count), np.zeros((1, count)))
    latency = LatencyModel(prior_mean(device), errors, forest(SHARE_NAMES), scale)
    files = write_models(
        folder, FittedModels(memory, latency, Provenance.PUBLIC_DATA), {"dataset": "made up"}
    )
    document = read_toml(device.folder / "device.toml")
    training = {"provenance": "public data", "files": files}
    write_device({**document, "name": "made-up", "profile": {"training": training}}, folder)
    return folder


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory):
    """A dataset of two networks, five levels and eight batch sizes, in the folder `jetson-tx2`."""
    return write_small_dataset(tmp_path_factory.mktemp("data") / "jetson-tx2")
