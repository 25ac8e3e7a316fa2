"""Lowered programs on disk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import TARGETS
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
