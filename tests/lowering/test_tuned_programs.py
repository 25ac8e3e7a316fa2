"""Programs whose schedules and layouts the tuner chose compute what those of the defaults compute."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.targets import target_here
from torch import nn

from torchedge.lowering import assembly
from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.opencl import open_context
from torchedge.runtime import Executor, kernel_times
from torchedge.runtime.kernel_times import CachedTimes
from torchedge.runtime.program_caches import key_of
from torchedge.storage.folders import CACHE_VARIABLE
from torchedge.textures.coefficients import default_coefficients
from torchedge.tracing.steps import capture_step

pytest.importorskip("pyopencl")


def tuned(name, **more):
    return replace(target_here(name), coefficients=default_coefficients(name), **more)


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 12), nn.Softmax(-1),
    )  # fmt: skip
    x = torch.randn(2, 8, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(
        model, (x,), loss=lambda y: (y * y).sum(), optimizer=optimizer, keep=frozenset(all_rules())
    ), x


def run(captured, x, target):
    program = lower(captured.step, target)
    with Executor(program) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        loss = executor.run(x.numpy())[0]
        return (
            program,
            loss,
            {t.name: executor.read(t.name) for t in program.tensors if t.role == "parameter"},
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "gpu", "mobile"])
def test_a_tuned_step_computes_the_same(name, step):
    captured, x = step
    _, loss, weights = run(captured, x, target_here("cpu"))
    program, tuned_loss, tuned_weights = run(captured, x, tuned(name))
    np.testing.assert_allclose(tuned_loss, loss, rtol=1e-5)
    for weight, value in weights.items():
        np.testing.assert_allclose(tuned_weights[weight], value, rtol=2e-4, atol=2e-6)
    assert program.digest != lower(captured.step, target_here(name)).digest


@pytest.mark.slow
def test_decisions_are_the_same_each_time_and_belong_to_the_key_of_the_program(step):
    captured, _ = step
    target = tuned("mobile")
    first, second = (lower(captured.step, target) for _ in range(2))
    assert first.digest == second.digest
    assert key_of(captured.step, target, {}) != key_of(captured.step, target_here("mobile"), {})


@pytest.mark.slow
def test_layouts_are_chosen_for_writer_and_readers_together(step, monkeypatch):
    captured, _ = step
    decided = []

    def kept(*args):
        decided.append((args, assembly_tune(*args)))
        return decided[-1][1]

    assembly_tune = assembly.tune
    monkeypatch.setattr(assembly, "tune", kept)
    lower(captured.step, tuned("mobile"))
    ((groups, before, fixed, *_), choice) = decided[0]
    assert choice.bound_ms <= choice.ms <= choice.default_ms
    overwritten = {n for g in groups for pair in g.stored.items() if pair[1] is not None for n in pair}
    for node in {*fixed, *overwritten} & before.keys():
        assert choice.layouts[node] == before[node]
    assert all(choice.layouts[node].order == before[node].order for node in before)


@pytest.fixture(scope="module")
def small():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(32, 32)
    return capture_step(model, (x,), training=False, keep=frozenset(all_rules())), x


def preferring(storage):
    """Return a timer to which kernels that touch a storage are fast, and the last schedule fastest."""

    def timer(kernels):
        return [
            [
                (
                    1.0
                    if storage in {layouts[n].storage for s in sources for n in s.tensors if n in layouts}
                    else 2.0
                )
                / (1 + place)
                for place, (sources, layouts) in enumerate(candidates)
            ]
            for candidates in kernels
        ]

    return timer


@pytest.mark.parametrize("storage", ["buffer", "image"])
def test_a_timer_decides_between_schedules_and_storages(small, storage):
    captured, _ = small
    program = lower(captured.step, tuned("gpu"), timer=preferring(storage))
    stored = {t.layout.storage for t in program.tensors}
    assert ("image" in stored) == (storage == "image")
    assert program.digest != lower(captured.step, target_here("gpu")).digest
    slowest = lower(captured.step, tuned("gpu"), timer=lambda kernels: [[1.0] * len(k) for k in kernels])
    assert slowest.digest == lower(captured.step, target_here("gpu")).digest  # no gain: the defaults stay


def test_measured_kernels_compute_the_same_and_are_timed_once(small, tmp_path, monkeypatch):
    captured, x = small
    _, output, _ = run(captured, x, target_here("cpu"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    timer = CachedTimes(open_context())
    program = lower(captured.step, tuned("cpu"), timer=timer)
    monkeypatch.setattr(kernel_times, "_times_of", None)
    again = lower(captured.step, tuned("cpu"), timer=CachedTimes(open_context()))
    assert again.digest == program.digest
    with Executor(program) as executor:
        executor.load({name: tensor.detach().numpy() for name, tensor in captured.tensors.items()})
        np.testing.assert_allclose(executor.run(x.numpy())[0], output, rtol=1e-5)
    keys = {key_of(captured.step, tuned("cpu"), {}, device) for device in ("", timer.device)}
    assert len(keys) == 2


def test_kernels_that_do_not_compile_are_never_fast(small):
    captured, _ = small
    candidates = []

    def timer(kernels):
        candidates.extend(kernels)
        return [[1.0] * len(k) for k in kernels]

    lower(captured.step, tuned("cpu"), timer=timer)
    sources, layouts = candidates[0][0]
    broken = [
        replace(s, kernel=replace(s.kernel, name="broken", source="__kernel void broken( {")) for s in sources
    ]
    whole, torn = kernel_times.kernel_times(open_context(), [[(sources, layouts), (broken, layouts)]])[0]
    assert 0 <= whole < float("inf") and torn == float("inf")
