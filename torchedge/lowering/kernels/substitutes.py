"""Contractions and scatters as plain reductions, for what has no faster kernel."""

from __future__ import annotations

from dataclasses import replace

from torchedge.expressions.indices import Fetched, of
from torchedge.expressions.scalars import Local, Position, Scalar, apply, cast, where
from torchedge.lowering.expansion import substitute
from torchedge.lowering.fusion import ACCUMULATED, Computed, Group
from torchedge.lowering.nodes import Contraction, Node, Output, Rows, Scatter, Stage, indices_of


def as_rows(group: Group) -> Group:
    """Return a group whose host is the same contraction or scatter written as a reduction over rows."""
    host = group.host
    assert isinstance(host, (Contraction, Scatter))
    stages, result = _contracted(host, group) if isinstance(host, Contraction) else _scattered(host, group)
    inner = host.inner if isinstance(host, Contraction) else host.source_axes
    rows = Rows(
        host.shape,
        host.dtype,
        host.axes,
        inner,
        stages,
        (Output(host.axes, result, host.dtype),),
        host_name(host),
    )
    computed = {n: Computed(_with_result(c.value, result), c.element) for n, c in group.computed.items()}
    return replace(group, host=rows, bodies=tuple([s.body for s in stages]), computed=computed)


def host_name(host: Node) -> str:
    """Return what a host is called in kernels and reports."""
    return host.name if isinstance(host, (Contraction, Rows)) else type(host).__name__.lower()


def _contracted(host: Contraction, group: Group) -> tuple[tuple[Stage, ...], Scalar]:
    a, b = group.bodies
    product = cast(a, "float32") * cast(b, "float32") if host.dtype == "float16" else a * b
    return (Stage("s0", "sum", product, product.dtype),), cast(Local("s0", product.dtype), host.dtype)


def _scattered(host: Scatter, group: Group) -> tuple[tuple[Stage, ...], Scalar]:
    row, value = group.bodies[0], group.bodies[1]
    base = group.bodies[2] if host.base is not None else value * 0
    here = cast(row, "int64").equals(Position(indices_of(host.axes)[0], "int64"))
    if not host.replace:
        total = Local("s0", value.dtype)
        stage = Stage("s0", "sum", where(here, value, 0), value.dtype)
        return (stage,), cast(total if host.base is None else base + total, host.dtype)
    assert len(host.source_axes) == 1
    source = host.source_axes[0]
    last = Stage("s0", "max", where(here, Position(of(source), "int64"), -1), "int64")
    found = Local("s0", "int64")
    inside = apply("maximum", found, 0)
    taken = substitute(value, {source: of(Fetched(inside, 0, source.extent - 1))})
    if host.base is None:
        base = taken * 0
    return (last,), cast(where(found < 0, base, taken), host.dtype)


def _with_result(scalar: Scalar, result: Scalar) -> Scalar:
    """Return an expression with the host's result in place of its local."""
    from torchedge.expressions.scalars import Apply, Guarded

    if isinstance(scalar, Local) and scalar.name == ACCUMULATED:
        return result
    if isinstance(scalar, Apply):
        return Apply(scalar.function, tuple([_with_result(a, result) for a in scalar.args]), scalar.dtype)
    if isinstance(scalar, Guarded):
        return Guarded(scalar.bounds, _with_result(scalar.value, result), _with_result(scalar.other, result))
    return scalar
