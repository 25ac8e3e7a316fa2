"""Captures the networks of the zoo and writes what came out as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from oracles.graph_checks import verify
from tracing.zoo import Entry

from torchedge.errors import CaptureError, InputError
from torchedge.graphs import ForwardGraph
from torchedge.graphs.sizes import poly, poly_at
from torchedge.ops import call_of, registry
from torchedge.tracing.capturing import capture

COMMAND = "TORCHEDGE_UPDATE_COVERAGE=1 python -m pytest -m slow -n0 tests/tracing/test_coverage.py"


@dataclass(frozen=True)
class Row:
    """What came out for one network: `error` is why it could not be captured, in some mode."""

    table: str
    name: str
    modes: tuple[str, ...]
    ops: tuple[int, ...]
    parameters: int
    unused: int
    gigaflops: float
    captured_by: str
    unknown: tuple[str, ...]
    error: str = ""


def flops(graph: ForwardGraph) -> int:
    """FLOPs of the forward pass at batch size 1, a multiply-add counted as two."""
    known = registry()
    total = sum(known[op.kind].flops(call_of(graph, op)) for op in graph.ops if op.known)
    return poly_at(poly(total), 1)


def measure(entry: Entry) -> Row:
    """Capture one network in its modes; asserts what must hold of every graph."""
    model = entry.build()
    graphs: list[ForwardGraph] = []
    error = ""
    for mode in entry.modes:
        try:
            graphs.append(capture(model, mode=mode, **entry.options()))  # type: ignore[arg-type]
        except (CaptureError, InputError) as reason:
            error = f"{mode}: {reason}"
    for graph in graphs:
        verify(graph)
    named = dict(model.named_parameters())
    used = {v.name for g in graphs for v in g.parameters}
    assert used <= named.keys(), (
        f"{entry.name}: {sorted(used - named.keys())[:3]} are no parameters of the model"
    )
    for graph in graphs:
        expected = sum(named[v.name].numel() for v in graph.parameters)
        assert sum(v.numel[0] for v in graph.parameters) == expected, entry.name
    return Row(
        entry.table, entry.name, tuple(m for m, g in zip(entry.modes, graphs, strict=False)),
        tuple(len(g.ops) for g in graphs), sum(named[n].numel() for n in used),
        sum(p.numel() for n, p in named.items() if n not in used), flops(graphs[-1]) / 1e9 if graphs else 0.0,
        " ".join(dict.fromkeys(g.captured_by for g in graphs)),
        tuple(dict.fromkeys(kind for g in graphs for kind in g.unsupported)), error,
    )  # fmt: skip


def page(rows: Iterable[Row]) -> str:
    """Return the Markdown page."""
    rows = list(rows)
    whole = [r for r in rows if not r.error]
    tables = list(dict.fromkeys(r.table for r in rows))
    lines = [
        "# What can be captured",
        "",
        f"Written by `{COMMAND}` with torch {torch.__version__.split('+')[0]}; do not edit by hand.",
        "",
        f"{len(whole)} of {len(rows)} networks are captured in training and inference mode,",
        f"{sum(not r.unknown for r in whole)} of them without an operator unknown to `torchedge.ops`.",
        "",
        "Ops: operators in training mode (with the loss) / in inference mode. Parameters: those that a",
        "forward pass reads in either mode; *unused* ones belong to the model and are read by none. GFLOPs:",
        "forward pass of one sample in inference mode, a multiply-add counted as two. By: the fast path",
        "(`trace`) or torch.export (`export`).",
        "",
        "A network that decides by the values it computes has no graph: whole detectors choose boxes by",
        "their scores, so their backbones stand here, as captured by",
        "`torchedge.capture(model.backbone, input_size=(3, 800, 800))`. Code that looks at the batch size",
        "(`if x.shape[0] > 8`) takes the branch of a large batch; pass `batch_size=` to capture for one.",
    ]
    for table in tables:
        lines += ["", f"## {table}", "", "| network | ops | parameters | GFLOPs | by | unknown operators |",
                  "|---|---:|---:|---:|---|---|"]  # fmt: skip
        lines += [_line(r) for r in rows if r.table == table and r.modes]
    failed = [r for r in rows if r.error]
    lines += ["", "## Not captured", ""]
    lines += [f"- {r.name} ({r.table}), {r.error}" for r in failed] or ["Nothing of the above."]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    unused = f" ({row.unused:,} unused)" if row.unused else ""
    ops = " / ".join(f"{n}" for n in row.ops)
    unknown = ", ".join(row.unknown)
    cells = (row.name, ops, f"{row.parameters:,}{unused}", f"{row.gigaflops:.3g}", row.captured_by, unknown)
    return f"| {' | '.join(cells)} |"
