"""Element-wise operators and their gradients over the whole range of float32, alone and mixed in vectors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.device_checks import captured

from torchedge.lowering.assembly import lower
from torchedge.lowering.rules import all_rules
from torchedge.tracing.decompositions import decompositions

pytest.importorskip("pyopencl")
aten = torch.ops.aten
CHECKOUT = Path(__file__).resolve().parents[2]
INF = float("inf")
POSITIVE = [
    0.0,
    1e-45,
    1e-39,
    1e-30,
    1e-10,
    1e-3,
    0.5,
    0.9,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    8.0,
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
FULL = 64
"""Elements come in whole vectors: PyTorch's scalar code has other gradients at NaN than its vectors."""


@dataclass(frozen=True)
class Bound:
    """Ulps that a number may be off by. of: what the ulp is of if larger. eager: beside PyTorch's error."""

    ulps: float
    of: str
    eager: bool

    def needed(self, found, best, eager, operands):
        """Return the ulps that each element is off by; below 0 where PyTorch is off by more."""
        scale = np.abs(best)
        sizes = np.abs([x.numpy() for x in operands])
        sizes = np.where(np.isfinite(sizes), sizes, 0)
        larger = {"1": np.ones_like(sizes), "x": sizes, "product": [*sizes, np.prod(sizes, 0)], "": sizes * 0}
        largest = np.fmax(scale, np.max(larger[self.of], 0))
        scale = np.minimum(largest, np.finfo(np.float32).max).astype(np.float32)
        beside = np.where(np.isfinite(eager), np.abs(eager - best), 0) if self.eager else 0
        return (np.abs(found - best) - beside) / np.spacing(scale).astype(np.float64)


def read_bounds():
    """Return the bounds of results and of gradients by function, as docs/kernel-figures.md states them."""
    bounds = {}
    page = CHECKOUT / "docs/kernel-figures.md"
    table = page.read_text(encoding="utf-8").split("| functions | OpenCL |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        names, _, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        parts = [
            re.fullmatch(r"([\d.]+)(?: of (1|x|product))?(, eager)?", cell) for cell in cells[:2] if cell
        ]
        for name in names.split(", "):
            assert name not in bounds, f"{name} has two rows"
            bounds[name] = [Bound(float(p[1]), p[2] or "", bool(p[3])) for p in parts]
    return bounds


def overloads():
    """Yield (name, overload) of operators of one or two tensors that have kernels and are tagged pointwise.

    PyTorch 2.11 tags fewer of them: a function that has a row of bounds and no overload with a tag is one.
    """
    known = {*all_rules()} | {str(target).split(".")[1] for target in decompositions(all_rules())}
    untagged = {
        kind
        for kind in read_bounds()
        if not any(
            torch.Tag.pointwise in getattr(getattr(aten, kind), overload).tags
            for overload in getattr(aten, kind).overloads()
        )
    }
    for schema in torch._C._jit_get_all_schemas():
        space, kind = schema.name.split("::")
        if space != "aten" or kind not in known:
            continue
        target = getattr(getattr(aten, kind), schema.overload_name or "default")
        tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
        others = [a for a in schema.arguments if str(a.type) != "Tensor" and not a.has_default_value()]
        optional = all(str(a.type).startswith("Optional") for a in others)
        pointwise = torch.Tag.pointwise in target.tags or kind in untagged
        drawn = "rrelu" in kind
        if schema.is_mutable or not (pointwise and len(tensors) in (1, 2) and optional) or drawn:
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
    lanes = [torch.cat([x, x.repeat_interleave(LANES)]) for x in mixed]
    return [torch.cat([x, torch.ones(-len(x) % FULL)]) for x in lanes]


def without_denormals(tensors):
    """Yield the operands as a device may take them: all denormals as they are, those of some as 0."""
    flushed = [torch.where(x.abs() < SMALLEST, x * 0, x) for x in tensors]
    for chosen in product((0, 1), repeat=len(tensors)):
        yield [(x, zero)[k] for x, zero, k in zip(tensors, flushed, chosen, strict=True)]


def with_gradients(target):
    """Return a function that gives the operator's results and the gradients of their sum."""

    differentiable = is_differentiable(target)

    def call(*given):
        if not differentiable:
            return [target(*given)]
        made, backward = torch.func.vjp(target, *given)
        return [made, *backward(torch.ones_like(made))]

    return call


def exact_results(name, call, given):
    """Return results and gradients in float64.

    There PyTorch's trigamma is finite at its poles, and its zeta NaN where 1 / other^input and all that
    follows vanish.
    """
    exact = call(*[x.double() for x in given])
    if name == "special_zeta.default":
        vanishes = (given[0] > 1e3) & given[0].isfinite() & (given[1] > 1) & given[1].isfinite()
        exact[0] = torch.where(vanishes, 0.0, exact[0])
    if name == "digamma.default":
        poles = (given[0] <= 0) & (given[0] == given[0].floor()) & given[0].isfinite()
        exact[1] = torch.where(poles, INF, exact[1])
    return exact


def off_by(found, exact, eager, bound, operands):
    """Return the ulps of a bound that numbers are off by; 0 if no numbers where PyTorch has none."""
    found, exact, eager = [x.astype(np.float64) for x in (found, exact, eager)]
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        best = np.where(np.isfinite(rounded), exact, eager)
        needed = np.where(np.isfinite(found), bound.needed(found, best, eager, operands), INF)
    flushed = (np.abs(exact) <= SMALLEST) & (np.abs(found) <= SMALLEST)
    known = np.isfinite(rounded) & np.isfinite(eager)
    same = (found == rounded) | (found == eager) | (np.isnan(found) & (np.isnan(rounded) | np.isnan(eager)))
    return np.where(flushed | (same & ~known), 0, np.where(np.isnan(needed), INF, needed))


def test_every_function_has_a_row_of_bounds_and_no_other():
    assert {name.split(".")[0] for name in OPERATORS} == {*read_bounds()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPERATORS)
def test_results_and_gradients_are_those_of_float64(name, record_property):
    from torchedge.runtime.executors import Executor

    call, given = with_gradients(OPERATORS[name]), operands(OPERATORS[name])
    step, constants, _ = captured(call, given, {})
    with Executor(lower(step)) as executor:
        executor.load({key: tensor.numpy() for key, tensor in constants.items()})
        found = executor.run(*[x.numpy() for x in given])
    bounds = [read_bounds()[name.split(".")[0]][min(place, 1)] for place in range(len(found))]
    off = [np.full(len(given[0]), INF) for _ in found]
    for taken in without_denormals(given):
        exact, eager = exact_results(name, call, taken), call(*taken)
        assert len(found) == len(exact)
        for place, (here, there, single) in enumerate(zip(found, exact, eager, strict=True)):
            errors = off_by(here, there.numpy(force=True), single.numpy(force=True), bounds[place], taken)
            off[place] = np.minimum(off[place], errors)
    record_property(
        "ulps", " ".join(f"{max(0, worst.max()):.1f}" for worst in off)
    )  # for drivers/run.py --ulps
    exact, eager = exact_results(name, call, given), call(*given)
    for place, (errors, bound) in enumerate(zip(off, bounds, strict=True)):
        wrong = errors > bound.ulps
        examples = [
            ([float(x[k]) for x in given], *[float(part[place][k]) for part in (found, exact, eager)])
            for k in np.flatnonzero(wrong)[:6]
        ]
        what = "the result" if place == 0 else f"gradient {place}"
        assert not examples, f"{what}, {wrong.sum()} elements: (operands, found, float64, eager): {examples}"
