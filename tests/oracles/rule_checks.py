"""Rules held against their operators: PyTorch in float64, nodes through numpy and as kernel text."""

import numpy as np
import torch
from oracles.device_checks import captured, run_on_device
from oracles.nodes import compute

from torchedge.expressions.dialect import Site
from torchedge.expressions.rendering import Renderer
from torchedge.lowering.node_checks import check_nodes
from torchedge.lowering.nodes import Contraction, Pointwise, Rows, RowsResult, Stored, nodes_below
from torchedge.lowering.rules.registry import Result, all_rules, apply_rule
from torchedge.lowering.translation import translate
from torchedge.textures.layouts import Layout

DTYPES = {
    torch.float64: "float32", torch.float32: "float32", torch.int64: "int64", torch.int32: "int32",
    torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16",
}  # fmt: skip
"""What dtype the nodes bear: float64 is how the oracle computes what a device holds in float32."""


def tensor(*shape):
    """Return random numbers, the same for a shape."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def check(target, *args, rtol=1e-10, atol=1e-10, equal_nan=True, compare=None, device=False, **kwargs):
    """Assert that the rule of an ATen overload makes what the operator makes, and that all of it has a text.

    Its reads must be shown to lie within their tensors.

    target: such as torch.ops.aten.add.Tensor. compare: positions of the outputs to compare (None: all).
    device: run it through OpenCL too, in single precision. Returns the nodes.
    """
    expected = target(*args, **kwargs)
    made = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    nodes, data = apply(target, args, kwargs, made)
    known = {}
    for place, (node, want) in enumerate(zip(nodes, [t for t in made if t is not None], strict=True)):
        if node is not None and (compare is None or place in compare):
            found = compute(node, data, known)
            assert found.shape == tuple(want.shape), (found.shape, tuple(want.shape))
            np.testing.assert_allclose(
                np.asarray(found, np.float64),
                want.resolve_conj().detach().to(torch.float64).numpy(),
                rtol=rtol,
                atol=atol,
                equal_nan=equal_nan,
            )
    check_nodes([node for node in nodes if node is not None])
    render(nodes)
    if device:
        check_on_device(target, args, kwargs, made, compare)
    return nodes


def check_on_device(target, args, kwargs, made, compare=None):
    """Assert that kernels make what PyTorch makes, to within single precision of its largest number."""
    present = [t for t in made if t is not None]
    for place, (found, want) in enumerate(
        zip(run_on_device(target, args, kwargs, made), present, strict=True)
    ):
        if found is not None and (compare is None or place in compare):
            exact = want.detach().to(torch.float64).numpy()
            largest = np.abs(exact[np.isfinite(exact)]).max(initial=1e-3)
            np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1e-5, atol=2e-5 * largest)


def apply(target, args, kwargs, made):
    """Return the nodes a rule makes, and what the tensors hold that they read, by name."""
    data = {}

    def plain(item):
        if isinstance(item, torch.Tensor):
            name = f"x{len(data)}"
            data[name] = item.detach().numpy()
            return Stored(tuple(item.shape), DTYPES[item.dtype], name, len(data))
        if isinstance(item, (list, tuple)):
            return [plain(i) for i in item]
        if isinstance(item, torch.dtype):
            return DTYPES[item]
        return item

    names = ["input" if a.name == "self" else a.name for a in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    kind = str(target._schema.name).split("::")[-1]
    if kind not in all_rules():
        return decomposed(target, args, kwargs)
    # By name, as a bundle's source stores them: rules take arguments by name and not by place.
    arguments = {name: plain(item) for name, item in sorted(given.items()) if item is not None}
    present = [t for t in made if t is not None]
    result = Result(tuple([tuple(t.shape) for t in present]), tuple([DTYPES[t.dtype] for t in present]))
    return apply_rule(kind, result, arguments), data


def decomposed(target, args, kwargs):
    """Return what `apply` does for an operator without a rule: through its decomposition, as captured."""
    step, constants, tensors = captured(target, args, kwargs)
    translation = translate(step)
    data = {f"x{k}": tensor.detach().numpy() for k, tensor in enumerate(tensors)}
    data |= {
        name: tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
        for name, tensor in constants.items()
    }
    return list(translation.outputs), data


def render(nodes):
    """Write every expression below the nodes as OpenCL C, one value and four values at a time."""
    sites = {}

    def site_of(tensor):
        name = sites.setdefault(tensor, f"t{len(sites)}")
        return Site(name, tensor.shape, tensor.dtype, Layout(tuple(range(len(tensor.shape)))))

    for node in nodes_below([n for n in nodes if n is not None]):
        for scalar, loops in _expressions(node):
            for width in (1, 4):
                lanes = [a for a in loops if a.extent % width == 0][-1:]
                renderer = Renderer(site_of, lanes[0] if lanes else None, width if lanes else 1)
                assert renderer.value(scalar)


def _expressions(node):
    """Yield the expressions of a node, each with the loops along which it may be computed four at a time."""
    if isinstance(node, Pointwise):
        yield node.body, node.axes
    elif isinstance(node, Rows):
        for stage in node.stages:
            yield stage.body, node.outer
        for output in node.outputs:
            yield output.body, [a for a in output.axes if a in node.outer]
    elif isinstance(node, Contraction):
        yield node.a, [a for a, r in zip(node.axes, node.roles, strict=True) if r == "row"]
        yield node.b, [a for a, r in zip(node.axes, node.roles, strict=True) if r == "col"]
    else:
        assert isinstance(node, (RowsResult, Stored))
