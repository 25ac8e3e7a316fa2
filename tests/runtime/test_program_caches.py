"""Lowered programs on disk."""

import pytest
import torch
from torch import nn

from torchedge.devices import match_device
from torchedge.errors import InputError
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS, with_tuner
from torchedge.runtime import program_caches
from torchedge.runtime.program_caches import key_of, lowered
from torchedge.textures.layouts import Layout
from torchedge.tracing.steps import capture_step


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    captured = capture_step(
        model,
        torch.randn(2, 3, 8, 8),
        targets=torch.tensor([0, 1]),
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        keep=frozenset(all_rules()),
    )
    return captured.step


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_was_lowered_is_read_back(step, tmp_path, target):
    made, cached = lowered(step, TARGETS[target], {}, tmp_path)
    assert not cached
    again, cached = lowered(step, TARGETS[target], {}, tmp_path)
    assert cached and again.digest == made.digest
    assert (again.tensors, again.kernels, again.launches, again.arena) == (
        made.tensors, made.kernels, made.launches, made.arena
    )  # fmt: skip


@pytest.mark.parametrize(("device", "target"), [("NVIDIA H200", "gpu"), ("Adreno 640", "mobile")])
def test_what_a_tuner_chose_is_read_back(tmp_path, device, target):
    """Vectors of two in local memory counted as vectors of four, so that no such program could be read."""
    model = nn.Linear(8, 10)
    captured = capture_step(
        model,
        torch.randn(16, 8),
        targets=torch.arange(16) % 10,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        keep=frozenset(all_rules()),
    )
    tuned = with_tuner(TARGETS[target], match_device(device), "model")
    made, _ = lowered(captured.step, tuned, {}, tmp_path)
    if target == "gpu":
        assert any("__local float2" in kernel.source for kernel in made.kernels)
    again, cached = lowered(captured.step, tuned, {}, tmp_path)
    assert cached and again.launches == made.launches and again.kernels == made.kernels


def test_the_log_says_why_no_program_was_read(step, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG", "torchedge")
    lowered(step, TARGETS["cpu"], {}, tmp_path)
    assert caplog.messages == [f"no program {key_of(step, TARGETS['cpu'], {})[:12]} in {tmp_path}"]
    caplog.clear()
    lowered(step, TARGETS["cpu"], {}, tmp_path)
    assert not caplog.messages

    def refuse(*_):
        raise InputError("kernels[0]: too long")

    monkeypatch.setattr(program_caches, "parse_program", refuse)
    assert not lowered(step, TARGETS["cpu"], {}, tmp_path)[1]
    assert caplog.messages == ["a cached program is made again, as it cannot be read: kernels[0]: too long"]


def test_a_damaged_entry_is_made_anew(step, tmp_path):
    made, _ = lowered(step, TARGETS["cpu"], {}, tmp_path)
    (entry,) = tmp_path.iterdir()
    data = bytearray(entry.read_bytes())
    data[-40] ^= 1
    entry.write_bytes(data)
    again, cached = lowered(step, TARGETS["cpu"], {}, tmp_path)
    assert not cached and again.digest == made.digest
    assert lowered(step, TARGETS["cpu"], {}, tmp_path)[1]


def test_everything_counts(step):
    plain = key_of(step, TARGETS["cpu"], {})
    assert plain == key_of(step, TARGETS["cpu"], {}) != key_of(step, TARGETS["gpu"], {})
    name = next(value.name for value in step.values if value.role == "parameter" and len(value.shape) == 4)
    assert key_of(step, TARGETS["cpu"], {name: Layout((2, 3, 1, 0))}) != plain


def test_an_entry_under_another_name_is_not_run(step, tmp_path):
    lowered(step, TARGETS["cpu"], {}, tmp_path)
    (entry,) = tmp_path.iterdir()
    key = key_of(step, TARGETS["gpu"], {})
    entry.rename(entry.with_name(entry.name.replace(key_of(step, TARGETS["cpu"], {}), key)))
    program, cached = lowered(step, TARGETS["gpu"], {}, tmp_path)
    assert not cached and program.target == "gpu"
