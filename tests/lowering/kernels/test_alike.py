"""Kernels of groups that differ in their tensors alone are those that each group has by itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchedge.lowering.assembly import lower
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.alike import Form, Forms
from torchedge.lowering.kernels.sources import KernelSource
from torchedge.tracing.steps import capture_step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "mobile", "gpu"])
def test_equal_groups_get_the_kernels_of_their_own(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    step = capture_step(
        model, torch.zeros(2, 5, 16), loss=torch.sum, optimizer=optimizer, training=True, seed=1
    ).step
    moved, shared = Forms.moved, list[FusionGroup]()

    def noted(self: Forms, sources: list[KernelSource], one: FusionGroup, other: FusionGroup) -> object:
        shared.append(other)
        return moved(self, sources, one, other)

    monkeypatch.setattr(Forms, "moved", noted)
    program = lower(step, target)
    assert len(shared) > 20
    form_of = Forms.of

    def apart(self: Forms, group: FusionGroup) -> Form:
        form = form_of(self, group)
        return replace(form, text=f"{id(group)} {form.text}")

    monkeypatch.setattr(Forms, "of", apart)
    shared.clear()
    assert lower(step, target).digest == program.digest
    assert not shared
