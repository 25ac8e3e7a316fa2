"""A report of predicted against measured with every picture: one HTML file, or a folder of PNG files.

    python benchmarks/accuracy/report.py DATASET --out report.html
    python benchmarks/accuracy/report.py nvidia-h200 --protocol left-out --out pictures

DATASET is a folder of measurements, a device's name or profile folder (for the measurements it ships), or
one of the public tables. `torchedge accuracy` prints the same comparison as tables; docs/reports.md shows
what is drawn. With the profile a minute, with models fitted without the rows several. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import base64
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from public_tables import find_public_table, read_public_samples

from torchedge import __version__, find_device
from torchedge.devices import Device
from torchedge.prediction.profiles import MODE_TABLES
from torchedge.profiling.accuracy import Comparison, Report, compare_profile, compare_unseen
from torchedge.profiling.datasets import is_dataset
from torchedge.profiling.latency_fitting import one_thread
from torchedge.profiling.plots import (
    COLOURS,
    MARKERS,
    bars,
    draw_error_histogram,
    draw_errors_by_network,
    draw_scatter,
    leading_networks,
)
from torchedge.profiling.samples import device_of, measured_device, read_samples
from torchedge.storage.pictures import canvas, picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS, FEWEST_LEVELS = 8, 3


@dataclass(frozen=True)
class Picture:
    """One figure: file name without suffix, caption, size in inches, and the function that draws it."""

    name: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Figure], object]

    def png(self) -> bytes:
        """Draw it and return a PNG file."""
        with canvas(*self.size) as figure:
            self.draw(figure)
        return picture_bytes(figure)


def pictures(report: Report) -> Iterator[Picture]:
    """Yield the pictures of a report: up to five of each figure measured."""
    for compared in report.comparisons:
        stem = compared.name.replace(" ", "-")
        symbol = f"{compared.symbol}, {compared.name}"
        yield Picture(
            f"{stem}-predicted-measured",
            f"{symbol}: predicted against measured; on the line both are equal, "
            "the band is 10 % to either side.",
            (6.2, 5.2),
            partial(_on_axes, draw_scatter, compared),
        )
        yield Picture(
            f"{stem}-errors",
            f"{symbol}: distribution of the errors.",
            (6.2, 3.4),
            partial(_on_axes, draw_error_histogram, compared),
        )
        count = int(sum(np.isfinite(means).sum() for means in bars(compared)[1].values()))
        yield Picture(
            f"{stem}-by-network",
            f"{symbol}: mean error by network (as perf4sight's Fig. 3 and 4).",
            (6.2, 1.2 + 0.22 * count),
            partial(_on_axes, draw_errors_by_network, compared),
        )
        names = _with_levels(compared)
        if not names:
            continue
        yield Picture(
            f"{stem}-by-level",
            f"{symbol}: mean error by the share of parameters that was pruned.",
            (6.2, 3.6),
            partial(_on_axes, draw_errors_by_level, compared),
        )
        yield Picture(
            f"{stem}-by-batch-size",
            f"{symbol} against batch size, one curve a pruning level (as perf4sight's Fig. 5): "
            "dots measured, lines predicted.",
            (9.6, 0.5 + 2.4 * (-(-len(names) // 3))),
            partial(draw_batch_sizes, compared=compared),
        )


def _on_axes(draw: Callable[[Axes, Comparison], object], compared: Comparison, figure: Figure) -> None:
    draw(figure.subplots(), compared)


def _with_levels(compared: Comparison) -> list[str]:
    """Return the networks that were measured at several pruning levels."""
    return [
        name
        for name in leading_networks(compared, MOST_PANELS)
        if len(set(compared.level[compared.network == name].tolist())) >= FEWEST_LEVELS
    ]


def draw_errors_by_level(axes: Axes, compared: Comparison) -> None:
    """Draw the mean absolute error over the pruning level, a line a network and one for all."""
    size = compared.size
    names = _with_levels(compared)
    chosen = np.isin(compared.network, names)
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        levels, means = _means(compared.level, size, compared.network == name)
        axes.plot(
            levels, means, color=colour, marker=marker, markersize=4, linewidth=1, alpha=0.8, label=name
        )
    levels, means = _means(compared.level, size, chosen)
    axes.plot(levels, means, color="#333333", linewidth=2.5, alpha=0.5, label="all of these")
    axes.set(
        xlabel="parameters pruned, %",
        ylabel=f"mean absolute error of {compared.symbol}, %",
        title=f"{compared.symbol}: by pruning level",
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _means(
    keys: Any,  # noqa: ANN401 - an array of numbers
    values: Any,  # noqa: ANN401
    rows: Any,  # noqa: ANN401
) -> tuple[list[float], list[float]]:
    levels = sorted(set(keys[rows].tolist()))
    return levels, [float(values[rows & (keys == level)].mean()) for level in levels]


def draw_batch_sizes(figure: Figure, compared: Comparison) -> None:
    """Draw a panel a network: the figure over batch size, a colour a pruning level; dots are measured."""
    import matplotlib
    from matplotlib.colors import Normalize
    from matplotlib.ticker import StrMethodFormatter

    names = _with_levels(compared)
    columns = min(3, len(names))
    panels = figure.subplots(-(-len(names) // columns), columns, squeeze=False).ravel()
    colours, scale = matplotlib.colormaps["viridis_r"], Normalize(-12, 92)
    for axes, name in zip(panels, names, strict=False):
        for label, level in _curves(compared, name):
            rows = np.flatnonzero((compared.network == name) & (compared.label == label))
            rows = rows[np.argsort(compared.batch[rows], kind="stable")]
            colour = colours(scale(level))
            axes.plot(compared.batch[rows], compared.value[rows], color=colour, linewidth=1.3)
            axes.plot(
                compared.batch[rows],
                compared.measured[rows],
                "o",
                color=colour,
                markersize=3.4,
                markeredgewidth=0.3,
                markeredgecolor="#333333",
                label=f"{level} %",
            )
        axes.set_title(name)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("batch size", fontsize=9)
    figure.supylabel(f"{compared.symbol}, {compared.unit}", fontsize=9)
    handles, labels = _legend(list(panels[: len(names)]))
    figure.legend(handles, labels, loc="outside right upper", title="parameters\npruned", title_fontsize=8)


def _curves(compared: Comparison, name: str, most: int = 7) -> Sequence[tuple[str, int]]:
    """Return (label, level) of a network's curves: one a level, pruned in one way, levels evenly spread."""
    rows = compared.network == name
    ways = [s for s in ("random", "l1") if (compared.strategy[rows] == s).any()] or [""]
    kept = rows & ((compared.strategy == ways[0]) | (compared.strategy == ""))
    label_of: dict[int, str] = {}
    for label, level in zip(compared.label[kept].tolist(), compared.level[kept].tolist(), strict=True):
        label_of.setdefault(level, label)
    levels = sorted(label_of)
    wanted = np.linspace(levels[0], levels[-1], most)
    nearest = {min(levels, key=lambda level: abs(level - goal)) for goal in wanted.tolist()}
    return [(label_of[level], level) for level in sorted(nearest)]


def _legend(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Return the handles of all panels, each level once, in order."""
    handle_of: dict[int, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handle_of.setdefault(int(label.split()[0]), handle)
    return [handle_of[k] for k in sorted(handle_of)], [f"{level} %" for level in sorted(handle_of)]


# the page ---------------------------------------------------------------------------------------------------

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


def page(report: Report | None, device: Device) -> str:
    """Return a whole HTML document: the comparison, where there is one, then what is known of the device."""
    parts = [f"<h1>{escape(device.title)}</h1>"]
    if report is not None:
        parts += _comparison(report)
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


def _comparison(report: Report) -> Iterator[str]:
    kind = "method seen" if report.seen else "method"
    yield f'<p class="{kind}">Measurements: {escape(report.dataset)} (sha256 {report.digest[:16]}). '
    yield f"Comparison with {escape(report.method)}.</p>"
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
    for compared in report.comparisons:
        size = compared.size
        figures = (
            compared.score.mean,
            np.median(size),
            np.quantile(size, 0.9),
            size.max(),
            compared.coverage,
        )
        name = f"{compared.symbol}, {compared.name}"
        counts = [f"{len(size):,}", str(len(compared.score.error))]
        rows.append([name, *counts, *(_percent(float(figure)) for figure in figures)])
    yield table_html([*head, "inside 90 % intervals, %"], rows)
    drawn = list(pictures(report))
    for compared in report.comparisons:
        stem = compared.name.replace(" ", "-")
        yield f'<h2 id="{stem}">{escape(compared.symbol)}, {escape(compared.name)}</h2>'
        shown = []
        for picture in drawn:
            if picture.name.startswith(f"{stem}-"):
                shown.append(_figure(picture.png(), picture.caption))
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


def _tables(compared: Comparison) -> Iterator[str]:
    score, size = compared.score, compared.size
    rows = [
        [n, f"{(compared.network == n).sum():,}", _percent(e), _percent(score.coverage.get(n, math.nan))]
        for n, e in score.error.items()
    ]
    table = table_html(["network", "rows", "mean error, %", "inside 90 % intervals, %"], rows)
    yield f"<details><summary>All {len(rows)} networks</summary>\n{table}</details>"
    levels, means = _means(compared.level, size, np.ones(len(size), dtype=bool))
    if len(levels) > 1:
        rows = [
            [f"{level} %", f"{(compared.level == level).sum():,}", _percent(mean)]
            for level, mean in zip(levels, means, strict=True)
        ]
        table = table_html(["parameters pruned", "rows", "mean error, %"], rows)
        yield f"<details><summary>All pruning levels</summary>\n{table}</details>"
    unit = compared.unit
    head = ["network", "batch size", f"measured, {unit}", f"predicted, {unit}", "error, %"]
    worst = [
        [name, str(batch), _number(measured), _number(predicted), f"{error:+.1f}"]
        for name, batch, measured, predicted, error in compared.worst()
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


# the command ------------------------------------------------------------------------------------------------


def compare_source(arguments: argparse.Namespace, scratch: Path) -> tuple[Device, Report | None]:
    """Return the device that the arguments name and, where there are measurements, the comparison."""
    folder = Path(arguments.source)
    public = folder.is_dir() and find_public_table(folder) is not None
    if public:
        device = device_of(folder, arguments.device)
    elif is_dataset(folder):
        device = measured_device(folder, arguments.device, scratch)
    else:
        device = find_device(folder if folder.is_dir() else arguments.source)
        folder = device.folder / "campaign"
        if not is_dataset(folder):
            return device, None
    with one_thread():
        if public:
            samples = read_public_samples(folder, device).samples
            measured = {samples.mode: samples}
        else:
            measured = read_samples(folder, device)
        if arguments.protocol == "profile":
            return device, compare_profile(measured, device)
        return device, compare_unseen(measured, device, arguments.protocol, intervals=arguments.intervals)


def main() -> None:
    """Compare and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="DATASET")
    parser.add_argument("--device", help="profile to compare with (default: the dataset's device)")
    parser.add_argument(
        "--protocol", choices=("profile", "own", "basis", "left-out", "levels"), default="profile"
    )
    parser.add_argument("--intervals", action="store_true", help="fit intervals too (ten times slower)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html|FOLDER")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    import matplotlib  # noqa: F401 - fails before the work

    with tempfile.TemporaryDirectory() as scratch:
        device, report = compare_source(arguments, Path(scratch))
    out: Path = arguments.out
    if out.suffix.lower() in (".html", ".htm"):
        out.write_text(page(report, device), encoding="utf-8")
    elif report is None:
        parser.error(
            f"{device.name} ships no measurements to draw: give FILE.html, or a folder of measurements"
        )
    else:
        out.mkdir(exist_ok=True)
        for picture in pictures(report):
            (out / f"{picture.name}.png").write_bytes(picture.png())
    print(f"written to {out}")


if __name__ == "__main__":
    main()
