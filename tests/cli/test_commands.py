"""Each command, run in this process: what it prints, its JSON, its exit status."""

import json
import re
from dataclasses import asdict

import pytest

from torchedge.cli import DOES_NOT_FIT, main
from torchedge.profiling import hosts

FACTORY = """
import torch
from torch import nn

print("a factory may print: it does not spoil the output")

def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))

module = nn.Linear(4, 2)

class Halving(nn.Linear):
    def forward(self, x):
        return super().forward(x[: x.shape[0] // 2])

halving = Halving(4, 2)

class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.wide = nn.Embedding(50, 64), nn.Linear(64, 8192)
        self.example_inputs = (torch.zeros(2, 16, dtype=torch.int64),)

    def forward(self, ids):
        x = self.table(ids)
        if x.is_cuda and x.shape[0] > 8:
            x = self.wide(x)
        return x.mean((1, 2))
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(FACTORY)
    return f"{file}:small"


STEP = ("--input-size", "3x16x16", "--device", "jetson-tx2")


def test_one_prediction(run, small):
    out = run("predict", small, "--batch-size", "32", *STEP)
    for word in ("batch 32", "training step on jetson-tx2", "memory Γ", "latency Φ", "reserved", "allocated"):
        assert word in out
    assert re.search(r"90 % interval", out) and re.search(r"optimizer_state +[\d.,]+ MiB", out)
    assert "fits into" in out and "at 95 % confidence" in out and "provenance: " in out
    assert max(map(len, out.splitlines())) <= 80


def test_several_batch_sizes_give_a_row_each(run, small):
    out = run("predict", small, "-b", "1,2,4,8,16,32,64", *STEP, "--max-batch-size", "--memory-limit", "4000")
    assert [line.split()[0] for line in out.splitlines() if re.match(r" *\d+ ", line)] == [
        *("1", "2", "4", "8", "16", "32", "64")
    ]
    assert "largest batch size that fits into 4,000 MiB" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_that_needs_a_batch_size_gets_it(run, small):
    halving = (f"{small.partition(':')[0]}:halving", "--input-size", "4")
    assert "batch 6" in run("predict", *halving, "-b", "6", "--device", "jetson-tx2")
    run("predict", *halving, "-b", "4,6", "--device", "jetson-tx2")
    run("simulate", *halving, "-b", "6")


def test_inference_is_called_so(run, small):
    out = run("predict", small, *STEP, "--mode", "infer")
    assert "inference on" in out and "memory γ" in out and "optimizer" not in out


KEYS = {
    *("model", "device", "mode", "batch_size", "memory", "needed", "latency"),
    *("allocated", "reserved", "breakdown"),
    *("device_kind", "device_memory_mib", "unsupported", "out_of_range", "provenance", "notes"),
    *("optimizer", "amp", "accumulation", "memory_limit_mib", "confidence", "needed_mib", "fits"),
}


def test_json_of_one_prediction_is_an_object(run, small):
    document = json.loads(run("predict", small, "-b", "8", *STEP, "--json", "--amp", "bfloat16"))
    assert set(document) == KEYS
    assert document["model"] == "nets:small" and document["amp"] == "bfloat16"
    assert set(document["memory"]) == {"value", "low", "high", "unit"}
    assert document["memory"]["low"] < document["memory"]["value"] < document["memory"]["high"]
    assert sum(document["breakdown"].values()) == pytest.approx(document["needed"]["value"])


def test_a_trace_shows_one_prediction(run, refused, small, tmp_path):
    out = tmp_path / "step.json"
    run("predict", small, "-b", "8", *STEP, "--trace", str(out))
    assert {e["name"] for e in json.loads(out.read_text())["traceEvents"]} >= {
        "forward",
        "backward",
        "update",
    }
    several = refused("predict", small, "-b", "8,16", *STEP, "--trace", str(out))
    assert "--trace is given with 1 x 2 predictions" in several


def test_json_of_several_is_a_list(run, small):
    documents = json.loads(run("predict", small, small, "-b", "8,16", *STEP, "--json", "--max-batch-size"))
    assert [d["batch_size"] for d in documents] == [8, 16, 8, 16]
    assert set(documents[0]) == KEYS | {"max_batch_size"}


def test_the_answer_is_that_of_the_library(run):
    import torchedge
    from torchedge.tracing.sources import load_model

    out = json.loads(run("predict", "squeezenet1_1", "-b", "4", "-d", "tx2", "--optimizer", "adam", "--json"))
    model, _ = load_model("squeezenet1_1")
    found = torchedge.predict(model, 4, "jetson-tx2", optimizer="adam")
    assert (out["memory"], out["latency"]) == (asdict(found.memory), asdict(found.latency))
    assert out["needed_mib"] == found.needed_mib()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("flag", "how"), [("--compile", True), ("--reduce-overhead", "reduce-overhead")])
def test_a_compiled_step_is_that_of_the_library(run, small, flag, how):
    import torchedge
    from torchedge.tracing.sources import load_model

    compiled = ("-d", "nvidia-h200", "--input-size", "3x16x16", flag, "--json")
    out, model = json.loads(run("predict", small, "-b", "64", *compiled)), load_model(small)[0]
    found = torchedge.predict(model, 64, "nvidia-h200", input_size=(3, 16, 16), compile=how)
    assert (out["allocated"], out["unsupported"]) == (asdict(found.allocated), [])
    assert out["latency"] == asdict(found.latency)
    assert any(note.startswith("torch.compile: memory") for note in out["notes"])


def test_compiled_steps_are_traced_at_each_batch_size(run, small):
    options = ("-d", "nvidia-h200", "--input-size", "3x16x16", "--compile", "--json")
    several = json.loads(run("predict", small, "-b", "8,64", *options))
    for size, found in zip((8, 64), several, strict=True):
        assert found["allocated"] == json.loads(run("predict", small, "-b", str(size), *options))["allocated"]


def test_a_run_that_does_not_fit_has_its_own_exit_status(run, small):
    out = run("predict", small, *STEP, "--memory-limit", "10", status=DOES_NOT_FIT)
    assert "does not fit into 10.0 MiB" in out
    assert run("predict", small, *STEP, "--memory-limit", "100000")
    assert "fits into 8,192 MiB" in run("predict", small, *STEP, "--memory-limit", "8GiB")
    out = run("predict", "resnet18", "-b", "512", "-d", "jetson-tx2", status=DOES_NOT_FIT)
    assert "does not fit into" in out, "without a limit it is the device's"
    assert "the most that the board shows as taken" in out and "needed memory by what fills it" in out
    out = run("predict", small, "-b", "1,1000000", *STEP, "--json", status=DOES_NOT_FIT)
    assert [row["fits"] for row in json.loads(out)] == [True, False]


def test_a_module_of_a_file_and_the_default_device(run, small):
    document = json.loads(run("predict", small.replace(":small", ":module"), "-b", "2", "--json"))
    assert document["device"] and document["notes"]


def test_simulate(run, small):
    out = run("simulate", small, "-b", "8", "--input-size", "3x16x16", "--optimizer", "adamw")
    assert "allocated peak" in out and "largest tensors at the peak" in out
    document = json.loads(run("simulate", small, "-b", "8", "--input-size", "3x16x16", "--json"))
    assert set(document) == {
        *("model", "batch_size", "optimizer", "amp", "accumulation", "allocated_mib", "reserved_mib"),
        *("live_mib", "peak", "breakdown", "largest", "unsupported", "stages"),
    }
    assert document["allocated_mib"] <= document["reserved_mib"] and document["stages"] == []
    sizes = ("-b", "8", "--input-size", "3x16x16", "--evaluate", "64")
    assert "step after it" in run("simulate", small, *sizes, "--empty-cache")
    assert len(json.loads(run("simulate", small, *sizes, "--json"))["stages"]) == 5


def test_simulate_draws(run, small, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "step.png"
    assert str(file) in run("simulate", small, "--input-size", "3x16x16", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_features(run, small):
    out = run("features", small, "-b", "1,2", "--input-size", "3x16x16")
    assert "56 features of perf4sight" in out and len(out.splitlines()) == 59
    document = json.loads(run("features", small, "-b", "4", "--input-size", "3x16x16", "--json"))
    assert set(document) == {"model", "feature_set", "batch_size", "features"}
    assert document["features"]["mem_w"] == 8 * 3 * 3 * 3 and len(document["features"]) == 56
    inference = json.loads(run("features", small, "--mode", "infer", "--input-size", "3x16x16", "--json"))
    assert len(inference["features"]) == 15


def test_devices(run):
    from torchedge import list_devices

    out = run("devices")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [device.name for device in list_devices()]
    assert max(map(len, out.splitlines())) <= 80
    documents = json.loads(run("devices", "--json"))
    words = {word for d in documents for word in d["predictions"].values()}
    assert words <= {"measured", "public data", "transferred", "assumed"}
    assert set(documents[0]) == {
        *("name", "title", "kind", "vendor", "memory", "aliases", "memory_mib", "usable_memory_mib"),
        *("predictions", "yours", "folder"),
    }


def test_predictions_are_listed_with_the_provenance_they_have(run):
    from torchedge import list_devices
    from torchedge.cli.listing import predictions_of
    from torchedge.prediction.profiles import load_models

    for device in list_devices():
        loaded = {mode: str(load_models(device, mode).provenance) for mode in ("train", "infer")}
        assert predictions_of(device) == loaded, device.name


def test_one_device_with_the_source_of_every_figure(run):
    out = run("devices", "tx2")
    assert "jetson-tx2: NVIDIA Jetson TX2" in out and "peak_fp32_gflops" in out
    assert "published" in out and "Data Sheet" in out
    assert max(map(len, out.splitlines()[5:])) <= 80
    document = json.loads(run("devices", "tx2", "--json"))
    figure = document["figures"]["peak_fp32_gflops"]
    assert set(figure) == {"value", "unit", "provenance", "source"}


def test_a_broken_profile_is_a_warning_and_hides_nothing(home, capsys):
    folder = home / "home" / "profiles" / "mine"
    folder.mkdir(parents=True)
    (folder / "device.toml").write_text("name = 3\n")
    assert main(["devices"]) == 0
    out, err = capsys.readouterr()
    assert "jetson-tx2" in out and err.startswith("torchedge: warning: ") and len(err.splitlines()) == 1


ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return torch.special.bessel_j0(self.first(x)).flatten(1)

def make():
    return Odd()
"""


def test_what_is_not_counted_or_not_covered_is_said(run, tmp_path, fitted):
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    words = ("predict", f"{file}:make", "--input-size", "3x8x8", "--device", str(fitted))
    out = run(*words, "-b", "4,8")
    assert "bessel_j0: unknown operator, counted as element-wise" in out.replace("special_", "")
    flat = " ".join(out.split())
    assert "out of range" in flat and "extrapolated" in flat
    assert "provenance: public data" in out
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(run(*words, "--json"))
    assert document["unsupported"] and document["out_of_range"]


def test_advise_prints_settings_that_fit(run, small):
    words = ("advise", small, "-b", "64", *STEP)
    assert re.search(r"^none +1 x 64 +sgd-momentum .* yes$", run(*words), re.MULTILINE)
    document = json.loads(run(*words, "--json"))
    assert document["fits"] and document["settings"][0]["changes"] == []
    out = run(*words, "--memory-limit", "1MiB", status=DOES_NOT_FIT)
    assert "no setting fits" in out and re.search(r"64 x 1 .* no$", out, re.MULTILINE)


@pytest.mark.parametrize("length", [(), ("--seq-len", "16")], ids=["size", "length"])
@pytest.mark.parametrize("sizes", ["16,4", "4,16"])
def test_predict_takes_branches_on_the_device_and_each_batch_size(run, small, sizes, length):
    def allocated(device, sizes):
        words = ("predict", small.replace(":small", ":Asking"), "-d", device, "-b", sizes, *length)
        rows = json.loads(run(*words, "--mode", "infer", "--json"))
        return {row["batch_size"]: row["allocated"]["value"] for row in rows}

    on_gpu, on_cpu = allocated("nvidia-h200", sizes), allocated("local-cpu", sizes)
    assert on_gpu[16] > 2 * on_cpu[16]
    assert on_gpu[4] < 2 * on_cpu[4]


def test_the_units_of_the_host_are_timed_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(hosts, "_ROUND_S", 0.002)
    monkeypatch.setattr(hosts.torch.cuda, "is_available", lambda: False)
    document = json.loads(run("profile", "--host", "--json"))
    assert document["device"] == "cpu" and min(document["us"].values()) > 0
    assert hosts.ASSUMED_LAUNCHES.keys() < document["us"].keys()
    assert "--operator-us" in run("profile", "--host")
    run("profile", "--host", "--quick", status=2)
