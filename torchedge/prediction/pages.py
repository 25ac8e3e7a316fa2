"""A prediction as one HTML file: no server, no script, nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from math import floor, log10
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchedge.devices import Device, DeviceKind
from torchedge.errors import CaptureError, InputError
from torchedge.graphs import ForwardGraph, Op
from torchedge.graphs.sizes import poly_at
from torchedge.ops.specs import forward_flops
from torchedge.prediction.advice import Advice, advise_settings
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.simulation import PHASES, MemoryProfile, simulate
from torchedge.prediction.memory.tape import CATEGORIES
from torchedge.prediction.predictor import (
    device_settings,
    predict_graph,
    predict_graphs,
    predict_length,
    predict_lengths,
)
from torchedge.prediction.range_remarks import range_remark
from torchedge.prediction.results import Prediction, Predictions
from torchedge.storage.pictures import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY
from torchedge.texts import number, printable, span
from torchedge.tracing.capturing import CaptureRequest, use_graph
from torchedge.tracing.sequence_lengths import LengthFamily

_COLOURS = (BLUE, GREEN, PINK, GREY, ORANGE, SKY, RED)
"""Of the categories of memory, in their order."""
_COLUMNS = 500
"""Moments of a step that a picture shows at most."""
_SIZES = 32
"""Batch sizes of the curve, about."""
_LARGEST = 1 << 16
_ROWS = 400
"""Layers that the table lists at most."""
_MIB = 2.0**20
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 300, 90, 40, 12

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Browsers load nothing for the page, whatever it says."""
_STYLE = """
:root{color-scheme:light dark;--bar:#0072b2;--ink:#1b1f24;--dim:#5b6570;--line:#d8dde3;--paper:#fff;
--bad:#b3261e;--good:#00704f}
@media (prefers-color-scheme:dark){
:root{--bar:#56b4e9;--ink:#e6e9ed;--dim:#9aa4af;--line:#3a424b;--paper:#15181c;--bad:#ff8a80;--good:#5ed3a8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:960px;
margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.15rem;margin-top:2rem}p.dim,caption,.key{color:var(--dim)}
.verdict{font-size:1.1rem;font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.scroll{overflow:auto;max-height:32rem;background:linear-gradient(var(--paper),var(--paper)) bottom/100% 2rem
local no-repeat,linear-gradient(transparent,var(--line)) bottom/100% 1rem scroll no-repeat}
table{border-collapse:collapse}
th,td{padding:.15rem .8rem .15rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th.l,td.l{text-align:left}td.l{white-space:normal;overflow-wrap:normal}
th{position:sticky;top:0;background:var(--paper)}
.bar{width:9rem}.bar i{display:block;height:.7rem;background:var(--bar)}
.picture{overflow-x:auto}svg{width:100%;min-width:780px;height:auto;display:block}
svg text{fill:var(--dim);font-size:12px}svg .grid{stroke:var(--line)}svg .band{fill:var(--bar);opacity:.35}
svg .ink{stroke:var(--ink);fill:none;stroke-width:1.5}svg .limit{stroke:var(--bad);stroke-dasharray:6 4}
svg .over{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8rem;height:.8rem;
margin-right:.3rem}.key i,.bar i,svg{print-color-adjust:exact}
@media print{
:root{color-scheme:light;--bar:#0072b2;--ink:#000;--dim:#444;--line:#bbb;--paper:#fff;--bad:#b3261e;
--good:#00704f}
body{margin:0;max-width:none;font-size:10pt}.scroll{max-height:none;overflow:visible;background:none}
th{position:static}
h2{break-after:avoid}.picture,tr{break-inside:avoid}svg{min-width:0}}
"""


class LayerFigures(NamedTuple):
    """A module of a model: parameters, FLOPs of its forward pass, MiB at the peak that its operators made."""

    scope: str
    kinds: str
    parameters: int
    flops: int
    peak_mib: float


@dataclass(frozen=True)
class ReportData:
    """All that a report shows of one step on one device; memory in MiB.

    curve: the same step at other batch sizes. largest: the largest batch size that fits, None for a graph of
    one batch size. advice: None for an inference and where `no_advice` says why. compiled: the step runs
    under torch.compile, whose tensors are not known one by one: `profile` is that of the eager step.
    """

    prediction: Prediction
    profile: MemoryProfile
    curve: Predictions
    layers: tuple[LayerFigures, ...]
    largest: int | None
    limit_mib: float
    confidence: float
    settings: StepSettings
    advice: Advice | None = None
    no_advice: str = ""
    compiled: bool = False


def collect_report(
    request: CaptureRequest,
    device: Device,
    settings: StepSettings,
    *,
    seq_len: int | None,
    limit_mib: float | None,
    confidence: float,
    progress: Callable[[str], object] = lambda stage: None,
) -> ReportData:
    """Predict and simulate a step at the batch size of the request, with other batch sizes and settings.

    seq_len: as for `predict`. limit_mib: None is the device's memory. Raises InputError and CaptureError.
    """
    assert request.batch_size is not None
    batch_size, request = request.batch_size, request.loaded()
    family = None if seq_len is None else LengthFamily(request)
    sized = replace(request, partitioned=True) if family is None or seq_len is None else family.at(seq_len)

    def predicted(graph: ForwardGraph) -> ReportData:
        progress("prediction")
        if family is None or seq_len is None:
            prediction = predict_graph(graph, batch_size, device, settings)
        else:
            prediction = predict_length(family, seq_len, batch_size, device, settings)
        limit = limit_mib if limit_mib is not None else prediction.device_memory_mib
        assert limit is not None
        largest, several = None, [batch_size]
        if graph.fixed_batch is None:
            largest = prediction.max_batch_size(limit, confidence=confidence)
            top = max(batch_size, min(2 * max(largest, batch_size), _LARGEST))
            spread = np.geomspace(1, top, _SIZES).round().astype(int).tolist()
            several = sorted({batch_size, *spread, max(largest, 1)})
        progress("batch sizes")
        if family is None or seq_len is None:
            curve = predict_graphs([graph], several, device, settings)
        else:
            curve = predict_lengths([family], several, [seq_len], device, settings)
        profile = simulate(graph, batch_size, device_settings(device, settings))
        layers = _layers(graph, profile)
        figures = (prediction, profile, curve, layers, largest, limit, confidence, settings)
        return ReportData(*figures, compiled=graph.compiled)

    data = use_graph(sized, predicted)
    if request.mode != "train":
        return data
    update = replace(sized, batch_size=batch_size * settings.accumulation)
    try:
        alone = replace(settings, accumulation=1)
        advice = advise_settings(
            update, device, alone, limit_mib=data.limit_mib, confidence=confidence, progress=progress
        )
    except (CaptureError, InputError) as error:  # of a graph for one batch size alone
        return replace(data, no_advice=str(error))
    return replace(data, advice=advice)


def _layers(graph: ForwardGraph, profile: MemoryProfile) -> tuple[LayerFigures, ...]:
    """Return the modules of a graph in the order in which they run first."""
    scopes: dict[str, list[Op]] = {}
    for op in graph.ops:
        scopes.setdefault(op.scope, []).append(op)
    tape, held = profile.tape, dict.fromkeys(scopes, 0.0)
    sizes, alive = tape.bytes_at(np.array([profile.batch_size]))[:, 0], tape.alive_after(profile.peak.index)
    events = tape.events[: profile.peak.index + 1]
    made = {
        int(event) - 1: int(owner) for event, owner in zip(events, tape.owners, strict=False) if event > 0
    }
    for storage, owner in made.items():
        scope = tape.operators[owner][1]
        if alive[storage] and scope in held:
            held[scope] += float(sizes[storage]) / _MIB
    layers, seen = [], set[int]()
    for scope, ops in scopes.items():
        read = {i for op in ops for i in op.inputs if i is not None and graph.values[i].role == "parameter"}
        flops = poly_at(forward_flops(replace(graph, ops=tuple(ops))), profile.batch_size)
        count = sum(graph.values[i].numel[0] for i in read - seen)
        seen |= read
        kinds = ", ".join(dict.fromkeys(op.kind for op in ops))
        layers.append(LayerFigures(scope, kinds, count, flops, held[scope]))
    return tuple(layers)


# the page ---------------------------------------------------------------------------------------------------


def render_report(data: ReportData) -> str:
    """Return the report as an HTML document that stands alone."""
    p, settings = data.prediction, data.settings
    step = "training step" if p.mode == "train" else "inference"
    about = [f"batch {p.batch_size:,}", f"{step} on {p.device}"]
    if p.mode == "train":
        about += [str(settings.optimizer)]
        about += [f"accumulation {settings.accumulation}"] * (settings.accumulation > 1)
    about += [f"amp {settings.amp}"] if settings.amp else []
    about += ["torch.compile"] * data.compiled
    eager = " in eager PyTorch" * data.compiled
    title, subtitle = _text(p.model), _text(", ".join(about))
    body = [
        f'<h1>{title}</h1>\n<p class="dim">{subtitle}</p>\n{_verdict(data)}',
        _prediction_part(data),
        f"<h2>Memory over the step{eager}</h2>\n{_memory_picture(data.profile, data.prediction.device_kind)}",
        f"<h2>Memory by batch size</h2>\n{_batch_picture(data)}",
        *_time_part(p),
        *_advice_part(data),
        _layer_part(data.layers),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{title}: {subtitle}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, bars: Sequence[float] = ()
) -> str:
    """Return a table in a box that scrolls; its first `left` columns are words. bars: shares, one a row."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [f'{tag} class="l"' if place < left else tag for place in range(len(cells))]
        return "".join(f"<{kind}>{_text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    drawn = [f'<td class="bar"><i style="width:{100 * min(share, 1):.1f}%"></i></td>' for share in bars]
    names = line("th", head) + "<th></th>" * bool(bars)
    lines = [f"<tr>{line('td', row)}{bar}</tr>" for row, bar in zip_longest(rows, drawn, fillvalue="")]
    return (
        f'<div class="scroll"><table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _verdict(data: ReportData) -> str:
    required = data.prediction.needed_mib(data.confidence)
    fits = required <= data.limit_mib
    return (
        f'<p class="verdict {"good" if fits else "bad"}">{"fits" if fits else "does not fit"} into '
        f"{number(data.limit_mib)} MiB: needs up to {number(required)} MiB at {100 * data.confidence:g} % "
        "confidence</p>"
    )


def _prediction_part(data: ReportData) -> str:
    p = data.prediction
    rows = [(n, meaning, f"{number(e.value)} {e.unit}", span(e.low, e.high)) for n, e, meaning in p.figures]
    total = max(p.needed.value, 1e-9)
    parts = [(_plain(name), number(mib), f"{100 * mib / total:.0f} %") for name, mib in p.breakdown.items()]
    shares = [mib / total for mib in p.breakdown.values()]
    remarks = [*p.unsupported_remarks, *p.notes]
    if p.out_of_range:
        remarks.append(f"out of range: {range_remark(p.out_of_range)}")
    if data.profile.unsupported and not p.unsupported:
        remarks += [f"memory of {kind} is a guess" for kind in data.profile.unsupported]
    notes = "".join(f"<li>{_text(note)}</li>" for note in dict.fromkeys(remarks))
    return "\n".join(
        [
            "<h2>Prediction</h2>",
            _table(("", "meaning", "value", "90 % interval"), rows, left=2),
            f'<p class="dim">provenance: {_text(str(p.provenance))}</p>',
            f"<ul>{notes}</ul>" if notes else "",
            _table(("memory by what fills it", "MiB", "share"), parts, bars=shares),
        ]
    )


def _advice_part(data: ReportData) -> list[str]:
    if data.advice is None and not data.no_advice:
        return []
    heading = f"<h2>Settings that fit {number(data.limit_mib)} MiB</h2>"
    if data.advice is None:
        return [heading, f"<p>none was tried: {_text(data.no_advice)}</p>"]
    fit = "" if data.advice.fits else '<p class="bad">no setting fits; this one needs least</p>'
    notes = "".join(f"<li>{_text(note)}</li>" for note in data.advice.notes)
    return [heading, fit, _table(*data.advice.rows(), left=3), f"<ul>{notes}</ul>" if notes else ""]


def _layer_part(layers: Sequence[LayerFigures]) -> str:
    rows = [
        (
            layer.scope or "(the model itself)",
            layer.kinds,
            f"{layer.parameters:,}",
            number(layer.flops / 1e6),
            number(layer.peak_mib),
        )
        for layer in layers
    ]
    more = f"<p>and {len(rows) - _ROWS:,} more</p>" if len(rows) > _ROWS else ""
    head = ("module", "operators", "parameters", "forward MFLOP", "MiB at the peak")
    total = sum(layer.parameters for layer in layers), sum(layer.flops for layer in layers)
    return (
        f"<h2>Layers</h2>\n<p>{total[0]:,} parameters, {number(total[1] / 1e9)} GFLOP forward. MiB at the "
        "peak counts the tensors that the operators of a module made in this step.</p>\n"
        f"{_table(head, rows[:_ROWS], left=2)}{more}"
    )


# pictures ---------------------------------------------------------------------------------------------------


class _Frame:
    """The axes of a picture: x from `first` to `last`, y from 0 to `top`."""

    def __init__(self, first: float, last: float, top: float) -> None:
        self.first, self.last, self.top = first, max(last, first + 1e-9), max(top, 1e-9) * 1.05

    def x(self, value: float) -> float:
        return _LEFT + (value - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - 10)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _BOTTOM - _TOP)

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def band(
        self, xs: npt.NDArray[np.float64], low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]
    ) -> str:
        return self.path([*xs, *xs[::-1]], [*low, *high[::-1]])

    def picture(
        self,
        label: str,
        x_label: str,
        shapes: Iterable[str],
        x_ticks: Iterable[float] = (),
        *,
        levels: bool = True,
    ) -> str:
        lines = []
        for tick in _ticks(self.top) if levels else ():
            y = self.y(tick)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f"{tick:,.6g} MiB"
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        low = _HEIGHT - _BOTTOM + 16
        lines += [
            f'<text x="{self.x(tick):.1f}" y="{low}" text-anchor="middle">{tick:,.6g}</text>'
            for tick in x_ticks
        ]
        middle = (_LEFT + _WIDTH) / 2
        lines.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{_text(x_label)}</text>')
        return (
            f'<div class="picture"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{_text(label)}">\n' + "\n".join([*lines, *shapes]) + "\n</svg></div>"
        )

    def limit(self, mib: float, name: str) -> str:
        """Return a dashed line across the picture, with its name and MiB above or below it."""
        y = self.y(mib)
        place = y - 5 if y > _TOP + 14 else y + 14
        return (
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="over" x="{_WIDTH - 14}" y="{place:.1f}" text-anchor="end">{name}: '
            f"{number(mib)} MiB</text>"
        )


def _ticks(top: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to `top`."""
    raw = top / count
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= raw)
    return [step * place for place in range(int(top / step) + 1)]


def _memory_picture(profile: MemoryProfile, kind: DeviceKind) -> str:
    timeline = profile.timeline()
    events = len(timeline.live_mib)
    if not events:
        return "<p>the step allocates nothing</p>"
    bins = np.array_split(np.arange(events), min(events, _COLUMNS))
    moments = np.array([part[timeline.live_mib[part].argmax()] for part in bins])  # keeps the peak
    stacked = np.cumsum(timeline.by_category[moments], axis=1)
    frame = _Frame(0, events - 1, max(profile.live_mib, profile.reserved_mib))
    xs = moments.astype(np.float64)
    shapes, keys = [], []
    low = np.zeros(len(xs))
    for place, (name, colour) in enumerate(zip(CATEGORIES, _COLOURS, strict=True)):
        high = stacked[:, place]
        if (high > low).any():
            title = f"<title>{_plain(name)}</title>"
            shapes.append(f'<polygon fill="{colour}" points="{frame.band(xs, low, high)}">{title}</polygon>')
            keys.append(f'<span><i style="background:{colour}"></i>{_plain(name)}</span>')
        low = high
    for phase, name in enumerate(PHASES):
        inside = np.flatnonzero(timeline.phase == phase)
        if len(inside):
            x = frame.x(float(inside[0]))
            shapes.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT - _BOTTOM}"/>')
            at, anchor = (x + 3, "start") if x < _WIDTH - 90 else (x - 3, "end")
            below = _HEIGHT - _BOTTOM + 16
            shapes.append(f'<text x="{at:.1f}" y="{below}" text-anchor="{anchor}">{name}</text>')
    if kind == "gpu":
        shapes.append(frame.limit(profile.reserved_mib, "reserved"))
    peak = max(profile.peak.index, 0)
    x, y = frame.x(peak), frame.y(profile.live_mib)
    shapes.append(f'<circle class="ink" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    picture = frame.picture("memory over the step", "allocations and releases of one step", shapes)
    largest = [(label, number(mib)) for label, mib in profile.largest]
    live, reserved = number(profile.live_mib), number(profile.reserved_mib)
    allocator = f"; PyTorch's allocator reserves {reserved} MiB (dashed)" if kind == "gpu" else ""
    return (
        f'{picture}\n<p class="key">{"".join(keys)}</p>\n<p>Simulated, nothing fitted: tensors peak at '
        f"{live} MiB (circle) in {_text(str(profile.peak))}{allocator}."
        f"</p>\n{_table(('largest tensors at the peak', 'MiB'), largest)}"
    )


def _time_part(p: Prediction) -> list[str]:
    """Return the lanes of host and device over the step; a processor is its own host."""
    timeline = p.timeline
    if timeline is None or p.device_kind != "gpu":
        return []
    frame, colours = _Frame(0.0, p.latency.value, 1.5), {"begin": GREY}
    colours |= dict(zip(("forward", "backward", "update"), (BLUE, ORANGE, GREEN), strict=True))
    lanes = {"host": 1.45, "device": 0.6}
    shapes = [
        f'<text x="{_LEFT - 6}" y="{frame.y(place - 0.3):.1f}" text-anchor="end">{lane}</text>'
        for lane, place in lanes.items()
    ]
    rows = []
    for item in timeline.spans:
        left, right = frame.x(item.start_ms), frame.x(item.end_ms)
        low, busy = lanes[item.lane] - 0.5, item.busy_ms / max(item.end_ms - item.start_ms, 1e-9)
        for filled, opacity in ((1.0, 0.25), (busy, 1.0)):
            top, height = frame.y(low + 0.5 * filled), frame.y(low) - frame.y(low + 0.5 * filled)
            shapes.append(
                f'<rect fill="{colours[item.phase]}" fill-opacity="{opacity}" x="{left:.1f}" y="{top:.1f}" '
                f'width="{right - left:.1f}" height="{height:.1f}">'
                f"<title>{item.lane}: {item.phase}, busy for {100 * busy:.0f} %</title></rect>"
            )
        rows.append((item.lane, item.phase, *map(number, (item.start_ms, item.end_ms, item.busy_ms))))
    picture = frame.picture(
        "host and device over the step", "ms", shapes, _ticks(p.latency.value, 8), levels=False
    )
    shown = dict.fromkeys(item.phase for item in timeline.spans)
    keys = "".join(f'<span><i style="background:{colours[name]}"></i>{name}</span>' for name in shown)
    return [
        f'<h2>Time of the step</h2>\n{picture}\n<p class="key">{keys}</p>\n'
        "<p>Filled: the share of a phase in which a lane works. The device waits for the host "
        f"{100 * timeline.waits:.0f} % of the time.</p>\n"
        f"{_table(('lane', 'phase', 'starts, ms', 'ends, ms', 'busy, ms'), rows, left=2)}"
    ]


def _batch_picture(data: ReportData) -> str:
    curve = data.curve
    xs = curve.batch_sizes.astype(np.float64)
    needed, memory, low, high = (
        np.asarray(column, dtype=np.float64).reshape(-1)
        for column in (curve.needed, curve.memory, curve.memory_low, curve.memory_high)
    )
    frame = _Frame(min(xs[0], 0.0), xs[-1], max(float(high.max()), float(needed.max()), data.limit_mib))
    p = data.prediction
    here = f"batch {p.batch_size:,}: {number(p.needed.value)} MiB"
    shapes = [
        f'<polygon class="band" points="{frame.band(xs, low, high)}"/>',
        f'<polyline class="ink" points="{frame.path(xs, needed)}"/>',
        frame.limit(data.limit_mib, "limit"),
        f'<circle fill="{RED}" cx="{frame.x(p.batch_size):.1f}" cy="{frame.y(p.needed.value):.1f}" r="5">'
        f"<title>{here}</title></circle>",
    ]
    picture = frame.picture("memory by batch size", "batch size", shapes, _ticks(frame.last, 8))
    largest = (
        ""
        if data.largest is None
        else (
            f"; largest batch size that fits at {100 * data.confidence:g} % confidence: "
            f"{f'{data.largest:,}' if data.largest else 'none'}"
        )
    )
    rows = [
        (f"{int(n):,}", number(m), span(a, b), number(asked), number(t))
        for n, m, a, b, asked, t in zip(xs, memory, low, high, needed, curve.latency.reshape(-1), strict=True)
    ]
    return (
        f"{picture}\n<p>Line: memory that the run asks for; band: 90 % interval of what the device shows as "
        f"taken; dashed: {number(data.limit_mib)} MiB; dot: {here}{largest}.</p>\n"
        f"{_table(('batch', 'memory MiB', '90 %', 'needed MiB', 'ms'), rows)}"
    )
