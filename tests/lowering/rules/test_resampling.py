"""Tensors drawn at other sizes: the same as PyTorch's."""

import pytest
import torch
from oracles.rule_checks import check, tensor

from torchedge.expressions.indices import Fetched, atoms_of
from torchedge.expressions.scalars import Read, reads_of
from torchedge.lowering.nodes import Pointwise
from torchedge.lowering.rules import all_rules
from torchedge.tracing.steps import capture_step

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("kind", "shape", "sizes", "rest"),
    [
        *(("upsample_nearest2d", (2, 3, 4, 5), sizes, ()) for sizes in ((8, 10), (7, 3))),
        *(("_upsample_nearest_exact2d", (2, 3, 7, 2), sizes, ()) for sizes in ((5, 9), (7, 2))),
        *((f"upsample_{kind}2d", (2, 3, 4, 5), (7, 9), (corners,))
          for kind in ("bilinear", "bicubic") for corners in (False, True)),
        ("upsample_bilinear2d", (1, 2, 9, 7), (15, 4), (False, 1.7, 0.6)),
        ("upsample_nearest1d", (2, 3, 5), (9,), ()),
        ("upsample_linear1d", (2, 3, 5), (9,), (True,)),
        ("upsample_nearest3d", (1, 2, 3, 4, 2), (6, 8, 4), ()),
        ("upsample_trilinear3d", (1, 2, 3, 4, 2), (5, 4, 6), (False,)),
    ],
)  # fmt: skip
def test_forward_and_gradient(kind, shape, sizes, rest):
    forward, backward = getattr(aten, kind).default, getattr(aten, f"{kind}_backward").default
    grad = tensor(*shape[: -len(sizes)], *sizes)
    check(forward, tensor(*shape), list(sizes), *rest, rtol=1e-6, atol=1e-6)
    check(backward, grad, list(sizes), list(shape), *rest, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [1.3, 1.7, 2.9, 0.3, 1 / 3, 3.1415])
def test_nearest_rounds_as_single_precision_does(factor):
    size = 61
    x = torch.arange(size, dtype=torch.float32).view(1, 1, -1)
    made = int(size * factor)
    check(aten.upsample_nearest1d.default, x, [made], factor, rtol=0, atol=0)
    check(aten._upsample_nearest_exact1d.default, x, [made], factor, rtol=0, atol=0)


def test_whole_factors_need_no_arithmetic_on_values():
    (node,) = check(aten.upsample_nearest2d.default, tensor(1, 4, 3, 3), [6, 9])
    assert isinstance(node, Pointwise) and isinstance(node.body, Read)
    (load,) = reads_of(node.body)
    assert not any(isinstance(a, Fetched) for i in load.indices for a in atoms_of(i))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_a_step_gathers_the_gradient_of_a_resampling(mode):
    """Capture keeps the operator: PyTorch's own decomposition scatters into its input."""

    class Larger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Conv2d(2, 3, 1)

        def forward(self, x):
            return torch.nn.functional.interpolate(self.mix(x), scale_factor=2, mode=mode)

    step = capture_step(
        Larger(), torch.zeros(1, 2, 4, 4), loss=lambda y: (y * y).mean(), keep=frozenset(all_rules())
    ).step
    kinds = [op.kind for op in step.ops]
    assert any(kind.endswith("_backward") and "upsample" in kind for kind in kinds)
    assert not any("index" in kind for kind in kinds)
    for name in ("upsample_nearest2d", "upsample_bilinear2d"):
        assert torch._C.DispatchKey.Autograd in getattr(torch.ops.aten, name).default.py_kernels
