"""PyTorch's operator samples on the device in use, two of each family of rules and more."""

import pytest

pytest.importorskip("pyopencl")
pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from oracles.operator_samples import all_entries, check_entry, title_of

ENTRIES = {title_of(entry): entry for entry in all_entries()}
FAMILIES = """
add atan2 clamp where pow nn.functional.gelu nn.functional.mish erfinv lgamma sum var amax argmax cumsum
logcumsumexp sort topk softmax nn.functional.layer_norm nn.functional.batch_norm nn.functional.group_norm bmm
nn.functional.linear nn.functional.bilinear nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d nn.functional.cross_entropy
nn.functional.embedding index_add gather scatter_add cat permute slice roll flip nn.functional.pad.constant
nn.functional.pad.reflect nn.functional.interpolate.bilinear
""".split()  # noqa: SIM905 - read as the list it is


@pytest.mark.sampled(4)
@pytest.mark.parametrize("title", [title for title in FAMILIES if title in ENTRIES])
def test_samples_come_out_right(title):
    tally = check_entry(ENTRIES[title], samples=2)
    assert [o for o in tally.outcomes if o.verdict not in ("passed", "none")] == []
