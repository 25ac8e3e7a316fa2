"""Profiles of training and inference, each with memory, latency or both; what is missing is marked."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import torchedge
from torchedge.devices import Provenance, find_device, transfer_error, write_device
from torchedge.errors import ProfileError
from torchedge.prediction.feature_sets import INFERENCE
from torchedge.prediction.intervals import DistanceScale, assumed_errors
from torchedge.prediction.latency.model import SHARE_NAMES, LatencyModel
from torchedge.prediction.latency.roofline import prior_mean
from torchedge.prediction.memory.model import MEMORY_FEATURES, MemoryModel, Process
from torchedge.prediction.profiles import (
    MODE_TABLES,
    FittedModels,
    file_names,
    load_models,
    read_models,
    write_models,
)
from torchedge.storage import read_toml

pytest.importorskip("sklearn")
MEASURED, ASSUMED = Provenance.MEASURED, Provenance.ASSUMED


def forest(names, value=0.1):
    from torchedge.profiling.forest_fitting import fit_forest

    rows = np.random.default_rng(0).random((30, len(names)))
    return fit_forest(rows, np.full(30, value), feature_names=names, trees=2)


def latency_model(device, *, names=SHARE_NAMES, amp=None):
    count = len(SHARE_NAMES)
    scale = DistanceScale(1.0, 0.1, np.zeros(count), np.ones(count), np.zeros((1, count)))
    grown = None if names is None else forest(names)
    return LatencyModel(prior_mean(device, amp), assumed_errors(0.1), grown, scale, amp)


def memory_model(names=MEMORY_FEATURES):
    errors = assumed_errors(0.1)
    process = Process((700.0, 800.0), (0.0, 0.0), 1e9, 20000.0)
    return MemoryModel(process, errors, errors, errors, None if names is None else forest(names))


@pytest.fixture
def profile(tmp_path):
    """Write fitted models by mode into a folder and return the device."""

    def make(base="rtx-2080ti", **modes):
        source = find_device(base)
        folder = tmp_path / "made-up"
        folder.mkdir(exist_ok=True)
        tables = {}
        for mode, models in modes.items():
            files = write_models(folder, models, {"dataset": "made up"}, mode)
            tables[MODE_TABLES[mode]] = {"provenance": str(models.provenance), "files": files}
        document = dict(read_toml(source.folder / "device.toml"))
        write_device({**document, "name": "made-up", "aliases": [], "profile": tables}, folder)
        return find_device(folder)

    return make


GRAPHS = {
    mode: torchedge.capture(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 5)),
        input_size=(3, 16, 16),
        mode=mode,
    )
    for mode in ("train", "infer")
}


def test_latency_alone_leaves_memory_assumed_and_says_which(profile):
    device = profile(infer=FittedModels(None, latency_model(find_device("rtx-2080ti")), MEASURED))
    models = load_models(device, "infer")
    assert (models.memory_provenance, models.latency_provenance) == (ASSUMED, MEASURED)
    assert models.notes == ("inference memory was not measured on made-up: it is simulated (assumed)",)
    found = torchedge.Predictor(device).predict(GRAPHS["infer"], 2)
    assert found.provenance is ASSUMED and any("inference memory" in note for note in found.notes)


def test_the_other_mode_stands_in_as_an_assumption(profile):
    device = profile(infer=FittedModels(memory_model(), latency_model(find_device("rtx-2080ti")), MEASURED))
    models = load_models(device, "train")
    assert models.provenance is ASSUMED and models.latency.forest is None and models.memory.forest is None
    assert models.memory.process.beside == (700.0, 800.0)
    assert "training memory was not measured on made-up: it follows" in models.notes[0]


def test_both_modes_are_read_apart(profile):
    base = find_device("rtx-2080ti")
    device = profile(
        train=FittedModels(memory_model(), None, Provenance.PUBLIC_DATA),
        infer=FittedModels(memory_model(None), latency_model(base, names=None), MEASURED),
    )
    assert load_models(device, "train").memory_provenance is Provenance.PUBLIC_DATA
    assert "training latency was not measured on made-up: it follows" in load_models(device).notes[0]
    infer = load_models(device, "infer")
    assert infer.provenance is MEASURED and not infer.notes and infer.latency.forest is None
    assert not (device.folder / file_names("infer")[1]).exists()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_forest_on_the_papers_columns_reads_them(profile, mode):
    base = find_device("rtx-2080ti")
    fitted = FittedModels(memory_model(INFERENCE.names), latency_model(base, names=INFERENCE.names), MEASURED)
    device = profile(**{mode: fitted})
    read = read_models(device, mode)
    assert read.latency.feature_set == read.memory.feature_set == "perf4sight-infer"
    predictor, without = (
        torchedge.Predictor(device),
        FittedModels(memory_model(None), latency_model(base, names=None), MEASURED),
    )
    one = predictor.predict(GRAPHS[mode], 3)
    many = predictor.predict_many([GRAPHS[mode]], [3, 4], mode=mode)
    assert np.isclose(many.latency[0, 0], one.latency.value)
    assert np.isclose(many.memory[0, 0], one.memory.value)
    assert one.out_of_range and one.needed_mib() >= one.memory.value
    plain = torchedge.Predictor(profile(**{mode: without})).predict(GRAPHS[mode], 3)
    assert np.isclose(one.latency.value, plain.latency.value * np.exp(0.1), rtol=1e-6)
    assert np.isclose(one.memory.value, plain.memory.value * np.exp(0.1), rtol=1e-6)


def test_latency_measured_under_autocast_is_converted_to_full_precision(profile):
    base = find_device("rtx-3090")
    device = profile(
        train=FittedModels(None, latency_model(base, names=None, amp="float16"), MEASURED), base="rtx-3090"
    )
    assert read_models(device, "train").latency.amp == "float16"
    half, other, full = (load_models(device, "train", amp) for amp in ("float16", "bfloat16", None))
    assert half.latency_provenance is other.latency_provenance is MEASURED
    assert any("taken to be the same in bfloat16" in note for note in other.notes)
    assert full.latency_provenance is ASSUMED and any("measured in float16" in note for note in full.notes)
    # The coefficients were the prior's under autocast, so that converted they are the prior's without.
    assert np.allclose(full.latency.coefficients, prior_mean(base))
    predictor = torchedge.Predictor(device)
    big = torchedge.capture(nn.Conv2d(64, 256, 3), input_size=(64, 64, 64))
    slow, fast = predictor.predict(big, 64), predictor.predict(big, 64, amp="float16")
    assert fast.latency.value < slow.latency.value


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.update(provenance="guessed"), "profile.inference.provenance"),
        (lambda t: t.update(files={"training.safetensors": "0"}), "profile.inference.files"),
        (lambda t: t["files"].update({"inference.safetensors": "0" * 64}), "its sha256 differs"),
    ],
)
def test_a_damaged_description_is_one_line(profile, damage, message):
    device = profile(infer=FittedModels(memory_model(), None, MEASURED))
    document = dict(read_toml(device.folder / "device.toml"))
    table = dict(document["profile"]["inference"])
    damage(table)
    write_device({**document, "profile": {"inference": table}}, device.folder)
    with pytest.raises(ProfileError, match=message):
        load_models(find_device(device.folder), "infer")


def test_tables_of_the_other_mode_are_refused(profile, tmp_path):
    device = profile(infer=FittedModels(memory_model(None), None, MEASURED))
    train, infer = (device.folder / file_names(mode)[0] for mode in ("train", "infer"))
    train.write_bytes(infer.read_bytes())
    document = dict(read_toml(device.folder / "device.toml"))
    digest = document["profile"]["inference"]["files"]["inference.safetensors"]
    tables = {"training": {"provenance": "measured", "files": {"training.safetensors": digest}}}
    write_device({**document, "profile": tables}, device.folder)
    with pytest.raises(ProfileError, match="another version"):
        load_models(find_device(device.folder))


def test_a_profile_without_models_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="memory or a latency model"):
        write_models(tmp_path, FittedModels(None, None, MEASURED), {})


def test_latency_scaled_with_known_errors_is_transferred():
    base = find_device("nvidia-h200")
    error = base.profile["transfer"]["latency_error"]
    for name, word, half in (("nvidia-v100", "transferred", error), ("rtx-4090", "assumed", 0.8)):
        models = load_models(find_device(name), "infer")
        assert str(models.latency_provenance) == word and f"({word})" in " ".join(models.notes)
        for latency in (models.latency, load_models(find_device(name), "infer", "float16").latency):
            assert latency.errors.half_width(np.ones(1)) == pytest.approx(half, abs=1e-3)
    assert load_models(find_device("nvidia-v100")).provenance is ASSUMED  # its memory is simulated


def test_an_error_of_transfer_out_of_range_is_refused():
    device = replace(find_device("nvidia-h200"), profile={"transfer": {"latency_error": "small"}})
    with pytest.raises(ProfileError, match="latency_error is 'small'; expected a number between 0 and 10"):
        transfer_error(device)
    assert transfer_error(replace(device, profile={})) is None
