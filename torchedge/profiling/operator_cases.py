"""The nine operators of TMModel's evaluation over its shapes (Table 3), each as one kernel to tune.

The paper gives ranges: sides of 2^4 to 2^12 for products, softmax and layer norm; sides of 2^4 to 2^9 and
windows of 3 to 7 for convolutions. It gives no channels: here 16 (three dimensions: 8), and shapes with more
arithmetic or memory than a limit are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchedge.errors import InputError
from torchedge.lowering.fusion import FusionGroup, form_groups
from torchedge.lowering.kernels.nests import Nest, nest_of
from torchedge.lowering.nodes import Node
from torchedge.lowering.placement import as_images, place_tensors
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import Target
from torchedge.lowering.translation import translate
from torchedge.textures.layouts import Layout, channels_last, row_major
from torchedge.tracing.steps import capture_step

CHANNELS, CHANNELS_3D = 16, 8
SIDES, LONG_SIDES, WINDOWS = (16, 32, 64, 128, 256, 512), tuple([2**n for n in range(4, 13)]), (3, 5, 7)


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operator at one shape.

    sizes: (rows, columns, inner) of MatMul, (rows, columns) of SoftMax and LayerNorm, (side, window) of the
    others.
    """

    operator: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Operator and sizes, such as "Conv2Ds1 64 3"."""
        return " ".join([self.operator, *map(str, self.sizes)])

    @property
    def flops(self) -> int:
        """Arithmetic of one run."""
        if self.operator == "MatMul":
            return 2 * prod(self.sizes)
        if self.operator in ("SoftMax", "LayerNorm"):
            return 8 * prod(self.sizes)
        side, window = self.sizes
        if self.operator == "DwConv2D":
            return 2 * CHANNELS * side**2 * window**2
        if self.operator == "Conv3D":
            return 2 * CHANNELS_3D**2 * side**3 * window**3
        stride = 2 if self.operator == "Conv2Ds2" else 1
        return 2 * CHANNELS**2 * (side // stride) ** 2 * window**2

    @property
    def elements(self) -> int:
        """Elements of the largest tensor, at most."""
        if self.operator in ("MatMul", "SoftMax", "LayerNorm"):
            return max([prod(pair) for pair in (self.sizes[:2], self.sizes[1:], self.sizes[::2])])
        side, _ = self.sizes
        if self.operator == "Conv3D":
            return CHANNELS_3D * side**3
        return CHANNELS * side**2 * (4 if self.operator == "DeConv2Ds2" else 1)


@dataclass(frozen=True, slots=True)
class OperatorKernel:
    """The kernel of an operator before a schedule is chosen: its group, where its tensors lie, its loops."""

    group: FusionGroup
    layouts: Mapping[Node, Layout]
    nest: Nest


class _Product(nn.Module):
    def __init__(self, inner: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, cols))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _convolution(sizes: tuple[int, ...], kind: type[nn.Module], stride: int, **more: Any) -> nn.Module:  # noqa: ANN401
    channels = CHANNELS_3D if kind is nn.Conv3d else CHANNELS
    window = sizes[1]
    return kind(channels, channels, window, stride=stride, padding=window // 2, bias=False, **more)


_MODULES: Mapping[str, Callable[[tuple[int, ...]], nn.Module]] = MappingProxyType(
    {
        "MatMul": lambda s: _Product(s[2], s[1]),
        "Conv2Ds1": lambda s: _convolution(s, nn.Conv2d, 1),
        "Conv2Ds2": lambda s: _convolution(s, nn.Conv2d, 2),
        "DeConv2Ds1": lambda s: _convolution(s, nn.ConvTranspose2d, 1),
        "DeConv2Ds2": lambda s: _convolution(s, nn.ConvTranspose2d, 2, output_padding=1),
        "Conv3D": lambda s: _convolution(s, nn.Conv3d, 1),
        "DwConv2D": lambda s: _convolution(s, nn.Conv2d, 1, groups=CHANNELS),
        "SoftMax": lambda s: nn.Softmax(-1),
        "LayerNorm": lambda s: nn.LayerNorm(s[1]),
    }
)
OPERATORS = tuple(_MODULES)
"""The operators of Table 3, in its order."""


MOST_ELEMENTS = 2**26
"""Elements of the largest tensor of a case."""


def all_cases(operators: tuple[str, ...] = OPERATORS, most_flops: float = 4e9) -> list[OperatorCase]:
    """Return the operators at all their shapes within limits of arithmetic and of elements of a tensor.

    operators: names, also with sizes, as in "Conv2Ds1 56 3": that shape alone, of any size.
    Raises InputError: an operator is not known, or takes other sizes.
    """
    cases: list[OperatorCase] = []
    for text in operators:
        operator, *sizes = text.split() or [""]
        if sizes:
            if not all(size.isdecimal() and 0 < int(size) < 2**20 for size in sizes):
                raise InputError(f"{text!r} has no sizes; expected whole numbers, as in `Conv2Ds1 56 3`")
            cases.append(case_of(operator, tuple(map(int, sizes))))
            continue
        if operator not in OPERATORS:
            raise InputError(f"operator is {operator!r}; expected one of {', '.join(OPERATORS)}")
        shapes = [OperatorCase(operator, sizes) for sizes in _sizes(operator)]
        cases += [case for case in shapes if case.flops <= most_flops and case.elements <= MOST_ELEMENTS]
    return cases


def case_of(operator: str, sizes: tuple[int, ...]) -> OperatorCase:
    """Return an operator at any shape.

    Raises InputError: the operator is not known, or takes another number of sizes.
    """
    if operator not in OPERATORS:
        raise InputError(f"operator is {operator[:40]!r}; expected one of {', '.join(OPERATORS)}")
    wanted = 3 if operator == "MatMul" else 2
    if len(sizes) != wanted:
        raise InputError(f"{operator} gets {len(sizes)} sizes; expected {wanted}, as in `MatMul 64 64 64`")
    case = OperatorCase(operator, sizes)
    if case.elements > 2**30:
        raise InputError(f"{case.name} has tensors of {case.elements} elements; expected at most {2**30}")
    return case


def _sizes(operator: str) -> Iterator[tuple[int, ...]]:
    if operator == "MatMul":
        yield from [(n, n, n) for n in LONG_SIDES]
        yield from [
            (a, b, c)
            for a in (16, 256, 4096)
            for b in (16, 256, 4096)
            for c in (16, 256, 4096)
            if len({a, b, c}) > 1
        ]
    elif operator in ("SoftMax", "LayerNorm"):
        yield from [(n, n) for n in LONG_SIDES]
        yield from [(a, b) for a in (16, 256, 4096) for b in (16, 256, 4096) if a != b]
    else:
        yield from [(side, window) for side in SIDES for window in WINDOWS]


@cache
def operator_kernel(case: OperatorCase, target: Target) -> OperatorKernel:
    """Return the kernel of an operator for a device class; activations lie channels last, as in a network."""
    model = _MODULES[case.operator](case.sizes).eval()
    if case.operator == "MatMul":
        x = torch.zeros(case.sizes[0], case.sizes[2])
    elif case.operator in ("SoftMax", "LayerNorm"):
        x = torch.zeros(case.sizes)
    elif case.operator == "Conv3D":
        x = torch.zeros(1, CHANNELS_3D, *[case.sizes[0]] * 3)
    else:
        x = torch.zeros(1, CHANNELS, case.sizes[0], case.sizes[0])
    with torch.device("meta"):
        captured = capture_step(
            model.to("meta"), (x.to("meta"),), training=False, keep=frozenset(all_rules())
        )
    translation = translate(captured.step)
    groups = [g for g in form_groups(translation, target).groups if g.host.numel]
    stored = list(translation.stored.values())
    inputs = {translation.stored[i] for i in captured.step.inputs}
    known = {
        node.name: channels_last(len(node.shape)) if len(node.shape) > 2 else row_major(len(node.shape))
        for node in inputs
    }
    layouts = place_tensors(groups, stored, [], known)
    group = max(groups, key=lambda g: g.host.numel)
    if target.name == "mobile":
        layouts = as_images(groups, layouts, [], target)
    return OperatorKernel(group, layouts, nest_of(group, layouts))
