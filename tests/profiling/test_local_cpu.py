"""This machine's own profile: written where predictions find it, every measured figure with its source."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.fake_campaigns import Silent
from oracles.small_datasets import networks, nodes

from torchedge import find_device
from torchedge.cli import main
from torchedge.devices import Figure, Provenance
from torchedge.errors import MissingExtraError
from torchedge.prediction.latency.roofline import COEFFICIENTS, prior_mean
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling import local_cpu
from torchedge.profiling.campaigns.plans import parse_plan, read_plan
from torchedge.profiling.campaigns.recording import Summary
from torchedge.profiling.campaigns.running import OtherMachineError
from torchedge.profiling.profile_folders import PartFit, write_profile
from torchedge.textures.coefficients import coefficients_of
from torchedge.tracing.capturing import capture


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(local_cpu, "_PRODUCT_SIDES", (64, 128))
    monkeypatch.setattr(local_cpu, "_COPY_MIB", (1,))
    monkeypatch.setattr(local_cpu, "_SECONDS", 0.001)
    monkeypatch.setattr(local_cpu, "process_mib", lambda: 300.0)
    return tmp_path


@pytest.mark.slow
def test_the_profile_is_measured_and_found(home):
    told = []
    device = local_cpu.measure_local_cpu(told.append)
    assert tuple(told) == local_cpu.PROBES
    assert device == find_device("local-cpu") and device.folder.is_relative_to(home)
    measured = {name for name, figure in device.figures.items() if figure.provenance is Provenance.MEASURED}
    assert measured >= {
        *("memory_mib", "context_mib", "peak_fp32_gflops", "compute_units", "launch_overhead_us"),
        *("bandwidth_gb_s", "measured_bandwidth_gb_s"),
    }
    assert all(local_cpu.COMMAND in device.figures[name].source for name in measured)
    assert device.value("context_mib") == 300


def test_coefficients_of_kernels_stay(home):
    template = find_device("local-cpu")
    folder = home / "home" / "profiles" / "local-cpu"
    folder.parent.mkdir(parents=True)
    kernels = PartFit(coefficients_of(template), {"provenance": "assumed"})
    write_profile(folder, template, {}, kernels=kernels)
    device = local_cpu._write("This machine", {"memory_mib": (1000.0, "a test")})
    assert device.value("memory_mib") == 1000
    assert coefficients_of(device) == kernels.model


def small_campaign(folder):
    """A campaign of two small networks, as it would be measured here."""
    plan = parse_plan("p", 'train_batch_sizes = [2, 4, 8, 16]\nnetworks = ["one", "two"]\n')
    rows = ["id,mode,batch_size,fits,memory_mib,allocated_mib,reserved_mib,latency_ms"]
    jobs = []
    for item, (_, _, width) in zip(plan.items(), networks()[::5], strict=True):
        jobs.append({"id": item.id, "network": item.network.label, "input_size": [3, 64, 64]})
        jobs[-1] |= {"optimizer": "sgd-momentum", "build": {"nodes": nodes(width)}}
        rows += [f"{item.id},{m},{b},1,{350 + b},,,{2 + b * width / 50}" for m, b in item.points]
    folder.mkdir(exist_ok=True)
    (folder / "measurements.csv").write_text("\n".join(rows) + "\n")
    (folder / "networks.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    (folder / "environment.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_from_the_shell_the_profile_is_measured_and_says_how_good_it_is(home, capsys, monkeypatch):
    folder = home / "campaign"
    folder.mkdir()
    asked = []
    monkeypatch.setattr(
        local_cpu, "measure_networks",
        lambda plan, bars, hurry: asked.append((plan.name, hurry)) or small_campaign(folder),
    )  # fmt: skip
    assert main(["profile", "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "local-cpu" and document["yours"] and asked == [("minute", True)]
    assert {f["symbol"] for f in document["fit"]["figures"]} == {"Γ", "Φ"}
    training = find_device("local-cpu").profile["training"]
    assert training["provenance"] == "measured" and training["memory_rows"] == 8
    assert main(["devices"]) == 0
    assert "(yours)" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_fit_the_figures_stay_and_a_warning_says_why(capsys, monkeypatch):
    def missing(*_, **__):
        raise MissingExtraError.of("torchvision", extra="vision", purpose="profiling")

    monkeypatch.setattr(local_cpu, "measure_networks", missing)
    assert main(["profile"]) == 0
    out, err = capsys.readouterr()
    assert "torchedge[vision]" in err and "stay assumed" in err and "bandwidth_gb_s" in out


def test_a_finished_measurement_begins_anew_and_so_does_one_of_another_machine(home, monkeypatch):
    plan, seen = read_plan("minute"), []
    folder = home / "home" / "profiling" / "local-cpu"

    def campaign(job, transport, listener):
        job.folder.mkdir(parents=True, exist_ok=True)
        seen.append(sorted(path.name for path in job.folder.iterdir()))
        if len(seen) == 1:
            raise OtherMachineError("torch was 2.0 and is 2.1")
        (job.folder / "plan.toml").write_text(plan.text)
        return Summary(job.folder, 28, 28, 0, 3)

    monkeypatch.setattr(local_cpu, "run_campaign", campaign)
    folder.mkdir(parents=True)
    (folder / "old").write_text("")
    listener = Silent()
    assert local_cpu.measure_networks(plan, listener, hurry=True) == folder
    assert seen == [["old"], []] and "3 of 28 points" in listener.notes[0]
    local_cpu.measure_networks(plan, listener, hurry=True)  # without rows it is not finished: go on
    assert seen[-1] == ["plan.toml", "rows.jsonl"]


def test_a_folder_that_cannot_be_written(monkeypatch, home, capsys):
    (home / "file").write_text("")
    monkeypatch.setenv("TORCHEDGE_HOME", str(home / "file"))
    assert main(["profile", "local-cpu"]) == 2
    assert "TORCHEDGE_HOME" in capsys.readouterr().err


def test_probes_give_sensible_figures():
    assert local_cpu.usable_cores() >= 1
    total, available = local_cpu.memory_mib()
    assert total > 64 and (available is None or 0 < available <= total)
    assert local_cpu.PROBE.processor()
    assert local_cpu.tiny_operator_us() > 0


# the factor between the time model and this machine ---------------------------------------------------------


def with_ratio(ratio):
    device = find_device("rtx-2080ti")
    figure = Figure(ratio, "1", Provenance.MEASURED, "a test")
    return replace(
        device, figures={**device.figures, "step_time_ratio": figure}, fingerprint=f"ratio {ratio}"
    )


def test_a_ratio_scales_every_time():
    plain = find_device("rtx-2080ti")
    moved = prior_mean(with_ratio(3.0)) - prior_mean(plain)
    assert np.allclose(moved, [math.log(3.0) if c.follows else 0.0 for c in COEFFICIENTS])


def test_a_ratio_scales_predicted_steps():
    graph = capture(local_cpu.small_networks()["plain"], input_size=(3, 64, 64))
    one, three = (predict_graph(graph, 8, with_ratio(ratio)).latency.value for ratio in (1.0, 3.0))
    assert 2.9 < three / one < 3.01  # idle lanes' and tiles' own shares do not follow the device


@pytest.mark.slow
def test_the_ratio_is_measured_without_touching_random_state():
    state = torch.get_rng_state()
    ratio = local_cpu.step_time_ratio(find_device("local-cpu"))
    assert 1e-4 < ratio < 1e4
    assert torch.equal(torch.get_rng_state(), state)
