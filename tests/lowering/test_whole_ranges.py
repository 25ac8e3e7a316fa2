"""Element-wise operators and their gradients over the whole range of float32, alone and mixed in vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.device_checks import captured

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.tracing.decompositions import decompositions

pytest.importorskip("pyopencl")
aten = torch.ops.aten
INF = float("inf")
POSITIVE = [
    0.0,
    1e-45,
    1e-39,
    1e-30,
    1e-10,
    1e-3,
    0.5,
    1.0,
    1.5,
    2.0,
    10.0,
    88.0,
    1000.0,
    1e10,
    1e19,
    1e30,
    3e38,
    INF,
]
POINTS = torch.tensor([sign * x for x in POSITIVE for sign in (1, -1)] + [float("nan")])
LANES = 16
SMALLEST = float(np.finfo(np.float32).tiny)
ULP = 4
"""What a result may be off by, beside what PyTorch's own in float32 is off by."""
ABSOLUTE = {"tanh.default": 2.4e-7}
"""More of it, in numbers: the gradient is 1 - y², and a driver's tanh may be 1 - 6e-8 for large operands."""
NAN_IS_INSIDE = "the gradient at NaN is that of the middle part; PyTorch has 0 or NaN"
FAILING = {
    **dict.fromkeys(["celu", "elu", "hardshrink", "hardtanh", "relu6", "selu", "softshrink"], NAN_IS_INSIDE),
    "mish": "the gradient that can be derived again has x (1 - tanh²), and tanh may be 1 - 6e-8",
    "sigmoid_backward": "beyond 0 to 1, where no sigmoid is, y (1 - y) overflows before a gradient of 0",
    "digamma": "the gradient at its poles, -1, -2, ..., is infinite; PyTorch has a large number",
    "special_zeta": "powers of huge exponents and bases are 0 or NaN before they are summed",
    "special_log_ndtr": "erfcx has no kernel",
}


def overloads():
    """Yield (name, overload) of pointwise operators of one or two tensors that have kernels."""
    known = {*all_rules()} | {str(target).split(".")[1] for target in decompositions(all_rules())}
    for schema in torch._C._jit_get_all_schemas():
        space, kind = schema.name.split("::")
        if space != "aten" or kind not in known:
            continue
        target = getattr(getattr(aten, kind), schema.overload_name or "default")
        tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
        others = [a for a in schema.arguments if str(a.type) != "Tensor" and not a.has_default_value()]
        optional = all(str(a.type).startswith("Optional") for a in others)
        pointwise = torch.Tag.pointwise in target.tags and not schema.is_mutable
        drawn = "rrelu" in kind
        if not (pointwise and len(tensors) in (1, 2) and optional) or drawn:
            continue
        if result_of(target) in (torch.float32, torch.bool):
            yield f"{kind}.{schema.overload_name or 'default'}", target


def ones(target):
    count = sum(str(a.type) == "Tensor" for a in target._schema.arguments)
    return [torch.ones(1, requires_grad=True) for _ in range(count)]


def result_of(target):
    """Return the dtype of an operator's result of float32, or None where it takes none."""
    try:
        made = target(*ones(target))
    except RuntimeError:
        return None
    return made.dtype


def is_differentiable(target):
    try:
        made = target(*ones(target))
        made.sum().backward()
    except RuntimeError:
        return False
    return True


OPERATORS = dict(sorted(overloads()))


def operands(target):
    mixed = (
        [POINTS]
        if len(ones(target)) == 1
        else [g.reshape(-1) for g in torch.meshgrid(POINTS, POINTS, indexing="ij")]
    )
    return [torch.cat([x, x.repeat_interleave(LANES)]) for x in mixed]


def with_gradients(target):
    """Return a function that gives the operator's results and the gradients of their sum."""

    differentiable = is_differentiable(target)

    def call(*given):
        if not differentiable:
            return [target(*given)]
        made, backward = torch.func.vjp(target, *given)
        return [made, *backward(torch.ones_like(made))]

    return call


def wrong(found, exact, eager, absolute):
    """Return where numbers are neither as near float64 as the bound, nor as PyTorch has them, nor flushed."""
    found, exact, eager = [x.astype(np.float64) for x in (found, exact, eager)]
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        best = np.where(np.isfinite(rounded), exact, eager)
        allowed = ULP * np.spacing(np.abs(best.astype(np.float32))) + absolute
        allowed = allowed + np.where(np.isfinite(eager), np.abs(eager - best), 0)
        near = np.isfinite(found) & (np.abs(found - best) <= allowed)
        flushed = (np.abs(exact) <= SMALLEST) & (np.abs(found) <= SMALLEST)
    same = (found == rounded) | (found == eager) | (np.isnan(found) & (np.isnan(rounded) | np.isnan(eager)))
    return ~(near | same | flushed)


def cases():
    for name in OPERATORS:
        reason = FAILING.get(name.split(".")[0])
        yield pytest.param(name, marks=pytest.mark.xfail(reason=reason, strict=True) if reason else ())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*cases()])
def test_results_and_gradients_are_those_of_float64(name):
    from torchedge.runtime.executors import Executor

    target = OPERATORS[name]
    given = operands(target)
    step, constants, _ = captured(with_gradients(target), given, {})
    exact = with_gradients(target)(*[x.double() for x in given])
    eager = with_gradients(target)(*given)
    with Executor(lower(step)) as executor:
        executor.load({key: tensor.numpy() for key, tensor in constants.items()})
        found = executor.run(*[x.numpy() for x in given])
    assert len(found) == len(exact)
    for place, (here, there, single) in enumerate(zip(found, exact, eager, strict=True)):
        bad = wrong(here, there.numpy(force=True), single.numpy(force=True), ABSOLUTE.get(name, 0))
        # An operand that is no normal number may count as zero.
        for x in given:
            bad &= ~((x.numpy() != 0) & (np.abs(x.numpy()) < SMALLEST))
        examples = [
            ([float(x[k]) for x in given], float(here[k]), float(there[k]), float(single[k]))
            for k in np.flatnonzero(bad)[:6]
        ]
        what = "the result" if place == 0 else f"gradient {place}"
        assert not examples, f"{what}, {bad.sum()} elements: (operands, found, float64, eager): {examples}"
