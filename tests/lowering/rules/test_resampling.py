"""Tensors drawn at other sizes: the same as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from oracles.rule_checks import check

from torchedge.expressions.indices import Fetched, atoms_of
from torchedge.expressions.scalars import Read, reads_of
from torchedge.lowering.nodes import Pointwise
from torchedge.lowering.rules import all_rules
from torchedge.tracing.steps import capture_step

aten = torch.ops.aten


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


SIZES = [
    ((4, 5), (8, 10)),
    ((4, 5), (7, 3)),
    ((3, 3), (3, 3)),
    ((1, 5), (4, 1)),
    ((7, 2), (5, 9)),
    ((2, 6), (6, 15)),
]
FACTORS = [(2.0, 2.0), (2.05, 1.0), (1.7, 0.6), (1.5, 3.0), (2.3, 1.1)]


def both(kind, space, shape, made, *rest, scales=(), device=False):
    name = f"{kind}{space}d"
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    x, grad = tensor(*shape), tensor(*shape[:-space], *made)
    nodes = check(forward.default, x, list(made), *rest, *scales, rtol=1e-6, atol=1e-6, device=device)
    check(
        backward.default, grad, list(made), list(shape), *rest, *scales, rtol=1e-6, atol=1e-6, device=device
    )
    return nodes


@pytest.mark.parametrize(("size", "made"), SIZES)
@pytest.mark.parametrize("kind", ["upsample_nearest", "_upsample_nearest_exact"])
def test_nearest(size, made, kind):
    both(kind, 2, (2, 3, *size), made)
    both(kind, 1, (2, 3, size[0]), made[:1])


@pytest.mark.parametrize(("size", "made"), SIZES)
@pytest.mark.parametrize("kind", ["upsample_bilinear", "upsample_bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_in_between(size, made, kind, align_corners):
    both(kind, 2, (2, 3, *size), made, align_corners)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize(
    ("kind", "rest"),
    [
        ("upsample_nearest", ()),
        ("_upsample_nearest_exact", ()),
        ("upsample_bilinear", (False,)),
        ("upsample_bicubic", (False,)),
    ],
)
def test_factors(factors, kind, rest):
    size = (9, 7)
    made = [int(n * f) for n, f in zip(size, factors, strict=True)]
    both(kind, 2, (1, 2, *size), made, *rest, scales=factors, device=True)


@pytest.mark.parametrize("align_corners", [False, True])
def test_one_and_three_dimensions(align_corners):
    both("upsample_linear", 1, (2, 3, 5), (9,), align_corners)
    both("upsample_trilinear", 3, (1, 2, 3, 4, 2), (5, 4, 6), align_corners)
    both("upsample_nearest", 3, (1, 2, 3, 4, 2), (6, 8, 4))
    both("_upsample_nearest_exact", 3, (1, 2, 3, 4, 2), (5, 9, 4))


@pytest.mark.parametrize("factor", [1.3, 1.7, 2.9, 0.3, 1 / 3, 3.1415])
def test_nearest_rounds_as_single_precision_does(factor):
    size = 61
    x = torch.arange(size, dtype=torch.float32).view(1, 1, -1)
    made = int(size * factor)
    check(aten.upsample_nearest1d.default, x, [made], factor, rtol=0, atol=0)
    check(aten._upsample_nearest_exact1d.default, x, [made], factor, rtol=0, atol=0)


def test_whole_factors_need_no_arithmetic_on_values():
    (node,) = both("upsample_nearest", 2, (1, 4, 3, 3), (6, 9))
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
