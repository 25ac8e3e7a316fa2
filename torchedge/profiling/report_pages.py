"""A report as one HTML file: figures inside, tables as tables, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from torchedge import __version__
from torchedge.devices import Device
from torchedge.prediction.step_models import MODE_TABLES
from torchedge.profiling.report_figures import pictures, png_bytes
from torchedge.profiling.reports import Compared, Report, summarise

__all__ = ["page", "profile_section", "table_html"]

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { margin-top: 2.4rem; border-bottom: 1px solid #ddd }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem } .method { color: #444; margin-top: 0 }
.seen { background: #fff4e0; border-left: 4px solid #e69f00; padding: .4rem .8rem }
table { border-collapse: collapse; margin: .4rem 0 1rem; font-size: 13px }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #eee; vertical-align: top }
th { border-bottom: 1px solid #999; font-weight: 600 } th:first-child, td:first-child { text-align: left }
td.text, th.text { text-align: left } figure { margin: .6rem 0 } figcaption { color: #555; font-size: 13px }
img { max-width: 100%; height: auto } .pair { display: flex; flex-wrap: wrap; gap: .5rem }
.pair figure { flex: 1 1 24rem } details summary { cursor: pointer; color: #0b5394 }
footer { color: #777; margin: 3rem 0 }
""".strip()


def page(report: Report | None, device: Device, tell: Callable[[str], object] = lambda _: None) -> str:
    """Return a whole HTML document: the comparison, where there is one, then what is known of the device."""
    parts = [f"<h1>{escape(device.title)}</h1>"]
    if report is not None:
        parts += _comparison(report, tell)
    parts.append(profile_section(device))
    title = escape(f"torchedge report: {device.name}")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n"
        f"<footer>torchedge {escape(__version__)}</footer>\n</body>\n</html>\n"
    )


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """Return a table; every cell is escaped. text: further columns, beside the first, that stand left."""

    def line(cells: Sequence[str], tag: str) -> str:
        marked = (
            f'<{tag} class="text">{escape(c)}</{tag}>' if i in text else f"<{tag}>{escape(c)}</{tag}>"
            for i, c in enumerate(cells)
        )
        return "<tr>" + "".join(marked) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f"<table>\n<thead>{line(head, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


# the comparison ---------------------------------------------------------------------------------------------


def _comparison(report: Report, tell: Callable[[str], object]) -> Iterator[str]:
    kind = "method seen" if report.seen else "method"
    yield f'<p class="{kind}">Measurements: {escape(report.dataset)} (sha256 {report.digest[:16]}). '
    yield f"Compared with {escape(report.method)}.</p>"
    yield from (f"<p>{escape(note)}.</p>" for note in report.notes)
    head = [
        "",
        "rows",
        "networks",
        "mean over networks, %",
        "median, %",
        "90 % of rows within, %",
        "largest, %",
    ]
    rows = []
    for compared in report.compared:
        found = summarise(compared)
        figures = (found.mean, found.median, found.tenth, found.largest)
        name = f"{compared.symbol}, {compared.name}"
        rows.append([name, f"{found.rows:,}", str(len(found.networks)), *map(_percent, figures)])
        rows[-1].append(_percent(found.coverage))
    yield table_html([*head, "inside 90 % intervals, %"], rows)
    drawn = list(pictures(report))
    for compared in report.compared:
        stem = compared.name.replace(" ", "-")
        yield f'<h2 id="{stem}">{escape(compared.symbol)}, {escape(compared.name)}</h2>'
        shown = []
        for picture in drawn:
            if picture.name.startswith(f"{stem}-"):
                tell(picture.name)
                shown.append(_figure(png_bytes(picture), picture.caption))
        yield f'<div class="pair">{"".join(shown[:2])}</div>'
        yield from shown[2:]
        yield from _tables(compared)


def _figure(image: bytes, caption: str) -> str:
    data = base64.b64encode(image).decode("ascii")
    words = escape(caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{words}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def _tables(compared: Compared) -> Iterator[str]:
    found = summarise(compared)
    rows = [[n, f"{count:,}", _percent(e), _percent(c)] for n, (count, e, c) in found.networks.items()]
    table = table_html(["network", "rows", "mean error, %", "inside 90 % intervals, %"], rows)
    yield f"<details><summary>All {len(rows)} networks</summary>\n{table}</details>"
    if len(found.levels) > 1:
        levels = [[f"{level} %", f"{n:,}", _percent(e)] for level, (n, e) in found.levels.items()]
        table = table_html(["parameters pruned", "rows", "mean error, %"], levels)
        yield f"<details><summary>All pruning levels</summary>\n{table}</details>"
    unit = compared.unit
    head = ["network", "batch size", f"measured, {unit}", f"predicted, {unit}", "error, %"]
    worst = [
        [name, str(batch), _number(measured), _number(predicted), f"{error:+.1f}"]
        for name, batch, measured, predicted, error in found.worst
    ]
    table = table_html(head, worst)
    yield f"<details><summary>The {len(worst)} rows that err most</summary>\n{table}</details>"


# the device -------------------------------------------------------------------------------------------------


def profile_section(device: Device) -> str:
    """Return what a profile holds: its figures with their sources, and how accurate its models are."""
    parts = [f"<h2>The profile {escape(device.name)}</h2>"]
    if device.notes:
        parts.append(f"<p>{escape(device.notes)}</p>")
    for mode, name in MODE_TABLES.items():
        described = device.profile.get(name)
        if isinstance(described, Mapping):
            parts += _fitted(mode, name, described)
    rows = [
        [name, f"{f.value:,.10g}", "" if f.unit == "1" else f.unit, str(f.provenance), f.source]
        for name, f in device.figures.items()
    ]
    rows += [
        [name, str(fact.value), "", str(fact.provenance), fact.source] for name, fact in device.facts.items()
    ]
    parts.append("<h3>Figures of the device</h3>")
    parts.append(table_html(["figure", "value", "unit", "provenance", "source"], rows, text=(2, 3, 4)))
    software = {**device.software, **{key: str(value) for key, value in device.runtime.items()}}
    if software:
        words = ", ".join(f"{key} {value}" for key, value in software.items())
        parts.append(f"<p>Software and simulated behaviour: {escape(words)}.</p>")
    return "\n".join(parts)


def _fitted(mode: str, name: str, described: Mapping[str, object]) -> Iterator[str]:
    yield f"<h3>Models of {escape(name)}</h3>"
    keys = ("provenance", "dataset", "base", "points", "rows", "date", "command")
    known = [[key, str(described[key])] for key in keys if key in described]
    yield table_html(["", ""], known, text=(1,))
    accuracy = described.get("accuracy")
    rows = []
    for target, protocols in accuracy.items() if isinstance(accuracy, Mapping) else ():
        for protocol, score in protocols.items() if isinstance(protocols, Mapping) else ():
            if isinstance(score, Mapping):
                cells = [score.get("mean"), score.get("coverage")]
                rows.append([_letter(mode, str(target)), str(protocol), *map(_cell, cells)])
    if rows:
        yield table_html(
            ["accuracy", "on", "mean error over networks, %", "inside 90 % intervals, %"], rows, text=(1,)
        )


def _letter(mode: str, target: str) -> str:
    inference = {"gamma": "γ, inference memory", "phi": "φ, inference latency"}
    training = {"gamma": "Γ, training memory", "phi": "Φ, training latency"}
    return (training if mode == "train" else inference).get(target, target)


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def _percent(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
