"""Adaptive fusion: element-wise values leave their products where the capacity of their own kernels pays."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import torchedge
from torchedge.devices import find_device
from torchedge.errors import InputError
from torchedge.streaming.planning import price_ms

pytest.importorskip("scipy")

OPTIONS = {"example": torch.zeros(2, 256), "chunk": "16KiB"}


def device(launch_us, disk_gb_s):
    """A phone of which the launch and the disk take as long as is said."""
    phone = find_device("adreno-750")
    given = {"launch_overhead_us": launch_us, "disk_read_gb_s": disk_gb_s, "unified_to_texture_gb_s": 4.0}
    figures = {name: replace(phone.figure(name), value=value) for name, value in given.items()}
    return replace(phone, figures={**phone.figures, **figures})


def mlp(depth=5):
    return nn.Sequential(*(x for _ in range(depth) for x in (nn.Linear(256, 256), nn.GELU())))


def test_values_are_kept_apart_where_weights_wait_for_capacity():
    slow_disk = device(launch_us=10, disk_gb_s=0.01)
    fused = torchedge.plan(mlp(), device=slow_disk, **OPTIONS)
    split = torchedge.plan(mlp(), device=slow_disk, fusion="adaptive", **OPTIONS)
    assert not fused.apart and len(split.apart) > 1
    assert len(split.program.launches) == len(fused.program.launches) + len(split.apart)
    assert price_ms(split) < price_ms(fused) and split.plan.objective < fused.plan.objective
    assert split.timeline.preloaded_bytes < fused.timeline.preloaded_bytes
    classes = [layer.load_class for layer in split.instance.layers]
    assert classes.count("elemental") == len(split.apart)


def test_nothing_is_split_where_launches_are_dear():
    plan = torchedge.plan(mlp(), device=device(launch_us=10_000, disk_gb_s=4), fusion="adaptive", **OPTIONS)
    assert not plan.apart


def test_a_bundle_of_such_a_plan_has_its_program(tmp_path):
    chosen, example = device(launch_us=10, disk_gb_s=0.01), torch.zeros(2, 256)
    plan = torchedge.plan(mlp(), example, device=chosen, chunk="16KiB", fusion="adaptive")
    bundle = torchedge.export(mlp(), example, out=tmp_path / "b", device=chosen, plan=plan, onnx=False)
    assert plan.apart and bundle.program.digest == plan.program.digest


def test_unknown_fusion():
    with pytest.raises(InputError, match="fusion is 'some'; expected one of all, adaptive"):
        torchedge.plan(mlp(), device="adreno-750", fusion="some", **OPTIONS)
