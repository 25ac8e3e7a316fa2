"""Convolutions and their gradients: the same as PyTorch's."""

from itertools import product

import pytest
import torch
from oracles.rule_checks import check, tensor

from torchedge.lowering.nodes import Contraction, Rows, nodes_below

aten = torch.ops.aten


def both(
    x, weight, bias, stride, padding, dilation, transposed=False, output_padding=0, groups=1, device=False
):
    """Check a convolution and its gradients; returns the nodes of both."""
    space = x.dim() - 2
    rest = [
        [v] * space if isinstance(v, int) else list(v) for v in (stride, padding, dilation, output_padding)
    ]
    given = (*rest[:3], transposed, rest[3], groups)
    forward = check(aten.convolution.default, x, weight, bias, *given, device=device)
    grad = tensor(*forward[0].shape)
    backward = check(
        aten.convolution_backward.default,
        grad,
        x,
        weight,
        [grad.shape[1]],
        *given,
        [True, True, True],
        device=device,
    )
    return forward, backward


def weight_for(channels, outputs, kernel, transposed=False, groups=1):
    if transposed:
        return tensor(channels, outputs // groups, *kernel)
    return tensor(outputs, channels // groups, *kernel)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_dimension(stride, padding, dilation, kernel, transposed):
    size = 4 if transposed else 9
    if transposed and (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 < 1:
        pytest.skip("no output")
    weight = weight_for(3, 2, [kernel], transposed)
    both(tensor(2, 3, size), weight, tensor(2), stride, padding, dilation, transposed)


PLANES = [
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 1), (2, 2), (0, 0), (1, 1)),
    ((5, 3), (3, 2), (2, 1), (1, 1)),
    ((3, 3), (2, 2), (2, 2), (2, 2)),
    ((2, 2), (4, 3), (0, 1), (3, 2)),
    ((7, 6), (1, 1), (0, 0), (1, 1)),
]
"""Kernel, stride, padding and dilation; the first two are computed in groups, too."""
GROUPED = [(2, 4, 6), (4, 4, 4), (3, 3, 6)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("plane", "grouped"), [*product(PLANES, [(1, 3, 4)]), *product(PLANES[:2], GROUPED)])
@pytest.mark.parametrize("transposed", [False, True])
def test_two_dimensions(plane, grouped, transposed):
    (kernel, stride, padding, dilation), (groups, channels, outputs) = plane, grouped
    sizes = (3, 4) if transposed else (7, 6)
    weight = weight_for(channels, outputs, kernel, transposed, groups)
    bias = tensor(outputs) if groups != 2 else None
    output_padding = tuple(s - 1 for s in stride) if transposed else 0
    x = tensor(2, channels, *sizes)
    device = bias is not None or stride != (1, 1)
    both(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_three_dimensions(transposed, groups):
    weight = weight_for(2, 4, (2, 3, 1), transposed, groups)
    both(tensor(1, 2, 3, 4, 2), weight, None, (1, 2, 1), (1, 1, 0), (1, 1, 2), transposed, 0, groups, True)


def test_sizes_of_one():
    both(tensor(1, 1, 1, 1), tensor(1, 1, 3, 3), tensor(1), 1, 1, 1)
    both(tensor(1, 9, 1, 5), tensor(2, 9, 1, 3), None, 2, (0, 1), 1)
    both(tensor(1, 2, 1), tensor(2, 3, 1), None, 1, 0, 1, True)


def test_a_gradient_without_a_bias():
    given = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    check(
        aten.convolution_backward.default,
        tensor(2, 4, 5, 5),
        tensor(2, 3, 5, 5),
        tensor(4, 3, 3, 3),
        None,
        *given,
    )


def test_a_mask_leaves_gradients_out():
    x, weight = tensor(2, 3, 5, 5), tensor(4, 3, 3, 3)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for mask in product([False, True], repeat=3):
        if any(mask):
            nodes = check(
                aten.convolution_backward.default, tensor(2, 4, 5, 5), x, weight, [4], *rest, list(mask)
            )
            assert len(nodes) == sum(mask)


def products(nodes):
    return [n for n in nodes_below(nodes) if isinstance(n, Contraction)]


def test_no_product_with_a_hole_is_computed_for_strides():
    _, (grad, _, _) = both(tensor(1, 8, 8, 8), tensor(8, 8, 2, 2), tensor(8), 2, 0, 1)
    (product,) = products([grad])
    assert product.flops == 2 * 8 * 8 * 8 * 8  # every input meets one of the four taps
    _, (grad, _, _) = both(tensor(1, 8, 8, 8), tensor(8, 8, 1, 1), tensor(8), 2, 0, 1)
    (product,) = products([grad])
    assert product.flops == 2 * 8 * 4 * 4 * 8  # three of four inputs meet none


def test_a_transposed_convolution_costs_what_the_gradient_costs():
    forward, backward = both(tensor(1, 8, 4, 4), tensor(8, 8, 2, 2), None, 2, 0, 1, True)
    assert products(forward)[0].flops == 2 * 8 * 8 * 8 * 8
    assert products(backward[:1])[0].flops == 2 * 8 * 4 * 4 * 8 * 4


def test_depthwise_convolutions_are_rows_over_the_window():
    forward, backward = both(tensor(2, 6, 5, 5), tensor(6, 1, 3, 3), None, 1, 1, 1, groups=6)
    names = {n.name for n in nodes_below([*forward, *backward]) if isinstance(n, Rows)}
    assert names == {"depthwise", "depthwise_weight", "sum"}
    assert not products([*forward, *backward])


def test_the_innermost_loop_runs_over_channels():
    forward, (grad, _, _) = both(tensor(1, 5, 6, 6), tensor(7, 5, 3, 3), None, 1, 1, 1)
    assert products(forward)[0].inner[-1].extent == 5
    assert products([grad])[0].inner[-1].extent == 7
