"""This machine's own profile: written where predictions find it, every measured figure with its source."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchedge import find_device
from torchedge.cli import main
from torchedge.devices import Figure, Provenance
from torchedge.prediction.latency.roofline import COEFFICIENTS, prior_mean
from torchedge.prediction.predictor import predict_graph
from torchedge.profiling import local_cpu
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


@pytest.mark.slow
def test_from_the_shell(home, capsys):
    assert main(["profile", "local-cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "local-cpu" and document["yours"]
    assert main(["devices"]) == 0
    assert "(yours)" in capsys.readouterr().out


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


@pytest.mark.slow
def test_a_training_process_takes_over_fifty_mib(monkeypatch):
    monkeypatch.undo()
    assert 50 < local_cpu.process_mib() < 4000
