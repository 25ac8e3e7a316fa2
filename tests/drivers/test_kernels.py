"""PyTorch's operator samples on the device in use, two of each family of rules and more."""

import numpy as np
import pytest
import torch

pytest.importorskip("pyopencl")
pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from oracles.device_checks import run_on_device
from oracles.operator_samples import check_entry, entries

from torchedge.opencl import choose_device

FAMILIES = """
add atan2 clamp where pow nn.functional.gelu nn.functional.mish erfinv lgamma sum var amax argmax cumsum
logcumsumexp sort topk softmax nn.functional.layer_norm nn.functional.batch_norm nn.functional.group_norm bmm
nn.functional.linear nn.functional.bilinear nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d nn.functional.cross_entropy
nn.functional.embedding index_add gather scatter_add cat permute slice roll flip nn.functional.pad.constant
nn.functional.pad.reflect nn.functional.interpolate.bilinear
""".split()  # noqa: SIM905 - read as the list it is


@pytest.mark.slow
@pytest.mark.parametrize("title", FAMILIES)
def test_samples_come_out_right(title):
    if title not in entries():
        pytest.skip("this PyTorch has no such entry")
    tally = check_entry(entries()[title], samples=2)
    assert [o for o in tally.outcomes if o.verdict not in ("passed", "none")] == []


@pytest.mark.parametrize("dtype", ["float32", "int64", "int32", "float64"])
def test_a_mask_selects_among_values_of_every_width(dtype):
    """Rusticl 22.3 loses the sign of a mask that is widened to 64 bits."""
    if dtype == "float64" and not choose_device().double:
        pytest.skip("the device has no float64")
    x = torch.arange(48).remainder(5)
    values = (x < 2, x.to(getattr(torch, dtype)), torch.full((48,), -3, dtype=getattr(torch, dtype)))
    expected = torch.where(*values)
    (mine,) = run_on_device(torch.ops.aten.where.self, values, {}, [expected])
    assert np.array_equal(mine, expected.numpy())
