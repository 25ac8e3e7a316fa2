"""The model of programs: fitted to canned launches of a device with a known law, refused where damaged."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from torchedge.devices import find_device
from torchedge.errors import ProfileError
from torchedge.profiling.profile_folders import write_profile
from torchedge.profiling.step_fitting import LAUNCHES, fit_device_programs, fit_steps, read_steps
from torchedge.streaming.program_costs import program_costs

pytest.importorskip("sklearn")
pytest.importorskip("scipy")

CLASSES = {"elemental": (50, 20, 2), "reusable": (200, 40, 5), "hierarchical": (30, 10, 8)}
"""GFLOP/s, GB/s and us of the canned device."""


def canned(network, batch, seed):
    """Return a row of a network whose launches follow the device's law."""
    draw = np.random.default_rng(seed)
    launches = []
    for load_class, (gflops, gb_s, us) in CLASSES.items():
        for _ in range(4 + 8 * (seed % 3)):
            elements = int(2 ** draw.uniform(10, 18)) * batch
            flops = elements * (64 if load_class == "reusable" else 2)
            ms = us / 1e3 + max(flops / gflops, 8 * elements / gb_s) / 1e6
            launches.append(["pointwise", load_class, flops, 4 * elements, 4 * elements, elements, 64, ms])
    sums, allocated = sum(launch[-1] for launch in launches), 2.0 * batch + draw.uniform(1, 30)
    point = {
        "kernels": 20, "latency_ms": 0.5 + 1.1 * sums + 3e-3 * len(launches), "allocated_mib": allocated,
        "memory_mib": 50 + allocated, "launches": launches,
    }  # fmt: skip
    return {"id": f"{network}@3x32x32-0", "mode": "train", "batch_size": batch, "launches": point}


def written(folder, rows):
    (folder / LAUNCHES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    points = [(network, batch) for network in "abcd" for batch in (1, 4)]
    rows = [canned(network, batch, seed) for seed, (network, batch) in enumerate(points)]
    return written(tmp_path_factory.mktemp("campaign"), rows)


@pytest.fixture(scope="module")
def fitted(campaign):
    return fit_device_programs(campaign, find_device("jetson-nano"))


@pytest.mark.slow
def test_networks_left_out_are_predicted(campaign, fitted):
    part, errors = fitted
    assert errors.mean("latency") < 15 and errors.mean("memory") < 5
    assert len(errors.latency) == 8 and set(errors.networks) == set("abcd")
    step = part.described["step"]
    assert 0.9 < step["share"] < 1.3 and 0.8 < step["memory_share"] < 1.2 and 0.4 < step["fixed_ms"] < 0.6


def test_the_profile_gives_back_what_was_fitted(campaign, fitted, tmp_path):
    device, (part, errors) = find_device("jetson-nano"), fitted
    profile = write_profile(tmp_path / "profile", device, {}, programs=part)
    costs, step = program_costs(profile), read_steps(campaign)[0]
    assert asdict(costs.step) == part.described["step"]
    assert np.isclose(costs.launches_ms(step.works).sum(), sum(step.times_ms), rtol=0.1)
    assert dict(profile.profile["programs"]["errors"]) == {
        name: round(errors.mean(name), 1) for name in ("latency", "memory")
    }
    assert program_costs(device) is None


def test_a_damaged_profile_is_refused(fitted, tmp_path):
    out = tmp_path / "profile"
    write_profile(out, find_device("jetson-nano"), {}, programs=fitted[0])
    text = (out / "device.toml").read_text()
    (out / "device.toml").write_text(text.replace("share = ", "share = -"))
    with pytest.raises(ProfileError, match="fit anew"):
        program_costs(find_device(out))
    (out / "device.toml").write_text(text)
    data = (out / "programs.safetensors").read_bytes()
    (out / "programs.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ProfileError):
        program_costs(find_device(out))


def test_a_campaign_without_launches_has_no_such_model(tmp_path):
    assert read_steps(tmp_path) == () and fit_device_programs(tmp_path, find_device("jetson-nano")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"latency_ms": 0},
        {"memory_mib": "1"},
        {"launches": []},
        {"launches": [["a", "other", 1, 1, 1, 1, 1, 1.0]]},
        {"launches": [["a", "elemental", -1, 1, 1, 1, 1, 1.0]]},
        {"launches": [["a", "elemental", 1, 1, 1, 1, 0, 1.0]]},
        {"launches": [["a", "elemental", 1, 1, 1, 1, 1, 0.0]]},
        {"launches": [["a", "elemental", 1, 1, 1, 1, 1, None]]},
    ],
)
def test_a_damaged_line_is_named(tmp_path, change):
    row = canned("a", 1, 0)
    row["launches"] |= change
    with pytest.raises(ProfileError, match="a point with its launches"):
        read_steps(written(tmp_path, [row]))


def test_too_few_points_are_refused(tmp_path):
    rows = [canned("a", batch, batch) for batch in range(1, 9)]
    with pytest.raises(ProfileError, match="8 points of 1 networks"):
        fit_steps(read_steps(written(tmp_path, rows)))
