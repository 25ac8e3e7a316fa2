"""Steps whose pace the host sets take as long as the host in use says."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchedge
from torchedge.devices import usual_host
from torchedge.errors import DeviceError, InputError, ProfileError
from torchedge.integrations import training_runs
from torchedge.integrations.training_runs import TrainingRun


def small():
    """Many small layers."""
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("amp", [None, "bfloat16"])
def test_launches_take_the_time_of_the_host_and_products_that_of_the_device(mode, amp):
    device = torchedge.find_device("nvidia-h200")
    met, spread = usual_host(device)

    def step(model, size, on):
        example = torch.zeros(1, next(model.parameters()).shape[1])
        return torchedge.predict(model, size, on, example=example, mode=mode, amp=amp)

    usual, same, slow = (step(small(), 1, d) for d in (device, device.on_host(met), device.on_host(2 * met)))
    assert same.latency.value == pytest.approx(usual.latency.value)
    known, unknown = (math.log(p.latency.high / p.latency.value) for p in (same, usual))
    assert known < unknown <= math.hypot(known, spread) + 1e-9
    share = 0.5 if mode == "train" else 0.1  # a part of every step is neither
    assert (1 + share) * usual.latency.value < slow.latency.value <= 2.01 * usual.latency.value
    assert slow.memory == usual.memory
    large = nn.Linear(8192, 8192)  # takes the device long
    busy, busy_slow = (step(large, 16384, d).latency for d in (device, device.on_host(2 * met)))
    assert busy_slow.value == pytest.approx(busy.value, rel=0.02)
    assert busy_slow.high / busy_slow.value == pytest.approx(busy.high / busy.value, rel=0.01)


def test_a_device_on_another_host_is_another_device():
    device = torchedge.find_device("nvidia-h200")
    slow = device.on_host(9)
    assert slow != device
    assert slow.fingerprint != device.fingerprint
    assert copy.deepcopy(slow) == slow
    assert slow.on_host(7) != slow


@pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf"), True, "9", None])
def test_a_time_that_is_none_is_refused(given):
    with pytest.raises(InputError, match="microseconds"):
        torchedge.find_device("nvidia-h200").on_host(given)


@pytest.mark.parametrize("name", ["jetson-tx2", "adreno-640"])
def test_a_profile_that_does_not_know_its_host_says_so(name):
    with pytest.raises(InputError, match=f"{name}: its profile does not say how fast the host"):
        torchedge.find_device(name).on_host(5)


def test_a_device_without_latencies_of_its_own_has_the_hosts_of_its_relative():
    device, (met, _) = torchedge.find_device("nvidia-a100"), usual_host(torchedge.find_device("nvidia-h200"))
    usual, same, slow = (
        torchedge.predict(small(), 1, d, example=torch.zeros(1, 16)).latency.value
        for d in (device, device.on_host(met), device.on_host(2 * met))
    )
    assert same == pytest.approx(usual) and slow > 1.5 * usual


@pytest.mark.parametrize("broken", [3, {"operator_us": 9.0}, {"operator_us": -1.0, "spread": 0.3}])
def test_hosts_that_a_profile_does_not_describe_as_numbers_are_refused(broken):
    device = torchedge.find_device("nvidia-h200")
    with pytest.raises(ProfileError, match=r"profile\.hosts\..*expected a number between 0 and"):
        usual_host(replace(device, profile={**device.profile, "hosts": broken}))


def test_a_device_that_was_not_measured_takes_the_host_given():
    device = torchedge.find_device("jetson-agx-orin")
    usual, slow = (
        torchedge.predict(small(), 1, d, example=torch.zeros(1, 16)) for d in (device, device.on_host(50))
    )
    assert slow.latency.value > 2 * usual.latency.value


def test_the_control_runs_on_any_device_of_the_machine():
    state = torch.get_rng_state()
    assert torchedge.measure_operator_us("cpu") > 0
    assert torch.equal(torch.get_rng_state(), state)  # a script's random numbers stay as they are
    with pytest.raises(DeviceError, match="expected a device of this machine"):
        torchedge.measure_operator_us("meta:broken")


def test_a_run_on_this_machine_is_predicted_on_its_host(monkeypatch):
    device = torchedge.find_device("nvidia-h200")
    monkeypatch.setenv("TORCHEDGE_DEVICE", device.name)
    monkeypatch.setattr(training_runs, "measure_operator_us", lambda: 3 * usual_host(device)[0])
    predictions = []
    for in_use in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        predictions.append(TrainingRun().check(small(), torch.zeros(2, 16), 2, optimizer="sgd"))
    usual, here = predictions
    assert here.latency.value > 2 * usual.latency.value
