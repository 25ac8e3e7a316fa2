"""Kernel texts stay as they are, letter by letter, unless a change to them is meant.

`pytest tests/lowering/kernels/test_golden_kernels.py --update-golden` writes the new ones.
"""

import re
from math import prod

import pytest
import torch
from oracles.node_runs import program_of
from oracles.rule_checks import apply

from torchedge.lowering.building import contraction, elementwise
from torchedge.lowering.nodes import Stored
from torchedge.lowering.schedules import NARROW, SMALL, TILE, ContractionSchedule

ATEN = torch.ops.aten
MORE = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
"""Stride 2, padding 1."""


def convolution():
    x, w, bias = torch.zeros(2, 16, 9, 9), torch.zeros(32, 16, 3, 3), torch.zeros(32)
    made = ATEN.convolution(x, w, bias, *MORE)
    nodes, _ = apply(ATEN.convolution.default, (x, w, bias, *MORE), {}, [made])
    return [elementwise(lambda a: a * 2, nodes[0], dtype="float32")], ()


def gradient():
    x, w = torch.zeros(2, 32, 9, 9), torch.zeros(16, 32, 3, 3)
    grad = torch.zeros_like(ATEN.convolution(x, w, None, *MORE))
    arguments = (grad, x, w, [16], *MORE, [True, False, False])
    nodes, _ = apply(ATEN.convolution_backward.default, arguments, {}, [x, None, None])
    return [nodes[0]], ()


def update():
    x, grad = Stored((400, 24), "float32", "x", 0), Stored((400, 10), "float32", "grad", 1)
    weight = Stored((10, 24), "float32", "weight", 2)
    product = contraction(
        (10, 24),
        ("row", "col"),
        (400,),
        lambda out, over: grad.at(over[0], out[0]),
        lambda out, over: x.at(over[0], out[1]),
        "float32",
    )
    return [], [(weight, elementwise(lambda w, g: w - g * 0.1, weight, product, dtype="float32"))]


def activation():
    x, shift = Stored((4, 6, 6, 36), "float32", "x", 0), Stored((36,), "float32", "shift", 1)
    return [elementwise(lambda a, b: (a + b) * 2, x, shift, dtype="float32")], ()


def softmax():
    x = torch.zeros(64, 1000)
    nodes, _ = apply(ATEN._softmax.default, (x, 1, False), {}, [x])
    return [nodes[0]], ()


def pooling():
    x = torch.zeros(2, 16, 9, 9)
    nodes, _ = apply(ATEN.avg_pool2d.default, (x, [3, 3], [2, 2]), {}, [ATEN.avg_pool2d(x, [3, 3], [2, 2])])
    return [nodes[0]], ()


CASES = {
    "activation_cpu": (activation, "cpu", None),
    "activation_gpu": (activation, "gpu", None),
    "softmax_cpu": (softmax, "cpu", None),
    "softmax_gpu": (softmax, "gpu", None),
    "pooling_cpu": (pooling, "cpu", None),
    "convolution_panel": (convolution, "cpu", None),
    "gradient_panel": (gradient, "cpu", None),
    "update_panel": (update, "cpu", ContractionSchedule("panel", 16, 32, 64, 8, 2, 16, slices=2)),
    "convolution_local": (convolution, "gpu", SMALL),
    "gradient_local": (gradient, "gpu", SMALL),
    "convolution_register": (convolution, "mobile", TILE),
    "update_register": (update, "mobile", NARROW),
}
ALIKE = ("activation_cpu", "convolution_register", "gradient_local")
"""Cases whose texts are written by the lines that write those of other cases."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in ALIKE])
def test_kernels_are_as_they_were(case, golden):
    make, target, schedule = CASES[case]
    nodes, updates = make()
    made = program_of(nodes, target, schedule, updates)
    texts = [kernel.source for kernel in made.kernels]
    golden(f"kernels/{case}.cl", "\n".join(texts))


@pytest.mark.parametrize("case", CASES)
def test_kernels_know_the_local_memory_that_their_texts_declare(case):
    make, target, schedule = CASES[case]
    nodes, updates = make()
    for kernel in program_of(nodes, target, schedule, updates).kernels:
        arrays = re.findall(r"__local (?:float|int) (\w+)((?:\[\d+\])+)", kernel.source)
        declared = sum(4 * prod(map(int, re.findall(r"\d+", sizes))) for _, sizes in arrays)
        assert kernel.local_bytes == declared
        assert bool(declared) == ("__local" in kernel.source)
